"""Memory and traffic estimate of ZeRO 1 and 2, by a simulation of the gradient lifecycle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from booster.comm import LOW_PRECISION, sum_dtype
from booster.interface import MemoryParts, MemoryRequest, RankMemory
from booster.plugins.sharding.memory import cast_bytes, largest_moment

from .config import ZeroConfig
from .flat_params import Bucket, FlatLayout
from .reducer import MAX_BUCKETS_IN_FLIGHT


@dataclass(slots=True, eq=False)
class _ParamGrad:
    """Gradient of a parameter; see Note [Gradient lifecycle].

    Attributes:
        num_bytes: Bytes of the full gradient.
        num_unsent: Number of its buckets that are not issued yet.
        has_arrived: If True, it has arrived; it is kept until its last bucket is issued.
    """

    num_bytes: int
    num_unsent: int = 0
    has_arrived: bool = False


@dataclass(slots=True, eq=False)
class _FlatBucket:
    """Bucket with its gradients.

    Attributes:
        group: Flat param group of the bucket.
        bucket: Region of the bucket.
        param_grads: Gradients in it by name.
        num_missing: Number of gradients that have not arrived.
    """

    group: _Group
    bucket: Bucket
    param_grads: dict[str, _ParamGrad] = field(default_factory=dict)
    num_missing: int = 0


class _Group:
    """Parameters of one dtype in one flat buffer, as in `FlatGroup`; see Note [Flat layout].

    Args:
        named: Names and shapes in the model's order.
        dtype: Dtype of weights and gradients.
        config: Options of ZeRO.
        num_shards: Number of ranks that share the buffer.

    Attributes:
        weight_bytes: Bytes of all weights, including padding.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype,
        config: ZeroConfig,
        num_shards: int,
    ) -> None:
        self.named = named
        self.dtype = dtype
        self.layout = FlatLayout([shape for _, shape in named], num_shards, config.max_bucket_numel)
        self.weight_bytes = self.layout.numel * dtype.itemsize
        is_low = dtype in LOW_PRECISION
        self.sum_dtype = sum_dtype(dtype)
        self.has_masters = is_low and config.master_weights
        self.main_dtype = self.sum_dtype if self.has_masters else dtype
        # With one shard, a low-precision bucket is too small to be overwritten by its fp32 sums.
        self.packs = config.stage == 2 or (num_shards == 1 and is_low)
        self.sent_dtype = config.communication_dtype or dtype

    def buckets(self) -> list[_FlatBucket]:
        """Return the buckets with their gradients, in buffer order."""
        param_grads = {
            name: _ParamGrad((param_range.stop - param_range.start) * self.dtype.itemsize)
            for (name, _), param_range in zip(self.named, self.layout.param_ranges, strict=True)
        }
        found = [_FlatBucket(self, bucket) for bucket in self.layout.buckets]
        for index, number in _overlaps(self.layout):
            name = self.named[index][0]
            found[number].param_grads[name] = param_grads[name]
            found[number].num_missing += 1
            param_grads[name].num_unsent += 1
        return found

    def shard_shapes(self) -> list[tuple[int, ...]]:
        """Return the shard shapes of the first rank, which has no padding and therefore the largest shards."""
        shapes: list[tuple[int, ...]] = []
        for index, number in _overlaps(self.layout):
            param_range, shard = self.layout.param_ranges[index], self.layout.buckets[number].shard_range(0)
            numel = int(min(param_range.stop, shard.stop) - max(param_range.start, shard.start))
            if numel > 0:
                shapes.append((numel,))
        return shapes


def _overlaps(layout: FlatLayout) -> Iterator[tuple[int, int]]:
    """Yield the pairs (parameter index, bucket index) that overlap, in order."""
    index = 0
    for number, bucket in enumerate(layout.buckets):
        while index < len(layout.param_ranges) and layout.param_ranges[index].stop <= bucket.start:
            index += 1
        here = index
        while here < len(layout.param_ranges) and layout.param_ranges[here].start < bucket.stop:
            if layout.param_ranges[here].stop > layout.param_ranges[here].start:
                yield here, number
            here += 1


class _Backward:
    """Simulation of the gradients and gradient shards of `GradientReducer` during a backward.

    Args:
        groups: All groups.
        order: Index of every parameter in the model, by name.

    Attributes:
        num_bytes: Current bytes of gradients and gradient shards.
    """

    def __init__(self, groups: Sequence[_Group], order: dict[str, int]) -> None:
        buckets = [bucket for group in groups if group.packs for bucket in group.buckets()]
        buckets.sort(key=lambda one: min((order[name] for name in one.param_grads), default=-1), reverse=True)
        self._to_issue = deque(buckets)
        self._buckets_of: dict[str, list[_FlatBucket]] = {}
        for bucket in buckets:
            for name in bucket.param_grads:
                self._buckets_of.setdefault(name, []).append(bucket)
        self._in_flight: deque[_FlatBucket] = deque()
        self.num_bytes = 0

    def receive(self, name: str) -> int:
        """Process the arrival of a gradient; return the peak bytes meanwhile."""
        buckets = self._buckets_of.get(name, [])
        if not buckets or buckets[0].param_grads[name].has_arrived:
            return self.num_bytes
        param_grad = buckets[0].param_grads[name]
        param_grad.has_arrived = True
        self.num_bytes += param_grad.num_bytes
        for bucket in buckets:
            bucket.num_missing -= 1
        most = self.num_bytes
        while self._to_issue and self._to_issue[0].num_missing == 0:
            most = max(most, self._issue(self._to_issue.popleft()))
        return most

    def finish(self) -> int:
        """Process the end of backward; return the peak bytes meanwhile."""
        most = self.num_bytes
        while self._to_issue:
            most = max(most, self._issue(self._to_issue.popleft()))
        while self._in_flight:
            self._wait_oldest()
        return max(most, self.num_bytes)

    def _issue(self, bucket: _FlatBucket) -> int:
        while len(self._in_flight) >= MAX_BUCKETS_IN_FLIGHT:
            self._wait_oldest()
        most = self.num_bytes
        for param_grad in bucket.param_grads.values():
            param_grad.num_unsent -= 1
            if param_grad.num_unsent == 0 and param_grad.has_arrived:
                self.num_bytes -= param_grad.num_bytes
        self._in_flight.append(bucket)
        return most

    def _wait_oldest(self) -> None:
        bucket = self._in_flight.popleft()
        self.num_bytes += bucket.bucket.shard_numel * bucket.group.sum_dtype.itemsize


def zero_memory(
    request: MemoryRequest,
    config: ZeroConfig,
    *,
    num_shards: int,
    num_replicas: int,
    offloads: bool,
) -> RankMemory:
    """Return the memory and traffic of a rank.

    Args:
        request: Model and optimizer.
        config: Options of ZeRO.
        num_shards: Number of ranks that share the shards.
        num_replicas: Number of replicas of this rank's shards.
        offloads: If True, masters and states are in the host memory of an accelerator.
    """
    named = list(request.model.named_parameters())
    groups = _groups(request, named, config, num_shards)
    trained = {id(one) for one in request.trained}
    frozen = [one for _, one in named if id(one) not in trained]
    masters, states = _updated_bytes(request, groups)
    elsewhere = masters + states if offloads else 0
    full = sum(0 if group.packs else group.weight_bytes for group in groups)
    kept = MemoryParts(
        parameters=sum(group.weight_bytes for group in groups) + cast_bytes(frozen, config.dtype),
        gradients=full,
        optimizer_states=0 if offloads else masters + states,
        buffers=cast_bytes(request.model.buffers(), config.dtype) + _buffer_bytes(groups),
    )
    backward = _Backward(groups, {name: index for index, (name, _) in enumerate(named)})
    worst = largest_moment(request.activations(config.dtype).intervals, backward)
    sums = sum(group.layout.shard_numel * group.sum_dtype.itemsize for group in groups)
    packed = sum(group.layout.shard_numel * group.sum_dtype.itemsize for group in groups if group.packs)
    per_link = sum(group.layout.shard_numel * (group.sent_dtype.itemsize + group.dtype.itemsize) for group in groups)
    return RankMemory(
        steady_state=kept,
        backward=_with(kept, gradients=full + worst.held, activations=worst.activations),
        step=_with(kept, gradients=full + packed, activations=_step_bytes(request, groups)),
        sent=(num_shards - 1) * per_link + 2 * (num_replicas - 1) * sums // num_replicas,
        offloaded=elsewhere,
    )


def _groups(
    request: MemoryRequest,
    named: Sequence[tuple[str, nn.Parameter]],
    config: ZeroConfig,
    num_shards: int,
) -> list[_Group]:
    trained = {id(one) for one in request.trained}
    by_dtype: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in named:
        if id(parameter) in trained:
            casts = config.dtype is not None and parameter.is_floating_point()
            dtype = config.dtype if casts and config.dtype is not None else parameter.dtype
            by_dtype.setdefault(dtype, []).append((name, tuple(parameter.shape)))
    return [_Group(members, dtype, config, num_shards) for dtype, members in by_dtype.items()]


def _updated_bytes(request: MemoryRequest, groups: Sequence[_Group]) -> tuple[int, int]:
    """Return the bytes of this rank's masters and states."""
    masters = states = 0
    for group in groups:
        shapes = [shape for _, shape in group.named]
        numel = sum(param_range.stop - param_range.start for param_range in group.layout.param_ranges)
        owned = sum(shape[0] for shape in group.shard_shapes())
        states += request.state_bytes(shapes, group.main_dtype, owned / max(1, numel))
        masters += 4 * group.layout.shard_numel if group.has_masters else 0
    return masters, states


def _buffer_bytes(groups: Sequence[_Group]) -> int:
    """Return the bytes of the persistent buffers for buckets in flight; see `BucketBuffers`."""
    found: dict[tuple[str, int, torch.dtype], int] = {}
    for group in groups:
        numel = max((bucket.numel for bucket in group.layout.buckets), default=0)
        for turn in range(MAX_BUCKETS_IN_FLIGHT):
            if group.packs or group.sent_dtype != group.dtype:
                key = ("sent", turn, group.sent_dtype)
                found[key] = max(found.get(key, 0), numel * group.sent_dtype.itemsize)
        if not group.packs and group.sum_dtype != group.dtype:
            key = ("sums", 0, group.sum_dtype)
            found[key] = max(found.get(key, 0), numel // group.layout.num_shards * group.sum_dtype.itemsize)
    return sum(found.values())


def _step_bytes(request: MemoryRequest, groups: Sequence[_Group]) -> int:
    most = 0
    rounded = 0
    for group in groups:
        most = max(most, request.step_bytes(group.shard_shapes(), group.main_dtype))
        if group.main_dtype != group.sum_dtype:  # gradients in the dtype of the update
            rounded += group.layout.shard_numel * group.main_dtype.itemsize
    return most + rounded


def _with(kept: MemoryParts, *, gradients: int, activations: int) -> MemoryParts:
    return MemoryParts(
        parameters=kept.parameters,
        gradients=gradients,
        optimizer_states=kept.optimizer_states,
        activations=activations,
        buffers=kept.buffers,
    )
