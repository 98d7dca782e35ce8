"""The model side of a plugin: runs the plugin's forward, shows the user's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from booster.errors import CheckpointError, ConfigError
from booster.interface.mixed_precision import MixedPrecision
from booster.interface.parameter_layout import layout_of
from booster.interface.tensor_slice import TensorSlice
from booster.phases import Phase, observers

__all__ = ["ModelWrapper"]


class ModelWrapper(nn.Module):
    """The boosted model.

    Calling it runs what the plugin made of the user's model, in the number format that was asked for. Parameter,
    buffer and module names, `state_dict` and `load_state_dict` are those of the user's model.

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
        self._is_primary = is_primary
        self.num_ranks_of_batch = 1
        self._load_hooks: list[Callable[[], None]] = []
        self._exact_copies: list[Callable[[], list[TensorSlice]]] = []
        # Kept out of the submodules: its names would appear a second time, with the plugin's prefix.
        self.__dict__["forward_module"] = module if forward_module is None else forward_module
        first = next(module.parameters(), None)
        self._device_type = "cpu" if first is None else first.device.type

    def unwrap(self) -> nn.Module:
        """Returns the user's model."""
        return self.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `forward` with its hooks, in a phase of its own."""
        if torch.compiler.is_compiling():  # phases are nothing that can be compiled
            return super().__call__(*args, **kwargs)
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
        super().train(mode)
        self.forward_module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            # Not passed through: a method that computes a loss would go round the plugin, and its gradients with it.
            raise AttributeError(
                f"{name!r} belongs to your {type(module).__name__}, and the boosted model runs only its forward: "
                f"write booster.unwrap_model(model).{name}"
            ) from None

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
        modules: Iterator[tuple[str, nn.Module]] = self.module.named_modules(memo, prefix, remove_duplicate)
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
