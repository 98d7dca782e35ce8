"""Module outputs that FSDP2 can register its backward hooks on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.utils._pytree import tree_leaves

from booster.mixed_precision.fp16 import cast_floats
from booster.pytree import map_tensors

from .param_group import fsdp_param_groups

# FSDP2's search for tensors in outputs; before torch 2.13 it searched pytrees.
_collect: Callable[[Any], Sequence[torch.Tensor]] | None = getattr(_common_utils, "collect_grad_tensors", None)


class ViewSafeOutputs:
    """Forward hook that runs before FSDP2's own.

    FSDP2 gathers weights for backward in a hook on each output tensor that it finds. This fails silently in two cases:
    if an output is a view that the caller modifies in place, autograd replaces the node that the hook is on; and in
    objects other than containers and dataclasses no tensor is found. In both, backward would read freed weights. So
    views are cloned, and where no tensor is found the weights stay gathered until after backward.

    Args:
        module: Module that `fully_shard` is about to be applied to.
        clones_views: If True, views are cloned; needed where the weights are freed after forward.
    """

    def __init__(self, module: nn.Module, *, clones_views: bool) -> None:
        self._clones_views = clones_views
        self._post_forward_meshes: dict[int, Any] | None = None
        module.register_forward_hook(self)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", module="torch")

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output for FSDP2 and the caller."""
        if not torch.is_grad_enabled():
            return output
        if _collect is not None:
            tensors = _collect(output)
        else:
            tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        self._keep_gathered(module, keeps=not tensors)
        if self._clones_views and any(one._base is not None for one in tensors):
            return map_tensors(lambda one: one.clone() if one.requires_grad and one._base is not None else one, output)
        return output

    def _keep_gathered(self, module: nn.Module, *, keeps: bool) -> None:
        if not keeps and self._post_forward_meshes is None:
            return
        assert isinstance(module, FSDPModule)
        groups = fsdp_param_groups(module)
        if keeps and self._post_forward_meshes is None:
            self._post_forward_meshes = {id(group): group.post_forward_mesh_info for group in groups}
        assert self._post_forward_meshes is not None
        for group in groups:
            group.post_forward_mesh_info = None if keeps else self._post_forward_meshes[id(group)]
        if not keeps:
            self._post_forward_meshes = None


def add_dtype_boundary(module: nn.Module, model_dtype: torch.dtype) -> None:
    """Cast a module's inputs to the dtype of its weights, and its outputs to the dtype of the model, by hooks.

    FSDP1 does so for `_module_classes_to_ignore`; FSDP2 leaves it to the user.

    Args:
        module: Module with weights, not sharded yet.
        model_dtype: Compute dtype of the rest of the model.
    """
    module_dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), model_dtype)
    if module_dtype != model_dtype:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (cast_floats(module_dtype, args), cast_floats(module_dtype, kwargs)),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda _, __, output: cast_floats(model_dtype, output))


def modules_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or its children if it is a container without a forward."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from modules_with_forward(child)
    else:
        yield module
