"""FSDP2 as its users set it up by hand, and the same with the collectives of the booster instead of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from _harness.gpt import GPT
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["FULL_SHARD", "SHARD_GRAD_OP", "STRATEGIES", "policy_of", "shard_manual"]

FULL_SHARD = "FULL_SHARD"
SHARD_GRAD_OP = "SHARD_GRAD_OP"
# What `fully_shard` is told; None: it frees the blocks' weights after the forward and keeps the root's, its default.
STRATEGIES: Mapping[str, bool | None] = {FULL_SHARD: None, SHARD_GRAD_OP: False}


def policy_of(precision: str, reduce_dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """Returns FSDP2's policy: nothing for "fp32"; "bf16" gathers and computes in bf16 over shards in fp32.

    Args:
        precision: "fp32" or "bf16".
        reduce_dtype: Of gradients on their variant, in bf16; None: as they are computed.
    """
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)


def shard_manual(
    model: GPT,
    policy: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool | None,
    device_type: str = "cpu",
    has_our_collectives: bool = False,
) -> None:
    """Shards a model over the world: every block is a unit, and what is left is the root's.

    Args:
        model: To shard, in place.
        policy: See `policy_of`.
        reshard_after_forward: As `fully_shard` takes it.
        device_type: Where it lives.
        has_our_collectives: Whether units communicate through `booster.comm`; on one rank they don't communicate.

    Collective.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        unit = fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        if has_our_collectives:
            unit.set_custom_all_gather(_OurAllGather())
            unit.set_custom_reduce_scatter(_OurReduceScatter())


class _Allocating:
    """As FSDP2's own collectives do it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _OurAllGather(_Allocating, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        from booster.comm import start_all_gather

        start_all_gather(output_tensor, group).wait()  # the input lies in its place in the output
        return None


class _OurReduceScatter(_Allocating, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        from booster.comm import start_reduce_scatter

        start_reduce_scatter(input_tensor, group).wait(output_tensor, accumulate=False)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
