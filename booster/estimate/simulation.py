"""Simulated training steps: a plugin's own code on fake tensors, with its allocations tracked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeAlias

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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from booster.booster import Booster
from booster.comm import count_communication, fake, num_communicators
from booster.core.activation_policy import LAYER_NAME
from booster.errors import BoosterError, ConfigError, first_line
from booster.interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin
from booster.pytree import iter_tensors

from .machine_profile import MachineProfile
from .operator_costs import operator_cost
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
_MAX_BUCKETS = 64
NUM_STEPS = 2  # the last is measured: the first allocates states and buffers, and traces

Category = Literal["parameters", "gradients", "optimizer_states", "activations", "buffers"]
_CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer_states", "activations", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory of a rank at one time, in bytes.

    Attributes:
        parameters: Weights that the model computes with, as the rank stores them between steps.
        gradients: Gradients of parameters.
        optimizer_states: Optimizer states and fp32 master weights.
        activations: Tensors that forward and backward save and compute; in the optimizer's step, its temporaries.
        buffers: The model's buffers, gathered weights, and communication buffers.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(getattr(self, one.name) for one in fields(self))


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


@dataclass(slots=True)
class _TrackedStorage:
    """Live storage of a fake tensor.

    Attributes:
        num_bytes: Its size.
        category: What it is counted as.
        is_on_device: If False, it is in host memory beside an accelerator.
        finalizer: Reports its end.
    """

    num_bytes: int
    category: Category
    is_on_device: bool
    finalizer: weakref.finalize


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that tracks the storages of fake tensors; see Note [Simulated training].

    Args:
        device: Device whose memory is counted.
        clock: Clock that operators advance, optional.

    Attributes:
        counts: Bytes by category.
        offloaded: Bytes in host memory beside an accelerator.
        peak_offloaded: The most of them since the last `take_peak`.
        flops: Floating-point operations, if they are counted.
    """

    def __init__(self, device: torch.device, clock: StepClock | None = None, *, counts_flops: bool = False) -> None:
        super().__init__()
        self._counts_flops = counts_flops
        self.flops = 0.0
        self._device_type = device.type
        self._clock = clock
        self._live: dict[int, _TrackedStorage] = {}
        self._ignored: set[int] = set()
        self._total = self._peak_total = 0
        self.counts: dict[Category, int] = dict.fromkeys(_CATEGORIES, 0)
        self.offloaded = self.peak_offloaded = 0
        self._peak = dict(self.counts)

    def __enter__(self) -> AllocationTracker:
        # FSDP frees and allocates gathered weights by resizing their storage, which no dispatch mode sees.
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = self._resize(storage, num_bytes)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        fake.max_buckets = _MAX_BUCKETS
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        fake.max_buckets = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        result = run_operator(func, args, kwargs or {})
        if self._clock is not None:
            self._clock.on_operator(func, args, kwargs or {}, result)
        if self._counts_flops:
            cost = operator_cost(func, args, kwargs or {}, result)
            self.flops += 0.0 if cost is None else cost.flops
        if isinstance(result, torch.Tensor):
            self.track(result)
        elif result is not None:
            for tensor in iter_tensors(result):
                self.track(tensor)
        return result

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count a tensor's storage, which must live as long as this mode."""
        key = storage_key(tensor)
        if key in self._live:
            self._live[key].finalizer.detach()
            self._free(key)
        self._ignored.add(key)

    def track(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now on."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._live or key in self._ignored:
            return
        is_on_device = tensor.device.type == self._device_type and not fake.is_offloading
        finalizer = weakref.finalize(storage, self._free, key)
        finalizer.atexit = False
        self._live[key] = _TrackedStorage(0, "activations", is_on_device, finalizer)
        self._set_size(key, storage.nbytes() * fake.num_threads)

    def categorize_activation(self, tensor: torch.Tensor, category: Category) -> None:
        """Count a tensor's storage as `category` if it counts as an activation."""
        one = self._live.get(storage_key(tensor)) if isinstance(tensor, FakeTensor) else None
        if one is not None and one.category == "activations":
            self._set_category(one, category)

    def categorize_all(self, categories: Mapping[int, Category], default: Category) -> None:
        """Set the category of all storages.

        Args:
            categories: Categories by address of the storage, as `storage_key` returns it.
            default: Category of the others.
        """
        for key, one in self._live.items():
            self._set_category(one, categories.get(key, default))

    def _set_category(self, one: _TrackedStorage, category: Category) -> None:
        if one.is_on_device:
            self.counts[one.category] -= one.num_bytes
            self.counts[category] += one.num_bytes
        one.category = category

    def take_peak(self) -> MemoryParts:
        """Return the peak since the last call, by category."""
        peak = MemoryParts(**self._peak)
        self._peak_total, self._peak = self._total, dict(self.counts)
        self.peak_offloaded = self.offloaded
        return peak

    def _set_size(self, key: int, num_bytes: int) -> None:
        one = self._live[key]
        change, one.num_bytes = num_bytes - one.num_bytes, num_bytes
        if not one.is_on_device:
            self.offloaded += change
            self.peak_offloaded = max(self.peak_offloaded, self.offloaded)
            return
        self.counts[one.category] += change
        self._total += change
        if self._total > self._peak_total:
            self._peak_total, self._peak = self._total, dict(self.counts)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            self._set_size(storage._cdata, storage.nbytes())

    def _free(self, key: int) -> None:
        self._set_size(key, 0)
        del self._live[key]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors, also where torch's fake implementations have gaps."""
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # Its fake implementation supports bf16 only, unlike the real one. The casts are not counted.
        return func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    if _has_real_integers(func, args):  # the ranks of a mesh, for example, whose values the code reads
        with _disable_current_modes():
            return func(*args, **kwargs)
    if func is torch.ops.aten._pin_memory.default:  # has no fake implementation
        return args[0].clone()
    return func(*args, **kwargs)


def _has_real_integers(func: Any, args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    if type(first) is not torch.Tensor or first.is_floating_point() or func is torch.ops.aten._to_copy.default:
        return False
    return not any(isinstance(one, FakeTensor) for one in args)


AtEnd: TypeAlias = Callable[[Booster, ModelWrapper, OptimizerWrapper, AllocationTracker], CheckpointMemory | None]
"""Called with the trained objects at the end of a simulation; returns the memory of their saves, if there were any."""


@dataclass(frozen=True, slots=True)
class Training:
    """Model and everything that trains it, as fake tensors.

    Attributes:
        model: User's model.
        optimizer: Optimizer over its parameters.
        batch: Batch of one rank.
        criterion: Function of (outputs, batch) that returns the loss.
    """

    model: nn.Module
    optimizer: Optimizer
    batch: Any
    criterion: Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMemory:
    """Memory and traffic of the last simulated step.

    Attributes:
        segments: Peaks of the segments of forward and backward, by name; see Note [Layer extrapolation].
        step: Peak of the optimizer's step.
        steady_state: Memory after the step.
        sent: Bytes that the rank sent.
        communicators: Process groups of several ranks for device tensors.
        offloaded: Bytes in another tier.
        checkpoint: Memory of saves; None if there were none.
        time: Predicted time of the step; None without a machine profile.
        forward_work: Work of each layer's forward, by name, if segments are those of each layer: seconds, or
            floating-point operations without a machine profile.
    """

    segments: Mapping[str, MemoryParts]
    step: MemoryParts
    steady_state: MemoryParts
    sent: int
    communicators: int
    offloaded: int
    checkpoint: CheckpointMemory | None = None
    time: StepTime | None = None
    forward_work: Mapping[str, float] = field(default_factory=dict)

    def summary(self) -> RankMemory:
        """Return the peak of all segments with the rest."""
        return RankMemory(
            backward=max(self.segments.values(), key=lambda parts: parts.total),
            step=self.step,
            steady_state=self.steady_state,
            sent=self.sent,
            communicators=self.communicators,
            offloaded=self.offloaded,
            checkpoint=self.checkpoint,
            time=self.time,
        )


def simulate(
    make_training: Callable[[], Training],
    plugin: Plugin,
    precision: MixedPrecision | None,
    mode: FakeTensorMode,
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
    with mode, tracker, fake.fake_memory(), nullcontext() if clock is None else clock.observing():
        training = make_training()
        batch, criterion = training.batch, training.criterion
        for tensor in iter_tensors(batch):
            tracker.ignore(tensor)
        for tensor in (*training.model.parameters(), *training.model.buffers()):
            tracker.track(tensor)
        training.model.train()
        model, optimizer, *_ = booster.boost(training.model, training.optimizer, criterion=criterion)
        del training
        for _ in range(num_steps):
            tracker.categorize_all(_steady_categories(model, optimizer), "buffers")
            parts = _each_layer(model.unwrap()) if by_layer else _ends_of_stack(model.unwrap(), layers)
            segments = _Segments(parts, tracker, clock)
            if clock is not None:
                clock.reset()
            with _mark_gathered(model.unwrap(), tracker), segments, count_communication() as count:
                _run_model(booster, model, optimizer, batch, criterion)
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
        return SimulatedMemory(
            segments=segments.peaks,
            step=step,
            steady_state=MemoryParts(**tracker.counts),
            sent=sum(count.sent.values()) + sum(count_of_step.sent.values()),
            communicators=num_communicators(),
            offloaded=tracker.offloaded,
            checkpoint=None if at_end is None else at_end(booster, model, optimizer, tracker),
            time=time,
            forward_work=segments.work if by_layer else {},
        )


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


def _run_model(booster: Booster, model: Any, optimizer: Any, batch: Any, criterion: Any) -> None:
    advice = "a forward with data-dependent control flow can't be measured; give a batch for which it has none"
    with on_fake_tensors(model.unwrap(), "measure its activations", advice):
        booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_loss=False)


@contextmanager
def on_fake_tensors(model: nn.Module, purpose: str, advice_on_values: str) -> Iterator[None]:
    """Run a model on fake tensors in the block; its errors say so.

    Args:
        model: The user's model.
        purpose: What it is run for.
        advice_on_values: What to do about a forward that reads values.

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
    """Return the segments of Note [Layer extrapolation]."""
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

    Args:
        parts: Layers that segments begin at.
        tracker: Tracker of the allocations.
        clock: Clock of the step, optional.

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
    """Return the categories of the storages of a boosted model and optimizer."""
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
