"""Activation memory of a forward and backward, measured on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from booster.comm import count_communication
from booster.interface.rank_memory import ActivationProfile, MemoryInterval
from booster.tensor_tree import map_tensors

__all__ = ["Event", "MemoryTimeline", "measure_peak", "profile_of", "record_timeline"]

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
    return ActivationProfile(
        _pareto_optimal(candidates),
        saved,
        gradients,
        timeline.sent,
        tuple(MemoryInterval(*one) for one in timeline_intervals),
    )


def _pareto_optimal(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for pair in sorted(set(pairs), reverse=True):
        if not found or pair[1] > found[-1][1]:
            found.append(pair)
    return tuple(found)


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
        found = result if isinstance(result, (tuple, list)) else (result,)
        for one in found:
            if isinstance(one, torch.Tensor):
                self._track(one)
            elif isinstance(one, (tuple, list)):
                for inner in one:
                    if isinstance(inner, torch.Tensor):
                        self._track(inner)
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
        def begin_backward(_: torch.Tensor) -> None:
            tracker.add_event("backward", name)

        def expect_backward(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad and isinstance(tensor, FakeTensor):  # vocab-parallel logits refuse hooks
                tensor.register_hook(begin_backward)
            return tensor

        def leave(_: nn.Module, inputs: Any, outputs: Any) -> None:
            sizes: dict[int, int] = {}
            map_tensors(lambda tensor: sizes.setdefault(id(tensor), tensor.numel() * tensor.itemsize), outputs)
            tracker.add_event("leave", name, sum(sizes.values()))
            map_tensors(expect_backward, outputs)

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
