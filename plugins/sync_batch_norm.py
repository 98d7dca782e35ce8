"""Normalization over the batches of all data-parallel ranks, on any device, and buffers that are equal on all ranks.

Torch's `SyncBatchNorm` accepts accelerator tensors only. `SynchronizedBatchNorm` supports all devices; a data-parallel
step then equals one process's step on the global batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from booster.comm import all_gather_equal, all_reduce_sum, broadcast_coalesced, group_size, sum_dtype
from booster.core.compiling import not_compiled
from booster.device import has_sync_batch_norm


class _Normalize(torch.autograd.Function):
    """Normalization with the global mean and variance. Two collectives: 2C+1 numbers forward, 2C backward."""

    @staticmethod
    def forward(
        ctx: Any, x_NC: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, eps: float, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean_C, var_C, count = _global_moments(x_NC, group)
        invstd_C = torch.rsqrt(var_C + eps)
        normal_NC = (x_NC - mean_C) * invstd_C
        ctx.save_for_backward(normal_NC, invstd_C, weight_C)
        ctx.count, ctx.group = count, group
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return normal_NC * weight_C + bias_C, mean_C, var_C, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NC: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        normal_NC, invstd_C, weight_C = ctx.saved_tensors
        grad_weight_C, grad_bias_C = (grad_NC * normal_NC).sum(0), grad_NC.sum(0)
        sums_2C = all_reduce_sum(torch.stack([grad_weight_C, grad_bias_C]), ctx.group) / ctx.count
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


class SynchronizedBatchNorm(_BatchNorm):
    """Batch normalization over all ranks of a group, for inputs of shape (batch, channels, ...).

    Parameters, buffers and evaluation mode are those of `torch.nn.BatchNorm*d`. In training, all ranks of the group
    must call it equally often.

    Args:
        source: Module to replace; its parameter and buffer objects are reused.
        group: Ranks to normalize over; optional, defaults to the world group.
    """

    def __init__(self, source: _BatchNorm, group: dist.ProcessGroup | None) -> None:
        super().__init__(source.num_features, source.eps, source.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats = source.affine, source.track_running_stats
        self.weight, self.bias = source.weight, source.bias
        self.running_mean, self.running_var = source.running_mean, source.running_var
        self.num_batches_tracked = source.num_batches_tracked
        self.training = source.training
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input in its dtype; statistics are computed in fp32 or higher."""
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions (batch, channels, ...), got {input.dim()}")
        if not self.training:
            use_batch = self.running_mean is None or self.running_var is None
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, use_batch, 0.0, self.eps
            )
        weight = self.weight if self.weight is not None else input.new_ones(self.num_features)
        bias = self.bias if self.bias is not None else input.new_zeros(self.num_features)
        rows_NC = input.movedim(1, -1).reshape(-1, self.num_features)
        # At least fp32, because the variance of low-precision inputs would be inaccurate.
        compute = torch.promote_types(torch.promote_types(input.dtype, weight.dtype), torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            out_NC, mean_C, var_C, count = _Normalize.apply(
                rows_NC.to(compute), weight.to(compute), bias.to(compute), self.eps, self.group
            )
        self._update_running(mean_C, var_C, count)
        out: torch.Tensor = out_NC.reshape(input.movedim(1, -1).shape).movedim(-1, 1)
        return out.to(input.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> SynchronizedBatchNorm:
        """Return a copy, such as of an average of weights, which normalizes over the same ranks."""
        copied: SynchronizedBatchNorm = _copy_with_group(self, self.group, memo)
        return copied

    @torch.no_grad()
    def _update_running(self, mean_C: torch.Tensor, var_C: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a cumulative average
            momentum = 1.0 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
        unbiased_C = var_C * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), momentum)


class _TorchSyncBatchNorm(nn.SyncBatchNorm):
    """Torch's module, which can be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _TorchSyncBatchNorm:
        copied: _TorchSyncBatchNorm = _copy_with_group(self, self.process_group, memo)
        return copied


def _copy_with_group(module: Any, group: dist.ProcessGroup | None, memo: dict[int, Any]) -> Any:
    """Return a copy of a module with the same process group, which can't be copied."""
    memo[id(group)] = group
    cls: Any = type(module)
    copied = memo[id(module)] = cls.__new__(cls)
    copied.__setstate__(copy.deepcopy(vars(module), memo))
    return copied


def convert_batch_norm(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Replace the model's BatchNorm modules in place by modules that normalize over all ranks.

    Uses torch's `SyncBatchNorm` on devices that support it, `SynchronizedBatchNorm` on others. Parameters stay the same
    objects, and modules with several names stay shared.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                continue
            if child not in replaced:
                if has_sync_batch_norm(device):
                    replaced[child] = nn.SyncBatchNorm.convert_sync_batchnorm(child, group)
                    replaced[child].__class__ = _TorchSyncBatchNorm
                else:
                    replaced[child] = SynchronizedBatchNorm(child, group)
            setattr(parent, name, replaced[child])


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
