"""Vocabulary-parallel logits that behave like the full logits.

Logits are the largest activation of a language model, and mostly only cast, reshaped and passed to a cross-entropy, all
of which work on shards. So a vocabulary-parallel head returns a tensor subclass with the shape of the full logits that
holds a shard. The operations in `split_operations` keep it sharded. Any other operation first gathers the logits, once,
and continues with a plain tensor: slower, but correct. Functions that bypass torch's override mechanism, such as a
user's autograd function, are handled below autograd: the tensor's graph contains `_WrapLogits`, whose backward returns this
rank's shard of a full gradient. The gathering is collective, so all ranks must apply the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelGroup
from booster.plugins.hybrid_parallel.tensor_parallel.regions import gather_from_tp_region
from booster.plugins.hybrid_parallel.tensor_parallel.split_operations import HANDLERS, is_unsupported, reads_metadata

__all__ = ["VocabParallelLogits"]


class VocabParallelLogits(torch.Tensor):
    """Logits sharded over the vocabulary, with the shape of the full logits. Created by `VocabParallelLogits.of`."""

    _local: torch.Tensor
    _tp_group: TensorParallelGroup
    _sizes: tuple[int, ...]
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
        logits._local, logits._tp_group, logits._sizes, logits._full = local, tp_group, tuple(sizes), None
        logits._node = logits.grad_fn
        return logits

    @property
    def local(self) -> torch.Tensor:
        """This rank's entries. Collective: no."""
        return self._local

    @property
    def tp_group(self) -> TensorParallelGroup:
        """The tensor-parallel group."""
        return self._tp_group

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each rank."""
        return self._sizes

    @property
    def vocab_start(self) -> int:
        """Index of this rank's first entry."""
        return sum(self._sizes[: self._tp_group.rank])

    @property
    def is_connected(self) -> bool:
        """Whether the local entries have the logits' graph; not so for outputs of an autograd function."""
        return self.grad_fn is self._node

    def full_tensor(self) -> torch.Tensor:
        """Return the full logits as a plain tensor, equal on all ranks. Collective: the first call."""
        is_detached = self._full is not None and self._full.requires_grad < self.requires_grad
        if self._full is None or (is_detached and torch.is_grad_enabled()):
            if self.is_connected:
                self._full = gather_from_tp_region(self._local, self._tp_group, self._sizes)
            else:
                self._full = _GatherLogits.apply(self)  # type: ignore[no-untyped-call]
        return self._full  # type: ignore[return-value]

    def with_local(self, local: torch.Tensor) -> VocabParallelLogits:
        """Return logits with other local values of the same entries."""
        return VocabParallelLogits.of(local, self._tp_group, self._sizes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without values, so that a single rank may print it. Collective: no."""
        return f"SplitLogits(shape={tuple(self.shape)}, dtype={self.dtype}, entries per rank={list(self._sizes)})"

    def __format__(self, specification: str) -> str:
        """Return `repr(self)`."""
        return repr(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run supported functions on shards, and all others on the gathered logits."""
        kwargs = dict(kwargs or {})
        if reads_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_unsupported(func, kwargs):
            raise RuntimeError(_unsupported_message(func.__name__))
        handler = HANDLERS.get(func)
        if handler is not None:
            logits, *others = args or (kwargs.pop("input"),)
            is_sharded = isinstance(logits, VocabParallelLogits) and logits.is_connected
            result = handler(logits, *others, **kwargs) if is_sharded else NotImplemented
            if result is not NotImplemented:
                return result
            args = (logits, *others)
        args, kwargs = tree_map_only(VocabParallelLogits, VocabParallelLogits.full_tensor, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Gather for operations that bypassed `__torch_function__`."""
        if func._schema.is_mutable:  # type: ignore[attr-defined]
            raise RuntimeError(_unsupported_message(str(func)))
        args, kwargs = tree_map_only(VocabParallelLogits, _full_values, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _full_values(logits: VocabParallelLogits) -> torch.Tensor:
    with torch.no_grad():
        return logits.full_tensor().detach()


def _unsupported_message(name: str) -> str:
    return (
        f"{name} on logits that are sharded over the vocabulary would affect this rank's shard only: call it on"
        " `logits.full_tensor()`, or give parallel_output=False to the plugin"
    )


class _WrapLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, tp_group: TensorParallelGroup, sizes: Sequence[int]) -> torch.Tensor:
        ctx.ranks, ctx.sizes = tp_group, sizes
        shape = (*local.shape[:-1], sum(sizes))
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            VocabParallelLogits, shape, dtype=local.dtype, device=local.device
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start = sum(ctx.sizes[: ctx.ranks.rank])
        return grad.narrow(-1, start, ctx.sizes[ctx.ranks.rank]), None, None


class _GatherLogits(torch.autograd.Function):
    """Gather logits whose local entries have no graph."""

    @staticmethod
    def forward(ctx: Any, logits: VocabParallelLogits) -> torch.Tensor:
        return gather_from_tp_region(logits.local.detach(), logits.tp_group, logits.sizes).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
