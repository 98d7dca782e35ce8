"""Deep copies in which a function decides what takes the place of each tensor, in whatever container it lies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.errors import ConfigError

__all__ = ["copy_with_tensors", "error_of_divided_copy"]


def copy_with_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, memo: dict[int, Any] | None = None
) -> Any:
    """Returns a deep copy of a value with `function(tensor)` in the place of every tensor.

    Args:
        function: Called once for every tensor, and with the data of every parameter. Its answer shares no memory with
            the tensor.
        value: Anything that `copy.deepcopy` takes.
        memo: As of `copy.deepcopy`: what takes the place of objects, by their id.
    """
    with _TensorCopies(function):
        return copy.deepcopy(value, memo)


class _TensorCopies(TorchFunctionMode):
    """`copy.deepcopy` asks a tensor for `__deepcopy__`, and that of a parameter clones the parameter's data."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._function(args[0])  # the mode is off in here
        return func(*args, **(kwargs or {}))


def error_of_divided_copy(module_class: type[nn.Module]) -> ConfigError:
    """Returns what to tell who copies a module while its weights are divided among the ranks."""
    return ConfigError(
        f"the weights of the {module_class.__name__} that was to be copied are divided among the ranks: copy the model"
        " that boost() returned, or copy inside of `with model.gathered():`. An average of weights, as AveragedModel"
        " keeps, is also updated inside of that, where all ranks must be"
    )
