"""State of the gradients of every parameter and bucket during an accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import ReduceScatter, start_all_reduce, sum_dtype

from .flat_params import Bucket, FlatGroup, OwnedShard, ParamRange

# Note [Gradient lifecycle]
# A gradient *arrives* when autograd has accumulated it into `.grad`. It is *local* until its buckets are *issued* to
# a reduce-scatter. The result is this rank's *gradient shard* of each bucket, summed over the ranks. A gradient that
# arrives after its bucket was issued in the same backward stays local in a separate `.grad` until the bucket is issued
# again. (A parameter inside a reentrant activation checkpoint arrives twice.)


@dataclass(slots=True, eq=False)
class ParamGrad:
    """The gradient of one parameter.

    Attributes:
        name: Name of the parameter in the user's model.
        parameter: Model parameter.
        range: Range in its group's flat buffers.
        buckets: Buckets that contain elements of it.
        num_arrived: How often it has arrived in the current backward.
        num_uses: How often it is expected to arrive for each microbatch, as in the last backward.
        is_used: If True, a gradient arrived in this accumulation.
        is_local: If True, at least one element is not reduced yet.
        num_issued: Number of its buckets issued since the gradient was last complete.
        source: Gradient that the remaining buckets copy their elements from.
    """

    name: str
    parameter: nn.Parameter
    range: ParamRange
    buckets: list[GradientBucket] = field(default_factory=list)
    num_arrived: int = 0
    num_uses: int = 1
    is_used: bool = False
    is_local: bool = False
    num_issued: int = 0
    source: torch.Tensor | None = None

    def overlap(self, bucket: Bucket) -> tuple[slice, slice]:
        """Return the slice that lies in a bucket, relative to the flattened parameter and to the bucket."""
        start, stop = max(self.range.start, bucket.start), min(self.range.stop, bucket.stop)
        return (
            slice(start - self.range.start, stop - self.range.start),
            slice(start - bucket.start, stop - bucket.start),
        )

    @property
    def local(self) -> torch.Tensor | None:
        """Gradient that is not reduced yet, in the parameter's shape, or None."""
        return self.parameter.grad if self.is_local else None

    def mark_issued(self) -> None:
        """Count one issued bucket; after the last one, release the gradient."""
        self.num_issued += 1
        if self.num_issued == len(self.buckets):
            self.num_issued, self.source = 0, None


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Gradients of one bucket.

    Attributes:
        group: Flat group of the bucket.
        bucket: Range in the group's buffers.
        param_grads: Gradients of the parameters with elements in it.
        owned: Shards that this rank updates, each with its parameter's gradient.
        padding: Ranges of the bucket that belong to no parameter.
        num_missing: Number of gradients that are not complete in the current backward.
        is_reducing: If True, it was issued to a reduce-scatter in the current backward.
        grad_shard: This rank's shard, summed over the ranks in this accumulation; None before the first reduction.
        is_summed: Whether it is summed over the replicas as well, as that of an unsharded group is in each reduction.
        host_grad_shard: Pinned memory for the shard where the masters are offloaded; None before the first step.
        store: Gradients of the group; set by the reducer.
    """

    group: FlatGroup
    bucket: Bucket
    param_grads: list[ParamGrad]
    owned: list[tuple[ParamGrad, OwnedShard]]
    padding: list[slice]
    num_missing: int = 0
    is_reducing: bool = False
    grad_shard: torch.Tensor | None = None
    is_summed: bool = False
    host_grad_shard: torch.Tensor | None = None
    store: GradientStore = field(init=False)

    def start_copy_to_host(self) -> Callable[[], None]:
        """Start to copy the shard to `host_grad_shard`; return the wait of the host for it."""
        assert self.grad_shard is not None
        assert self.group.pinned is not None
        if self.host_grad_shard is None:
            memory = self.group.pinned.allocate(self.grad_shard.nbytes).memory
            self.host_grad_shard = memory.view(self.grad_shard.dtype)
        self.host_grad_shard.copy_(self.grad_shard, non_blocking=True)
        event = torch.Event(device=self.grad_shard.device)
        event.record()
        return partial(_wait_on_host, event)

    @property
    def is_unsharded(self) -> bool:
        """Whether replicas hold all of it and none a shard, so that it is reduced over them at once."""
        return self.group.groups.num_shards == 1 and self.group.groups.replica_group is not None

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of gradient sums: fp32 for low-precision weights."""
        return sum_dtype(self.group.dtype)


def make_param_grads(
    groups: Iterable[FlatGroup], model_order: Sequence[nn.Parameter]
) -> tuple[list[ParamGrad], list[GradientBucket]]:
    """Return the gradients of all parameters, and all buckets in the order in which backward fills them.

    Backward runs from the last layer to the first, so the first parameter of a bucket in the model's order is the last
    one to arrive.
    """
    order = {id(parameter): index for index, parameter in enumerate(model_order)}
    param_grads: list[ParamGrad] = []
    buckets: list[GradientBucket] = []
    for group in groups:
        fields = zip(group.names, group.parameters, group.layout.param_ranges, strict=True)
        own = [ParamGrad(*one) for one in fields]
        param_grads += own
        owned: dict[int, list[tuple[ParamGrad, OwnedShard]]] = {}
        for one in group.owned:
            owned.setdefault(one.range.bucket, []).append((own[one.range.param], one))
        for number, bucket in enumerate(group.layout.buckets):
            inside = [own[index] for index in group.layout.params_in(bucket)]
            padding = group.layout.padding_in(bucket)
            buckets.append(GradientBucket(group, bucket, inside, owned.get(number, []), padding))
            for param_grad in inside:
                param_grad.buckets.append(buckets[-1])
    buckets.sort(
        key=lambda one: min((order[id(param_grad.parameter)] for param_grad in one.param_grads), default=-1),
        reverse=True,
    )
    return param_grads, buckets


class BucketBuffers:
    """Communication buffers reused in every step, because the first write to new memory is many times slower.

    Args:
        num_buckets: Maximum number of buckets in flight.
    """

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._buffers: dict[tuple[str, int, torch.dtype, torch.device], torch.Tensor] = {}
        self._turn = 0

    def next_bucket(self) -> None:
        """Switch to the buffers of the oldest bucket in flight, whose collective must be complete."""
        self._turn = (self._turn + 1) % self._num_buckets

    def get(
        self, what: str, numel: int, dtype: torch.dtype, device: torch.device, *, per_bucket: bool = True
    ) -> torch.Tensor:
        """Return an uninitialized buffer of the current bucket or (`per_bucket=False`) of all buckets."""
        key = (what, self._turn if per_bucket else 0, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel]


class ReplicaSum:
    """All-reduce of an unsharded bucket over its replicas in flight, in place of a reduce-scatter.

    Args:
        payload: The bucket's gradients in the dtype of sums, which become the sums.
        group: The replicas.
        is_kept: Whether the payload is memory of its own, which may be kept.
    """

    def __init__(self, payload: torch.Tensor, group: dist.ProcessGroup | None, *, is_kept: bool) -> None:
        self.payload, self.is_kept = payload, is_kept
        self._work = start_all_reduce(payload, group)

    def wait(self, output: torch.Tensor, *, accumulate: bool) -> None:
        """Wait, then set `output` to the sums, or add them to it. It may be the payload."""
        self._work.wait()
        if accumulate:
            output.add_(self.payload)
        elif output.data_ptr() != self.payload.data_ptr():
            output.copy_(self.payload)


class GradientStore:
    """Gradients of one flat group; see Note [Gradient lifecycle].

    Stage 2: gradients stay in `.grad` until their bucket is issued; only this rank's shards are kept. The shards live
    from backward to the end of the accumulation: the next forward's activations may reuse their memory.

    Args:
        group: Flat param group of the gradients.
        buffers: Buffers for buckets in flight.
    """

    def __init__(self, group: FlatGroup, buffers: BucketBuffers) -> None:
        self._device = group.device
        self._buffers = buffers

    def receive(self, param_grad: ParamGrad) -> None:
        """Store a gradient that has arrived in `.grad`."""

    def send_buffer(self, bucket: GradientBucket, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's local gradients for sending, and release those that no other bucket needs."""
        where = bucket.bucket
        buffer = self._buffers.get("sent", where.numel, dtype, bucket.group.device)
        targets, sources = [], []
        for param_grad in bucket.param_grads:
            if param_grad.num_issued == 0:
                # Removed from `.grad`: autograd must not accumulate into a gradient that was sent in part.
                param_grad.source, param_grad.is_local = param_grad.parameter.grad, False
                param_grad.parameter.grad = None
            in_parameter, in_bucket = param_grad.overlap(where)
            if param_grad.source is None:
                buffer[in_bucket].zero_()
            elif param_grad.source.is_sparse:
                buffer[in_bucket].copy_(param_grad.source.to_dense().reshape(-1)[in_parameter])
            else:
                targets.append(buffer[in_bucket])
                sources.append(param_grad.source.reshape(-1)[in_parameter])
            param_grad.mark_issued()
        if targets:
            torch._foreach_copy_(targets, sources)
        _zero_padding(buffer, bucket)
        return buffer

    def finish_reduction(self, bucket: GradientBucket, work: ReduceScatter | ReplicaSum) -> None:
        """Wait for the reduction and accumulate its result into the bucket's gradient shard."""
        accumulates = bucket.grad_shard is not None
        if bucket.grad_shard is None and isinstance(work, ReplicaSum) and work.is_kept:
            bucket.grad_shard = work.payload
        elif bucket.grad_shard is None:
            bucket.grad_shard = torch.empty(bucket.bucket.shard_numel, dtype=bucket.sum_dtype, device=self._device)
        work.wait(bucket.grad_shard, accumulate=accumulates)

    def detach_grad_shard(self, bucket: GradientBucket) -> None:
        """Move the gradient shard to memory that new local gradients do not overwrite."""


class FullGradients(GradientStore):
    """Stage 1: local gradients in a flat buffer, reduced in place; every `.grad` is a view of it.

    The gradient shard of a bucket overwrites its local gradients. With low-precision weights, the fp32 shard needs no
    more bytes than the full bucket, because a bucket has at least two shards.
    """

    def __init__(self, group: FlatGroup, buffers: BucketBuffers) -> None:
        super().__init__(group, buffers)
        self._flat = torch.zeros(group.layout.numel, dtype=group.dtype, device=group.device)
        self._rank = group.groups.rank
        self._views = {id(one): self._flat[one.start : one.stop].view(one.shape) for one in group.layout.param_ranges}

    def receive(self, param_grad: ParamGrad) -> None:
        view, gradient = self._views[id(param_grad.range)], param_grad.parameter.grad
        if gradient is None or gradient is view:
            return
        if gradient.is_sparse:
            view.zero_().add_(gradient)
        else:
            view.copy_(gradient)
        param_grad.parameter.grad = view

    def send_buffer(self, bucket: GradientBucket, dtype: torch.dtype) -> torch.Tensor:
        where = bucket.bucket
        local = self._flat[where.start : where.stop]
        for param_grad in bucket.param_grads:
            if param_grad.num_issued == 0:
                param_grad.source, param_grad.is_local = None, False
                if param_grad.parameter.grad is not None:
                    self.receive(param_grad)  # it arrived outside booster.backward, or after its bucket was issued
                    # Removed from `.grad`: autograd must not accumulate later gradients into it.
                    param_grad.source, param_grad.parameter.grad = self._views[id(param_grad.range)], None
            if param_grad.source is None:
                local[param_grad.overlap(where)[1]].zero_()
            param_grad.mark_issued()
        _zero_padding(local, bucket)
        if dtype == local.dtype:
            return local
        return self._buffers.get("sent", where.numel, dtype, local.device).copy_(local)

    def finish_reduction(self, bucket: GradientBucket, work: ReduceScatter | ReplicaSum) -> None:
        if bucket.grad_shard is not None:
            work.wait(bucket.grad_shard, accumulate=True)
            return
        bucket.grad_shard = self._shard_view(bucket)
        if bucket.grad_shard.dtype == self._flat.dtype:
            work.wait(bucket.grad_shard, accumulate=False)
            return
        numel = bucket.bucket.shard_numel
        sums = self._buffers.get("sums", numel, bucket.sum_dtype, self._flat.device, per_bucket=False)
        work.wait(sums, accumulate=False)  # writing in place would overwrite gradients that are still being summed
        bucket.grad_shard.copy_(sums)

    def detach_grad_shard(self, bucket: GradientBucket) -> None:
        if bucket.grad_shard is not None and bucket.grad_shard.data_ptr() == self._shard_view(bucket).data_ptr():
            bucket.grad_shard = bucket.grad_shard.clone()

    def _shard_view(self, bucket: GradientBucket) -> torch.Tensor:
        where = bucket.bucket
        if bucket.sum_dtype == self._flat.dtype:
            return self._flat[where.shard_range(self._rank)]
        return self._flat[where.start : where.stop].view(bucket.sum_dtype)[: where.shard_numel]


def _wait_on_host(event: torch.Event) -> None:
    if not event.query():
        event.synchronize()


def _zero_padding(buffer: torch.Tensor, bucket: GradientBucket) -> None:
    for padding in bucket.padding:
        buffer[padding].zero_()
