"""Operations of vocabulary-parallel logits that work on a rank's shard.

Each handler takes the logits and the operation's other arguments, and returns its result, or `NotImplemented` if the
arguments affect the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from booster.plugins.hybrid_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from booster.plugins.hybrid_parallel.tensor_parallel.split_logits import VocabParallelLogits

__all__ = ["HANDLERS", "is_unsupported", "reads_metadata"]

_PLAIN = (torch.Tensor, FakeTensor)  # other subclasses may override the operations


def reads_metadata(function: Callable[..., Any]) -> bool:
    """Whether a function reads only metadata of the logits: shape, dtype, device or graph."""
    return function in _METADATA


def is_unsupported(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function modifies the tensor in place or hooks it, which would affect a rank's shard only."""
    name = getattr(function, "__name__", "")
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return is_in_place or kwargs.get("out") is not None


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def apply(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
        return logits.with_local(function(logits.local, *args, **kwargs))

    return apply


def _scale(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def apply(logits: VocabParallelLogits, other: Any) -> Any:
        # The gradient of a trained factor would be partial.
        is_number = isinstance(other, (int, float)) or (
            isinstance(other, torch.Tensor) and other.dim() == 0 and not other.requires_grad
        )
        return logits.with_local(function(logits.local, other)) if is_number else NotImplemented

    return apply


def _to(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values())):
        return NotImplemented
    return logits.with_local(logits.local.to(*args, **kwargs))


def _reshape(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    shape = [logits.numel() // max(known, 1) if size == -1 else size for size in sizes]
    if list(sizes).count(-1) > 1 or math.prod(shape) != logits.numel() or shape[-1] != logits.shape[-1]:
        return NotImplemented  # or an invalid shape, for which the full tensor raises torch's error
    return logits.with_local(logits.local.reshape(*shape[:-1], logits.local.shape[-1]))


def _flatten(logits: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return logits.with_local(logits.local.flatten(start_dim, end_dim))


def _getitem(logits: VocabParallelLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    return logits.with_local(logits.local[index]) if _keeps_last_dim(items, logits.dim()) else NotImplemented


def _keeps_last_dim(items: Sequence[Any], num_dims: int) -> bool:
    """Whether an index keeps the last dimension in full and in the last position."""
    if not items or not all(_is_simple(item) for item in items):
        return False
    if isinstance(items[-1], slice) and items[-1] == slice(None):
        return True
    has_ellipsis = any(item is Ellipsis for item in items)
    if has_ellipsis and items[-1] is not Ellipsis:
        return False
    return sum(_num_dims_of(item) for item in items) < num_dims


def _is_simple(item: Any) -> bool:
    is_index = type(item) in _PLAIN and item.dtype in (torch.int64, torch.bool)
    return item is None or isinstance(item, (int, slice, EllipsisType)) or is_index


def _num_dims_of(item: Any) -> int:
    if isinstance(item, torch.Tensor) and item.dtype == torch.bool:
        return item.dim()
    if isinstance(item, bool):
        return 0
    return int(isinstance(item, (int, slice, torch.Tensor)))


def _cross_entropy(
    logits: VocabParallelLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_old_call = size_average is not None or reduce is not None
    has_plain_target = type(target) in _PLAIN and target.dtype == torch.int64
    fits = has_plain_target and logits.dim() in (1, 2) and target.shape == logits.shape[:-1]
    if is_old_call or weight is not None or not fits or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    local = logits.local
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()  # autocast runs cross_entropy in fp32
    return vocab_parallel_cross_entropy(
        local,
        target,
        logits.tp_group,
        logits.vocab_start,
        vocab_size=logits.shape[-1],
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


HANDLERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.cross_entropy: _cross_entropy,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.to: _to,
    **dict.fromkeys((torch.Tensor.view, torch.Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((torch.Tensor.flatten, torch.flatten), _flatten),
    **{
        function: _elementwise(function)
        for function in (
            torch.Tensor.float,
            torch.Tensor.double,
            torch.Tensor.half,
            torch.Tensor.bfloat16,
            torch.Tensor.cpu,
            torch.Tensor.contiguous,
            torch.Tensor.clone,
            torch.clone,
            torch.Tensor.detach,
            torch.detach,
            torch.Tensor.neg,
            torch.neg,
            torch.Tensor.tanh,
            torch.tanh,
        )
    },
    **{
        function: _scale(function)
        for function in (
            torch.Tensor.mul,
            torch.mul,
            torch.Tensor.__mul__,
            torch.Tensor.__rmul__,
            torch.Tensor.div,
            torch.div,
            torch.Tensor.true_divide,
            torch.true_divide,
            torch.Tensor.__truediv__,
        )
    },
}

_IN_PLACE = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "register_hook",
    "retain_grad",
}

_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "itemsize",
        "nbytes",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "grad",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "_version",
        "_backward_hooks",
        "output_nr",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.Tensor.is_complex,
    torch.is_complex,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
}
