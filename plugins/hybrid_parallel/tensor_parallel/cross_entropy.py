"""Vocabulary-parallel cross-entropy: no all-gather of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from booster.comm import all_reduce_max, all_reduce_sum
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks

__all__ = ["split_cross_entropy"]

# The loss of a token is the logarithm of the sum of exp(logit) over all classes, minus the logit of its target. Each
# rank has the partial sum over its classes, and one rank has the target's logit. The ranks all-reduce the maximum logit
# of every token, which keeps the exponentials in range, then the target logits, the sums of logits (label smoothing)
# and the sums of exponentials: four numbers per token instead of all logits. Backward needs no communication.


def split_cross_entropy(
    local_logits: torch.Tensor,
    target: torch.Tensor,
    ranks: TensorParallelRanks,
    first_entry: int,
    *,
    num_entries: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of the full logits, computed in fp32 for half-precision dtypes.

    Args:
        local_logits: This rank's classes along the last dimension, possibly none.
        target: Class of each token, of the logits' shape without the last dimension.
        ranks: The tensor-parallel group.
        first_entry: Index of this rank's first class.
        num_entries: Number of classes; optional without `label_smoothing`, targets are then not checked.
        ignore_index: Target of ignored tokens.
        reduction: "mean", "sum" or "none".
        label_smoothing: Fraction of each target that is spread over all classes.

    Raises:
        IndexError: A target is not a class (checked on the CPU only).

    Collective: two all-reduces.
    """
    if num_entries is None and label_smoothing > 0:
        raise AssertionError("label_smoothing needs the number of classes")
    is_counted = target != ignore_index
    if num_entries is not None and target.device.type == "cpu" and not isinstance(target, FakeTensor):
        _require_classes(target[is_counted], num_entries)
    losses = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        local_logits, target, is_counted, ranks, first_entry, num_entries or 0, label_smoothing
    )
    if reduction == "none":
        return losses.to(local_logits.dtype)  # type: ignore[no-any-return]
    total = losses.sum()
    if reduction == "mean":
        total = total / is_counted.sum()
    elif reduction != "sum":
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return total.to(local_logits.dtype)  # type: ignore[no-any-return]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        is_counted: torch.Tensor,
        ranks: TensorParallelRanks,
        first_entry: int,
        num_entries: int,
        smoothing: float,
    ) -> torch.Tensor:
        local_target = target - first_entry
        is_mine = is_counted & (local_target >= 0) & (local_target < logits.shape[-1])
        column = local_target.masked_fill(~is_mine, 0).unsqueeze(-1)
        largest = _largest(logits)
        all_reduce_max(largest, ranks.group)
        shifted = _widened(logits) - largest.unsqueeze(-1)
        parts = [_picked(shifted, column, is_mine), shifted.sum(-1), shifted.exp_().sum(-1)]
        sums = torch.stack(parts)
        all_reduce_sum(sums, ranks.group)
        of_target, of_all, denominator = sums
        losses = denominator.log() - of_target
        if smoothing > 0:
            losses = (1 - smoothing) * losses + smoothing * (denominator.log() - of_all / num_entries)
        ctx.save_for_backward(logits, largest, denominator, column, is_mine, is_counted)
        ctx.smoothing, ctx.num_entries = smoothing, num_entries
        return losses.masked_fill(~is_counted, 0)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, largest, denominator, column, is_mine, is_counted = ctx.saved_tensors
        grad = (_widened(logits) - largest.unsqueeze(-1)).exp_().div_(denominator.unsqueeze(-1))
        if logits.shape[-1] > 0:
            grad.scatter_add_(-1, column, (ctx.smoothing - 1) * is_mine.to(grad.dtype).unsqueeze(-1))
        if ctx.smoothing > 0:
            grad -= ctx.smoothing / ctx.num_entries
        grad *= grad_losses.masked_fill(~is_counted, 0).unsqueeze(-1)  # the mean over 0 tokens has nan gradients
        return grad.to(logits.dtype), *[None] * 6


def _widened(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _largest(logits: torch.Tensor) -> torch.Tensor:
    wide = _widened(logits[..., :0])
    if logits.shape[-1] == 0:
        return wide.new_full(logits.shape[:-1], -torch.inf)
    return logits.amax(-1).to(wide.dtype)


def _picked(shifted: torch.Tensor, column: torch.Tensor, is_mine: torch.Tensor) -> torch.Tensor:
    """Return the logit of every token's target; 0 if another rank holds it."""
    if shifted.shape[-1] == 0:
        return shifted.new_zeros(shifted.shape[:-1])
    return shifted.gather(-1, column).squeeze(-1).masked_fill(~is_mine, 0)


def _require_classes(targets: torch.Tensor, num_entries: int) -> None:
    wrong = targets[(targets < 0) | (targets >= num_entries)]
    if wrong.numel() > 0:
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
