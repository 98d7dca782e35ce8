"""Hooks that gather weights before they are used: module hooks, parameter reads, and saved tensors of autograd."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from booster.comm.fake import unseen_by_modes
from booster.core.compiling import BEFORE_RECOMPUTATION, LAYER_OF_COMPILED, EagerHook, not_compiled
from booster.core.plain_torch import refuse_tracing
from booster.errors import ConfigError, format_list
from booster.lazy_init.materialize import METADATA_FUNCTIONS
from booster.plugins.sharding.deferred_init import sharded_copy_error
from booster.plugins.sharding.optimizer import written_weights_error
from booster.pytree import iter_tensors

from .chunk import Chunk, ChunkParam
from .chunk_manager import ChunkManager

_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Note [Saved weights]
# Most operators save their weights, or a view of them, for backward. In the model's forward, saved-tensor hooks replace
# these. For a tensor in a gathered chunk, `pack` stores the chunk, the parameter and the view's geometry; `unpack`
# gathers the chunk when the operator's backward needs the weights. No backward hooks of modules are involved, so it
# does not matter which module used the weights, through which view, or what its outputs are. All other tensors are
# stored unchanged. torch checks versions of saved tensors only without hooks, so the check is repeated here: a tensor
# modified before backward is an error. Other saved-tensor hooks may be active: activation checkpointing, which saves
# nothing in forward and fills a list in backward, or the user's offloading. They receive all other tensors but never
# weights, which would otherwise stay gathered. Checkpointing counts tensors in forward and again in backward, so both
# must exclude the same ones: these hooks are therefore the innermost ones in every module.


class _SavedWeight:
    """Saved view of a parameter's weights."""

    __slots__ = ("_offset", "_param", "_size", "_source", "_stride", "_version")

    def __init__(self, source: ModuleHooks, param: ChunkParam, tensor: torch.Tensor, offset: int) -> None:
        self._source = source
        self._param = param
        self._version = param.chunk.version
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = offset - param.region.start
        param.num_saved += 1

    def __del__(self) -> None:
        self._param.num_saved -= 1

    def unpack(self) -> torch.Tensor:
        """Return the weights, after gathering them if necessary."""
        if self._param.chunk.version != self._version:
            raise RuntimeError(
                f"backward needs {self._param.name!r} as it was in the forward, but the weights were changed since,"
                " by optimizer.step(), by loading a checkpoint or in `with model.gathered():`: call backward() before"
                " that"
            )
        param = self._source.params[id(self._param.parameter)]  # it moves when it is unfrozen
        payload = self._source.gather_for_backward(param)
        return payload.as_strided(self._size, self._stride, param.region.start + self._offset)


class _SavedOther:
    """Saved tensor that is not a weight."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an operator's output would otherwise keep its own graph alive
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" {self._tensor.dtype} tensor of shape {tuple(self._tensor.shape)} is at version"
                f" {self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class _CountedOther(_SavedOther):
    """Saved tensor that is not a weight, with its memory counted."""

    __slots__ = ("_memory", "_source")

    def __init__(self, tensor: torch.Tensor, source: ModuleHooks, storage: torch.UntypedStorage) -> None:
        super().__init__(tensor)
        self._source = source
        self._memory = storage.data_ptr(), storage.nbytes()
        source.note_saved(*self._memory)

    def __del__(self) -> None:
        self._source.note_released(*self._memory)


class SavedTensors:
    """Saved-tensor hooks of a model's forward; see Note [Saved weights]."""

    def __init__(self, source: ModuleHooks) -> None:
        self._source = source
        # One object each, for comparison by identity.
        self._pack_hook = self._pack
        self._unpack_hook = self._unpack
        self._outer: list[_Hooks | None] = []
        self.counts = False

    def begin(self) -> bool:
        """Install the hooks as the innermost ones; return whether `end` must be called.

        Does nothing without gradients, if the hooks are already innermost, if torch forbids hooks, or in
        `torch.export.export`, whose tensors have no memory.
        """
        is_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        is_allowed = is_allowed and not torch.compiler.is_exporting()
        if not torch.is_grad_enabled() or not is_allowed:  # torch.func's transforms do not allow them
            return False
        first: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if first is not None and first[0] is self._pack_hook:
            return False
        self._outer.append(first)
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack_hook, self._unpack_hook)
        return True

    def end(self) -> None:
        """Remove the hooks of the last `begin`."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._outer.pop()

    @not_compiled
    def _pack(self, tensor: torch.Tensor) -> Any:
        # Sparse tensors, those that consist of others and tangents that are zero have no memory of their own.
        is_plain = (
            tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor) and not tensor._is_zerotensor()
        )
        storage = tensor.untyped_storage() if is_plain else None
        if storage is not None:
            saved = self._saved_weight(tensor, storage)
            if saved is not None:
                return saved
        outer = self._outer[-1]
        if outer is not None:
            return outer[1], outer[0](tensor)
        if self.counts and storage is not None:
            return _CountedOther(tensor, self._source, storage)
        return _SavedOther(tensor)

    def _saved_weight(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _SavedWeight | None:
        """Return the record of a view of a weight, or None for other tensors.

        Complex, conjugated and negated views are others: they keep the memory that the weights were gathered in.
        """
        chunk = self._source.manager.chunk_at(storage.data_ptr())
        if chunk is None or tensor.dtype != chunk.layout.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        param = _param_at(chunk, offset)
        return None if param is None else _SavedWeight(self._source, param, tensor, offset)

    @staticmethod
    @not_compiled
    def _unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, tuple):
            unpack, packed = saved
            tensor: torch.Tensor = unpack(packed)
        else:
            tensor = saved.unpack()
        return tensor


def _param_at(chunk: Chunk, element: int) -> ChunkParam | None:
    """Return the parameter that contains an element of the chunk."""
    index = bisect_right(chunk.starts, element) - 1
    while index >= 0:  # parameters without elements share their start with another one
        param = chunk.params[index]
        if param.region.start <= element < param.region.stop:
            return param
        if param.region.stop > param.region.start:
            return None
        index -= 1
    return None


# A module's own parameters are gathered before it runs and may be released after it. A module may also read parameters
# of another module that is never called: `nn.MultiheadAttention` reads those of its `out_proj`, a language model those
# of a tied embedding. Python reads a parameter from its module's `_parameters`; this dictionary is replaced by one that
# records reads. A parameter that is read is gathered for as long as the reading module runs. A parameter that a module
# returns stays gathered for as long as the caller runs. In backward, activation checkpointing may run a function that
# is not a module: parameters read there stay gathered until the next gradient is computed.


@dataclass(slots=True, eq=False)
class _RunningModule:
    """Running module.

    Attributes:
        module: Running module, or None for a function that backward recomputes.
        pinned: Parameters that it uses, with the version of the weights at first use.
        error: Exception that was being handled at its start.
        packs: If True, it has installed the saved-tensor hooks.
    """

    module: nn.Module | None
    pinned: list[tuple[ChunkParam, int]] = field(default_factory=list)
    error: BaseException | None = None
    packs: bool = False

    def pin(self, params: Iterable[ChunkParam]) -> None:
        """Pin gathered parameters."""
        for param in params:
            param.chunk.pin((param,))
            self.pinned.append((param, param.parameter._version))

    def written(self) -> list[str]:
        """Return the names of parameters that were written to since they were pinned."""
        found = []
        for param, version in self.pinned:
            if param.parameter._version != version or param.is_elsewhere:
                found.append(param.name)
                param.record_version()
        return found

    def unpin(self) -> None:
        """Unpin all its parameters."""
        for param, _ in self.pinned:
            param.chunk.unpin((param,))
        self.pinned.clear()


class HookedParameters(dict[str, Any]):
    """Parameter dictionary of a module that records reads, except those of the graph of a compiled layer."""

    __slots__ = ("_hooks", "_is_in_graph", "_module_class")

    def __init__(
        self, parameters: dict[str, Any], hooks: ModuleHooks, module_class: type[nn.Module], is_in_graph: bool
    ) -> None:
        super().__init__(parameters)
        self._hooks: ModuleHooks | None = hooks
        self._module_class = module_class
        self._is_in_graph = is_in_graph

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if self._is_in_graph and torch.compiler.is_compiling():
            return parameter
        if parameter is not None and self._hooks is not None and self._hooks.is_running:
            self._hooks.note_read(parameter)
        return parameter

    def __reduce__(self) -> Any:  # type: ignore[override]
        if self._hooks is not None:
            self._hooks.check_gathered(self.values(), self._module_class)
        return dict, (dict(self),)  # a copy of the module, a deep one too, has a plain dict


# Note [Weights outside of modules]
# A penalty, a logger or an average may read a parameter while no module and no backward runs. It may be bound to a
# placeholder then, or become so before backward reads what autograd has saved, which is the parameter itself. So
# parameters are *hidden* then: their class has a `__torch_function__` that gathers the weights for an operator, and the
# saved-tensor hooks see what it saves. All ranks must do the same. Modules and backward see the parameter's own class,
# at no cost, but for sharded weights that they find elsewhere, as in `self.model.parameters()`. A write, also through a
# view that an operator has returned, has no effect. It changes the parameter's version, which is checked.
_GET_DATA, _SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_READS_NO_WEIGHTS = METADATA_FUNCTIONS | {torch.Tensor.data_ptr, torch.Tensor.untyped_storage}
_all_hooks: weakref.WeakSet[ModuleHooks] = weakref.WeakSet()


class HiddenParameter(nn.Parameter):
    """Parameter whose weights an operator gathers; see Note [Weights outside of modules]."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter(size={tuple(self.shape)}, dtype={self.dtype}), sharded over the ranks"

    @classmethod
    @not_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hidden = {id(one): one for one in iter_tensors((args, kwargs)) if isinstance(one, HiddenParameter)}
        with ExitStack() as stack:
            if func not in _READS_NO_WEIGHTS:
                for hooks in list(_all_hooks):
                    params = [hooks.params[key] for key in hidden if key in hooks.params]
                    if params:
                        stack.enter_context(hooks.reading(params, func))
            if any(isinstance(one, HiddenParameter) for one in hidden.values()):
                stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            return func(*args, **kwargs)


@cache
def _hidden_class(cls: type) -> type:
    return type(f"Hidden{cls.__name__}", (HiddenParameter, cls), {}) if issubclass(cls, nn.Parameter) else cls


class ModuleHooks:
    """Hooks of the user's model, given the chunk parameter of each parameter by its `id`.

    Attributes:
        params: Chunk parameter of each parameter by its `id`.
    """

    def __init__(self, model: nn.Module, manager: ChunkManager, params: dict[int, ChunkParam]) -> None:
        self.manager = manager
        self.params: dict[int, ChunkParam] = {}
        self._running: list[_RunningModule] = []
        self._again = _RunningModule(None)
        self._saved_bytes = 0
        self._times_saved: Counter[int] = Counter()
        self._saved = SavedTensors(self)
        self._handles: list[Any] = []
        self._gradient_handles: dict[int, RemovableHandle] = {}
        self._watched: list[nn.Module] = []
        self._is_in_backward = False
        self.watch(model, params)
        _all_hooks.add(self)

    def watch(self, model: nn.Module, params: dict[int, ChunkParam]) -> None:
        """Watch these parameters in place of those before; graphs created earlier go on with these hooks."""
        for handle in self._handles:
            handle.remove()
        for module in self._watched:
            module._parameters = dict(module._parameters)
        self._handles, self._watched, self.params = [], [], params
        compiled = vars(model).get(LAYER_OF_COMPILED, {})
        for module in model.modules():
            self._watch(module, compiled)
        for key, param in params.items():
            param.show()
            param.record_version()
            if param.region.start < param.region.stop:
                param.shown_class = type(param.parameter)
                param.hidden_class = _hidden_class(param.shown_class)
            if param.chunk.is_hidden:
                param.hide()
            if key in self._gradient_handles:
                param.has_grad_hook = True
            elif param.parameter.requires_grad and param.chunk.layout.trains:
                hook = partial(_on_grad_accumulated, weakref.ref(self))
                self._gradient_handles[key] = param.parameter.register_post_accumulate_grad_hook(hook)
                param.has_grad_hook = True

    def _watch(self, module: nn.Module, compiled: Mapping[nn.Module, nn.Module]) -> None:
        is_layer = module in compiled.values()  # its graph reads all weights, unseen; see Note [Compiled layers]
        own = [self.params[id(one)] for one in module.parameters(recurse=is_layer) if id(one) in self.params]
        if not own and not any(True for _ in module.children()):
            return
        before: Callable[..., Any] = ModuleHook(lambda module, args: self.enter(module, own))
        after: Callable[..., Any] = ModuleHook(lambda module, args, output: self.exit(module, output))
        if module in compiled:
            before, after = EagerHook(before), EagerHook(after)
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))
        if own:
            if is_layer:
                module.__dict__[BEFORE_RECOMPUTATION] = ModuleHook(lambda: self.read_again(own))
            is_in_graph = is_layer or module in compiled
            module._parameters = HookedParameters(module._parameters, self, type(module), is_in_graph)
            self._watched.append(module)

    def check_gathered(self, parameters: Iterable[nn.Parameter | None], module_class: type[nn.Module]) -> None:
        """Check that parameters of a module are gathered before they are copied or pickled."""
        params = [self.params.get(id(one)) for one in parameters]
        if any(param is not None and param.chunk.is_hidden for param in params):
            raise sharded_copy_error(module_class)

    # Forward.

    @property
    def is_running(self) -> bool:
        """Whether a module or a backward is running."""
        return bool(self._running) or self._is_in_backward or _is_autograd_running()

    def enter(self, module: nn.Module, own: Sequence[ChunkParam]) -> None:
        """Handle the start of a module."""
        with unseen_by_modes():
            if not self._running:
                self._begin_outermost()
            running = _RunningModule(module, error=sys.exc_info()[1])
            self._running.append(running)
            if own:
                self.manager.need(own)
                running.pin(own)
            running.packs = self._saved.begin()

    def exit(self, module: nn.Module, output: Any) -> None:
        """Handle the end of a module, also after an exception.

        Raises:
            ConfigError: The module wrote to weights.
        """
        with unseen_by_modes():
            written: list[str] = []
            while self._running:
                running = self._running.pop()
                if running.packs:
                    self._saved.end()
                if self._running:
                    returned = [self.params.get(id(one)) for one in iter_tensors(output)]
                    self._running[-1].pin(param for param in returned if param is not None)
                written = running.written()
                running.unpin()
                if running.module is module:
                    break
            has_failed = sys.exc_info()[1] not in (None, running.error)
            if written and not has_failed:
                raise written_weights_error(type(module).__name__, written)
            if self._running or self._is_in_backward:
                return
            if has_failed:
                self.manager.restart()
            else:
                self.manager.end_forward(trains=torch.is_grad_enabled())

    @not_compiled
    def note_read(self, parameter: nn.Parameter) -> None:
        """Handle a read of a module's parameter."""
        param = self.params.get(id(parameter))
        if param is not None and (param.num_pins == 0 or param.is_overwritten or not param.chunk.is_gathered):
            self.read_again((param,))

    def read_again(self, params: Sequence[ChunkParam]) -> None:
        """Gather weights for the running module or, if none is, for what backward recomputes."""
        with unseen_by_modes():
            if not self._running:
                self._note_backward()
            self.manager.need(params)
            (self._running[-1] if self._running else self._again).pin(params)

    # Outside of modules.

    @contextmanager
    def reading(self, params: Sequence[ChunkParam], func: Callable[..., Any]) -> Iterator[None]:
        """Gather the weights of hidden parameters for an operator. Collective over the shard group.

        Raises:
            ConfigError: The operator writes to the weights, or takes or replaces the memory of a parameter.
        """
        if func == _SET_DATA or (func == _GET_DATA and not self.is_running):
            raise ConfigError(
                f"the memory of {params[0].name!r} was read or replaced, by .data, model.to(), .half() or the like,"
                " while its weights are sharded over the ranks: convert the model before boost(), read the parameter"
                " itself, and change weights inside of `with model.gathered():`"
            )
        chunks = list(dict.fromkeys(param.chunk for param in params))
        if func is torch.autograd.grad:  # uses no weights but those that were saved
            for chunk in chunks:
                chunk.show()
        elif self.is_running:
            for param in params:
                self.note_read(param.parameter)
            yield
            return
        else:
            with unseen_by_modes(), self.manager.aside(releases=False):
                self.manager.need(params)
        packs = self._saved.begin()
        try:
            yield
        finally:
            if packs:
                self._saved.end()
            for chunk in chunks:
                chunk.hide()
        self.refuse_modified(params)

    def refuse_modified(self, params: Iterable[ChunkParam]) -> None:
        """Check that parameters were not written while their weights are sharded.

        Raises:
            ConfigError: One was. Its weights are as before.
        """
        modified = [param for param in params if param.is_modified]
        if modified:
            for param in modified:
                param.record_version()
            self.manager.release_all()
            raise ConfigError(
                f"{format_list((repr(param.name) for param in modified), 4)} was modified while the weights are sharded"
                " over the ranks, and the change is lost: change weights inside of `with model.gathered():`, or before"
                " boost()"
            )

    def _begin_outermost(self) -> None:
        if _is_autograd_running():  # activation checkpointing recomputes a part of the forward
            self._note_backward()
            return
        if self._is_in_backward:
            self._abort_backward()
        if not self.manager.is_whole:
            refuse_tracing()
        self.manager.begin_forward(trains=torch.is_grad_enabled())
        self._saved.counts = self.manager.tracer is not None

    # Backward.

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run autograd's backward in the block. Collective over the shard group."""
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
        self.manager.begin_backward()
        with torch._C.DisableTorchFunctionSubclass():
            for key, handle in self._gradient_handles.items():
                hooks = self.params[key].parameter._post_accumulate_grad_hooks
                hooks[handle.id] = hooks.pop(handle.id)  # behind hooks that the user registered later

    def _end_backward(self) -> None:
        self._is_in_backward = False
        self._again.unpin()
        self.manager.end_backward()

    def _abort_backward(self) -> None:
        """Handle a failed backward; for a plain loss.backward(), this runs at the start of the next pass."""
        self._is_in_backward = False
        self._again.unpin()
        self.manager.restart()
        self.manager.reduction.abort()

    def _note_backward(self) -> None:
        """Start a backward that was not called through `backward`, such as a plain loss.backward()."""
        if not self._is_in_backward:
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def on_grad_ready(self, parameter: torch.Tensor) -> None:
        """Handle a gradient that is complete in `.grad`, unless the hook of the parameter was removed."""
        param = self.params.get(id(parameter))
        if param is None or not param.has_grad_hook:
            return
        self._note_backward()
        self._again.unpin()
        self.manager.reduction.on_grad_ready(param)

    # Called by `SavedTensors`.

    def gather_for_backward(self, param: ChunkParam) -> torch.Tensor:
        """Gather the weights of a parameter and return the chunk's gathered buffer."""
        with unseen_by_modes():
            if not self._running:  # else it is for an autograd.grad() inside of a forward
                self._note_backward()
                self._again.unpin()
            self.manager.need((param,))
        assert param.chunk.gathered is not None
        return param.chunk.gathered

    def note_saved(self, address: int, num_bytes: int) -> None:
        """Count memory saved by autograd; memory saved several times counts once."""
        self._times_saved[address] += 1
        if self._times_saved[address] == 1:
            self._saved_bytes += num_bytes
            self.manager.note_other_bytes(self._saved_bytes)

    def note_released(self, address: int, num_bytes: int) -> None:
        """Count memory released by autograd."""
        self._times_saved[address] -= 1
        if self._times_saved[address] == 0:
            del self._times_saved[address]
            self._saved_bytes -= num_bytes


class ModuleHook:
    """Hook of a module that does nothing in a copy of it, so that a model with hooks can be copied and pickled."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return type(self), ()

    @not_compiled
    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)


@not_compiled
def _on_grad_accumulated(hooks: weakref.ref[ModuleHooks], parameter: torch.Tensor) -> None:
    """Handle a gradient, without a reference from it: Python can't collect a cycle through a tensor's hooks."""
    alive = hooks()
    if alive is not None and parameter.grad is not None:  # autograd drops that of one frozen since its forward
        alive.on_grad_ready(parameter)


def _is_autograd_running() -> bool:
    """Whether this thread is executing a node of a backward graph."""
    return torch._C._current_graph_task_id() != -1
