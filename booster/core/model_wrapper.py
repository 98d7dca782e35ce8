"""Base class of boosted models: runs the plugin's forward, with the attributes and names of the user's model."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from booster.deprecation import DeprecatedAlias
from booster.errors import CheckpointError, ConfigError, incomplete_error
from booster.fault_tolerance.progress import current_thread, in_phase
from booster.pytree import map_tensors

from .precision import Precision
from .shard_spec import TensorSlice, is_sharded, shard_spec_of

# Note [Attributes of the boosted model]
# Attributes that the wrapper lacks are the user's module's: reading, setting and deleting them is forwarded to it. The
# wrapper's attributes are those that its constructor sets and its classes declare; they take precedence. A method of
# the user's module, such as `model.loss(x)`, may run a forward: it runs in the precision of the forward, and the
# collectives before a forward run when its first module does. A method that runs no module communicates nothing, so one
# rank alone may call it.

# What to write for methods that torch's and others' wrappers of models have.
_METHODS_ELSEWHERE = {
    "no_sync": "booster.no_sync(model, optimizer)",
    "clip_grad_norm_": "booster.clip_grad_norm_(optimizer, max_norm)",
    "backward": "booster.backward(loss, optimizer)",
}


class _ConstructionMarker(type):
    """Metaclass that marks the end of construction, after which new attributes are the user's module's."""

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        vars(model)["_is_constructed"] = True
        return model


class ModelWrapper(nn.Module, metaclass=_ConstructionMarker):
    """Boosted model.

    Calling it runs the plugin's forward in the chosen precision. Names of parameters, buffers and modules, `state_dict`
    and `load_state_dict` are those of the user's model, and so are other attributes and methods; see Note [Attributes
    of the boosted model]. `unwrap()` returns the user's model, also for names that the wrapper has itself.

    Args:
        module: The user's model.
        forward_module: Module that runs the forward, such as a `DistributedDataParallel` around `module`; optional,
            defaults to `module`.
        is_primary: True on exactly one of the ranks that hold the same parameters. Its values are the reference; the
            others write parts of equal copies.
    """

    module: nn.Module
    forward_module: nn.Module
    precision: Precision | None
    model_parallel_size: int  # ranks that compute each batch together, with equal inputs
    first_model_rank: int | None  # the first of these in the world; None where they need not agree on the batch
    tensor_parallel_size: int  # those of them that compute the same tokens, with shards of layers
    broadcasts_buffers: bool  # False if each rank trains with its own buffers
    failed_loads: dict[object, str]  # why a load has failed halfway, by the model or optimizer that is incomplete since

    def __init__(self, module: nn.Module, forward_module: nn.Module | None = None, *, is_primary: bool = True) -> None:
        super().__init__()
        self.module = module
        self.precision = None
        self._running_method = False
        self._is_primary = is_primary
        self.model_parallel_size = self.tensor_parallel_size = 1
        self.first_model_rank = None
        self._is_closed = False
        self.broadcasts_buffers = True
        self.failed_loads = {}
        self._load_hooks: list[Callable[[], None]] = []
        self._master_slices: list[Callable[[], list[TensorSlice]]] = []
        self._optimizer: weakref.ref[Any] | None = None
        # Not a submodule: its names would appear a second time, with the plugin's prefix.
        self.__dict__["forward_module"] = module if forward_module is None else forward_module
        first = next(module.parameters(), None)
        self._compute_device_type = "cpu" if first is None else first.device.type

    def unwrap(self) -> nn.Module:
        """Return the user's model, once weights in flight have arrived."""
        return self.module

    def mark_closed(self) -> None:
        """Record that `Booster.close` has released its process groups."""
        self.__dict__["_is_closed"] = True

    def require_open(self) -> None:
        """Raise `ConfigError` after `Booster.close`."""
        if self._is_closed:
            raise ConfigError(
                "the Booster of this model is closed, which has released its process groups: close a Booster when"
                " nothing that it has boosted is used any more, or boost again with a new plugin"
            )

    def require_complete(self) -> None:
        """Raise `CheckpointError` while some part is neither what it was before a failed load nor what it should be."""
        for part, error in self.failed_loads.items():
            raise incomplete_error("model" if part is self else "optimizer", error)

    def require_usable(self) -> None:
        """Raise after `Booster.close`, and from a failed load to the next one that succeeds."""
        if self._is_closed or self.failed_loads:
            self.require_open()
            self.require_complete()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with its hooks, in its own phase."""
        if torch.compiler.is_compiling():  # phases cannot be compiled
            return super().__call__(*args, **kwargs)
        self.require_usable()
        trains = torch.is_grad_enabled()
        if trains:
            for observer in current_thread.state.observers:
                observer.on_forward(self, args, kwargs)
        return (self._run_training if trains or self.training else self._run_evaluation)(args, kwargs)

    @in_phase("forward")
    def _run_training(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().__call__(*args, **kwargs)

    @in_phase("evaluate")
    def _run_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plugin's forward; arguments and result are those of the user's model."""
        precision = self.precision
        if precision is None:
            return self.forward_module(*args, **kwargs)
        args, kwargs = precision.convert_inputs(args, kwargs)
        with precision.forward_context(self._compute_device_type):
            outputs = self.forward_module(*args, **kwargs)
        return precision.convert_outputs(outputs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the user's module in place, as `torch.nn.Module.compile` does."""
        self.module.compile(*args, **kwargs)

    def train(self, mode: bool = True) -> ModelWrapper:
        """Set training or evaluation mode of the user's model and of the plugin's forward module."""
        self.module.train(mode)
        if self.forward_module is not self.module:
            self.forward_module.train(mode)
        # Not by assignment, which is forwarded to the user's module: its `train` may have left it in another mode.
        vars(self)["training"] = mode
        return self

    def register_optimizer(self, optimizer: Any) -> None:
        """Register the boosted optimizer of this model; called by the optimizer."""
        self._optimizer = weakref.ref(optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model, those of its optimizer as `optimizer.zero_grad()` does."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            super().zero_grad(set_to_none)
        else:
            optimizer.zero_model_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy with all weights and without an optimizer, as for averages of weights.

        Its forward communicates nothing. Collective where ranks hold shards of the weights.
        """
        self.require_complete()
        copied = ModelWrapper(self._copy_module(memo), is_primary=self._is_primary)
        copied.precision = self.precision
        return copied.train(self.training)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a boosted model was pickled, as torch.save(model, path) does, or given to copy.copy(), and it belongs to"
            " process groups and an optimizer: write booster.save_model(model, path), or copy.deepcopy(model)"
        )

    # Overridden by plugins: for a copy, around a forward, around a method that runs modules, and before a backward.

    def _copy_module(self, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of the user's module with all weights of this rank's parts."""
        return copy.deepcopy(self.unwrap(), memo)

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before modules run. Collective; does nothing by default."""

    def _end_run(self) -> None:
        """Called after modules have run. Collective; does nothing by default."""

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Called with every loss before its backward. Collective; does nothing by default."""

    def _run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's module; see Note [Attributes of the boosted model]."""
        if self._running_method or torch.compiler.is_compiling():  # the outer call does the rest
            return method(*args, **kwargs)
        precision = self.precision
        if precision is not None:
            args, kwargs = precision.convert_inputs(args, kwargs)
        modules = frozenset(self.module.modules())
        has_run = False

        def begin(module: nn.Module, _: Any) -> None:
            nonlocal has_run
            if not has_run and module in modules:
                has_run = True
                self.require_usable()
                self._begin_run(args, kwargs)

        self._running_method = True
        context = nullcontext() if precision is None else precision.forward_context(self._compute_device_type)
        try:
            with register_module_forward_pre_hook(begin), context:
                outputs = method(*args, **kwargs)
        finally:
            self._running_method = False
        if not has_run:
            return outputs
        self._end_run()
        return outputs if precision is None else precision.convert_outputs(outputs)

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("_modules", {}).get("module")
        if name == "module" and module is not None:
            return module
        if module is None:  # __init__ did not run
            raise AttributeError(name)
        try:
            value = getattr(self.unwrap(), name)
        except AttributeError as error:
            if name not in _METHODS_ELSEWHERE:
                raise
            raise AttributeError(f"a boosted model has no {name}(): write {_METHODS_ELSEWHERE[name]}") from error
        if inspect.ismethod(value) and value.__self__ is module:
            return functools.wraps(value)(functools.partial(self._run_method, value))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
            if name == "training":
                self.module.training = value
            return
        registered = name in self.module._parameters or name in self.module._modules
        if registered or isinstance(value, (nn.Parameter, nn.Module)):
            raise _unknown_member_error(f"model.{name} = {type(value).__name__}(...)")
        buffer = self.module._buffers.get(name)
        if isinstance(buffer, torch.Tensor) and isinstance(value, torch.Tensor):
            # The plugin chose device and dtype. The old tensor is not overwritten: a graph may have saved it.
            both_float = buffer.is_floating_point() and value.is_floating_point()
            value = value.to(buffer.device, buffer.dtype if both_float else value.dtype)
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
            return
        if name in self.module._parameters or name in self.module._modules or name in self.module._buffers:
            raise ConfigError(
                f"del model.{name} after boost() would delete a module, parameter or buffer that the plugin and the"
                " optimizer hold: delete it before boost()"
            )
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def _is_own(self, name: str) -> bool:
        if not vars(self).get("_is_constructed", False) or name in vars(self) or name == "module":
            return True
        classes = [one for one in type(self).__mro__ if issubclass(one, ModelWrapper)]
        return any(name in vars(one) or name in vars(one).get("__annotations__", {}) for one in classes)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the user's module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise `ConfigError`: neither the plugin nor the optimizer would know the parameter."""
        raise _unknown_member_error(f"model.register_parameter({name!r}, ...)")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise `ConfigError`: neither the plugin nor the optimizer would know the module."""
        raise _unknown_member_error(f"model.add_module({name!r}, ...)")

    def get_submodule(self, target: str) -> nn.Module:
        """Return the user's module of that name."""
        return self.unwrap().get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the user's parameter of that name."""
        return self.unwrap().get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the user's buffer of that name."""
        return self.unwrap().get_buffer(target)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the user's parameters under the user's names."""
        return self.unwrap().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the user's buffers under the user's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the user's modules under the user's names."""
        modules: Iterator[tuple[str, nn.Module]] = self.unwrap().named_modules(memo, prefix, remove_duplicate)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the user's model's `state_dict` on this rank."""
        self.require_complete()
        return self.unwrap().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the user's model and its fp32 master weights.

        Raises:
            ConfigError: assign=True was given, which would replace the optimizer's parameters.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) gives a boosted model new parameters, and the optimizer would keep the"
                " old ones: leave assign out, or load before boost()"
            )
        result = self.unwrap().load_state_dict(state_dict, strict=strict)
        self.notify_loaded()
        return result

    # Called by a CheckpointIO.

    def tensor_slices(self) -> list[TensorSlice]:
        """Return this rank's slices of every parameter and persistent buffer, tied ones once, in model order.

        The slices' tensors are the model's memory: filling them loads the model. Call `load_computed_state` with those
        that are not, and `notify_loaded`, afterwards.

        Raises:
            CheckpointError: The model's state has a value that is not a tensor.
        """
        state = self.unwrap().state_dict()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        memory = parameters | dict(self.module.named_buffers(remove_duplicate=False))
        slices: list[TensorSlice] = []
        for name in (names[0] for names in self._tied(state)):
            logical_name, is_primary, is_shared = self.logical_name(name), self.writes(name), name in parameters
            parameter = parameters.get(name, state[name])
            if is_sharded(parameter):
                spec = shard_spec_of(parameter)
                parts = spec.slices(logical_name, state[name], primary=is_primary, shared=is_shared)
            else:
                parts = [TensorSlice.full(logical_name, state[name], primary=is_primary, shared=is_shared)]
            is_computed = name not in memory or not _share_memory(state[name], memory[name])
            slices += [replace(part, is_computed=True) for part in parts] if is_computed else parts
        return slices

    def load_computed_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Give state that is not the model's memory to the modules that have it, as torch's `load_state_dict` does.

        Args:
            state: Loaded tensors by their logical names. Not collective.
        """
        given = OrderedDict(state)
        versions = {name: {"version": module._version} for name, module in self.module.named_modules()}
        given._metadata = versions  # type: ignore[attr-defined]  # of torch's state dicts
        self.module.load_state_dict(given, strict=False)

    def logical_name(self, name: str) -> str:
        """Return the first name in the user's full model of a tensor of this rank's module."""
        return name

    def logical_parameters(self) -> list[nn.Parameter]:
        """Return the full model's parameters, tied ones once; those of other ranks are on the meta device."""
        return list(self.module.parameters())

    def writes(self, name: str) -> bool:
        """Return whether this rank is the one that writes a tensor, of all that hold the same elements.

        Args:
            name: Name in this rank's module, or the logical name of a parameter, whose optimizer states it writes, too.
        """
        return self._is_primary

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        """Return the other names of the same memory in the model, by slice name."""
        return {names[0]: tuple(names[1:]) for names in self._tied(self.module.state_dict()) if len(names) > 1}

    def require_equal_copies(self) -> None:
        """Check that ranks which should hold equal copies of tensors do. Collective.

        Called by every rank before a save of the model; does nothing by default.

        Raises:
            CheckpointError: They differ; on all ranks.
        """

    def register_load_hook(self, hook: Callable[[], None]) -> None:
        """Register `hook()`, called after weights were loaded."""
        self._load_hooks.append(hook)

    def register_master_slices(self, slices: Callable[[], list[TensorSlice]]) -> None:
        """Register `slices()`, which returns master weights that a load fills, too, by the weights' names."""
        self._master_slices.append(slices)

    def master_slices(self) -> list[TensorSlice]:
        """Return this rank's slices of master weights."""
        return [part for slices in self._master_slices for part in slices()]

    exact_slices = DeprecatedAlias("master_slices")
    register_exact_copies = DeprecatedAlias("register_master_slices")

    def notify_loaded(self) -> None:
        """Call the hooks after weights were loaded."""
        for hook in self._load_hooks:
            hook()

    def _named_state(self, sharded: Container[int]) -> list[tuple[list[str], torch.Tensor]]:
        """Return the tensors of the module's state, each with all of its names.

        Args:
            sharded: The `id`s of parameters whose memory does not tell which are tied.
        """
        state = self.module.state_dict(keep_vars=True)
        groups: dict[int, list[str]] = {}
        for name, value in state.items():
            if id(value) in sharded:
                groups.setdefault(id(value), []).append(name)
        others = {name: value for name, value in state.items() if id(value) not in sharded}
        found = {names[0]: (names, state[names[0]]) for names in [*groups.values(), *self._tied(others)]}
        return [found[name] for name in state if name in found]

    @staticmethod
    def _tied(state: Mapping[str, Any]) -> list[list[str]]:
        """Group the state's names by memory; the first name of each group is the saved one."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"{name!r} of the model's state is a {type(tensor).__name__}, and a checkpoint without pickle"
                    " stores tensors only: return a tensor from get_extra_state(), or save it in `extra`"
                )
            has_memory = tensor.numel() > 0 and tensor.device.type != "meta"
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if has_memory else (name,)
            groups.setdefault(key, []).append(name)
        return list(groups.values())


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == 0 or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _unknown_member_error(what: str) -> ConfigError:
    return ConfigError(
        f"{what} after boost() adds a module or parameter that is unknown to the plugin and the optimizer: set it"
        " before boost()"
    )


def batch_on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its host tensors copied to an accelerator; tensors that are elsewhere stay there."""
    if device.type == "cpu":
        return batch
    return map_tensors(lambda one: one.to(device, non_blocking=True) if one.device.type == "cpu" else one, batch)


class LabeledBatch(NamedTuple):
    """Batch of which the model is given the inputs alone, and the criterion the targets.

    Attributes:
        inputs: A batch as in `forward_arguments`.
        targets: Anything; a pipeline splits it together with the inputs.
    """

    inputs: Any
    targets: Any


def call_with_batch(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch; see `forward_arguments`.

    Raises:
        ConfigError: The batch is empty, or does not match the signature of the model's forward.
    """
    args, kwargs = forward_arguments(batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        users = model.unwrap() if isinstance(model, ModelWrapper) else model  # the wrapper's forward accepts anything
        signature = inspect.signature(getattr(users, "forward", users))
        try:
            signature.bind(*args, **kwargs)
        except TypeError as mismatch:
            given = f"the keys {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} entries"
            raise ConfigError(
                f"a batch with {given} was given to {type(users).__name__}, whose forward has the signature {signature}"
                f" ({mismatch}): the full batch is passed, a dict by keyword, a tuple by position, with labels. Let"
                " forward accept them all (forward(self, x, y=None)), or let the data iterator yield its arguments only"
            ) from error
        raise


def forward_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a forward.

    Args:
        batch: Mapping of keyword arguments, sequence of positional ones, the only one, or a `LabeledBatch` of these.

    Raises:
        ConfigError: The batch is empty.
    """
    if isinstance(batch, LabeledBatch):
        return forward_arguments(batch.inputs)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    if not batch:
        raise ConfigError(
            "the data iterator yielded an empty batch, and the model needs arguments: give a tensor, or a dict or a"
            " tuple of the model's arguments"
        )
    return tuple(batch), {}
