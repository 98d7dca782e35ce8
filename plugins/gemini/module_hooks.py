"""Brings a module's weights before it runs: hooks of the user's own modules, and of how they read their parameters."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from booster.errors import ConfigError
from booster.plugins.sharding.compiling import not_compiled
from booster.plugins.sharding.deferred_init import sharded_copy_error

from .chunk import Chunk, ChunkParam
from .chunk_manager import ChunkManager
from .collective_order import PassKind

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Note [Saved weights]
# Most operators save the weights that they multiplied with, or a view of them, for their backward. While the model's
# forward runs, autograd asks `pack` what to keep instead. Of a tensor in a chunk's payload it keeps the chunk, the
# parameter, and the view's shape; `unpack` has the chunk gathered when the operator's backward asks for it, exactly
# then. That needs no hook of any module, so it makes no difference which module used the weights, through what view,
# and how its outputs look. Every other tensor is kept as it is. torch compares versions of saved tensors only where
# these are not packed, so that is done here as well: a tensor that was written over before backward is an error.
# Others pack, too: activation checkpointing, which saves nothing in forward and fills a list in backward, or a user who
# moves what is saved elsewhere. They are handed all other tensors, and never weights: what they keep of those would
# stay gathered. As checkpointing counts tensors in forward and again in backward, both must hide the same ones; so
# wherever a module begins, these hooks come first.


class WeightSource(Protocol):
    """Who knows the chunks."""

    def chunk_at(self, address: int) -> Chunk | None:
        """Return the chunk whose payload begins at an address in memory."""
        ...

    def gather_for_backward(self, slot: ChunkParam) -> torch.Tensor:
        """Return the payload with the weights of a parameter."""
        ...

    def note_saved(self, address: int, num_bytes: int) -> None:
        """Record memory that autograd keeps."""
        ...

    def note_released(self, address: int, num_bytes: int) -> None:
        """Record that autograd releases it once."""
        ...


class _SavedWeight:
    """A view of a parameter's weights."""

    __slots__ = ("_offset", "_param", "_size", "_source", "_stride", "_version")

    def __init__(self, source: WeightSource, slot: ChunkParam, tensor: torch.Tensor, offset: int) -> None:
        self._source = source
        self._param = slot
        self._version = slot.chunk.version
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), offset
        slot.num_saved += 1

    def __del__(self) -> None:
        self._param.num_saved -= 1

    def unpack(self) -> torch.Tensor:
        """Return the weights, gathered if they are not here."""
        if self._param.chunk.version != self._version:
            raise RuntimeError(
                f"backward needs {self._param.name!r} as it was in the forward, but the weights were changed since,"
                " by optimizer.step() or by loading a checkpoint: call backward() before that"
            )
        payload = self._source.gather_for_backward(self._param)
        return payload.as_strided(self._size, self._stride, self._offset)


class _SavedOther:
    """Any other tensor."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # not itself: an operator's output would keep its own graph alive
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Return it."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" {self._tensor.dtype} tensor of shape {tuple(self._tensor.shape)} is at version"
                f" {self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class _CountedOther(_SavedOther):
    """Any other tensor, whose memory is taken note of."""

    __slots__ = ("_memory", "_source")

    def __init__(self, tensor: torch.Tensor, source: WeightSource, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor)
        self._source = source
        self._memory = storage.data_ptr(), storage.nbytes()
        source.note_saved(*self._memory)

    def __del__(self) -> None:
        self._source.note_released(*self._memory)


class SavedTensors:
    """Packs and unpacks while a model's modules run; see Note [Saved weights].

    Args:
        source: Provider of the chunks.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        # One object each, to be known again by. torch.compile must not look into them: it would compile them, too.
        self._pack_hook = not_compiled(self._pack)
        self._unpack_hook = not_compiled(self._unpack)
        self._outer: list[_Hooks | None] = []
        self.counts = False

    def begin(self) -> bool:
        """Begin to pack, before all other hooks, where a graph is made; returns whether `end` has to be called.

        Nothing has to be begun where these hooks come first already, and nothing can be where torch forbids hooks.
        """
        if not torch.is_grad_enabled() or not _may_pack():
            return False
        first: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if first is not None and first[0] is self._pack_hook:
            return False
        self._outer.append(first)
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack_hook, self._unpack_hook)
        return True

    def end(self) -> None:
        """End what `begin` began last."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._outer.pop()

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        chunk = self._source.chunk_at(storage.data_ptr())
        if chunk is not None:
            offset = int(tensor.storage_offset())
            slot = _param_at(chunk, offset * tensor.itemsize // chunk.layout.dtype.itemsize)
            if slot is not None:
                return _SavedWeight(self._source, slot, tensor, offset)
        outer = self._outer[-1]
        if outer is not None:
            return outer[1], outer[0](tensor)
        if self.counts:
            return _CountedOther(tensor, self._source, storage)
        return _SavedOther(tensor)

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, tuple):
            unpack, packed = saved
            tensor: torch.Tensor = unpack(packed)
        else:
            tensor = saved.unpack()
        return tensor


def _may_pack() -> bool:
    """Whether torch lets hooks be, which torch.func's transforms do not."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def _param_at(chunk: Chunk, element: int) -> ChunkParam | None:
    """Return the parameter in whose place an element lies."""
    index = bisect_right(chunk.starts, element) - 1
    while index >= 0:  # parameters without elements begin where another one does
        slot = chunk.params[index]
        if slot.region.start <= element < slot.region.stop:
            return slot
        if slot.region.stop > slot.region.start:
            return None
        index -= 1
    return None


# A module's own parameters are gathered before it runs and may go when it has ended. A module may also read those of
# another one that is never called: `nn.MultiheadAttention` does with its `out_proj`, a language model with a tied
# embedding. Python reads a parameter out of its module's `_parameters`; that dictionary is replaced by one that notes
# who reads, and while some module runs a parameter that is read is gathered, for as long as that module runs. A
# parameter that a module returns stays for as long as the one that called it runs. In backward, activation
# checkpointing may run a function that is not a module: what is read there stays until a gradient is computed again.


@dataclass(slots=True, eq=False)
class _RunningModule:
    """A module that runs.

    Attributes:
        module: Running module, or None for a function that backward recomputes.
        pinned: Parameters that it uses.
        error: The exception that was being handled when it began.
        packs: Whether it has begun to pack saved tensors.
        version: How often its own weights had been written to when it began.
    """

    module: nn.Module | None
    pinned: list[tuple[Chunk, list[ChunkParam]]] = field(default_factory=list)
    error: BaseException | None = None
    packs: bool = False
    version: int = 0

    def unpin(self) -> None:
        """Return that it uses nothing more."""
        for chunk, slots in self.pinned:
            chunk.unpin(slots)
        self.pinned.clear()


class HookedParameters(dict[str, Any]):
    """A module's parameters by name, that says when one is read."""

    __slots__ = ("_hooks", "_module_class")

    def __init__(self, parameters: dict[str, Any], hooks: ModuleHooks, module_class: type[nn.Module]) -> None:
        super().__init__(parameters)
        self._hooks: ModuleHooks | None = hooks
        self._module_class = module_class

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None and self._hooks is not None and self._hooks.is_running:
            self._hooks.note_read(parameter)
        return parameter

    def __reduce__(self) -> Any:  # type: ignore[override]
        self._require_shown()
        return dict, (dict(self),)  # a copy of the module is an ordinary one

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        import copy

        self._require_shown()
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def _require_shown(self) -> None:
        """Raise if what is to be copied or pickled is nan."""
        if self._hooks is not None and self._hooks.hides(self.values()):
            raise sharded_copy_error(self._module_class)


class ModuleHooks:
    """The hooks of a model; `remove` takes them off.

    Args:
        model: The user's model.
        manager: Of its chunks.
        slots: Chunk parameter of each parameter by its `id`.
    """

    def __init__(self, model: nn.Module, manager: ChunkManager, slots: dict[int, ChunkParam]) -> None:
        self._manager = manager
        self._params = slots
        self._running: list[_RunningModule] = []
        self._again = _RunningModule(None)
        self._saved_bytes = 0
        self._times_saved: Counter[int] = Counter()
        self._saved = SavedTensors(self)
        self._handles: list[Any] = []
        self._gradient_handles: dict[int, RemovableHandle] = {}
        self._watched: list[nn.Module] = []
        self._is_in_backward = False
        for module in model.modules():
            self._watch(module)
        self.watch_gradients()

    def _watch(self, module: nn.Module) -> None:
        own = [self._params[id(one)] for one in module.parameters(recurse=False) if id(one) in self._params]
        if not own and not any(True for _ in module.children()):
            return
        self._handles.append(module.register_forward_pre_hook(_BeforeForward(self, own), prepend=True))
        self._handles.append(module.register_forward_hook(_AfterForward(self, own), always_call=True))
        if own:
            module._parameters = HookedParameters(module._parameters, self, type(module))
            self._watched.append(module)

    def hides(self, parameters: Iterable[nn.Parameter | None]) -> bool:
        """Return whether the weights of some of these parameters are not here now."""
        slots = [self._params.get(id(one)) for one in parameters]
        return any(slot is not None and slot.chunk.gathered is None for slot in slots)

    def watch_gradients(self) -> None:
        """Have the chunks take gradients of parameters that train and were not watched yet."""
        for slot in self._params.values():
            if slot.parameter.requires_grad and slot.chunk.layout.trains and not slot.has_grad_hook:
                self._gradient_handles[id(slot.parameter)] = slot.parameter.register_post_accumulate_grad_hook(
                    _GradientArrived(self)
                )
                slot.has_grad_hook = True

    def gradient_arrived_at(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter that is watched."""
        slot = self._params.get(id(parameter))
        if slot is not None and slot.has_grad_hook:
            self.gradient_arrived(slot)

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in [*self._handles, *self._gradient_handles.values()]:
            handle.remove()
        self._gradient_handles.clear()  # graphs from before still come here
        for module in self._watched:
            module._parameters = dict(module._parameters)
        for slot in self._params.values():
            slot.has_grad_hook = False

    # Forward.

    @property
    def is_running(self) -> bool:
        """Whether some module runs, or a backward does."""
        return bool(self._running) or self._is_in_backward or _is_autograd_running()

    def enter(self, module: nn.Module, own: Sequence[ChunkParam]) -> None:
        """Called before a module runs."""
        with _unseen():
            if not self._running:
                self._begin_outermost()
            running = _RunningModule(module, error=sys.exc_info()[1])
            self._running.append(running)
            if own:
                self._manager.need(own)
                self._pin(running, own)
                running.version = _version_of(own)
            running.packs = self._saved.begin()

    def exit(self, module: nn.Module, own: Sequence[ChunkParam], output: Any) -> None:
        """Called when a module has ended, by an exception too.

        Raises:
            ConfigError: The module wrote to its own weights.
        """
        with _unseen():
            while self._running:
                running = self._running.pop()
                if running.packs:
                    self._saved.end()
                if self._running:
                    self._pin(self._running[-1], self._returned(output))
                running.unpin()
                if running.module is module:
                    break
            has_failed = sys.exc_info()[1] not in (None, running.error)
            if own and not has_failed and running.version != _version_of(own):
                raise _error_of_writing(module, own)
            if not self._running:
                self._end_outermost(has_failed=has_failed)

    def _returned(self, output: Any) -> list[ChunkParam]:
        """Return the model's own parameters in a module's output."""
        slots = (self._params.get(id(one)) for one in _parameters_in(output))
        return [slot for slot in slots if slot is not None]

    @not_compiled
    def note_read(self, parameter: nn.Parameter) -> None:
        """Called when a module's parameter is read."""
        slot = self._params.get(id(parameter))
        if slot is None or (slot.num_pins > 0 and not slot.is_overwritten and slot.chunk.is_gathered):
            return
        with _unseen():
            if not self._running:
                self._note_backward()
            self._manager.need((slot,))
            self._pin(self._running[-1] if self._running else self._again, (slot,))

    def _pin(self, running: _RunningModule, slots: Sequence[ChunkParam]) -> None:
        by_chunk: dict[int, tuple[Chunk, list[ChunkParam]]] = {}
        for slot in slots:
            by_chunk.setdefault(slot.chunk.index, (slot.chunk, []))[1].append(slot)
        for chunk, members in by_chunk.values():
            chunk.pin(members)
            running.pinned.append((chunk, members))

    def _begin_outermost(self) -> None:
        if _is_autograd_running():  # activation checkpointing computes a part of the forward again
            self._note_backward()
            return
        if self._is_in_backward:
            self._abort_backward()
        self._manager.begin_forward(trains=torch.is_grad_enabled())
        self._saved.counts = self._manager.is_recording

    def _end_outermost(self, *, has_failed: bool) -> None:
        if self._is_in_backward:
            return
        if has_failed:
            self._manager.abort_forward()
        else:
            self._manager.end_forward(trains=torch.is_grad_enabled())

    # Backward.

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround autograd. Collective."""
        if self._is_in_backward:
            self._abort_backward()
        self._begin_backward()
        try:
            yield
        except BaseException:
            self._abort_backward()
            raise
        self._end_backward()

    def _begin_backward(self) -> None:
        self._is_in_backward = True
        self._manager.phase = PassKind.BACKWARD
        for key, handle in self._gradient_handles.items():
            hooks = self._params[key].parameter._post_accumulate_grad_hooks
            hooks[handle.id] = hooks.pop(handle.id)  # behind the user's of later: it takes the gradient

    def _end_backward(self) -> None:
        self._is_in_backward = False
        self._again.unpin()
        self._manager.end_backward()

    def _abort_backward(self) -> None:
        """Called when a backward has failed; of a plain loss.backward() that shows when the next thing begins."""
        self._is_in_backward = False
        self._again.unpin()
        self._manager.abort_backward()

    def _note_backward(self) -> None:
        """Begin a backward that was called past `backward`, by a plain loss.backward()."""
        if not self._is_in_backward:
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def gradient_arrived(self, slot: ChunkParam) -> None:
        """Called when a gradient is complete in `.grad`."""
        self._note_backward()
        self._again.unpin()
        self._manager.reduction.on_grad_ready(slot)

    # What `SavedTensors` asks.

    def chunk_at(self, address: int) -> Chunk | None:
        """Return the chunk whose payload begins at an address."""
        return self._manager.chunk_at(address)

    def gather_for_backward(self, slot: ChunkParam) -> torch.Tensor:
        """Return the payload with the weights of a parameter."""
        chunk = slot.chunk
        with _unseen():
            if not self._running:  # else it is for an autograd.grad() inside of a forward
                self._note_backward()
                self._again.unpin()
            if not chunk.is_gathered or slot.is_overwritten:
                self._manager.need((slot,))
            else:
                chunk.pin(())  # or it might have to be evicted for prefetched chunks
                self._manager.note_use(chunk)
                chunk.unpin(())
        assert chunk.gathered is not None
        return chunk.gathered

    def note_saved(self, address: int, num_bytes: int) -> None:
        """Count what autograd keeps, memory that is saved several times once."""
        self._times_saved[address] += 1
        if self._times_saved[address] == 1:
            self._saved_bytes += num_bytes
            self._manager.note_other_bytes()

    def note_released(self, address: int, num_bytes: int) -> None:
        """Count what autograd lets go."""
        self._times_saved[address] -= 1
        if self._times_saved[address] == 0:
            del self._times_saved[address]
            self._saved_bytes -= num_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps, as far as they were counted."""
        return self._saved_bytes


class _BeforeForward:
    """Hooks are objects with weights of their own left out, so that a model with hooks can be copied."""

    def __init__(self, hooks: ModuleHooks, own: Sequence[ChunkParam]) -> None:
        self._hooks: ModuleHooks | None = hooks
        self._own = own

    @not_compiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._hooks is not None:
            self._hooks.enter(module, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeforeForward:
        copied = _BeforeForward.__new__(_BeforeForward)
        copied._hooks, copied._own = None, ()
        return copied


class _AfterForward:
    def __init__(self, hooks: ModuleHooks, own: Sequence[ChunkParam]) -> None:
        self._hooks: ModuleHooks | None = hooks
        self._own = own

    @not_compiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._hooks is not None:
            self._hooks.exit(module, self._own, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AfterForward:
        copied = _AfterForward.__new__(_AfterForward)
        copied._hooks, copied._own = None, ()
        return copied


class _GradientArrived:
    """Holds nothing that leads back to the parameter: Python can't collect a cycle through a tensor's hooks."""

    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = weakref.ref(hooks)

    @not_compiled
    def __call__(self, parameter: torch.Tensor) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.gradient_arrived_at(parameter)


def _version_of(slots: Sequence[ChunkParam]) -> int:
    return sum(slot.parameter._version for slot in slots)


def _error_of_writing(module: nn.Module, own: Sequence[ChunkParam]) -> ConfigError:
    names = ", ".join(repr(slot.name) for slot in own)
    return ConfigError(
        f"the forward of {type(module).__name__} wrote to its weights ({names}), as nn.Embedding does with max_norm:"
        " what was gathered for it is thrown away, and the change with it. Leave that out, change weights between steps"
        " inside of `with model.gathered():`, or use a plugin that keeps weights whole"
    )


def _is_autograd_running() -> bool:
    """Whether this thread computes a node of a backward."""
    return torch._C._current_graph_task_id() != -1


def _unseen() -> AbstractContextManager[Any]:
    """Surround work of our own, which is nothing to those who watch or store the model's operators as they are run."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() > 0 else nullcontext()


def _parameters_in(output: Any) -> Iterator[nn.Parameter]:
    if isinstance(output, nn.Parameter):
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _parameters_in(one)
    elif isinstance(output, dict):
        yield from _parameters_in(tuple(output.values()))
