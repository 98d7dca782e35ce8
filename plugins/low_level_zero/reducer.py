"""Brings the gradients of all ranks together: bucket by bucket, in one order on all ranks, whatever arrived where."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import ReduceScatter, all_reduce_max, all_reduce_sum, collective_device, start_reduce_scatter
from booster.errors import ConfigError

from .flat_params import FlatGroup
from .grad_bucket import FullGradients, GradientBucket, GradientStore, PackedGradients, Scratch, Slot, make_slots

BUCKETS_UNDER_WAY = 2  # one that is sent while the next one fills

# Ranks must issue the same collectives in the same order, but which gradients a rank has may differ from rank to rank
# and from step to step. So a bucket is issued when it is complete *and* all buckets before it were issued; what is not
# complete when backward ends is issued then, with zeros for gradients that did not arrive. Gradients that were not
# reduced in a backward (no_sync, arrivals after their bucket was issued) are found when the window ends: one all-reduce
# of a byte per parameter and bucket tells every rank which parameters were used anywhere, and which buckets hold
# something to reduce anywhere.


class GradientReducer:
    """Collects gradients as backward gives them and sums them over the ranks.

    Args:
        groups: The flat groups.
        model_order: The model's parameters in the order in which it registers them.
        stage: 1: local gradients are kept until they are reduced. 2: they are reduced in every backward.
        overlaps: Buckets are reduced while backward continues.
        agreement_group: All ranks among which data are divided, to agree on what there is to reduce; on an accelerator
            a group of the CPU's, so that no rank waits for its device.
        shard_group: The ranks among them that share the shards.
        replica_group: The ranks that hold copies of this rank's shards; None: there are none.
        communication_dtype: Format in which gradients travel; None: their own.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        model_order: Sequence[nn.Parameter],
        *,
        stage: int,
        overlaps: bool,
        agreement_group: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        communication_dtype: torch.dtype | None,
    ) -> None:
        self._stage = stage
        self._overlaps = overlaps or stage == 2
        self._agreement_group = agreement_group
        self._shard_group = shard_group
        self._replica_group = replica_group
        self._communication_dtype = communication_dtype
        self._scratch = Scratch(BUCKETS_UNDER_WAY)
        self._flights: deque[tuple[GradientBucket, ReduceScatter]] = deque()
        self._is_collecting = False
        self._reduces_now = False
        self._next = 0
        self._hooks: list[Any] = []
        self.slots, self._buckets = make_slots(groups, model_order)
        self._stores: dict[int, GradientStore] = {id(group): self._new_store(group) for group in groups}
        self._watch()

    def _new_store(self, group: FlatGroup) -> GradientStore:
        # A world of one has no second piece in whose place fp32 sums of half gradients could go.
        packs = self._stage == 2 or (group.sharding.num_shards == 1 and group.dtype.itemsize < 4)
        return PackedGradients(group, self._scratch) if packs else FullGradients(group, self._scratch)

    def _watch(self) -> None:
        # Weakly: Python's garbage collector does not see through a parameter to its hooks, and would free neither.
        reducer = weakref.ref(self)
        for index, slot in enumerate(self.slots):
            hook = partial(_arrived, reducer, index)
            self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    # During backward.

    @contextmanager
    def collecting(self, *, synchronizes: bool) -> Iterator[None]:
        """Take the gradients of the backward that runs inside.

        Args:
            synchronizes: This backward needs the other ranks' part; False: `no_sync`.

        Collective.
        """
        self._begin(self._stage == 2 or (synchronizes and self._overlaps))
        try:
            yield
        finally:
            self._is_collecting = False
        self._issue_rest()

    def _begin(self, reduces: bool) -> None:
        self._drain()
        for slot, hook in zip(self.slots, self._hooks, strict=True):
            slot.has_arrived = False
            hooks = slot.parameter._post_accumulate_grad_hooks
            hooks[hook.id] = hooks.pop(hook.id)  # behind the user's of later: it takes the gradient
        for bucket in self._buckets:
            bucket.num_missing, bucket.is_issued = len(bucket.slots), False
            self._store_of(bucket).evict_for(bucket)
        self._next = 0
        self._is_collecting, self._reduces_now = True, reduces

    def take_note(self, slot: Slot) -> None:
        """Called when a gradient has arrived in `.grad`."""
        slot.is_used = slot.is_local = True
        if not self._is_collecting or any(bucket.is_issued for bucket in slot.buckets):
            return  # stays in `.grad`; see Note [Life of a gradient]
        if slot.buckets:
            self._store_of(slot.buckets[0]).receive(slot)
        if self._reduces_now and not slot.has_arrived:
            for bucket in slot.buckets:
                bucket.num_missing -= 1
            self._issue_complete()
        slot.has_arrived = True

    def _issue_complete(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].num_missing == 0:
            self._issue(self._buckets[self._next])
            self._next += 1

    def _issue_rest(self) -> None:
        if self._reduces_now:
            for bucket in self._buckets[self._next :]:
                self._issue(bucket)
            self._next = len(self._buckets)

    # Reducing.

    @torch.no_grad()
    def _issue(self, bucket: GradientBucket) -> None:
        while len(self._flights) >= BUCKETS_UNDER_WAY:
            self._finish_oldest()
        self._scratch.next_bucket()
        dtype = self._communication_dtype or bucket.group.dtype
        payload = self._store_of(bucket).payload(bucket, dtype)
        others = bucket.bucket.numel - bucket.bucket.piece_numel
        received = partial(self._scratch.take, "received", others, dtype, payload.device)
        self._flights.append((bucket, start_reduce_scatter(payload, self._shard_group, received)))
        bucket.is_issued = True

    @torch.no_grad()
    def _finish_oldest(self) -> None:
        bucket, flight = self._flights.popleft()
        self._store_of(bucket).collect(bucket, flight)

    def _drain(self) -> None:
        while self._flights:
            self._finish_oldest()

    def _store_of(self, bucket: GradientBucket) -> GradientStore:
        return self._stores[id(bucket.group)]

    # At the end of a window.

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce whatever was not reduced yet on any rank; then every bucket that was used has its sums.

        Marks a parameter as used if any rank had a gradient of it. Collective over all ranks.
        """
        self._drain()
        for bucket in self._agree():
            self._store_of(bucket).evict_for(bucket)
            self._issue(bucket)
        self._drain()
        for slot in self.slots:  # one without a gradient here may lie in some buckets that were reduced only
            slot.num_issued, slot.source = 0, None
        if self._replica_group is not None:
            for bucket in self._buckets:
                if bucket.sums is not None:
                    all_reduce_sum(bucket.sums, self._replica_group)

    def _agree(self) -> list[GradientBucket]:
        """Return the buckets in which some rank has something to reduce, and spreads which parameters were used."""
        if not self.slots:
            return []
        local = [any(slot.is_local for slot in bucket.slots) for bucket in self._buckets]
        foreign = [slot.name for slot in self.slots if slot.parameter.grad is not None and not slot.is_local]
        facts = [slot.is_used for slot in self.slots] + local + [bool(foreign)]
        mask = torch.tensor(facts, dtype=torch.uint8, device=collective_device(self._agreement_group))
        agreed = all_reduce_max(mask, self._agreement_group).tolist()
        if agreed.pop():
            raise ConfigError(
                f"the .grad of {foreign[0] if foreign else 'a parameter on another rank'!r} was set by hand, which the"
                " optimizer would not see: gradients come from backward(), and optimizer.register_gradient_hook() gives"
                " the true ones to be changed in place"
            )
        for slot, is_used in zip(self.slots, agreed, strict=False):
            slot.is_used = bool(is_used)
        return [one for one, is_local in zip(self._buckets, agreed[len(self.slots) :], strict=True) if is_local]

    def agree_on_use(self) -> None:
        """Mark a parameter as used if any rank had a gradient of it in this window. Collective over all ranks."""
        self._drain()
        self._agree()

    def reset(self, *, keeps_use: bool = False) -> None:
        """Drop the window's gradients.

        Args:
            keeps_use: Parameters that had a gradient go on with a gradient of zero.
        """
        self._drain()
        for group_id, store in self._stores.items():
            store.forget([slot for slot in self.slots if slot.buckets and id(slot.buckets[0].group) == group_id])
        for slot in self.slots:
            slot.is_used, slot.is_local = slot.is_used and keeps_use, False
        for bucket in self._buckets:
            bucket.sums = None

    # Looking.

    @property
    def has_gradients(self) -> bool:
        """True where this rank has gradients of the window, reduced or not."""
        return any(slot.is_local for slot in self.slots) or any(bucket.sums is not None for bucket in self._buckets)

    @property
    def buckets(self) -> Sequence[GradientBucket]:
        """All buckets, in the order in which they are reduced."""
        return self._buckets

    def local(self, slot: Slot) -> torch.Tensor | None:
        """Return what this rank has of a gradient that was not reduced yet, in the parameter's shape."""
        return self._store_of(slot.buckets[0]).local(slot) if slot.buckets else slot.parameter.grad

    def set_local(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Make a tensor this rank's part of a gradient that is to be reduced."""
        slot.parameter.grad = torch.empty_like(slot.parameter, requires_grad=False).copy_(gradient)
        slot.is_used = slot.is_local = True
        if slot.buckets:
            self._store_of(slot.buckets[0]).receive(slot)

    def zero_sums(self, bucket: GradientBucket) -> None:
        """Make the sums of a bucket zeros, to be filled."""
        self._store_of(bucket).zero_sums(bucket)


def _arrived(reducer: weakref.ref[GradientReducer], index: int, parameter: torch.Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.take_note(alive.slots[index])
