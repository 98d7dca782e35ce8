"""What a forward and a backward keep in memory, measured on tensors without memory."""

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
from booster.interface.rank_memory import ActivationProfile, Stretch
from booster.tensor_tree import map_tensors

__all__ = ["Event", "Recording", "peak_of", "profile_of", "record"]

# Note [Measuring activations]
# The model runs forward and backward on fake tensors, which have shapes, formats and storages of the right size, and no
# memory. After each operator, storages that are new are counted until nothing refers to them any more: the same moments
# at which an allocator would take and return memory, because autograd keeps and lets go of fake tensors as of others.
# What the model had before is not counted. Gradients of parameters are counted apart: a plugin may keep them whole, in
# part, or not at all. How much there is of both changes all the time; the largest sum of activations and a share of the
# gradients is at one of a few moments, those at which no other moment has more of the one and not less of the other.
# A plugin that holds more or less as a backward goes on follows its *course*, from one event to the next.


# What happens: (event, module's or parameter's name, bytes returned, 0), or ("", "", bytes of activations that come,
# bytes of gradients that come).
Event: TypeAlias = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class Recording:
    """All that happens, one after the other.

    Attributes:
        forward: Until there is the loss.
        backward: Thereafter.
        sent: Bytes that this rank sent meanwhile.
    """

    forward: Sequence[Event]
    backward: Sequence[Event]
    sent: int


def record(model: nn.Module, run: Callable[[], torch.Tensor], *, before: Sequence[torch.Tensor]) -> Recording:
    """Return what happens in `run` and the backward of the loss that it returns. Within a `FakeTensorMode`.

    Args:
        model: Whose parameters get the gradients.
        run: Runs the model's forward on fake tensors.
        before: What is there before: parameters, buffers, the batch.
    """
    meter = _Meter(before)
    with meter, _gradients_reported(model, meter), _course_noted(model, meter):
        with count_communication() as count:
            loss = run()
            num_before_loss = len(meter.events)
            loss.backward()
        events = list(meter.events)
    return Recording(events[:num_before_loss], events[num_before_loss:], sum(count.sent.values()))


def profile_of(recording: Recording) -> ActivationProfile:
    """Return what is to be known of all that happens."""
    activations = gradients = kept = 0
    moments: list[tuple[int, int]] = []
    course: list[tuple[str, str, int, int, int]] = []
    for index, (event, name, more, more_gradients) in enumerate((*recording.forward, *recording.backward)):
        if index == len(recording.forward):
            kept = activations
        if event:
            course.append((event, name, activations, activations, more))
            continue
        activations += more
        gradients += more_gradients
        if more > 0 and course and course[-1][3] < activations:
            course[-1] = (*course[-1][:3], activations, course[-1][4])
        if more > 0 or more_gradients > 0:
            moments.append((activations, gradients))
    return ActivationProfile(
        _those_that_matter(moments), kept, gradients, recording.sent, tuple(Stretch(*one) for one in course)
    )


def _those_that_matter(moments: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for moment in sorted(set(moments), reverse=True):
        if not found or moment[1] > found[-1][1]:
            found.append(moment)
    return tuple(found)


def peak_of(run: Callable[[], Any], before: Sequence[torch.Tensor]) -> int:
    """Return the most bytes that tensors take at a time that come while something runs, within a `FakeTensorMode`.

    Args:
        run: What runs.
        before: Tensors that are there before, which don't count.
    """
    meter = _Meter(before)
    with meter:
        run()
    return max((activations for activations, _ in profile_of(Recording((), meter.events, 0)).moments), default=0)


class _Meter(TorchDispatchMode):
    """Count the storages that are alive."""

    def __init__(self, before: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known: dict[int, tuple[weakref.finalize, int]] = {}
        self._gradients: set[int] = set()
        self._ours = {_key(tensor) for tensor in before}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = _run(func, args, kwargs or {})
        found = result if isinstance(result, (tuple, list)) else (result,)
        for one in found:
            if isinstance(one, torch.Tensor):
                self._note(one)
            elif isinstance(one, (tuple, list)):
                for inner in one:
                    if isinstance(inner, torch.Tensor):
                        self._note(inner)
        return result

    def begin_stretch(self, event: str, name: str, returned: int = 0) -> None:
        """Notes that something happens."""
        self.events.append((event, name, returned, 0))

    def count_as_gradient(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as a gradient from now on."""
        key = _key(tensor)
        if key in self._known and key not in self._gradients:
            self._gradients.add(key)
            size = self._known[key][1]
            self.events.append(("", "", -size, size))

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._ours:
            return
        size = storage.nbytes()
        self._known[key] = (weakref.finalize(storage, self._forget, key), size)
        self.events.append(("", "", size, 0))

    def _forget(self, key: int) -> None:
        _, size = self._known.pop(key)
        is_gradient = key in self._gradients
        self._gradients.discard(key)
        self.events.append(("", "", 0, -size) if is_gradient else ("", "", -size, 0))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # Without values it knows no other format, with values it does. What comes in between here isn't counted.
        return func(*(one.bfloat16() for one in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _gradients_reported(model: nn.Module, meter: _Meter) -> Iterator[None]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def report(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            meter.count_as_gradient(parameter.grad)
            meter.begin_stretch("gradient", names[id(parameter)])

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
def _course_noted(model: nn.Module, meter: _Meter) -> Iterator[None]:
    def watch(name: str, module: nn.Module) -> list[Any]:
        def begin_backward(_: torch.Tensor) -> None:
            meter.begin_stretch("backward", name)

        def expect_backward(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad and isinstance(tensor, FakeTensor):  # split logits refuse to be watched
                tensor.register_hook(begin_backward)
            return tensor

        def leave(_: nn.Module, inputs: Any, outputs: Any) -> None:
            sizes: dict[int, int] = {}
            map_tensors(lambda tensor: sizes.setdefault(id(tensor), tensor.numel() * tensor.itemsize), outputs)
            meter.begin_stretch("leave", name, sum(sizes.values()))
            map_tensors(expect_backward, outputs)

        return [
            module.register_forward_pre_hook(lambda *_: meter.begin_stretch("enter", name)),
            # Checkpointing leaves what it computes again by an exception, once it has all that it needs.
            module.register_forward_hook(leave, always_call=True),
        ]

    hooks = [hook for name, module in model.named_modules() for hook in watch(name, module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
