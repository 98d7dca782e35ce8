"""Normalization over the batches of all data-parallel ranks, on any device, and buffers that are equal on all ranks.

Torch's `SyncBatchNorm` accepts accelerator tensors only, and replaces modules. Here all devices are supported, and
modules stay what they are; a data-parallel step then equals one process's step on the global batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from booster.comm import all_gather_equal, all_reduce_sum, broadcast_coalesced, group_size, sum_dtype
from booster.core.compiling import not_compiled
from booster.core.layer_stacks import subclass_of
from booster.device import has_sync_batch_norm


class _AllReduceSum(torch.autograd.Function):
    """Sum over the ranks, whose gradient is the sum of the ranks' gradients; differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, addend: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return all_reduce_sum(addend.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllReduceSum.apply(grad, ctx.group), None


class _Normalize(torch.autograd.Function):
    """Normalization with the global mean and variance. Two collectives: 2C+1 numbers forward, 2C backward."""

    @staticmethod
    def forward(
        ctx: Any, x_NC: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, eps: float, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean_C, var_C, count = _global_moments(x_NC, group)
        invstd_C = torch.rsqrt(var_C + eps)
        ctx.save_for_backward(x_NC, weight_C, mean_C, invstd_C, count)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return (x_NC - mean_C) * invstd_C * weight_C + bias_C, mean_C, var_C, count

    @staticmethod
    def backward(ctx: Any, grad_NC: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x_NC, weight_C, mean_C, invstd_C, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # for gradients of gradients, of which the moments are functions of the input, too
            mean_C = _AllReduceSum.apply(x_NC.sum(0), ctx.group) / count
            var_C = _AllReduceSum.apply((x_NC - mean_C).square().sum(0), ctx.group) / count
            invstd_C = torch.rsqrt(var_C + ctx.eps)
        normal_NC = (x_NC - mean_C) * invstd_C
        grad_weight_C, grad_bias_C = (grad_NC * normal_NC).sum(0), grad_NC.sum(0)
        sums_2C = _AllReduceSum.apply(torch.stack([grad_weight_C, grad_bias_C]), ctx.group) / count
        grad_x_NC = (grad_NC - sums_2C[1] - normal_NC * sums_2C[0]) * (invstd_C * weight_C)
        return grad_x_NC, grad_weight_C, grad_bias_C, None, None


def _global_moments(
    x_NC: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean, biased variance and number of rows over all ranks.

    The ranks' moments are combined as in Chan, Golub, LeVeque 1979, which avoids the cancellation of E[x^2] - E[x]^2.
    """
    channels = x_NC.shape[1]
    mean_C = x_NC.mean(0) if len(x_NC) else x_NC.new_zeros(channels)
    spread_C = (x_NC - mean_C).square().sum(0)
    mine = torch.cat([mean_C, spread_C, x_NC.new_tensor([float(len(x_NC))])])
    ranks_RK = all_gather_equal(mine, group).view(-1, len(mine))
    means_RC, spreads_RC, counts_R1 = ranks_RK.split([channels, channels, 1], dim=1)
    count = counts_R1.sum()
    mean_C = (means_RC * counts_R1).sum(0) / count
    var_C = (spreads_RC + counts_R1 * (means_RC - mean_C).square()).sum(0) / count
    return mean_C, var_C, count


# Note [Synchronized batch norms]
# A module stays the same object, with its hooks, attributes, names and class, of which it gets a subclass: others may
# hold it, and a class of the user's may do more than normalize. In its forward in training, calls of torch's
# `batch_norm` normalize over the batches of all ranks.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_GROUP = "_batch_norm_group"  # attribute of the modules
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_ARGUMENTS = ("input", "running_mean", "running_var", *_DEFAULTS)


class _GroupReference:
    """Process group of a module, which copies of the module share, such as averages of weights."""

    __slots__ = ("group",)

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _GroupReference:
        return self


class _OverAllRanks(TorchFunctionMode):
    """Lets `torch.nn.functional.batch_norm` normalize over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.batch_norm:
            given = _DEFAULTS | dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {})
            if given.pop("training"):
                return _batch_norm(**given, group=self._group)
        return function(*args, **(kwargs or {}))


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return `torch.nn.functional.batch_norm` in training, over the batches of all ranks of a group. Collective."""
    if input.dim() < 2:
        raise ValueError(f"expected an input of at least 2 dimensions (batch, channels, ...), got {input.dim()}")
    channels = input.shape[1]
    weight = input.new_ones(channels) if weight is None else weight
    bias = input.new_zeros(channels) if bias is None else bias
    rows_NC = input.movedim(1, -1).reshape(-1, channels)
    # At least fp32, because the variance of low-precision inputs would be inaccurate.
    compute = torch.promote_types(torch.promote_types(input.dtype, weight.dtype), torch.float32)
    with torch.autocast(input.device.type, enabled=False):
        out_NC, mean_C, var_C, count = _Normalize.apply(
            rows_NC.to(compute), weight.to(compute), bias.to(compute), eps, group
        )
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean_C.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased_C = var_C * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased_C.to(running_var.dtype), momentum)
    out: torch.Tensor = out_NC.reshape(input.movedim(1, -1).shape).movedim(-1, 1)
    return out.to(input.dtype)


def _synchronized_members(base: type[nn.Module]) -> dict[str, Any]:
    @not_compiled
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return base.forward(self, *args, **kwargs)
        with _OverAllRanks(vars(self)[_GROUP].group):
            return base.forward(self, *args, **kwargs)

    return {"forward": forward}


def _members_of_torchs(base: type[nn.Module]) -> dict[str, Any]:
    return {"process_group": property(lambda self: vars(self)[_GROUP].group)}


def convert_batch_norm(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Let the model's batch norms normalize over all ranks in training; see Note [Synchronized batch norms].

    Uses torch's `SyncBatchNorm` on devices that support it, for modules with torch's forward. In training, all ranks of
    the group must call a module equally often.

    Args:
        model: The user's model, changed in place.
        device: Device of the model.
        group: Ranks to normalize over; optional, defaults to the world group.
    """
    for module in model.modules():
        if not isinstance(module, _NORMS):
            continue
        is_new, cls = _GROUP not in vars(module), type(module)
        vars(module)[_GROUP] = _GroupReference(group)
        if is_new and has_sync_batch_norm(device) and cls.forward is _BatchNorm.forward:
            subclass = subclass_of(cls, "torch's synchronized", _members_of_torchs, mixin=nn.SyncBatchNorm)
        else:
            subclass = subclass_of(cls, "synchronized", _synchronized_members) if is_new else cls
        module.__class__ = subclass  # type: ignore[assignment]


@not_compiled
@torch.no_grad()
def synchronize_buffers(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make the buffers of all ranks equal: the first rank's, and of instance norms the mean of all ranks' statistics.

    The statistics of a batch are means over its samples, so that with equally many samples on each rank the mean is
    what one process computes, after any number of forwards. Collective over the group.
    """
    buffers = list(model.buffers())
    if not buffers:
        return
    norms = [one for one in model.modules() if isinstance(one, _InstanceNorm) and one.running_mean is not None]
    statistics = [one for norm in norms for one in (norm.running_mean, norm.running_var) if one is not None]
    averaged = {id(one) for one in statistics}
    broadcast_coalesced([one for one in buffers if id(one) not in averaged], group)
    for one in statistics:
        one.data.copy_(all_reduce_sum(one.detach().to(sum_dtype(one.dtype)).clone(), group).div_(group_size(group)))
