"""Vocabulary-parallel cross-entropy: no all-gather of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from booster.comm import all_reduce_max, all_reduce_sum
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelGroup

__all__ = ["vocab_parallel_cross_entropy"]

# The loss of a token is the logarithm of the sum of exp(logit) over all classes, minus the logit of its target. Each
# rank has the partial sum over its classes, and one rank has the target's logit. The ranks all-reduce the maximum logit
# of every token, which keeps the exponentials in range, then the target logits, the sums of logits (label smoothing)
# and the sums of exponentials: four numbers per token instead of all logits. Backward needs no communication.


def vocab_parallel_cross_entropy(
    local_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: TensorParallelGroup,
    vocab_start: int,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return `torch.nn.functional.cross_entropy` of the full logits, computed in fp32 for half-precision dtypes.

    Args:
        local_logits: This rank's classes along the last dimension, possibly none.
        target: Class of each token, of the logits' shape without the last dimension.
        tp_group: The tensor-parallel group.
        vocab_start: Index of this rank's first class.
        vocab_size: Number of classes; optional without `label_smoothing`, targets are then not checked.
        ignore_index: Target of ignored tokens.
        reduction: "mean", "sum" or "none".
        label_smoothing: Fraction of each target that is spread over all classes.

    Raises:
        IndexError: A target is not a class (checked on the CPU only).

    Collective: two all-reduces.
    """
    if vocab_size is None and label_smoothing > 0:
        raise AssertionError("label_smoothing needs the number of classes")
    is_counted = target != ignore_index
    if vocab_size is not None and target.device.type == "cpu" and not isinstance(target, FakeTensor):
        _check_targets(target[is_counted], vocab_size)
    losses = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        local_logits, target, is_counted, tp_group, vocab_start, vocab_size or 0, label_smoothing
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
        tp_group: TensorParallelGroup,
        vocab_start: int,
        vocab_size: int,
        smoothing: float,
    ) -> torch.Tensor:
        local_target = target - vocab_start
        is_local = is_counted & (local_target >= 0) & (local_target < logits.shape[-1])
        column = local_target.masked_fill(~is_local, 0).unsqueeze(-1)
        max_logits = _max_logits(logits)
        all_reduce_max(max_logits, tp_group.group)
        shifted = _upcast(logits) - max_logits.unsqueeze(-1)
        partial_sums = [_target_logits(shifted, column, is_local), shifted.sum(-1), shifted.exp_().sum(-1)]
        sums = torch.stack(partial_sums)
        all_reduce_sum(sums, tp_group.group)
        target_logits, logit_sums, denominator = sums
        losses = denominator.log() - target_logits
        if smoothing > 0:
            losses = (1 - smoothing) * losses + smoothing * (denominator.log() - logit_sums / vocab_size)
        ctx.save_for_backward(logits, max_logits, denominator, column, is_local, is_counted)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return losses.masked_fill(~is_counted, 0)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, max_logits, denominator, column, is_local, is_counted = ctx.saved_tensors
        grad = (_upcast(logits) - max_logits.unsqueeze(-1)).exp_().div_(denominator.unsqueeze(-1))
        if logits.shape[-1] > 0:
            grad.scatter_add_(-1, column, (ctx.smoothing - 1) * is_local.to(grad.dtype).unsqueeze(-1))
        if ctx.smoothing > 0:
            grad -= ctx.smoothing / ctx.vocab_size
        grad *= grad_losses.masked_fill(~is_counted, 0).unsqueeze(-1)  # the mean over 0 tokens has nan gradients
        return grad.to(logits.dtype), *[None] * 6


def _upcast(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _max_logits(logits: torch.Tensor) -> torch.Tensor:
    wide = _upcast(logits[..., :0])
    if logits.shape[-1] == 0:
        return wide.new_full(logits.shape[:-1], -torch.inf)
    return logits.amax(-1).to(wide.dtype)


def _target_logits(shifted: torch.Tensor, column: torch.Tensor, is_local: torch.Tensor) -> torch.Tensor:
    """Return the logit of every token's target; 0 if another rank holds it."""
    if shifted.shape[-1] == 0:
        return shifted.new_zeros(shifted.shape[:-1])
    return shifted.gather(-1, column).squeeze(-1).masked_fill(~is_local, 0)


def _check_targets(targets: torch.Tensor, vocab_size: int) -> None:
    wrong = targets[(targets < 0) | (targets >= vocab_size)]
    if wrong.numel() > 0:
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
