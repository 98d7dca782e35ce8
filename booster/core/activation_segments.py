"""Recomputation of segments of several layers, whose model calls one layer after another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from booster.pytree import iter_tensors

from .activation_chain import Items, restricted, stages_of
from .activation_offload import ActivationOffload, Packed, keep

# Note [Segments]
# The model's own forward calls the layers of a segment. Each runs as always, but a hook replaces every tensor that it
# saves for backward by a handle, so that nothing is kept but the segment's input. Backward asks for the tensor of a
# handle; then the segment is replayed from its input: each layer's forward with its arguments, its random numbers and
# its autocast, where the first argument is what the layer before it has returned in the replay. Hooks put what a layer
# saves in place of its handles, in the same order, or drop it if the schedule of the recomputation does not keep that
# layer: it is then replayed again, from the input of its inner segment. Gradients flow through the graph of the first
# forward; those of replays are dropped. Layers run in the order and as often as the schedule says, so that collectives
# in them are the same on all ranks.
# Hooks of a layer run in the first forward only; what its forward needs in a replay is in its class, as for any
# activation checkpointing. A plugin that gathers a layer's weights by such hooks runs single layers, whose
# recomputation is within their own backward.

Function = Callable[..., Any]


class _Handle:
    """Tensor that a layer saved for backward, which a replay provides.

    Args:
        segment: Segment in one forward.
        layer: Index of the layer in the segment.
        tensor: The tensor, whose metadata is kept.
    """

    __slots__ = ("__weakref__", "_layer", "_metadata", "_segment", "task", "tensor")

    def __init__(self, segment: SegmentForward, layer: int, tensor: torch.Tensor) -> None:
        self._segment, self._layer, self._metadata = segment, layer, _metadata(tensor)
        self.tensor: torch.Tensor | None = None

    def fill(self, tensor: torch.Tensor) -> None:
        """Set the tensor; raise `RuntimeError` if the replay differs from the forward."""
        if _metadata(tensor) != self._metadata:
            raise RuntimeError(
                f"a recomputed layer saved a tensor of {_metadata(tensor)} in place of {self._metadata}: its forward"
                " must do the same each time"
            )
        self.tensor = tensor.detach()

    def get(self) -> torch.Tensor:
        """Return the tensor, after a replay if there is none."""
        self._segment.provide(self._layer)
        if self.tensor is None:
            raise RuntimeError("a recomputed layer saved fewer tensors than before: its forward must do the same")
        return self.tensor


@dataclass(slots=True)
class _LayerCall:
    """Call of a layer: its function and arguments, and what was set around it.

    Attributes:
        function: The layer's forward.
        args: Arguments, without those that are replaced.
        chained: Index of the argument that is the output of the layer before it; None for the first layer.
        handles: What it saved for backward, as far as that is still needed.
        state: Random numbers and autocast.
    """

    function: Function
    args: list[Any]
    chained: int | None
    handles: list[weakref.ref[_Handle]]
    state: _CallState


@dataclass(slots=True)
class _Source:
    """Where layers are recomputed from: the first layer, its input there unless it is the segment's, and the items."""

    first: int
    value: torch.Tensor | None
    items: Items


class _EndOfReplay(Exception):
    """Raised when all that is needed has been saved again."""


class SegmentForward:
    """A segment in one forward; see Note [Segments].

    Args:
        items: Schedule of the recomputation, by index of the layer in the segment.
        offload: Offload of the segment's input, optional.
    """

    def __init__(self, items: Items, offload: ActivationOffload | None = None) -> None:
        self._items = items
        self._offload = offload
        self._calls: list[_LayerCall] = []
        self._inputs: list[tuple[Packed, bool] | None] = []  # of the first layer: tensors, and whether they need grads
        self._sources: list[_Source | None] = []
        self._task: int | None = None

    def run(self, function: Function, args: Sequence[Any], chained: int | None) -> Any:
        """Run the next layer, and keep nothing but the input of the first one.

        Args:
            function: The layer's forward.
            args: Its arguments.
            chained: Index of the argument that is the output of the layer before it; None for the first layer.
        """
        given = list(args)
        if chained is None:
            self._inputs = [self._pack(one) if isinstance(one, torch.Tensor) else None for one in args]
            given = [None if isinstance(one, torch.Tensor) else one for one in args]
        else:
            given[chained] = None
        call = _LayerCall(function, given, chained, [], _CallState(args))
        index = len(self._calls)
        self._calls.append(call)

        def pack(tensor: torch.Tensor) -> _Handle:
            handle = _Handle(self, index, tensor)
            call.handles.append(weakref.ref(handle))
            return handle

        with torch.autograd.graph.saved_tensors_hooks(pack, _Handle.get):
            return function(*args)

    def provide(self, layer: int) -> None:
        """Replay what is needed for the tensors of a layer, in this backward."""
        task = torch._C._current_graph_task_id()
        if self._task is None or task != self._task:  # a second backward over a retained graph begins anew
            self._task = task
            items = restricted(self._items, 0, len(self._calls))
            self._sources = [_Source(0, None, items)] * len(self._calls)
            for call in self._calls:
                for reference in call.handles:
                    handle = reference()
                    if handle is not None:
                        handle.tensor = None
        while (source := self._sources[layer]) is not None:
            self._replay(source)

    def _pack(self, tensor: torch.Tensor) -> tuple[Packed, bool]:
        packed = self._offload.pack(tensor) if self._offload is not None and tensor.requires_grad else None
        return packed or keep(tensor), tensor.requires_grad

    def _replay(self, source: _Source) -> None:
        value = source.value
        with torch.enable_grad(), ExitStack() as stack:
            state = self._calls[source.first].state
            stack.enter_context(torch.random.fork_rng(devices=state.devices, device_type=state.device_type))
            for item in source.items:
                stages = stages_of((item,))
                is_last = stages[-1] == stages_of(source.items)[-1]
                if isinstance(item, int):
                    self._sources[item] = None
                    value = self._fill(item, value, is_last)
                    continue
                if stages[0] > source.first and value is not None:
                    value = value.detach().requires_grad_(value.requires_grad)
                inner = _Source(stages[0], value, item)
                self._sources[stages[0] : stages[-1] + 1] = [inner] * len(stages)
                for stage in () if is_last else stages:
                    with torch.autograd.graph.saved_tensors_hooks(_drop, _refuse):
                        value = self._call(stage, value)

    def _fill(self, index: int, value: torch.Tensor | None, is_last: bool) -> torch.Tensor | None:
        """Run a layer again and give its handles their tensors; None if the output is not needed."""
        handles = self._calls[index].handles
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if count >= len(handles):
                raise RuntimeError("a recomputed layer saved more tensors than before: its forward must do the same")
            handle = handles[count]()
            count += 1
            if handle is not None:
                handle.fill(tensor)
            if is_last and count == len(handles):
                raise _EndOfReplay

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _refuse):
                return self._call(index, value)
        except _EndOfReplay:
            return None

    def _call(self, index: int, value: torch.Tensor | None) -> torch.Tensor | None:
        """Run a layer with its arguments, the output of the one before it, or the segment's input."""
        call = self._calls[index]
        args = list(call.args)
        if call.chained is not None:
            args[call.chained] = value
        else:
            for position, kept in enumerate(self._inputs):
                if kept is not None:
                    packed, requires_grad = kept
                    args[position] = packed().detach().requires_grad_(requires_grad)
        with call.state.restored():
            return first_tensor(call.function(*args))


class _CallState:
    """What a call's numbers depend on besides its arguments: random generators and autocast.

    Args:
        args: Arguments of the call, whose devices' generators are recorded.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        accelerator = next((one.device.type for one in iter_tensors(args) if one.device.type != "cpu"), None)
        self.device_type = "cuda" if accelerator is None else accelerator
        self.cpu = torch.get_rng_state()
        self.devices, self._states = get_device_states(*args)
        self._autocasts = [
            (
                one,
                torch.is_autocast_enabled(one),
                torch.get_autocast_dtype(one),
                torch.is_autocast_cache_enabled(),
            )
            for one in dict.fromkeys(("cpu", accelerator or "cpu"))
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context with the state of the call; random states are not put back."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self._states, device_type=self.device_type)
        with ExitStack() as stack:
            for device_type, enabled, dtype, has_cache in self._autocasts:
                stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=has_cache))
            yield


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a layer's output, which the next layer takes."""
    return next(iter_tensors(output), None)


def chained_argument(args: Sequence[Any], previous: torch.Tensor | None) -> int | None:
    """Return the index of the argument that is the output of the layer before, or None."""
    if previous is None:
        return None
    return next((index for index, one in enumerate(args) if one is previous), None)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("a layer's forward reads what it saves for backward, which a recomputation does not keep")
