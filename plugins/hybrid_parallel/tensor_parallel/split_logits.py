"""Logits that are split over the ranks by vocabulary entry, and behave as the whole ones.

Note [Split logits]
The largest activation of a language model is its logits, and most often all that happens to them is a cast, a change of
shape and a cross-entropy, all of which work on the parts. So a split output head returns a tensor that shows the shape
of the whole logits and holds a part. The few operations named here keep it split. Whatever else is done to it, first
gathers the logits, once, and goes on with an ordinary tensor: slower, but never a wrong number. Functions that go
past torch's override mechanism, such as an autograd function of the user's own, meet the same below autograd: the
tensor's own graph leads through `_Shown`, whose backward keeps a rank's part of a whole gradient.
Gathering is collective: all ranks have to do the same with their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.regions import gather_features
from booster.plugins.hybrid_parallel.tensor_parallel.split_operations import HANDLERS, is_refused, is_shown

__all__ = ["SplitLogits"]


class SplitLogits(torch.Tensor):
    """Logits of which this rank has some vocabulary entries; see Note [Split logits]. Made by `SplitLogits.of`."""

    _local: torch.Tensor
    _ranks: TensorParallelRanks
    _sizes: tuple[int, ...]
    _whole: torch.Tensor | None
    _node: object

    @staticmethod
    def of(local: torch.Tensor, ranks: TensorParallelRanks, sizes: Sequence[int]) -> SplitLogits:
        """Returns logits from this rank's part of them.

        Args:
            local: This rank's entries along the last dimension; it may have none.
            ranks: Who have the others.
            sizes: Entries of each rank.
        """
        shown: SplitLogits = _Shown.apply(local, ranks, tuple(sizes))  # type: ignore[no-untyped-call]
        shown._local, shown._ranks, shown._sizes, shown._whole = local, ranks, tuple(sizes), None
        shown._node = shown.grad_fn
        return shown

    @property
    def local(self) -> torch.Tensor:
        """This rank's entries. No communication."""
        return self._local

    @property
    def ranks(self) -> TensorParallelRanks:
        """Who have the other entries."""
        return self._ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each rank."""
        return self._sizes

    @property
    def first_entry(self) -> int:
        """Number of this rank's first entry."""
        return sum(self._sizes[: self._ranks.rank])

    @property
    def is_connected(self) -> bool:
        """Whether this rank's entries have the graph of the logits; those that an autograd function returns do not."""
        return self.grad_fn is self._node

    def whole(self) -> torch.Tensor:
        """Returns the logits as an ordinary tensor, which is the same on all ranks. Collective at the first call."""
        is_late = self._whole is not None and self._whole.requires_grad < self.requires_grad
        if self._whole is None or (is_late and torch.is_grad_enabled()):
            if self.is_connected:
                self._whole = gather_features(self._local, self._ranks, self._sizes)
            else:
                self._whole = _Gathered.apply(self)  # type: ignore[no-untyped-call]
        return self._whole  # type: ignore[return-value]

    def with_local(self, local: torch.Tensor) -> SplitLogits:
        """Returns logits of which this rank has other values, at the same entries."""
        return SplitLogits.of(local, self._ranks, self._sizes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Returns a text without the numbers, as one rank may print alone. No communication."""
        return f"SplitLogits(shape={tuple(self.shape)}, dtype={self.dtype}, entries per rank={list(self._sizes)})"

    def __format__(self, specification: str) -> str:
        """Returns the text of `repr`."""
        return repr(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keeps what stays split split, and gathers for everything else."""
        kwargs = dict(kwargs or {})
        if is_shown(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_refused(func, kwargs):
            raise RuntimeError(_refusal(func.__name__))
        handler = HANDLERS.get(func)
        if handler is not None:
            logits, *others = args or (kwargs.pop("input"),)
            is_split = isinstance(logits, SplitLogits) and logits.is_connected
            result = handler(logits, *others, **kwargs) if is_split else NotImplemented
            if result is not NotImplemented:
                return result
            args = (logits, *others)
        args, kwargs = tree_map_only(SplitLogits, SplitLogits.whole, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Gathers for what came past `__torch_function__`."""
        if func._schema.is_mutable:  # type: ignore[attr-defined]
            raise RuntimeError(_refusal(str(func)))
        args, kwargs = tree_map_only(SplitLogits, _whole_values, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _whole_values(logits: SplitLogits) -> torch.Tensor:
    with torch.no_grad():
        return logits.whole().detach()


def _refusal(name: str) -> str:
    return (
        f"{name} on logits that are split over the ranks by vocabulary would change or watch a part of them only: call"
        " it on `logits.whole()`, or give parallel_output=False to the plugin"
    )


class _Shown(torch.autograd.Function):
    """Shows the shape of the whole logits to autograd."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, ranks: TensorParallelRanks, sizes: Sequence[int]) -> torch.Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        shape = (*local.shape[:-1], sum(sizes))
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            SplitLogits, shape, dtype=local.dtype, device=local.device
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start = sum(ctx.sizes[: ctx.ranks.rank])
        return grad.narrow(-1, start, ctx.sizes[ctx.ranks.rank]), None, None


class _Gathered(torch.autograd.Function):
    """Gathers logits of which only the whole has a graph."""

    @staticmethod
    def forward(ctx: Any, logits: SplitLogits) -> torch.Tensor:
        return gather_features(logits.local.detach(), logits.ranks, logits.sizes).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
