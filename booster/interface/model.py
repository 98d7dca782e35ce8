"""The model side of a plugin: runs the plugin's forward, shows the user's own names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from booster.errors import CheckpointError, ConfigError
from booster.interface.mixed_precision import MixedPrecision
from booster.interface.parameter_layout import layout_of
from booster.interface.tensor_slice import TensorSlice
from booster.phases import Phase, observers

__all__ = ["ModelWrapper"]

# Note [Attributes of the boosted model]
# Attributes that the wrapper lacks are the user's module's: reading, setting and deleting them reaches that. The
# wrapper's own are what its constructor sets and its classes declare, and win where names are the same. A method of the
# user's module may be a forward in disguise, such as `model.loss(x)`: it runs in the precision of the forward, and
# what all ranks have to do before a forward is done once the first module in it runs. A method that runs no module
# communicates nothing, so one rank alone may call it.


class _Constructed(type):
    """Marks the end of construction, after which new attributes are the user's module's."""

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        vars(model)["_is_constructed"] = True
        return model


class ModelWrapper(nn.Module, metaclass=_Constructed):
    """The boosted model.

    Calling it runs what the plugin made of the user's model, in the dtype that was asked for. Parameter, buffer and
    module names, `state_dict` and `load_state_dict` are those of the user's model, and so are further attributes and
    methods; see Note [Attributes of the boosted model]. `unwrap()` reaches those whose names the wrapper has itself.

    Args:
        module: The user's model.
        forward_module: What runs the forward, such as a `DistributedDataParallel` around `module`; None: `module`.
        is_primary: True on exactly one of the ranks that hold the same parameters: the one that writes them.
    """

    module: nn.Module
    forward_module: nn.Module
    precision: MixedPrecision | None
    num_ranks_of_batch: int  # that compute each batch together, and are given the same

    def __init__(self, module: nn.Module, forward_module: nn.Module | None = None, *, is_primary: bool = True) -> None:
        super().__init__()
        self.module = module
        self.precision = None
        self._running_method = False
        self._is_primary = is_primary
        self.num_ranks_of_batch = 1
        self._is_closed = False
        self._load_hooks: list[Callable[[], None]] = []
        self._exact_copies: list[Callable[[], list[TensorSlice]]] = []
        # Kept out of the submodules: its names would appear a second time, with the plugin's prefix.
        self.__dict__["forward_module"] = module if forward_module is None else forward_module
        first = next(module.parameters(), None)
        self._device_type = "cpu" if first is None else first.device.type

    def unwrap(self) -> nn.Module:
        """Returns the user's model."""
        return self.module

    def mark_closed(self) -> None:
        """Says that `Booster.close` has given back what it needs."""
        self.__dict__["_is_closed"] = True

    def require_open(self) -> None:
        """Raises after `Booster.close`.

        Raises:
            ConfigError: What the model needs was given back.
        """
        if self._is_closed:
            raise ConfigError(
                "the Booster of this model was closed, which has given back the groups of ranks that it needs: close"
                " a Booster when nothing that it has boosted is used any more, or boost again with a new plugin"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `forward` with its hooks, in a phase of its own."""
        if torch.compiler.is_compiling():  # phases are nothing that can be compiled
            return super().__call__(*args, **kwargs)
        self.require_open()
        trains = torch.is_grad_enabled()
        if trains:
            for observer in observers():
                observer.forward_called(self, args, kwargs)
        with Phase("forward" if trains or self.training else "evaluate"):
            return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plugin's forward; arguments and result are those of the user's model."""
        precision = self.precision
        if precision is None:
            return self.forward_module(*args, **kwargs)
        args, kwargs = precision.convert_inputs(args, kwargs)
        with precision.forward_context(self._device_type):
            outputs = self.forward_module(*args, **kwargs)
        return precision.convert_outputs(outputs)

    def train(self, mode: bool = True) -> ModelWrapper:
        """Sets training or evaluation mode of the user's model and of what the plugin made of it."""
        self.module.train(mode)
        if self.forward_module is not self.module:
            self.forward_module.train(mode)
        # Not by assignment, which reaches the user's module: its own `train` may have left it in another mode.
        vars(self)["training"] = mode
        return self

    # What a plugin does around a forward, and around a method that runs modules.

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Does what all ranks have to do before modules run. Collective; here nothing."""

    def _end_run(self) -> None:
        """Does what comes after modules have run. Collective; here nothing."""

    def _run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the user's module; see Note [Attributes of the boosted model]."""
        if self._running_method or torch.compiler.is_compiling():  # called by another one, which did what is needed
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
                self.require_open()
                self._begin_run(args, kwargs)

        self._running_method = True
        context = nullcontext() if precision is None else precision.forward_context(self._device_type)
        try:
            with register_module_forward_pre_hook(begin), context:
                outputs = method(*args, **kwargs)
        finally:
            self._running_method = False
        if not has_run:
            return outputs
        self._end_run()
        return outputs if precision is None else precision.convert_outputs(outputs)

    # Attributes.

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("_modules", {}).get("module")
        if name == "module" and module is not None:
            return module
        if module is None:  # __init__ did not run
            raise AttributeError(name)
        value = getattr(self.unwrap(), name)  # a property, or what is read, may have weights that are in flight
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
            raise _unknown_to_the_plugin(f"model.{name} = {type(value).__name__}(...)")
        buffer = self.module._buffers.get(name)
        if isinstance(buffer, torch.Tensor) and isinstance(value, torch.Tensor):
            # The plugin chose the device and the precision. The old tensor stays as it is: a graph may have saved it.
            both_float = buffer.is_floating_point() and value.is_floating_point()
            value = value.to(buffer.device, buffer.dtype if both_float else value.dtype)
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
            return
        if name in self.module._parameters or name in self.module._modules or name in self.module._buffers:
            raise ConfigError(
                f"del model.{name} after boost() takes a module, parameter or buffer away that the plugin and the"
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
        """Adds a buffer to the user's module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses.

        Raises:
            ConfigError: Always: neither the plugin nor the optimizer would know it.
        """
        raise _unknown_to_the_plugin(f"model.register_parameter({name!r}, ...)")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuses.

        Raises:
            ConfigError: Always: neither the plugin nor the optimizer would know it.
        """
        raise _unknown_to_the_plugin(f"model.add_module({name!r}, ...)")

    def get_submodule(self, target: str) -> nn.Module:
        """Returns the user's module of that name."""
        return self.unwrap().get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns the user's parameter of that name."""
        return self.unwrap().get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Returns the user's buffer of that name."""
        return self.unwrap().get_buffer(target)

    # The user's own names.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the user's parameters under the user's names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the user's buffers under the user's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the user's modules under the user's names."""
        modules: Iterator[tuple[str, nn.Module]] = self.unwrap().named_modules(memo, prefix, remove_duplicate)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the user's model's `state_dict`: what this rank holds."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads into the user's model; fp32 master weights follow.

        Raises:
            ConfigError: assign=True, which would take the parameters away from the optimizer.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) gives a boosted model new parameters, and the optimizer would go on with"
                " the old ones: leave assign out, or load before boost()"
            )
        result = self.module.load_state_dict(state_dict, strict=strict)
        self.notify_loaded()
        return result

    # What a CheckpointIO reads and fills.

    def tensor_slices(self) -> list[TensorSlice]:
        """Returns what this rank holds of every parameter and persistent buffer, tied ones once, in model order.

        The slices' tensors are the model's own memory: filling them loads the model; call `notify_loaded` after it.

        Raises:
            CheckpointError: The model's state holds something that is no tensor.
        """
        state = self.module.state_dict()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return [
            part
            for names in self._tied(state)
            for part in layout_of(parameters.get(names[0], state[names[0]])).slices(
                self.logical_name(names[0]),
                state[names[0]],
                primary=self.writes(names[0]),
                shared=names[0] in parameters,
            )
        ]

    def logical_name(self, name: str) -> str:
        """Returns the name that a tensor of what is here has in the whole model, where that has it first."""
        return name

    def logical_parameters(self) -> list[nn.Parameter]:
        """Returns the whole model's parameters, tied ones once; those that others have alone are on the meta device."""
        return list(self.module.parameters())

    def writes(self, name: str) -> bool:
        """Returns whether this rank writes a tensor for all that hold the same of its layout."""
        return self._is_primary

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        """Returns for every slice's name the further names that the same memory has in the model."""
        return {names[0]: tuple(names[1:]) for names in self._tied(self.module.state_dict()) if len(names) > 1}

    def require_equal_copies(self) -> None:
        """Check that ranks that compute a batch together hold equal copies of what one of them would save. Collective.

        Raises:
            CheckpointError: They don't; on all ranks.
        """

    def register_load_hook(self, hook: Callable[[], None]) -> None:
        """Has `hook()` called whenever the weights were loaded from outside."""
        self._load_hooks.append(hook)

    def register_exact_copies(self, slices: Callable[[], list[TensorSlice]]) -> None:
        """Has `slices()` say which copies of weights with more digits a load fills as well, by the weights' names."""
        self._exact_copies.append(slices)

    def exact_slices(self) -> list[TensorSlice]:
        """Returns what this rank holds of copies that keep more digits than the weights, as fp32 masters do."""
        return [part for slices in self._exact_copies for part in slices()]

    def notify_loaded(self) -> None:
        """Tells the hooks that the weights were changed from outside."""
        for hook in self._load_hooks:
            hook()

    @staticmethod
    def _tied(state: Mapping[str, Any]) -> list[list[str]]:
        """Groups the state's names by the memory they stand for; the first name of each group is the one saved."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"{name!r} of the model's state is a {type(tensor).__name__}, and a checkpoint without pickle holds"
                    " only tensors: return a tensor from get_extra_state(), or save it in `extra`"
                )
            has_memory = tensor.numel() > 0 and tensor.device.type != "meta"
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if has_memory else (name,)
            groups.setdefault(key, []).append(name)
        return list(groups.values())


def _unknown_to_the_plugin(what: str) -> ConfigError:
    return ConfigError(
        f"{what} after boost() gives the model a module or parameter that neither the plugin nor the optimizer knows:"
        " set it before boost()"
    )
