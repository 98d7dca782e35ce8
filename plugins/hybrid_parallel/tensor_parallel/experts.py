"""Mixture-of-experts blocks whose expert weights are split over the ranks, and other modules that add to a sum.

What is split is inside of these modules' forwards, so they are surrounded by hooks. The styles are those of
transformers' plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import copy_to_ranks, sum_over_ranks
from booster.plugins.sharding.compiling import not_compiled
from booster.tensor_tree import map_tensors

__all__ = ["make_identity_expert", "make_latent_projection", "make_output_sum", "make_split_experts"]


def make_split_experts(module: nn.Module, ranks: TensorParallelRanks) -> None:
    """Lets a module that has a part of every expert's features return the sum over the ranks: "moe_tp_experts".

    Its tensors are the same on all ranks: hidden states, which experts they go to, and with which weights. Each rank
    adds to the gradients of the hidden states and of the weights.

    Args:
        module: Its parameters are this rank's.
        ranks: Who have the other features.

    The module's forward and backward are collective.
    """
    module.register_forward_pre_hook(_CopyInputs(ranks), with_kwargs=True)
    module.register_forward_hook(_SumOutputs(ranks))


def make_output_sum(module: nn.Module, ranks: TensorParallelRanks) -> None:
    """Lets a module return the sum over the ranks of what it returned: "all_reduce". Its forward is collective."""
    module.register_forward_hook(_SumOutputs(ranks))


def make_identity_expert(module: nn.Module, ranks: TensorParallelRanks) -> None:
    """Lets an expert that is the same on all ranks add one share to the sum of split ones: "moe_identity_expert"."""
    module.register_forward_pre_hook(_ShareInput(ranks))


def make_latent_projection(module: nn.Module, ranks: TensorParallelRanks, *, num_rotary: int) -> None:
    """Lets each rank's heads read the rotary part of a replicated latent projection: "mla_kv_a_proj".

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) projects to a compressed key-value vector, which goes
    through a column-parallel layer, and to a rotary key, which all heads use as it is: its gradient is a sum over the
    ranks.

    Args:
        module: Its output's last features are the rotary key.
        ranks: Who have the other heads.
        num_rotary: How many features that is.

    The module's backward is collective.
    """
    module.register_forward_hook(_CopyRotary(ranks, num_rotary))


@dataclass(frozen=True, slots=True)
class _CopyInputs:
    ranks: TensorParallelRanks

    @not_compiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = map_tensors(lambda one: copy_to_ranks(one, self.ranks), (args, kwargs))
        return args, kwargs


@dataclass(frozen=True, slots=True)
class _SumOutputs:
    ranks: TensorParallelRanks

    @not_compiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(lambda one: sum_over_ranks(one, self.ranks), output)


@dataclass(frozen=True, slots=True)
class _ShareInput:
    ranks: TensorParallelRanks

    @not_compiled
    def __call__(self, module: nn.Module, args: Any) -> Any:
        return (args[0] / self.ranks.size, *args[1:])


@dataclass(frozen=True, slots=True)
class _CopyRotary:
    ranks: TensorParallelRanks
    num_rotary: int

    @not_compiled
    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.split([output.shape[-1] - self.num_rotary, self.num_rotary], dim=-1)
        return torch.cat([latent, copy_to_ranks(rotary, self.ranks)], dim=-1)
