"""Vocabulary-parallel logits that behave like the full logits.

A vocabulary-parallel head returns a tensor subclass with the shape of the full logits that holds a shard, on which the
usual operations run; see `booster.core.partial_logits`. Any other operation first gathers the logits, once, and
continues with a plain tensor: slower, but correct. Functions that bypass torch's override mechanism, such as a user's
autograd function, are handled below autograd: the tensor's graph contains `_WrapLogits`, whose backward returns this
rank's shard of a full gradient. The gathering is collective, so all ranks must apply the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from booster.comm import all_reduce_max, all_reduce_sum, sum_dtype
from booster.core.partial_logits import PartialLogits, check_classes

from .group import TensorParallelGroup
from .mappings import gather_from_tp_region

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
    vocab_size: int,
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
        vocab_size: Number of classes.
        ignore_index: Target of ignored tokens.
        reduction: "mean", "sum" or "none".
        label_smoothing: Fraction of each target that is spread over all classes.

    Raises:
        IndexError: A target is not a class (checked on the CPU only).

    Collective: two all-reduces.
    """
    is_counted = target != ignore_index
    check_classes(target, vocab_size, ignore_index)
    losses = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        local_logits, target, is_counted, tp_group, vocab_start, vocab_size, label_smoothing
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
        is_empty = logits.shape[-1] == 0
        max_logits = logits.new_full(logits.shape[:-1], -torch.inf) if is_empty else logits.amax(-1)
        max_logits = _upcast(max_logits)
        all_reduce_max(max_logits, tp_group.group)
        shifted = _upcast(logits) - max_logits.unsqueeze(-1)
        # the logit of every token's target; 0 if another rank holds it
        target_logits = (
            shifted.new_zeros(shifted.shape[:-1])
            if is_empty
            else shifted.gather(-1, column).squeeze(-1).masked_fill(~is_local, 0)
        )
        sums = torch.stack([target_logits, shifted.sum(-1), shifted.exp_().sum(-1)])
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
    return logits.to(sum_dtype(logits.dtype))


class VocabParallelLogits(PartialLogits):
    """Logits sharded over the vocabulary, with the shape of the full logits. Created by `VocabParallelLogits.of`.

    Attributes:
        local: This rank's entries.
        tp_group: The tensor-parallel group.
        sizes: Number of entries of each rank.
    """

    _unsupported = (
        "on logits that are sharded over the vocabulary would affect this rank's shard only: call it on"
        " `logits.full_tensor()`, or give parallel_output=False to the plugin"
    )
    local: torch.Tensor
    tp_group: TensorParallelGroup
    sizes: tuple[int, ...]
    _full: torch.Tensor | None
    _node: object

    @staticmethod
    def of(local: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int]) -> VocabParallelLogits:
        """Return logits from this rank's shard.

        Args:
            local: This rank's entries along the last dimension, possibly none.
            tp_group: The tensor-parallel group.
            sizes: Number of entries of each rank.
        """
        logits: VocabParallelLogits = _WrapLogits.apply(local, tp_group, tuple(sizes))  # type: ignore[no-untyped-call]
        logits.local, logits.tp_group, logits.sizes = local, tp_group, tuple(sizes)
        logits._full, logits._node = None, logits.grad_fn
        return logits

    @property
    def is_connected(self) -> bool:
        """Whether the local entries have the logits' graph; not so for outputs of an autograd function."""
        return self.grad_fn is self._node

    def full_tensor(self) -> torch.Tensor:
        """Return the full logits as a plain tensor, equal on all ranks. Collective: the first call."""
        is_detached = self._full is not None and self._full.requires_grad < self.requires_grad
        if self._full is None or (is_detached and torch.is_grad_enabled()):
            if self.is_connected:
                self._full = gather_from_tp_region(self.local, self.tp_group, self.sizes)
            else:
                self._full = _GatherLogits.apply(self)  # type: ignore[no-untyped-call]
        return self._full  # type: ignore[return-value]

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> VocabParallelLogits:
        return VocabParallelLogits.of(function(self.local), self.tp_group, self.sizes)

    map_elements = map_rows

    def cross_entropy(
        self,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Any:
        if weight is not None:
            return NotImplemented
        local = self.local
        if torch.is_autocast_enabled(local.device.type):
            local = local.float()  # autocast runs cross_entropy in fp32
        return vocab_parallel_cross_entropy(
            local,
            target,
            self.tp_group,
            sum(self.sizes[: self.tp_group.rank]),
            vocab_size=self.shape[-1],
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without values, so that a single rank may print it. Collective: no."""
        shape, sizes = tuple(self.shape), list(self.sizes)
        return f"VocabParallelLogits(shape={shape}, dtype={self.dtype}, entries per rank={sizes})"


class _WrapLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int]) -> torch.Tensor:
        ctx.tp_group, ctx.sizes = tp_group, sizes
        shape = (*local.shape[:-1], sum(sizes))
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            VocabParallelLogits, shape, dtype=local.dtype, device=local.device
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start = sum(ctx.sizes[: ctx.tp_group.rank])
        return grad.narrow(-1, start, ctx.sizes[ctx.tp_group.rank]), None, None


class _GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits) -> torch.Tensor:
        return gather_from_tp_region(logits.local.detach(), logits.tp_group, logits.sizes).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
