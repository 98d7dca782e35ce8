"""Deep copies in which a function decides what takes the place of each tensor, in whatever container it lies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["copy_with_tensors"]


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
