"""Cross-entropy of logits that are split over the ranks by class, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from booster.comm import all_reduce_max, all_reduce_sum
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks

__all__ = ["split_cross_entropy"]

# Note [Split cross-entropy]
# The loss of a token is the logarithm of the sum of exp(logit) over all classes, minus the logit of its target. Each
# rank knows the sum over its own classes, and one of them knows the target's logit. So the ranks exchange the largest
# logit of every token, which keeps the exponentials in range, and after that the sums, those of all logits too, which
# label smoothing needs: four numbers a token instead of all logits. Backward needs no communication.


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
    """Returns what `torch.nn.functional.cross_entropy` returns for the joined logits; fp32 inside for lower formats.

    Args:
        local_logits: This rank's classes along the last dimension; it may have none.
        target: The class of each token, of the shape without that dimension.
        ranks: Who have the other classes.
        first_entry: Number of this rank's first class.
        num_entries: How many classes there are; None: not known, and not checked. Needed with `label_smoothing`.
        ignore_index: The target of tokens that don't count.
        reduction: "mean", "sum" or "none".
        label_smoothing: How much of each target is spread over all classes.

    Raises:
        IndexError: A target is no class (on the CPU).

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
        grad *= grad_losses.masked_fill(~is_counted, 0).unsqueeze(-1)  # a mean over no tokens is not a number
        return grad.to(logits.dtype), *[None] * 6


def _widened(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _largest(logits: torch.Tensor) -> torch.Tensor:
    wide = _widened(logits[..., :0])
    if logits.shape[-1] == 0:
        return wide.new_full(logits.shape[:-1], -torch.inf)
    return logits.amax(-1).to(wide.dtype)


def _picked(shifted: torch.Tensor, column: torch.Tensor, is_mine: torch.Tensor) -> torch.Tensor:
    """Returns the value of every token's target; 0 where another rank has it."""
    if shifted.shape[-1] == 0:
        return shifted.new_zeros(shifted.shape[:-1])
    return shifted.gather(-1, column).squeeze(-1).masked_fill(~is_mine, 0)


def _require_classes(targets: torch.Tensor, num_entries: int) -> None:
    wrong = targets[(targets < 0) | (targets >= num_entries)]
    if wrong.numel() > 0:
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
