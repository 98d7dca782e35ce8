"""Models that wrong calls are made with: each tensor is larger than any message of an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from booster import Booster, Plugin
from booster.device import current_device
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

__all__ = ["PLAN", "PLUGINS", "Pair", "batches", "boosted", "pair", "plugin"]

_WIDTH = 48
PLAN = {"up": "colwise", "down": "rowwise"}


class Pair(nn.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, width) to (batch, width)."""
        return self.down(F.gelu(self.up(x)))


def pair() -> tuple[Pair, torch.optim.Optimizer]:
    """Returns a model, the same on all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = Pair()
    return model, torch.optim.AdamW(model.parameters())


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "fsdp": TorchFSDPPlugin,
    "tensor": lambda: HybridParallelPlugin(tp_size=2, precision="fp32", plan=PLAN),
    "pipeline": lambda: HybridParallelPlugin(
        tp_size=1, pp_size=2, precision="fp32", num_microbatches=2, execution_sequence=["up", "down"]
    ),
}


@cache
def plugin(name: str) -> Plugin:
    """Returns the plugin of that name, one for all calls of a process: its groups are made once."""
    return PLUGINS[name]()


def boosted(name: str = "ddp", mixed_precision: Any = None) -> tuple[Booster, Any, Any]:
    """Returns a booster, and a model and an optimizer that it boosted."""
    booster = Booster(plugin=plugin(name), mixed_precision=mixed_precision)
    return booster, *booster.boost(*pair())[:2]


def batches(count: int = 1) -> list[torch.Tensor]:
    """Returns batches of the model, on this rank's device."""
    return [torch.ones(4, _WIDTH, device=current_device()) for _ in range(count)]
