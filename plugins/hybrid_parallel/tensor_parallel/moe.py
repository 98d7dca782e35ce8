"""Tensor parallelism of mixture-of-experts blocks, and of other modules with partial outputs.

The sharded computation is inside of these modules' forwards, so hooks around them communicate. The styles are those of
transformers' plans.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .group import TensorParallelGroup
from .mappings import copy_to_tp_region, reduce_from_tp_region


def make_sharded_experts(module: nn.Module, tp_group: TensorParallelGroup) -> None:
    """Style "moe_tp_experts": all-reduce the output of experts whose features are sharded.

    The module's inputs are equal on all ranks: hidden states, and the indices and weights of their experts. Their
    gradients are partial and all-reduced.

    Args:
        module: Module with this rank's shards as parameters.
        tp_group: The tensor-parallel group.

    Collective: no; the module's forward and backward are.
    """

    def copy_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: copy_to_tp_region(one, tp_group), (args, kwargs))

    module.register_forward_pre_hook(copy_inputs, with_kwargs=True)
    make_output_all_reduce(module, tp_group)


def make_output_all_reduce(module: nn.Module, tp_group: TensorParallelGroup) -> None:
    """Style "all_reduce": all-reduce a module's output. Collective: no; the module's forward is."""

    def all_reduce_outputs(_: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: reduce_from_tp_region(one, tp_group), output)

    module.register_forward_hook(all_reduce_outputs)


def make_identity_expert(module: nn.Module, tp_group: TensorParallelGroup) -> None:
    """Style "moe_identity_expert": divide a replicated expert's input by the ranks, as the outputs are all-reduced."""
    module.register_forward_pre_hook(lambda _, args: (args[0] / tp_group.size, *args[1:]))


def make_latent_projection(module: nn.Module, tp_group: TensorParallelGroup, *, num_rotary: int) -> None:
    """Style "mla_kv_a_proj": all-reduce the gradient of the rotary part of a replicated latent projection.

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) projects to a compressed key-value vector, which a
    column-parallel layer reads, and to a rotary key, which all heads use directly. Each rank's heads compute a partial
    gradient of the rotary key.

    Args:
        module: Projection whose last output features are the rotary key.
        tp_group: The tensor-parallel group.
        num_rotary: Number of features of the rotary key.

    Collective: no; the module's backward is.
    """

    def copy_rotary(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.split([output.shape[-1] - num_rotary, num_rotary], dim=-1)
        return torch.cat([latent, copy_to_tp_region(rotary, tp_group)], dim=-1)

    module.register_forward_hook(copy_rotary)
