"""Gradient reduction in buckets, issued in the same order on all ranks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.comm import (
    ReduceScatter,
    all_reduce_sum,
    any_rank_or_different,
    start_reduce_scatter,
)
from booster.errors import ConfigError
from booster.plugins.base import ForwardWrites, taking_hooks
from booster.plugins.sharding.config import ShardGroups, ZeroConfig
from booster.plugins.step_settings import StepSettings

from .flat_params import FlatGroup
from .grad_bucket import (
    BucketBuffers,
    FullGradients,
    GradientBucket,
    GradientStore,
    ParamGrad,
    ReplicaSum,
    make_param_grads,
)

MAX_BUCKETS_IN_FLIGHT = 2  # one is sent while the next one fills

# All ranks must issue the same collectives in the same order, but the set of gradients may differ between ranks and
# steps. A bucket is therefore issued when it is complete *and* all buckets before it are issued. Incomplete buckets are
# issued at the end of the backward, with zeros for missing gradients. With expert parallelism all are: ranks exchange
# tokens' gradients inside of the backward, where a rank that waits for another's bucket, which is not complete there,
# would keep that one from completing it. A pipeline stage runs the backwards of several microbatches as one: a gradient
# is complete when that of the last one has arrived, and buckets are issued only once the stage needs no more of other
# stages, so that none waits for a rank that waits for it. Some gradients are not reduced in their backward:
# those of no_sync, and those that arrive after their bucket was issued. They are reduced at the end of the
# accumulation.
# One all-reduce of two bytes per parameter then determines which parameters any rank used, and of which any rank has
# unreduced gradients. Not of bytes per bucket: with expert parallelism the ranks have different buckets of experts.


class GradientReducer:
    """Reduces gradients over the ranks while backward runs.

    Args:
        groups: Flat groups.
        model_order: Model parameters in registration order.
        config: Options of ZeRO. Stage 1 keeps local gradients until they are reduced; stage 2 reduces them in every
            backward.
        summed_before: Names of parameters whose gradients are summed over other ranks before the reduction.
        shard_groups: Process groups of all data-parallel ranks. The used parameters are all-reduced over the control
            group, a CPU group on an accelerator, which avoids a device synchronization. A bucket is reduced over the
            groups of its flat group.
        writes: What forwards have written, for the ranks to compare.

    Attributes:
        param_grads: Gradients of all parameters.
        buckets: All buckets, in the order in which they are reduced.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        model_order: Sequence[nn.Parameter],
        config: ZeroConfig,
        shard_groups: ShardGroups,
        summed_before: Collection[str] = (),
        *,
        writes: ForwardWrites,
    ) -> None:
        self._stage = config.stage
        self._overlaps = config.overlap_communication or config.stage == 2
        self._issues_in_backward = all(group.groups is shard_groups for group in groups)
        self._control_group = shard_groups.control_group or shard_groups.data_parallel_group
        self._communication_dtype = config.communication_dtype
        self._writes = writes
        self._buffers = BucketBuffers(MAX_BUCKETS_IN_FLIGHT)
        self._in_flight: deque[tuple[GradientBucket, ReduceScatter | ReplicaSum]] = deque()
        self._is_collecting = False
        self._reduces_now = self._may_issue = False
        self._num_microbatches = 1
        self._next = 0
        self._hooks: list[Any] = []
        self.param_grads, buckets = make_param_grads(groups, model_order)
        late = [one for one in buckets if any(param_grad.name in summed_before for param_grad in one.param_grads)]
        self.buckets = [one for one in buckets if one not in late] + late
        self._num_early = len(buckets) - len(late)
        for group in groups:
            # With one shard, a low-precision bucket is too small to be overwritten by its fp32 sums.
            is_sharded = config.stage == 2 or (group.groups.num_shards == 1 and group.dtype.itemsize < 4)
            store = (GradientStore if is_sharded else FullGradients)(group, self._buffers)
            for bucket in buckets:
                if bucket.group is group:
                    bucket.store = store
        # Weak reference: Python's garbage collector does not traverse a parameter's hooks, so a cycle would leak.
        reducer = weakref.ref(self)
        for index, param_grad in enumerate(self.param_grads):
            hook = partial(_on_grad_accumulated, reducer, index)
            with taking_hooks(param_grad.parameter):
                self._hooks.append(param_grad.parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    # During backward.

    @contextmanager
    def collecting(
        self,
        *,
        synchronizes: bool,
        num_microbatches: int | None = None,
        sum_before: Callable[[GradientReducer], None] | None = None,
    ) -> Iterator[None]:
        """Receive the gradients of the backward in the block.

        Args:
            synchronizes: If False, the backward runs under `no_sync`.
            num_microbatches: Number of backwards in the block, which is a pipeline stage's: buckets are issued after
                `start_issuing`. Optional, defaults to one that issues them at once.
            sum_before: Function that sums the gradients of `summed_before`, optional.

        Collective over the data-parallel ranks.
        """
        self._begin_backward(num_microbatches or 1)
        self._reduces_now = self._stage == 2 or (synchronizes and self._overlaps)
        self._is_collecting, self._may_issue = True, num_microbatches is None
        try:
            yield
        finally:
            self._is_collecting = False
        if self._reduces_now:
            for bucket in self.buckets[self._next : self._num_early]:
                self._issue(bucket)
            if sum_before is not None:
                sum_before(self)
            for bucket in self.buckets[self._num_early :]:
                self._issue(bucket)
            self._next = len(self.buckets)

    def start_issuing(self) -> None:
        """Issue the buckets that are complete in the current backward, and from now on each that becomes so."""
        self._may_issue = True
        self._issue_complete()

    def _begin_backward(self, num_microbatches: int) -> None:
        self._wait()
        for param_grad, hook in zip(self.param_grads, self._hooks, strict=True):
            if param_grad.num_arrived > 0:
                param_grad.num_uses = max(1, param_grad.num_arrived // self._num_microbatches)
            param_grad.num_arrived = 0
            hooks = param_grad.parameter._post_accumulate_grad_hooks
            hooks[hook.id] = hooks.pop(hook.id)  # behind hooks that the user registered later: it removes the gradient
        for bucket in self.buckets:
            bucket.num_missing, bucket.is_reducing = len(bucket.param_grads), False
            self._detach_grad_shard(bucket)
        self._next, self._num_microbatches = 0, num_microbatches

    def on_grad_ready(self, param_grad: ParamGrad) -> None:
        """Handle a gradient in `.grad`; autograd drops that of a parameter that was frozen since its forward."""
        if param_grad.parameter.grad is None:
            return
        param_grad.is_used = param_grad.is_local = True
        param_grad.num_arrived += self._is_collecting
        if not self._is_collecting:
            return
        for bucket in param_grad.buckets:
            if bucket.is_reducing:
                return  # stays in `.grad`; see Note [Gradient lifecycle]
        if param_grad.buckets:
            param_grad.buckets[0].store.receive(param_grad)
        if param_grad.num_arrived == self._num_microbatches * param_grad.num_uses:
            for bucket in param_grad.buckets:
                bucket.num_missing -= 1
            self._issue_complete()

    def _issue_complete(self) -> None:
        if not (self._reduces_now and self._may_issue and self._issues_in_backward):
            return
        while self._next < self._num_early and self.buckets[self._next].num_missing == 0:
            self._issue(self.buckets[self._next])
            self._next += 1

    # Reducing.

    @torch.no_grad()
    def _issue(self, bucket: GradientBucket) -> None:
        self._wait(MAX_BUCKETS_IN_FLIGHT - 1)
        self._buffers.next_bucket()
        dtype = self._communication_dtype or bucket.group.dtype
        send_buffer = bucket.store.send_buffer(bucket, dtype)
        self._in_flight.append((bucket, self._start_reduction(bucket, send_buffer)))
        bucket.is_reducing = True

    def _start_reduction(self, bucket: GradientBucket, send_buffer: torch.Tensor) -> ReduceScatter | ReplicaSum:
        groups = bucket.group.groups
        if bucket.is_unsharded:
            payload = send_buffer.to(bucket.sum_dtype)
            return ReplicaSum(payload, groups.replica_group, is_kept=payload is not send_buffer)
        others = bucket.bucket.numel - bucket.bucket.shard_numel
        received = partial(self._buffers.get, "received", others, send_buffer.dtype, send_buffer.device)
        return start_reduce_scatter(send_buffer, groups.shard_group, received)

    @torch.no_grad()
    def _wait(self, max_in_flight: int = 0) -> None:
        """Finish the reduction of the oldest buckets until at most this number is in flight."""
        while len(self._in_flight) > max_in_flight:
            bucket, work = self._in_flight.popleft()
            bucket.store.finish_reduction(bucket, work)
            bucket.is_summed = bucket.is_unsharded

    # At the end of an accumulation.

    @torch.no_grad()
    def finish(self, settings: StepSettings) -> None:
        """Reduce all gradients that any rank has not reduced yet, and sum the shards over the replicas.

        Marks a parameter as used if any rank had a gradient for it. Collective over the data-parallel ranks.

        Args:
            settings: Those of the step, for the ranks to compare.
        """
        unreduced = self.sync_used_params(settings)
        for bucket in unreduced:  # before the first is issued: it copies gradients that reach into the next one
            self._detach_grad_shard(bucket)
        for bucket in unreduced:
            self._issue(bucket)
        self._wait()
        for param_grad in self.param_grads:  # possibly only some buckets of an unused parameter were issued
            param_grad.num_issued, param_grad.source = 0, None
        for bucket in self.buckets:
            self._sum_over_replicas(bucket)

    def _detach_grad_shard(self, bucket: GradientBucket) -> None:
        """Prepare what is reduced for further sums."""
        bucket.store.detach_grad_shard(bucket)
        if bucket.is_unsharded:  # its sums may come from a checkpoint
            self._sum_over_replicas(bucket)

    def _sum_over_replicas(self, bucket: GradientBucket) -> None:
        replicas = bucket.group.groups.replica_group
        if bucket.grad_shard is not None and replicas is not None and not bucket.is_summed:
            all_reduce_sum(bucket.grad_shard, replicas)
            bucket.is_summed = bucket.is_unsharded

    def sync_used_params(self, settings: StepSettings | None = None) -> list[GradientBucket]:
        """Mark every parameter for which any rank had a gradient in this accumulation as used.

        Args:
            settings: Those of the step, for the ranks to compare; optional.

        Returns:
            The buckets in which any rank has unreduced gradients.

        Raises:
            ConfigError: A `.grad` on any rank does not come from a backward, or forwards wrote other weights on each.
            DesyncError: The settings differ.

        Collective over the data-parallel ranks.
        """
        self._wait()
        if not self.param_grads:
            return []
        local = [one.is_local for one in self.param_grads]
        foreign = [one.name for one in self.param_grads if one.parameter.grad is not None and not one.is_local]
        flags = [one.is_used for one in self.param_grads] + local + [bool(foreign)]
        writes = self._writes.bytes()
        numbers = [*writes, *(() if settings is None else settings.bytes())]
        flags, differs = any_rank_or_different(flags, numbers, self._control_group)
        if any(differs[: len(writes)]):
            raise self._writes.error()
        if any(differs) and settings is not None:
            raise settings.error(self._control_group)
        self._writes.forget()
        if flags.pop():
            raise ConfigError(
                f"the .grad of {foreign[0] if foreign else 'a parameter on another rank'!r} was set by hand, which the"
                " optimizer would not see: gradients come from backward(), and optimizer.register_gradient_hook() gives"
                " the true ones to be changed in place"
            )
        for param_grad, is_used in zip(self.param_grads, flags, strict=False):
            param_grad.is_used = is_used
        is_local = {id(one): flag for one, flag in zip(self.param_grads, flags[len(self.param_grads) :], strict=True)}
        return [one for one in self.buckets if any(map(is_local.__getitem__, map(id, one.param_grads)))]

    def reset(self, *, keeps_use: bool = False) -> None:
        """Drop the gradients of the accumulation; with `keeps_use`, parameters that had one keep a gradient of zero."""
        self._wait()
        for param_grad in self.param_grads:
            param_grad.parameter.grad = param_grad.source = None
            param_grad.num_issued = 0
            param_grad.is_used, param_grad.is_local = param_grad.is_used and keeps_use, False
        for bucket in self.buckets:
            bucket.grad_shard, bucket.is_summed = None, False

    def set_local(self, param_grad: ParamGrad, gradient: torch.Tensor) -> None:
        """Set this rank's unreduced gradient."""
        param_grad.parameter.grad = torch.empty_like(param_grad.parameter, requires_grad=False).copy_(gradient)
        param_grad.is_used = param_grad.is_local = True
        if param_grad.buckets:
            param_grad.buckets[0].store.receive(param_grad)


def _on_grad_accumulated(reducer: weakref.ref[GradientReducer], index: int, parameter: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.on_grad_ready(alive.param_grads[index])
