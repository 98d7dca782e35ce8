"""Simulated training steps: a plugin's own code on fake tensors, with its allocations tracked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types

from booster.booster import Booster
from booster.comm import count_communication, fake, num_communicators, observe_communication
from booster.core.activation_policy import LAYER_NAME
from booster.errors import BoosterError, ConfigError, first_line
from booster.interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin
from booster.pytree import iter_tensors

from .allocation_tracker import AllocationTracker, Category, MemoryParts, storage_key
from .machine_profile import MachineProfile
from .step_time import StepClock, StepTime

# Note [Simulated training]
# The plugin configures the model and trains it for a few steps, as it would on a real rank. All tensors are fake: they
# have shapes, dtypes and storage sizes, but no memory. Each storage is counted from the operator that creates it until
# its last reference is dropped. These are the times at which an allocator would allocate and free it, because autograd
# and the plugin hold and release fake tensors as any others. Collectives and kernels leave their outputs as they are.
# Where the plugin's code reads a value on the host, `booster.comm.host_value` returns a constant.
# Storages that live between steps are parameters, gradients, optimizer states or buffers, by which of the boosted
# objects has them. Other storages are activations, unless parameters are bound to them (gathered weights, counted as
# buffers) or they become gradients.
# A save is planned and its bytes are staged as on a real rank: the slices of other ranks are known as far as they are
# replicas of this one's (`FakeReplicas`), which they share the writing of. Files take nothing (`FakeStorage`), values
# are asked for and skipped in `checkpoint_io.copy_elements`, and host buffers come from `host_memory`, which reports
# them. Work of several threads is run in one and counted for each (`as_threads`).
_ADVICE = "a forward with data-dependent control flow can't be measured; give a batch for which it has none"
NUM_STEPS = 2  # the last is measured: the first allocates states and buffers, and traces


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMemory:
    """Memory that saves take in addition to the steady state, at their peak, in bytes.

    Attributes:
        device: Device memory of `save_model` and `save_optimizer`, synchronous or not.
        host: Host memory of the synchronous ones.
        async_host: Host memory of both in flight at once, with `use_async=True`.
    """

    device: int
    host: int
    async_host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of training on the rank that needs the most.

    Attributes:
        backward: Peak of forward and backward.
        step: Peak of the optimizer's step.
        steady_state: Steady state between steps.
        sent: Bytes that the rank sends in a step.
        communicators: Process groups of several ranks for device tensors. Each has buffers of NCCL, which are not
            included: they depend on its version and its settings.
        offloaded: Bytes offloaded to another tier: host memory beside an accelerator, or files.
        checkpoint: Memory that saves take; None if it was not asked for.
        time: Predicted time of a step; None without a machine profile.
    """

    backward: MemoryParts
    step: MemoryParts
    steady_state: MemoryParts
    sent: int
    communicators: int = 0
    offloaded: int = 0
    checkpoint: CheckpointMemory | None = None
    time: StepTime | None = None

    @property
    def peak(self) -> MemoryParts:
        """Peak of all."""
        saving = self.steady_state
        if self.checkpoint is not None:
            saving = replace(saving, buffers=saving.buffers + self.checkpoint.device)
        return max((self.backward, self.step, saving), key=lambda parts: parts.total)


class Training(NamedTuple):
    """A user's model, an optimizer over its parameters, and the batch of one rank, as fake tensors."""

    model: nn.Module
    optimizer: Optimizer
    batch: Any


AtEnd: TypeAlias = Callable[[Booster, ModelWrapper, OptimizerWrapper, AllocationTracker], CheckpointMemory | None]
"""Called with the trained objects at the end of a simulation; returns the memory of their saves, if there were any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMemory:
    """Memory and traffic of the last simulated step.

    Attributes:
        memory: Memory of the rank.
        segments: Peaks of the segments of forward and backward, by name; see Note [Layer extrapolation].
        forward_work: Work of each layer's forward, by name, if segments are those of each layer: seconds, or
            floating-point operations without a machine profile.
    """

    memory: RankMemory
    segments: Mapping[str, MemoryParts]
    forward_work: Mapping[str, float] = field(default_factory=dict)


def simulate(
    make_training: Callable[[], Training],
    plugin: Plugin,
    precision: MixedPrecision | None,
    mode: FakeTensorMode,
    criterion: Callable[[Any, Any], torch.Tensor],
    *,
    layers: str | None = None,
    by_layer: bool = False,
    num_steps: int = NUM_STEPS,
    at_end: AtEnd | None = None,
    profile: MachineProfile | None = None,
) -> SimulatedMemory:
    """Train for a few steps on fake tensors; see Note [Simulated training]. Must be called with a fake process group.

    Args:
        make_training: Function that returns what is trained, called within `mode`.
        plugin: Plugin.
        precision: Mixed precision of the Booster, optional.
        mode: Mode of the fake tensors.
        criterion: Function of (outputs, batch) that returns the loss.
        layers: Name of a list of layers that segments begin at, optional.
        by_layer: If True, segments begin at each layer that `checkpoint_activations` was called for, and are named by
            it, as `layer_segment` and `backward_segment` return.
        num_steps: Number of steps.
        at_end: `simulate_saves` or `note_held_shards` with its first arguments, optional.
        profile: Speed of the machine, for the step's time; optional.
    """
    booster = Booster(plugin=plugin, mixed_precision=precision)
    clock = None if profile is None else StepClock(profile, plugin)
    tracker = AllocationTracker(plugin.device, clock, counts_flops=by_layer and clock is None)
    with mode, tracker, fake.fake_memory(), nullcontext() if clock is None else observe_communication(clock):
        plain_model, plain_optimizer, batch = make_training()
        for tensor in iter_tensors(batch):
            tracker.ignore(tensor)
        for tensor in (*plain_model.parameters(), *plain_model.buffers()):
            tracker.track(tensor)
        plain_model.train()
        model, optimizer, *_ = booster.boost(plain_model, plain_optimizer, criterion=criterion)
        del plain_model, plain_optimizer
        for _ in range(num_steps):
            tracker.categorize_all(_steady_categories(model, optimizer), "buffers")
            parts = _each_layer(model.unwrap()) if by_layer else _ends_of_stack(model.unwrap(), layers)
            segments = _Segments(parts, tracker, clock)
            if clock is not None:
                clock.reset()
            on_fakes = on_fake_tensors(model.unwrap(), "measure its activations", _ADVICE)
            with _mark_gathered(model.unwrap(), tracker), segments, count_communication() as count, on_fakes:
                booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_loss=False)
            _mark_gradients(model, optimizer, tracker)
            tracker.take_peak()
            if clock is not None:
                clock.end_model()
            with count_communication() as count_of_step, _foreach_for_fake_tensors():
                optimizer.step()
                optimizer.zero_grad()
            step = tracker.take_peak()
        time = None if clock is None else clock.result(model, tracker.offloaded)
        tracker.categorize_all(_steady_categories(model, optimizer), "buffers")
        memory = RankMemory(
            backward=max(segments.peaks.values(), key=lambda parts: parts.total),
            step=step,
            steady_state=MemoryParts(**tracker.counts),
            sent=sum(count.sent.values()) + sum(count_of_step.sent.values()),
            communicators=num_communicators(),
            offloaded=tracker.offloaded,
            checkpoint=None if at_end is None else at_end(booster, model, optimizer, tracker),
            time=time,
        )
        return SimulatedMemory(memory=memory, segments=segments.peaks, forward_work=segments.work if by_layer else {})


@contextmanager
def _foreach_for_fake_tensors() -> Iterator[None]:
    """Let torch's optimizers choose for fake tensors what they do for real ones: `foreach`, on accelerators."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


def note_held_shards(
    found: set[Hashable], booster: Booster, model: ModelWrapper, optimizer: OptimizerWrapper, tracker: AllocationTracker
) -> None:
    """Add what this rank holds of a checkpoint, without what may differ from other ranks' copies."""
    slices = [*model.tensor_slices(), *optimizer.checkpoint_state().slices()]
    found |= {(one.name, one.box, one.span) for one in slices if one.shared}


def simulate_saves(
    replicas: fake.FakeReplicas,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    tracker: AllocationTracker,
) -> CheckpointMemory:
    """Save with the plugin's own code: plan, copies, conversions and buffers, without files; see `FakeStorage`."""
    fake.replicas = replicas

    def peak(use_async: bool) -> tuple[int, int]:
        tracker.take_peak()
        device, host = sum(tracker.counts.values()), tracker.offloaded
        booster.save_model(model, "model", shard=True, use_async=use_async)
        booster.save_optimizer(optimizer, "optimizer", shard=True, use_async=use_async)
        booster.wait_for_checkpoints()
        most_host = tracker.peak_offloaded
        return tracker.take_peak().total - device, most_host - host

    try:
        (device, host), (async_device, async_host) = peak(use_async=False), peak(use_async=True)
    finally:
        fake.replicas = None
    return CheckpointMemory(device=max(device, async_device), host=host, async_host=async_host)


@contextmanager
def on_fake_tensors(model: nn.Module, purpose: str, advice_on_values: str) -> Iterator[None]:
    """Run a user's model on fake tensors in the block; errors say for what, and what to do if it reads values.

    Raises:
        ConfigError: The block raised another error than one of this library.
    """
    try:
        yield
    except BoosterError:
        raise
    except Exception as error:
        advice = "check that it runs on a real batch of these shapes and with this criterion"
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            advice = advice_on_values
        raise ConfigError(
            f"{type(model).__name__} can't be run on fake tensors to {purpose} ({type(error).__name__}:"
            f" {first_line(error)[:200]}): {advice}"
        ) from error


def layer_segment(name: str) -> str:
    """Return the name of the segment of a layer's forward."""
    return f"forward of {name}"


def backward_segment(name: str) -> str:
    """Return the name of the segment from the gradient of a layer's output on."""
    return f"backward of {name}"


@dataclass(frozen=True, slots=True)
class _SegmentNames:
    """A layer, and the names of the segments that begin with its forward, after it, and with its backward."""

    layer: nn.Module
    forward: str
    after: str
    backward: str


def _ends_of_stack(model: nn.Module, name: str | None) -> list[_SegmentNames]:
    # See Note [Layer extrapolation].
    layers = [] if name is None else list(model.get_submodule(name).children())
    last = len(layers) - 1
    names = ["first layer", *(["layers"] * (last - 1)), "last layer"]
    return [
        _SegmentNames(layer, names[index], "end" if index == last else "layers", f"backward of {names[index]}")
        for index, layer in enumerate(layers)
    ]


def _each_layer(model: nn.Module) -> list[_SegmentNames]:
    layers = {vars(one)[LAYER_NAME]: one for one in model.modules() if LAYER_NAME in vars(one)}
    return [_SegmentNames(layer, layer_segment(name), "end", backward_segment(name)) for name, layer in layers.items()]


class _Segments:
    """Context that divides forward and backward into segments; see Note [Layer extrapolation].

    Attributes:
        peaks: Peak of each segment.
        work: Seconds of the clock, or floating-point operations, in the last forward of each layer.
    """

    def __init__(self, parts: Sequence[_SegmentNames], tracker: AllocationTracker, clock: StepClock | None) -> None:
        self.peaks: dict[str, MemoryParts] = {}
        self.work: dict[str, float] = {}
        self._parts, self._tracker, self._clock = parts, tracker, clock
        self._name = "start"
        self._begun = 0.0

    def __enter__(self) -> _Segments:
        self._tracker.take_peak()
        self._hooks = [
            hook
            for part in self._parts
            for hook in (
                part.layer.register_forward_pre_hook(partial(self._enter, part.forward)),
                part.layer.register_forward_hook(partial(self._leave, part), always_call=True),
            )
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        self._begin("")
        for hook in self._hooks:
            hook.remove()

    def _begin(self, name: str) -> None:
        before, self._name = self._name, name
        peak = self._tracker.take_peak()
        if before not in self.peaks or peak.total > self.peaks[before].total:
            self.peaks[before] = peak

    def _now(self) -> float:
        return self._tracker.flops if self._clock is None else self._clock.now

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if not self._name.startswith("backward"):  # activation checkpointing runs layers again
            self._begin(name)
            self._begun = self._now()

    def _leave(self, part: _SegmentNames, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._name.startswith("backward"):
            return
        self.work[part.forward] = self._now() - self._begun
        self._begin(part.after)
        for tensor in iter_tensors(outputs):
            if tensor.requires_grad and isinstance(tensor, FakeTensor):
                tensor.register_hook(lambda _: self._begin(part.backward))


def _steady_categories(model: ModelWrapper, optimizer: OptimizerWrapper) -> dict[int, Category]:
    optim, module = optimizer.unwrap(), model.unwrap()
    updated = [parameter for group in optim.param_groups for parameter in group["params"]]
    found: dict[int, Category] = {}
    tensors_of: dict[Category, Iterable[torch.Tensor]] = {
        "optimizer_states": [*iter_tensors(dict(optim.state)), *updated],
        "parameters": [*module.parameters(), *(one.tensor for one in model.tensor_slices())],
        "gradients": [one.grad for one in (*updated, *module.parameters()) if one.grad is not None],
        "buffers": module.buffers(),
    }
    for category, tensors in tensors_of.items():
        found |= {storage_key(tensor): category for tensor in tensors if isinstance(tensor, FakeTensor)}
    return found


def _mark_gradients(model: ModelWrapper, optimizer: OptimizerWrapper, tracker: AllocationTracker) -> None:
    parameters = [*model.unwrap().parameters(), *(one for group in optimizer.param_groups for one in group["params"])]
    for parameter in parameters:
        if parameter.grad is not None:
            tracker.categorize_activation(parameter.grad, "gradients")


@contextmanager
def _mark_gathered(model: nn.Module, tracker: AllocationTracker) -> Iterator[None]:
    """Count what parameters are bound to while their module runs as buffers, and their gradients as gradients."""

    def mark(module: nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                tracker.categorize_activation(parameter.detach(), "buffers")

    hooks = [module.register_forward_pre_hook(mark) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
