"""Logits of which only a part is in memory: the operations that models and losses apply to them before the loss.

Logits are the largest activation of a language model, and mostly only cast, reshaped and passed to a cross-entropy.
So a head may return a tensor subclass with the shape of the full logits that holds something smaller: shards of them,
or the hidden states that they are computed from. The operations in `HANDLERS` keep it so. Any other one continues with
the full logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from .compiling import not_compiled

_PLAIN = (torch.Tensor, FakeTensor)  # other subclasses may override the operations


def _elementwise(function: Callable[..., torch.Tensor], logits: PartialLogits, *args: Any, **kwargs: Any) -> Any:
    return logits.map_elements(lambda part: function(part, *args, **kwargs))


def _scale(function: Callable[..., torch.Tensor], logits: PartialLogits, other: Any) -> Any:
    # The gradient of a trained factor would be partial.
    is_number = isinstance(other, (int, float)) or (
        isinstance(other, torch.Tensor) and other.dim() == 0 and not other.requires_grad
    )
    return logits.map_elements(lambda part: function(part, other)) if is_number else NotImplemented


def _to(logits: PartialLogits, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values())):
        return NotImplemented
    return logits.map_elements(lambda part: part.to(*args, **kwargs))


def _reshape(logits: PartialLogits, *args: Any, **kwargs: Any) -> Any:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    shape = [logits.numel() // max(known, 1) if size == -1 else size for size in sizes]
    if list(sizes).count(-1) > 1 or math.prod(shape) != logits.numel() or shape[-1] != logits.shape[-1]:
        return NotImplemented  # or an invalid shape, for which the full tensor raises torch's error
    return logits.map_rows(lambda rows: rows.reshape(*shape[:-1], rows.shape[-1]))


def _flatten(logits: PartialLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return logits.map_rows(lambda rows: rows.flatten(start_dim, end_dim))


def _getitem(logits: PartialLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    return logits.map_rows(lambda rows: rows[index]) if _keeps_last_dim(items, logits.dim()) else NotImplemented


def _keeps_last_dim(items: Sequence[Any], num_dims: int) -> bool:
    """Whether an index keeps the last dimension in full and in the last position."""
    num_indexed = 0
    for item in items:
        if type(item) in _PLAIN and item.dtype in (torch.int64, torch.bool):
            num_indexed += item.dim() if item.dtype == torch.bool else 1
        elif isinstance(item, (int, slice)):
            num_indexed += not isinstance(item, bool)  # True adds a dimension
        elif item is not None and item is not Ellipsis:
            return False
    if not items:
        return False
    if isinstance(items[-1], slice) and items[-1] == slice(None):
        return True
    has_ellipsis = any(item is Ellipsis for item in items)
    if has_ellipsis and items[-1] is not Ellipsis:
        return False
    return num_indexed < num_dims


def _cross_entropy(
    logits: PartialLogits,
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
    if is_old_call or not fits or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    return logits.cross_entropy(
        target, weight=weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


# Each handler takes the logits and the operation's other arguments, and returns its result, or `NotImplemented` if the
# arguments affect the last dimension.
HANDLERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.cross_entropy: _cross_entropy,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.to: _to,
    **dict.fromkeys((torch.Tensor.view, torch.Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((torch.Tensor.flatten, torch.flatten), _flatten),
    **{
        function: functools.partial(_elementwise, function)
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
        function: functools.partial(_scale, function)
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
"""Functions that modify or hook a tensor and whose name does not end with one underscore."""

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
"""Functions that read only metadata of the logits: shape, dtype, device or graph."""


def check_classes(target: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise torch's IndexError for a target that is not a class, on all ranks that have it; on the CPU only.

    Otherwise a rank that computes other rows or classes would wait for the one that raises.
    """
    if target.device.type == "cpu" and not isinstance(target, FakeTensor):
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= num_classes))]
        if wrong.numel() > 0:
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


class PartialLogits(torch.Tensor):
    """Logits with the shape of the full ones, of which only a part is in memory.

    A subclass holds a tensor whose dimensions but the last are those of the logits.
    """

    _unsupported: str  # what to write instead of an operation in place

    @property
    def is_connected(self) -> bool:
        """Whether the part has the logits' graph; not so for outputs of an autograd function."""
        raise NotImplementedError

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PartialLogits:
        """Apply a function that keeps the last dimension to what is held."""
        raise NotImplementedError

    def map_elements(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PartialLogits:
        """Apply an elementwise function to the logits."""
        raise NotImplementedError

    def cross_entropy(
        self,
        target: torch.Tensor,
        *,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Any:
        """Return `torch.nn.functional.cross_entropy` of the full logits, or `NotImplemented`."""
        raise NotImplementedError

    def full_tensor(self) -> torch.Tensor:
        """Return the full logits as a plain tensor."""
        raise NotImplementedError

    def full_tensor_for(self, function: Callable[..., Any]) -> torch.Tensor:
        """Return the full logits for a function without a handler."""
        return self.full_tensor()

    def __format__(self, specification: str) -> str:
        return repr(self)

    @classmethod
    @not_compiled  # a graph would make logits without what they hold
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run supported functions on the part, and all others on the full logits."""
        kwargs = dict(kwargs or {})
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
        if is_in_place or kwargs.get("out") is not None:
            raise RuntimeError(f"{name} {cls._unsupported}")
        handler = HANDLERS.get(func)
        if handler is not None:
            logits, *others = args or (kwargs.pop("input"),)
            is_partial = isinstance(logits, PartialLogits) and logits.is_connected
            result = handler(logits, *others, **kwargs) if is_partial else NotImplemented
            if result is not NotImplemented:
                return result
            args = (logits, *others)
        args, kwargs = tree_map_only(PartialLogits, lambda one: one.full_tensor_for(func), (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run operations that bypass `__torch_function__` on the full logits, within the graph of this tensor."""
        if func._schema.is_mutable:  # type: ignore[attr-defined]
            raise RuntimeError(f"{func} {cls._unsupported}")
        with torch.no_grad():
            args, kwargs = tree_map_only(
                PartialLogits, lambda logits: logits.full_tensor().detach(), (tuple(args), dict(kwargs or {}))
            )
        return func(*args, **kwargs)
