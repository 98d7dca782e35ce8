"""Bytes that a rank receives in each mode of tensor parallelism, counted in fake worlds, beside the papers'."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["GridBytes", "grid_bytes", "grid_bytes_table"]

NUM_RANKS = (4, 8, 16, 64)
_HIDDEN, _INNER, _EXAMPLES, _TOKENS, _LAYERS = 64, 256, 64, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GridBytes:
    """Bytes received by one rank in forward and backward of a layer of two linear layers.

    Attributes:
        num_ranks: Tensor-parallel ranks.
        mode: Mode of tensor parallelism, with its depth.
        counted: What the plugin's collectives received.
        theory: What the papers' formulas give.
    """

    num_ranks: int
    mode: str
    counted: float
    theory: float


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_HIDDEN, _INNER, bias=False), nn.Linear(_INNER, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def grid_bytes() -> list[GridBytes]:
    """Returns a row for each mode that each number of ranks has."""
    return [
        GridBytes(
            num_ranks=num_ranks,
            mode=f"{mode} depth {depth}" if depth else mode,
            counted=_counted(num_ranks, mode, depth),
            theory=_theory(num_ranks, mode, depth or 1),
        )
        for num_ranks in NUM_RANKS
        for mode, depth in _modes(num_ranks)
    ]


def grid_bytes_table() -> str:
    """Returns the rows as a table of KiB per layer."""
    lines = [
        f"KiB that a rank receives per layer and step: {_HIDDEN} -> {_INNER} -> {_HIDDEN} features, {_EXAMPLES} x"
        f" {_TOKENS} tokens, fp32",
        f"{'ranks':>5}  {'mode':12}{'counted':>10}{'theory':>10}",
    ]
    for row in grid_bytes():
        lines.append(f"{row.num_ranks:>5}  {row.mode:12}{row.counted / 1024:>10.1f}{row.theory / 1024:>10.1f}")
    return "\n".join(lines)


def _modes(num_ranks: int) -> Iterator[tuple[str, int | None]]:
    yield "1d", None
    if math.isqrt(num_ranks) ** 2 == num_ranks:
        yield "2d", None
    depth = {8: 2, 16: 4, 64: 4}.get(num_ranks)
    if depth is not None:
        yield "2.5d", depth
    if round(num_ranks ** (1 / 3)) ** 3 == num_ranks:
        yield "3d", None


def _counted(num_ranks: int, mode: str, depth: int | None) -> float:
    """Returns the bytes per layer: of a model with more layers, less those of one with fewer."""
    fewer, more = (_step(num_ranks, mode, depth, layers) for layers in (_LAYERS, 2 * _LAYERS))
    return (more - fewer) / _LAYERS


def _step(num_ranks: int, mode: str, depth: int | None, num_layers: int) -> int:
    from booster import Booster
    from booster.comm import count_communication, fake_world
    from booster.plugins import HybridParallelPlugin

    settings: dict[str, Any] = {"tp_size": num_ranks, "tp_mode": mode, "tp_depth": depth}
    model = nn.Sequential(*(_Layer() for _ in range(num_layers)))
    with fake_world(num_ranks):
        plugin = HybridParallelPlugin(precision="fp32", plan={"*.up": "colwise", "*.down": "rowwise"}, **settings)
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(_EXAMPLES, _TOKENS, _HIDDEN, requires_grad=True)
        with count_communication() as count:
            booster.backward(boosted(x).sum(), optimizer)
    return sum(count.received.values())


def _theory(num_ranks: int, mode: str, depth: int) -> float:
    """Returns the bytes of both linear layers, forward and backward; see the notes of the plugin's files."""
    rows, size = _EXAMPLES * _TOKENS, 4
    if mode == "1d":  # one all-reduce of the activations in each direction
        return 2 * 2 * (num_ranks - 1) / num_ranks * rows * _HIDDEN * size
    total = 0.0
    for inputs, outputs in ((_HIDDEN, _INNER), (_INNER, _HIDDEN)):
        x, weight, output = (
            rows * inputs / num_ranks,
            inputs * outputs / num_ranks,
            rows * outputs / num_ranks,
        )
        if mode == "3d":
            side = round(num_ranks ** (1 / 3))
            total += (side - 1) * (3 * x + 3 * weight + 2 * output)
        else:
            side = math.isqrt(num_ranks // depth)
            weight *= depth
            total += (side - 1) * 3 * (x + weight) + 2 * (depth - 1) / depth * weight
    return total * size
