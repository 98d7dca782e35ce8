"""What the engines of benchmarks/zero/run.py should hold by their method's formula, and what they do hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from _harness.gpt import GPT, SIZES
from _harness.pair import Comparison, World, memory_of
from _harness.table import align
from zero.engines import BASELINE, FLOOR, REDUNDANCY, STAGES, deepspeed_name, our_name, probe
from zero.fsdp import manual_name, plugin_name
from zero.manual import FULL_SHARD, STRATEGIES

__all__ = [
    "Formula",
    "MemoryRow",
    "activation_bytes",
    "format_memory",
    "formula_of",
    "largest_unit",
    "memory_rows",
    "num_parameters",
]

_OUR_UNDER_WAY = 6 * 2**20  # elements of the two buckets that are sent: half of reduce_bucket_size_in_m
_DEEPSPEED_BUCKET = 500_000_000  # elements: reduce_bucket_size
_MIB = 2**20
_HEAD = ["engine", "weights", "gradients", "states", "buffers", "formula MiB", "peak MiB", "of formula"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Bytes that a rank needs by the theory of its method, activations left out.

    Attributes:
        weights: That forward and backward work with.
        gradients: Of the weights.
        states: Of the optimizer, fp32 masters among them.
        buffers: Of the communication, as large as the method's arguments name them; weights that are gathered.
    """

    weights: int
    gradients: int
    states: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.states + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One engine's formula beside its resident memory.

    Attributes:
        name: Of the engine.
        formula: Without activations.
        activations: Bytes, the same for all engines of a comparison.
        peak: The most bytes that were resident during the steps, on the worst rank; None: not measured.
    """

    name: str
    formula: Formula
    activations: int
    peak: int | None

    @property
    def expected(self) -> int:
        """Bytes of formula and activations."""
        return self.formula.total + self.activations

    @property
    def share(self) -> float | None:
        """The peak over what was expected."""
        return None if self.peak is None else self.peak / self.expected


def num_parameters(size: str) -> int:
    """Returns N, the number of weights of the model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(SIZES[size]).parameters())


def largest_unit(size: str) -> int:
    """Returns the weights of FSDP2's largest unit: of a block, or of what the blocks leave to the root."""
    with torch.device("meta"):
        model = GPT(SIZES[size])
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    return max(*blocks, num_parameters(size) - sum(blocks))


def formula_of(name: str, precision: str, N: int, P: int, U: int = 0) -> Formula | None:
    """Returns what an engine needs by its theory; None where it has no simple one.

    Args:
        name: Of the engine.
        precision: "fp32" or "bf16".
        N: Weights of the model.
        P: Ranks that share them.
        U: Weights of FSDP2's largest unit.
    """
    for strategy in STRATEGIES:
        manual = (manual_name(strategy, has_our_collectives=has_ours) for has_ours in (False, True))
        if name in (plugin_name(strategy), *manual):
            return _fully_sharded(precision, N, P, U if strategy == FULL_SHARD else N)
    for stage in STAGES:
        if name == our_name(stage):
            return _sharded(stage, precision, N, P, _our_buffer_elements(stage, N, P))
        if name == deepspeed_name(stage):
            return _sharded(stage, precision, N, P, min(_DEEPSPEED_BUCKET, N))
    if precision != "fp32":
        return None  # autocast: its copies of the weights come and go with the activations
    replicated = {
        BASELINE: Formula(weights=4 * N, gradients=4 * N, states=8 * N, buffers=4 * N),
        FLOOR: Formula(weights=4 * N, gradients=4 * N, states=8 * N, buffers=0),
        REDUNDANCY: Formula(weights=4 * N, gradients=4 * N, states=8 * N // P, buffers=0),
    }
    return replicated.get(name)


def _our_buffer_elements(stage: int, N: int, P: int) -> int:
    """What is received for the buckets in flight, and in stage 2 they themselves: in stage 1 they are the gradients."""
    under_variant = min(_OUR_UNDER_WAY, N)
    received = under_variant * (P - 1) // P
    return received if stage == 1 else under_variant + received


def _sharded(stage: int, precision: str, N: int, P: int, buffer_elements: int) -> Formula:
    """ZeRO stages 1 and 2 (Rajbhandari et al., arXiv:1910.02054, section 5); sums of bf16 gradients are fp32."""
    weight_bytes, state_bytes = (4, 8) if precision == "fp32" else (2, 12)
    return Formula(
        weights=weight_bytes * N,
        gradients=weight_bytes * N if stage == 1 else 4 * N // P,
        states=state_bytes * N // P,
        buffers=weight_bytes * buffer_elements,
    )


def _fully_sharded(precision: str, N: int, P: int, gathered: int) -> Formula:
    """ZeRO stage 3 in fp32 (section 5.3 of the same), and the weights that are gathered at a time."""
    weight_bytes = 4 if precision == "fp32" else 2
    return Formula(weights=4 * N // P, gradients=4 * N // P, states=8 * N // P, buffers=weight_bytes * gathered)


def activation_bytes(size: str, precision: str, world: World, steps: int) -> int | None:
    """Measures what forward and backward need beside weights and gradients, in processes of their own."""
    memory = memory_of(probe(size, precision), world, steps)
    if memory is None or memory.step_peak is None:
        return None
    weight_bytes = 4 if precision == "fp32" else 2
    return memory.step_peak - 2 * weight_bytes * num_parameters(size)


def memory_rows(comparison: Comparison, size: str, precision: str, activations: int) -> list[MemoryRow]:
    """Returns a row for every measured engine that has a formula."""
    N, P, U = num_parameters(size), comparison.world.size, largest_unit(size)
    rows = []
    for engine in comparison.engines:
        formula = formula_of(engine.name, precision, N, P, U)
        if formula is not None and engine.memory is not None:
            row = MemoryRow(name=engine.name, formula=formula, activations=activations, peak=engine.memory.step_peak)
            rows.append(row)
    return rows


def format_memory(rows: Sequence[MemoryRow]) -> str:
    """Returns the table of formulas, activations in its title."""
    activations = _mebibytes(rows[0].activations) if rows else "-"
    lines = [_HEAD]
    for row in rows:
        parts = (row.formula.weights, row.formula.gradients, row.formula.states, row.formula.buffers, row.expected)
        share = "-" if row.share is None else f"{row.share:.3f}"
        lines.append([row.name, *map(_mebibytes, parts), _mebibytes(row.peak), share])
    return "\n".join([f"MiB per rank by the formula, with {activations} of activations", *align(lines)])


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / _MIB:.1f}"
