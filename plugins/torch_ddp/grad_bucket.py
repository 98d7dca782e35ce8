"""Gradients of parameters, and the buckets in which they are all-reduced together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from booster.comm import AllReduce

MAX_IN_FLIGHT = 2  # one bucket is reduced while the next one fills


@dataclass(slots=True, eq=False)
class ParamGrad:
    """Gradient of one parameter.

    Attributes:
        parameter: Model parameter.
        produces_sparse: If True, an embedding with sparse=True uses the parameter.
        bucket: Bucket of the gradient; None if the parameter is frozen or its gradient sparse.
        view: View of the bucket's buffer.
        has_arrived: If True, it has arrived in the current backward.
        is_local: If True, it changed on this rank since its bucket was issued.
        source: `.grad` while the bucket is in flight.
        unclaimed: Mean of a gradient that this rank does not have, until the ranks have exchanged which are used.
        handle: Handle of the reducer's hook on the parameter.
        version: The parameter's version at the beginning of a backward, if the user has a hook on it.
    """

    parameter: nn.Parameter
    produces_sparse: bool
    bucket: Bucket | None = None
    view: torch.Tensor | None = None
    has_arrived: bool = False
    is_local: bool = False
    source: torch.Tensor | None = None
    unclaimed: torch.Tensor | None = None
    handle: RemovableHandle | None = None
    version: int | None = None


@dataclass(slots=True, eq=False)
class Bucket:
    """Gradients of one dtype that are all-reduced together.

    Attributes:
        index: Position in the order of reduction; continued where buckets are formed anew, as hooks keep states by it.
        grads: Gradients in buffer order.
        flat: Flat buffer.
        views: Views of the buffer, one per gradient.
        num_missing: Number of gradients that have not arrived in the current backward.
        is_issued: If True, it was issued in the current backward.
        waits_for_end: If True, it is only issued at the end of backward.
        is_discarded: If True, backward failed while it was in flight.
        in_flight: All-reduce of the buffer, or future of a communication hook; None if no reduction is in flight.
    """

    index: int
    grads: list[ParamGrad]
    flat: torch.Tensor
    views: list[torch.Tensor]
    num_missing: int = 0
    is_issued: bool = False
    waits_for_end: bool = False
    is_discarded: bool = False
    in_flight: AllReduce | torch.futures.Future[Any] | None = field(default=None, repr=False)


class GradBucket:
    """Bucket passed to a communication hook, with the interface of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """Return the bucket's position in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients as one flat tensor, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the flat tensor."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, as views of the flat tensor."""
        return views_of(self._buffer, [grad.parameter for grad in self._bucket.grads])

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return [grad.parameter for grad in self._bucket.grads]

    def is_last(self) -> bool:
        """Return whether it is the last bucket of a backward."""
        return self._is_last


def assign_buckets(grads: Sequence[ParamGrad], bucket_bytes: int) -> list[list[ParamGrad]]:
    """Return the gradients of every bucket, last parameter first; a larger parameter has a separate bucket.

    This is the order in which backward reaches the layers of most models. Unlike DistributedDataParallel, buckets are
    not rebuilt after the first step: the position of an element in its bucket determines the summation order on three
    or more ranks, and a resumed run must sum in the same order.
    """
    buckets: list[list[ParamGrad]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[ParamGrad], int]] = {}
    for grad in reversed(grads):
        key = (grad.parameter.dtype, grad.parameter.device)
        bucket, num_bytes = open_buckets.pop(key, ([], 0))
        bucket.append(grad)
        num_bytes += grad.parameter.nbytes
        if num_bytes >= bucket_bytes:
            buckets.append(bucket)
        else:
            open_buckets[key] = bucket, num_bytes
    return buckets + [bucket for bucket, _ in open_buckets.values()]


def allocate_buffers(buckets: Sequence[Sequence[ParamGrad]], uses_views: bool) -> list[torch.Tensor]:
    """Return a flat buffer for every bucket. Without views, buckets that are never in flight together share one."""
    sizes = [sum(grad.parameter.numel() for grad in bucket) for bucket in buckets]
    homes = [(bucket[0].parameter.dtype, bucket[0].parameter.device) for bucket in buckets]
    if uses_views:
        return [
            torch.zeros(size, dtype=dtype, device=device) for size, (dtype, device) in zip(sizes, homes, strict=True)
        ]
    keys = [(index % MAX_IN_FLIGHT, *home) for index, home in enumerate(homes)]
    largest: dict[tuple[int, torch.dtype, torch.device], int] = {}
    for key, size in zip(keys, sizes, strict=True):
        largest[key] = max(size, largest.get(key, 0))
    shared = {key: torch.empty(size, dtype=key[1], device=key[2]) for key, size in largest.items()}
    return [shared[key][:size] for key, size in zip(keys, sizes, strict=True)]


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor with the shapes of the parameters, and the strides of the dense ones."""
    starts = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
    parts = [flat[start : start + one.numel()] for start, one in zip(starts, parameters, strict=False)]
    return [
        part.as_strided(one.shape, one.stride()) if _is_dense(one) else part.view(one.shape)
        for part, one in zip(parts, parameters, strict=True)
    ]


def _is_dense(parameter: torch.Tensor) -> bool:
    """Return whether the elements are contiguous in memory in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return math.prod(parameter.shape) > 0


@torch.no_grad()
def move_into_view(grad: ParamGrad) -> None:
    given = grad.parameter.grad
    if grad.view is not None and given is not None and given is not grad.view:
        grad.view.copy_(given.to_dense() if given.is_sparse else given)
        grad.parameter.grad = grad.view
