"""Activation checkpointing within a memory budget: as few layers as possible are recomputed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from booster.comm import is_fake_world, max_of_numbers, raise_on_all_ranks
from booster.errors import ConfigError
from booster.pytree import iter_tensors

from .activation_offload import ActivationOffload, packing
from .activation_policy import LAYER_NAME, ActivationPolicy

_HOST = torch.device("cpu")
_RESOLUTION = 1024  # steps that the budget is divided into
_MEASURED_STEPS = 2  # the first one also compiles, and allocates what is reused later

# Note [Activation budget]
# In the first steps all layers are recomputed, which needs least memory, and each forward is measured: the bytes that
# its operations save for backward, its time, and how many of its forwards wait for their backward at once (of several
# microbatches). The layers to recompute are then chosen once: those whose forwards together take the least time while
# what the others keep fits. Layers that share a batch must recompute the same ones, because a recomputation
# communicates: the maximum of all ranks' measurements decides. Numbers of the training do not depend on the choice.


@dataclass(slots=True)
class LayerCost:
    """Measurement of a layer.

    Attributes:
        input_bytes: Bytes of the inputs that need a gradient, which are kept in any case.
        kept_bytes: Bytes that the forward keeps in addition if the layer is not recomputed.
        nanoseconds: Time of the forward.
        num_live: Number of forwards that wait for their backward at once.
    """

    input_bytes: int = 0
    kept_bytes: int = 0
    nanoseconds: int = 0
    num_live: int = 0


_Mark: TypeAlias = int | torch.Event


@dataclass(slots=True)
class _Measured:
    cost: LayerCost
    num_live: int = 0
    marks: list[tuple[_Mark, _Mark]] = field(default_factory=list)  # when each forward began and ended


class _LiveForward:
    """A forward that waits for its backward: referenced by what it saves."""

    def __init__(self, measured: _Measured) -> None:
        self._measured = measured
        measured.num_live += 1
        measured.cost.num_live = max(measured.cost.num_live, measured.num_live)

    def __del__(self) -> None:
        self._measured.num_live -= 1


class ActivationBudget(ActivationPolicy):
    """Recomputes as few layers as possible such that the activations kept for backward fit a budget.

    Args:
        names: Names of the layers of all stacks, equal on all ranks, also those that other ranks hold.
        budget_bytes: Bytes of activations per rank, of layers' inputs, of what kept layers save, and of the largest
            recomputation.
        offload: Offload of the inputs of recomputed layers, optional.

    Attributes:
        recomputed: Names of the layers that are recomputed; None until it is decided.
        costs: Measurements by name, of the layers of all ranks.
    """

    def __init__(self, names: Sequence[str], budget_bytes: int, offload: ActivationOffload | None = None) -> None:
        super().__init__(offload)
        self._names = tuple(names)
        self.budget_bytes = budget_bytes
        self.fingerprint += f" of {budget_bytes} bytes"
        self._measured = {name: _Measured(LayerCost()) for name in names}
        self._num_steps = 0
        self.end_step = self._choose
        self.recomputed: frozenset[str] | None = None
        self.costs: dict[str, LayerCost] = {}

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        """Run the layer: measured, recomputed or with all its activations kept."""
        name = layer.__dict__[LAYER_NAME]
        if self.recomputed is None:
            return self.recompute(_MeasuredForward(self._measured[name], layer, forward), *args)
        return self.recompute(forward, *args) if name in self.recomputed else forward(*args)

    def _choose(self) -> None:
        """Choose the layers after the last measured step.

        Collective: over the world.

        Raises:
            ConfigError: The budget is less than what is needed with all layers recomputed; on all ranks.
        """
        self._num_steps += 1
        if self.recomputed is not None or self._num_steps < (1 if is_fake_world() else _MEASURED_STEPS):
            return
        for measured in self._measured.values():
            measured.cost.nanoseconds = min((_nanoseconds(*marks) for marks in measured.marks), default=0)
            measured.marks.clear()
        fields = ("input_bytes", "kept_bytes", "nanoseconds", "num_live")
        own = [getattr(self._measured[name].cost, field) for name in self._names for field in fields]
        found = iter(max_of_numbers(own))
        self.costs = {name: LayerCost(*(next(found) for _ in fields)) for name in self._names}
        local = {name: self.costs[name] for name in self._names if self._measured[name].cost.num_live}
        error = None
        try:
            chosen = choose_recomputed(local, self.budget_bytes, keeps_inputs=self.offload is None)
            self.recomputed = chosen | (set(self._names) - local.keys())  # nothing is known of layers that did not run
        except ConfigError as raised:
            error = raised
        raise_on_all_ranks(error)


class _MeasuredForward:
    """Forward of a layer that records its cost, unless backward repeats it."""

    def __init__(self, measured: _Measured, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._measured, self._layer, self._forward = measured, layer, forward

    def __call__(self, *args: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return self._forward(*args)
        cost, live = self._measured.cost, _LiveForward(self._measured)
        inputs = {one.untyped_storage()._cdata: one for one in iter_tensors(args)}
        weights = {one.untyped_storage()._cdata for one in (*self._layer.parameters(), *self._layer.buffers())}
        saved: dict[int, StorageWeakRef] = {}  # references keep addresses unique
        num_bytes = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal num_bytes
            storage = tensor.untyped_storage()
            if storage._cdata not in saved and storage._cdata not in inputs and storage._cdata not in weights:
                saved[storage._cdata] = StorageWeakRef(storage)
                num_bytes += storage.nbytes()

        device = next((one.device for one in inputs.values()), _HOST)
        start = _mark(device)
        with packing(pack, held=live):
            output = self._forward(*args)
        self._measured.marks.append((start, _mark(device)))
        cost.kept_bytes = max(cost.kept_bytes, num_bytes)
        cost.input_bytes = max(cost.input_bytes, sum(one.nbytes for one in inputs.values() if one.requires_grad))
        return output


def _mark(device: torch.device) -> _Mark:
    """Return the time on the host, or an event in the current stream of an accelerator, which runs later."""
    if device.type == "cpu" or is_fake_world():
        return time.perf_counter_ns()
    return torch.accelerator.current_stream(device).record_event(torch.Event(device=device, enable_timing=True))


def _nanoseconds(start: _Mark, end: _Mark) -> int:
    """Return the time between two marks; waits for the second."""
    if isinstance(start, int) or isinstance(end, int):
        return cast(int, end) - cast(int, start)
    end.synchronize()
    return round(1e6 * start.elapsed_time(end))


def choose_recomputed(costs: dict[str, LayerCost], budget_bytes: int, *, keeps_inputs: bool = True) -> frozenset[str]:
    """Return the layers to recompute, such that their forwards take the least time and the rest fits the budget.

    A 0/1 knapsack, by dynamic programming over the budget in steps. What a recomputation holds for a while counts, too:
    it is that of the largest recomputed layer, so that each layer is tried as the largest one.

    Args:
        costs: Measurements by name of the layers.
        budget_bytes: Bytes for inputs, kept activations and the largest recomputation.
        keeps_inputs: If True, inputs of recomputed layers are kept on the device.

    Raises:
        ConfigError: Not even the recomputation of all layers fits.
    """
    inputs = {name: cost.input_bytes * cost.num_live for name, cost in costs.items()}
    kept = {name: cost.kept_bytes * cost.num_live for name, cost in costs.items()}
    if not keeps_inputs:  # then a kept layer has its input on the device in addition
        kept = {name: kept[name] + inputs[name] for name in costs}
    base = sum(inputs.values()) if keeps_inputs else 0
    if base + sum(kept.values()) <= budget_bytes:
        return frozenset()
    best: tuple[int, frozenset[str]] | None = None
    for largest in sorted({cost.kept_bytes for cost in costs.values()}):
        free = [name for name, cost in costs.items() if cost.kept_bytes <= largest]
        capacity = budget_bytes - base - largest - sum(kept[name] for name in costs if name not in free)
        if capacity < 0:
            continue
        keep = _most_valuable(free, [kept[one] for one in free], [costs[one].nanoseconds for one in free], capacity)
        recomputed = frozenset(free) - keep
        total = sum(costs[name].nanoseconds for name in recomputed)
        if best is None or total < best[0]:
            best = (total, recomputed)
    if best is None:
        least = base + max(cost.kept_bytes for cost in costs.values())
        hint = ", or offload='cpu', which moves the inputs to the host" if keeps_inputs else ""
        raise ConfigError(
            f"checkpoint_activations(budget_bytes={budget_bytes}): with all {len(costs)} layers recomputed, their"
            f" inputs take {base} bytes and the recomputation of the largest one {least - base} more: give at least"
            f" budget_bytes={least}, a smaller batch{hint}"
        )
    return best[1]


def _most_valuable(names: Sequence[str], sizes: Sequence[int], values: Sequence[int], capacity: int) -> frozenset[str]:
    """Return the names of the largest total value whose total size is at most a capacity."""
    divisor = math.gcd(*sizes)  # equal layers are exact
    step = divisor if divisor and capacity // divisor <= _RESOLUTION else max(1, math.ceil(capacity / _RESOLUTION))
    slots = capacity // step
    best = [0] * (slots + 1)
    takes: list[list[bool]] = []
    for size, value in zip(sizes, values, strict=True):
        need = math.ceil(size / step)
        took = [False] * (slots + 1)
        for free in range(slots, need - 1, -1):
            if best[free - need] + value > best[free]:
                best[free], took[free] = best[free - need] + value, True
        takes.append(took)
    chosen, free = set(), slots
    for index in reversed(range(len(names))):
        if takes[index][free]:
            chosen.add(names[index])
            free -= math.ceil(sizes[index] / step)
    return frozenset(chosen)
