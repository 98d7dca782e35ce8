"""Modules that compute in the dtype of their weights inside a model that computes in another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from booster.mixed_precision.half_weights import cast_floats

__all__ = ["DtypeBoundary", "modules_with_forward"]


class DtypeBoundary:
    """Casts a module's inputs to the dtype of its weights, and its outputs to the dtype of the model.

    FSDP1 does so for `_module_classes_to_ignore`; FSDP2 leaves it to the user.

    Args:
        module: Module with weights, not sharded yet.
        outside: Compute dtype of the rest of the model.
    """

    def __init__(self, module: nn.Module, model_dtype: torch.dtype) -> None:
        module_dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), model_dtype)
        if module_dtype == model_dtype:
            return
        self._module_dtype, self._model_dtype = module_dtype, model_dtype
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(self._module_dtype, args), cast_floats(self._module_dtype, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_floats(self._model_dtype, output)


def modules_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or its children if it is a container without a forward."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from modules_with_forward(child)
    else:
        yield module
