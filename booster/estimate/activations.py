"""Activation memory of a forward and backward, measured on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from booster.comm import count_communication
from booster.interface.memory import ActivationProfile, MemoryInterval
from booster.pytree import iter_tensors

# Note [Activation memory]
# The model runs forward and backward on fake tensors, which have shapes, dtypes and storage sizes, but no memory. Each
# new storage is counted from the operator that creates it until its last reference is dropped. These are the times at
# which an allocator would allocate and free it, because autograd saves and releases fake tensors as any others. Tensors
# that existed before are not counted. Gradients of parameters are counted separately: a plugin may keep them full,
# sharded, or not at all. So the peak of activations plus a fraction of the gradients is at one of the Pareto-optimal
# pairs of the two, which are few. A plugin whose own memory changes during backward uses the timeline of events.

# (event, name of module or parameter, bytes of outputs, 0), or ("", "", change in bytes of activations, change in bytes
# of gradients).
Event: TypeAlias = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Timeline of memory events of a forward and backward.

    Attributes:
        forward: Events of the forward including the loss.
        backward: Events of the backward.
        sent: Bytes sent by this rank.
    """

    forward: Sequence[Event]
    backward: Sequence[Event]
    sent: int


def record_timeline(
    model: nn.Module, run: Callable[[], torch.Tensor], *, existing: Sequence[torch.Tensor]
) -> MemoryTimeline:
    """Record the memory events of `run` and of the backward of its loss. Must be called within a `FakeTensorMode`.

    Args:
        model: Model whose parameters get the gradients.
        run: Function that runs the model's forward on fake tensors and returns the loss.
        existing: Existing tensors, which are not counted: parameters, buffers, the batch.
    """
    tracker = _StorageTracker(existing)
    with tracker, _track_gradients(model, tracker), _track_modules(model, tracker):
        with count_communication() as count:
            loss = run()
            num_before_loss = len(tracker.events)
            loss.backward()
        events = list(tracker.events)
    return MemoryTimeline(events[:num_before_loss], events[num_before_loss:], sum(count.sent.values()))


def profile_of(timeline: MemoryTimeline) -> ActivationProfile:
    """Summarize a recording; see Note [Activation memory]."""
    activations = gradients = saved = 0
    candidates: list[tuple[int, int]] = []
    timeline_intervals: list[tuple[str, str, int, int, int]] = []
    for index, (event, name, change, gradient_change) in enumerate((*timeline.forward, *timeline.backward)):
        if index == len(timeline.forward):
            saved = activations
        if event:
            timeline_intervals.append((event, name, activations, activations, change))
            continue
        activations += change
        gradients += gradient_change
        if change > 0 and timeline_intervals and timeline_intervals[-1][3] < activations:
            timeline_intervals[-1] = (*timeline_intervals[-1][:3], activations, timeline_intervals[-1][4])
        if change > 0 or gradient_change > 0:
            candidates.append((activations, gradients))
    peaks: list[tuple[int, int]] = []
    for pair in sorted(set(candidates), reverse=True):  # keep the Pareto-optimal pairs
        if not peaks or pair[1] > peaks[-1][1]:
            peaks.append(pair)
    return ActivationProfile(
        tuple(peaks),
        saved,
        gradients,
        timeline.sent,
        tuple(MemoryInterval(*one) for one in timeline_intervals),
    )


def measure_peak(run: Callable[[], Any], existing: Sequence[torch.Tensor]) -> int:
    """Return the peak bytes of tensors allocated by `run`. Must be called within a `FakeTensorMode`.

    Args:
        run: Function to measure.
        existing: Existing tensors, which are not counted.
    """
    tracker = _StorageTracker(existing)
    with tracker:
        run()
    return max((activations for activations, _ in profile_of(MemoryTimeline((), tracker.events, 0)).peaks), default=0)


class _StorageTracker(TorchDispatchMode):
    """Dispatch mode that records allocation and release of storages."""

    def __init__(self, existing: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known: dict[int, tuple[weakref.finalize, int]] = {}
        self._gradients: set[int] = set()
        self._existing = {_key(tensor) for tensor in existing}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = _run(func, args, kwargs or {})
        for tensor in iter_tensors(result):
            self._track(tensor)
        return result

    def add_event(self, event: str, name: str, returned: int = 0) -> None:
        self.events.append((event, name, returned, 0))

    def count_as_gradient(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._known and key not in self._gradients:
            self._gradients.add(key)
            size = self._known[key][1]
            self.events.append(("", "", -size, size))

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._existing:
            return
        size = storage.nbytes()
        self._known[key] = (weakref.finalize(storage, self._untrack, key), size)
        self.events.append(("", "", size, 0))

    def _untrack(self, key: int) -> None:
        _, size = self._known.pop(key)
        is_gradient = key in self._gradients
        self._gradients.discard(key)
        self.events.append(("", "", 0, -size) if is_gradient else ("", "", -size, 0))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # Its fake implementation supports bf16 only, unlike the real one. The casts are not counted.
        return func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _track_gradients(model: nn.Module, tracker: _StorageTracker) -> Iterator[None]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def report(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.count_as_gradient(parameter.grad)
            tracker.add_event("gradient", names[id(parameter)])

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(report) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None


@contextmanager
def _track_modules(model: nn.Module, tracker: _StorageTracker) -> Iterator[None]:
    def watch(name: str, module: nn.Module) -> list[Any]:
        def leave(_: nn.Module, inputs: Any, outputs: Any) -> None:
            sizes = {id(tensor): tensor.numel() * tensor.itemsize for tensor in iter_tensors(outputs)}
            tracker.add_event("leave", name, sum(sizes.values()))
            for tensor in iter_tensors(outputs):
                if tensor.requires_grad and isinstance(tensor, FakeTensor):  # vocab-parallel logits refuse hooks
                    tensor.register_hook(lambda _: tracker.add_event("backward", name))

        return [
            module.register_forward_pre_hook(lambda *_: tracker.add_event("enter", name)),
            # Checkpointing ends recomputation by an exception, once it has all tensors that it needs.
            module.register_forward_hook(leave, always_call=True),
        ]

    hooks = [hook for name, module in model.named_modules() for hook in watch(name, module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Note [Layer extrapolation]
# A model of eighty identical layers is run with the first three, four and five of them, and all memory events are
# recorded. If each additional layer inserts the same events at the same position, between any two events of the rest
# of the model, the events of the full model follow without running it. If anything else changes, or the layers differ
# in any visible attribute, the full model is run.
_DEPTHS = (3, 4, 5)
_MIN_LAYERS = 1 + sum(_DEPTHS)
_COMPARABLE_TYPES = (int, float, str, bool, type(None), torch.dtype, torch.device, tuple)


def measure_activations(
    model: nn.Module, run: Callable[[], torch.Tensor], *, existing: Sequence[torch.Tensor] = ()
) -> ActivationProfile:
    """Measure the memory of `run` and of the backward of its loss. Must be called within a `FakeTensorMode`.

    Args:
        model: Model whose parameters get the gradients.
        run: Function that runs the model's forward on fake tensors and returns the loss.
        existing: Further existing tensors, such as the batch.
    """
    existing = [*model.parameters(), *model.buffers(), *existing]
    name = find_repeated_layers(model)
    timeline = None if name is None else _extrapolate_from_few(model, name, run, existing)
    return profile_of(record_timeline(model, run, existing=existing) if timeline is None else timeline)


def find_repeated_layers(model: nn.Module) -> str | None:
    """Return the name of the longest `ModuleList` of identical layers that is worth extrapolating, or None."""
    lists = {name: one for name, one in model.named_modules() if type(one) is nn.ModuleList and len(one) >= _MIN_LAYERS}
    alike = [name for name, one in lists.items() if _are_identical(list(one)) and _are_untied(model, one)]
    name = max(alike, key=lambda one: len(lists[one]), default=None)
    return None if name is None or _has_per_layer_settings(model, len(lists[name])) else name


def extrapolate(timelines: Sequence[MemoryTimeline], name: str, num_layers: int) -> MemoryTimeline | None:
    """Extrapolate to the full model; None if its events do not follow from those of fewer layers.

    Args:
        timelines: Recordings with three, four and five layers.
        name: Name of the list of layers.
        num_layers: Number of layers of the full model.
    """
    passes: list[list[Event]] = []
    for phase_name in ("forward", "backward"):
        full: list[Event] = []
        segments = [_segments([_split_event(event, name) for event in getattr(one, phase_name)]) for one in timelines]
        if len({len(one) for one in segments}) > 1:
            return None
        for three, four, five in zip(*segments, strict=True):
            found = _repeat_layers(three, four, num_layers, phase_name == "forward")
            if found is None or _repeat_layers(three, four, 5, phase_name == "forward") != five:
                return None
            full += [_join_event(event, name) for event in found]
        passes.append(full)
    sent = [one.sent for one in timelines]
    if sent[2] - sent[1] != sent[1] - sent[0]:
        return None
    return MemoryTimeline(passes[0], passes[1], sent[0] + (num_layers - 3) * (sent[1] - sent[0]))


def _extrapolate_from_few(
    model: nn.Module, name: str, run: Callable[[], torch.Tensor], existing: Sequence[torch.Tensor]
) -> MemoryTimeline | None:
    stack = model.get_submodule(name)
    num_layers = len(stack._modules)
    timelines: list[MemoryTimeline] = []
    for depth in _DEPTHS:
        try:
            with _truncate_layers(stack, depth):
                timelines.append(record_timeline(model, run, existing=existing))
        except Exception:  # any error of a model that depends on its layers: the full run reports real ones
            return None
    return extrapolate(timelines, name, num_layers)


@contextmanager
def _truncate_layers(stack: nn.Module, depth: int) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise RuntimeError("a removed layer was called")

    layers = stack._modules
    kept = dict(list(layers.items())[:depth])
    removed = [one for key, one in layers.items() if one is not None and key not in kept]
    hooks = [one.register_forward_pre_hook(refuse) for one in removed]
    stack._modules = kept
    try:
        yield
    finally:
        stack._modules = layers
        for hook in hooks:
            hook.remove()


# An event whose name is split into the layer's index (-1 if of no layer) and the rest.
_LayerEvent = tuple[str, int, str, int, int]


def _split_event(event: Event, name: str) -> _LayerEvent:
    kind, full_name, activations, gradients = event
    if full_name.startswith(f"{name}."):
        index, dot, rest = full_name[len(name) + 1 :].partition(".")
        if index.isdecimal():
            return kind, int(index), dot + rest, activations, gradients
    return kind, -1, full_name, activations, gradients


def _join_event(event: _LayerEvent, name: str) -> Event:
    kind, index, rest, activations, gradients = event
    return kind, rest if index < 0 else f"{name}.{index}{rest}", activations, gradients


def _segments(events: Sequence[_LayerEvent]) -> list[list[_LayerEvent]]:
    """Split the events at those of the rest of the model."""
    found: list[list[_LayerEvent]] = [[]]
    for event in events:
        if event[0] and event[1] < 0:
            found.append([])
        found[-1].append(event)
    return found


def _repeat_layers(
    three: Sequence[_LayerEvent], four: Sequence[_LayerEvent], num_layers: int, is_forward: bool
) -> list[_LayerEvent] | None:
    """Return the events of `num_layers` layers; None if those of four layers do not extend those of three."""
    size = len(four) - len(three)
    if size < 0:
        return None
    position = next((at for at, pair in enumerate(zip(three, four, strict=False)) if not _is_same(*pair)), len(three))
    if not all(_is_same(*pair) for pair in zip(three[position:], four[position + size :], strict=True)):
        return None
    more = num_layers - 4
    head, block, tail = four[:position], four[position : position + size], four[position + size :]
    full = [_shift_layer(one, 0 if is_forward else more) for one in head]
    for copy in range(more + 1):
        full += [_shift_layer(one, copy if is_forward else more - copy) for one in block]
    return full + [_shift_layer(one, more if is_forward else 0) for one in tail]


def _is_same(one: _LayerEvent, other: _LayerEvent) -> bool:
    return (one[0], one[1] < 0, *one[2:]) == (other[0], other[1] < 0, *other[2:])


def _shift_layer(event: _LayerEvent, by: int) -> _LayerEvent:
    return event if event[1] < 0 else (event[0], event[1] + by, *event[2:])


def _are_identical(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers differ in their index only."""
    described = [_description(layer) for layer in layers]
    if any(one.keys() != described[0].keys() for one in described):
        return False
    return all(_is_equal_or_index([one[key] for one in described]) for key in described[0])


def _description(layer: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        found[name, "type"] = type(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found[name, "hooks"] = tuple(len(one) for one in hooks)
        for key, value in vars(module).items():
            if not key.startswith("_"):
                found[name, f"attribute {key}"] = value if isinstance(value, _COMPARABLE_TYPES) else type(value)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found[name, f"tensor {key}"] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    return found


def _is_equal_or_index(values: Sequence[Any]) -> bool:
    if all(type(one) is type(values[0]) and one == values[0] for one in values):
        return True
    return all(type(one) is int and one - values[0] == index for index, one in enumerate(values))


def _are_untied(model: nn.Module, stack: nn.Module) -> bool:
    """Return whether no parameter of the layers is tied."""
    uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return all(uses[id(one)] == 1 for one in stack.parameters())


def _has_per_layer_settings(model: nn.Module, num_layers: int) -> bool:
    """Return whether the model or its config has a list of settings that differ by layer, such as attention types."""
    holders = [vars(one) for one in model.modules()]
    configs = {id(one["config"]): one["config"] for one in holders if hasattr(one.get("config"), "__dict__")}
    for holder in [*holders, *map(vars, configs.values())]:
        for value in holder.values():
            is_list = isinstance(value, (list, tuple)) and len(value) == num_layers
            if is_list and any(type(one) is not type(value[0]) or one != value[0] for one in value):
                return True
    return False
