"""Activation checkpointing within a memory budget: as little as possible is recomputed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from booster.comm import is_fake_world, max_of_numbers, raise_on_all_ranks
from booster.errors import ConfigError
from booster.pytree import iter_tensors

from .activation_chain import Chain, ChainStage, smallest_schedule, solve_chain
from .activation_offload import ActivationOffload, packing
from .activation_policy import LAYER_NAME, ActivationPolicy
from .activation_schedule import ActivationSchedule, ScheduledLayers
from .activation_segments import chained_argument, first_tensor

_HOST = torch.device("cpu")
_MEASURED_STEPS = 2  # the first one also compiles, and allocates what is reused later

# Note [Activation budget]
# In the first steps all layers are recomputed, and each forward is measured: the bytes that its operations save for
# backward, its time, how many of its forwards wait for their backward at once (of several microbatches), and whether it
# takes the output of the layer before it. The schedule is then chosen once: the one whose recomputations take the least
# time within the budget; see Note [Persistent schedules]. Layers that share a batch must recompute the same ones,
# because a recomputation communicates: the maximum of all ranks' measurements decides. Numbers of the training do not
# depend on the choice.


@dataclass(slots=True)
class LayerCost:
    """Measurement of a layer.

    Attributes:
        input_bytes: Bytes of the inputs that need a gradient, which are kept in any case.
        kept_bytes: Bytes that the forward keeps in addition if the layer is not recomputed.
        nanoseconds: Time of the forward.
        num_live: Number of forwards that wait for their backward at once.
        position: Position among the layers of a forward that ran here, from 1; 0 if it did not run.
        num_unchained: Number of forwards that did not take the output of the layer before it.
    """

    input_bytes: int = 0
    kept_bytes: int = 0
    nanoseconds: int = 0
    num_live: int = 0
    position: int = 0
    num_unchained: int = 0


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


class MeasuredLayers(ActivationPolicy):
    """Recomputes all layers and measures them; see Note [Activation budget].

    Args:
        names: Names of the layers of all stacks, equal on all ranks, also those that other ranks hold.
        offload: Offload of the layers' inputs, optional.
    """

    def __init__(self, names: Sequence[str], offload: ActivationOffload | None = None) -> None:
        super().__init__(offload)
        self._names = tuple(names)
        self._measured = {name: _Measured(LayerCost()) for name in names}
        self._num_run = 0  # layers of this step
        self._output: torch.Tensor | None = None  # of the layer that ran last

    @property
    def local_costs(self) -> dict[str, LayerCost]:
        """Measurements by name, of the layers that ran here."""
        return {name: one.cost for name, one in self._measured.items() if one.cost.num_live}

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        measured = self._measured[layer.__dict__[LAYER_NAME]]
        self._num_run += 1
        measured.cost.position = measured.cost.position or self._num_run
        measured.cost.num_unchained += chained_argument(args, self._output) is None
        output = self.recompute(_MeasuredForward(measured, layer, forward), *args)
        self._output = first_tensor(output)
        return output


class ActivationBudget(MeasuredLayers):
    """Recomputes as little as possible such that the activations kept for backward fit a budget.

    Args:
        names: Names of the layers of all stacks, equal on all ranks, also those that other ranks hold.
        budget_bytes: Bytes of activations per rank: inputs of layers and segments, what kept layers save, and what a
            recomputation keeps.
        offload: Offload of the inputs of recomputed layers and segments, optional.

    Attributes:
        schedule: Schedule of the layers that ran here; None until it is decided.
        costs: Measurements by name, of the layers of all ranks.
    """

    def __init__(self, names: Sequence[str], budget_bytes: int, offload: ActivationOffload | None = None) -> None:
        super().__init__(names, offload)
        self.budget_bytes = budget_bytes
        self.fingerprint += f" of {budget_bytes} bytes"
        self._num_steps = 0
        self._runs_segments = True
        self._layers: ScheduledLayers | None = None
        self.end_step = self._choose
        self.schedule: ActivationSchedule | None = None
        self.costs: dict[str, LayerCost] = {}

    @property
    def recomputed(self) -> frozenset[str] | None:
        """Names of the layers that are recomputed, and of those that did not run; None until it is decided."""
        if self.schedule is None:
            return None
        return self.schedule.recomputed | (set(self._names) - set(self.schedule.names))

    def prepare(self, plugin: str, *, gathers_layers: bool) -> None:
        """Recompute single layers only if a plugin has the weights of one layer at a time."""
        self._runs_segments = not gathers_layers

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        """Run the layer: measured, recomputed or with all its activations kept."""
        if self._layers is None:
            return super().run(layer, forward, *args)
        name = layer.__dict__[LAYER_NAME]
        is_known = self._measured[name].cost.num_live
        return self._layers.run(name, forward, args) if is_known else self.recompute(forward, *args)

    def _choose(self) -> None:
        """Choose the schedule after the last measured step.

        Collective: over the world.

        Raises:
            ConfigError: No schedule fits the budget; on all ranks.
        """
        self._num_steps += 1
        self._num_run, self._output = 0, None
        if self.schedule is not None or self._num_steps < (1 if is_fake_world() else _MEASURED_STEPS):
            return
        for measured in self._measured.values():
            measured.cost.nanoseconds = min((_nanoseconds(*marks) for marks in measured.marks), default=0)
            measured.marks.clear()
        names = tuple(one.name for one in fields(LayerCost))
        own = [getattr(self._measured[name].cost, field) for name in self._names for field in names]
        found = iter(max_of_numbers(own))
        self.costs = {name: LayerCost(*(next(found) for _ in names)) for name in self._names}
        local = {name: self.costs[name] for name in self.local_costs}
        error = None
        try:
            self.schedule = choose_schedule(
                local, self.budget_bytes, keeps_inputs=self.offload is None, has_segments=self._runs_segments
            )
            self._layers = ScheduledLayers(self.schedule, self.recompute, self.offload, is_strict=False)
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


def choose_schedule(
    costs: dict[str, LayerCost], budget_bytes: int, *, keeps_inputs: bool = True, has_segments: bool = True
) -> ActivationSchedule:
    """Return the schedule whose recomputations take the least time within a budget; see `solve_chain`.

    Args:
        costs: Measurements by name of the layers.
        budget_bytes: Bytes for inputs, kept activations and recomputation.
        keeps_inputs: If True, inputs of recomputed layers and segments are kept on the device.
        has_segments: If True, segments may have several layers.

    Raises:
        ConfigError: No schedule fits.
    """
    if not costs:
        return ActivationSchedule(())
    names = sorted(costs, key=lambda name: costs[name].position)
    stages = tuple(
        ChainStage(
            input_bytes=cost.input_bytes,
            kept_bytes=cost.kept_bytes,
            forward_time=cost.nanoseconds,
            num_live=max(1, cost.num_live),
            is_chained=has_segments and not cost.num_unchained,
        )
        for cost in map(costs.__getitem__, names)
    )
    chain = Chain(stages=stages, offloads_inputs=not keeps_inputs)
    solution = solve_chain(chain, budget_bytes)
    if solution is not None:
        return ActivationSchedule.of_chain(solution.items, names)
    inputs = sum(cost.input_bytes * cost.num_live for cost in costs.values())
    hint = ", or offload='cpu', which moves the inputs to the host" if keeps_inputs else ""
    raise ConfigError(
        f"checkpoint_activations(budget_bytes={budget_bytes}) is too small for {len(names)} layers, whose inputs take"
        f" {inputs} bytes and whose activations"
        f" {sum(cost.kept_bytes * cost.num_live for cost in costs.values())} more: give at least"
        f" budget_bytes={smallest_schedule(chain).num_bytes}, a smaller batch{hint}"
    )
