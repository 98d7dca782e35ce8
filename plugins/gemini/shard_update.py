"""Optimizer update of a chunk: this rank's shards and their optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import Shard
from booster.plugins.sharding.masters import update_master

from .chunk import Chunk, ChunkParam
from .chunk_layout import ShardRegionInChunk
from .chunk_shard import ChunkShard
from .tiers import Tier


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard and its region."""

    shard: Shard
    part: ShardRegionInChunk
    param: ChunkParam


class ChunkUpdate:
    """Shards of a chunk that this rank updates, as views of the chunk's master shard.

    Args:
        chunk: Trained chunk with allocated memory.
        group_of: Index of the param group by a parameter's `id`.
        is_primary: If True, this rank saves its shards; its replicas do not.

    Attributes:
        owned: Shards in chunk order.
        states: Per-element optimizer states in a tier, by name.
    """

    def __init__(self, chunk: Chunk, group_of: Mapping[int, int], *, is_primary: bool) -> None:
        self.chunk = chunk
        self.states: dict[str, ChunkShard] = {}
        main = chunk.master.as_tensor()
        self.owned = [
            self._own(part, main[part.in_shard], group_of, is_primary) for part in chunk.layout.parts(chunk.rank)
        ]

    def _own(
        self, part: ShardRegionInChunk, memory: torch.Tensor, group_of: Mapping[int, int], is_primary: bool
    ) -> OwnedShard:
        param = self.chunk.params[part.region_index]
        shard = Shard(
            name=param.name,
            global_shape=param.region.shape,
            span=part.span,
            parameter=nn.Parameter(memory, requires_grad=True),
            model_param=param.parameter,
            group_index=group_of[id(param.parameter)],
            has_master=self.chunk.master.dtype != self.chunk.layout.dtype,
            is_primary=is_primary,
        )
        return OwnedShard(shard, part, param)

    @property
    def has_copy(self) -> bool:
        """Whether the weights are a copy of the master shard."""
        return self.chunk.master is not self.chunk.weights

    @property
    def rounds_in_place(self) -> bool:
        """Whether a fused optimizer step may write this rank's weights together with their masters."""
        return self.has_copy and self.chunk.master.device == self.chunk.weights.device

    def point(self) -> None:
        """Rebind the shards to the master shard, which may have moved to another tier."""
        main = self.chunk.master.as_tensor()
        for one in self.owned:
            one.shard.parameter.data = main[one.part.in_shard]

    def point_gradients(self) -> None:
        """Set `.grad` of every used shard to its reduced gradient, and clear those of the others."""
        sums = self.chunk.grad_shard.as_tensor() if self.chunk.has_grad_shard else None
        for one in self.owned:
            parameter = one.shard.parameter
            if not one.param.is_used:
                parameter.grad = None
            elif sums is None:  # no backward since zero_grad(set_to_none=False)
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            else:
                parameter.grad = sums[one.part.in_shard].to(device=parameter.device, dtype=parameter.dtype)

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the shards' gradients by shard index."""
        grads = ((number, one.shard.parameter.grad) for number, one in enumerate(self.owned))
        return {number: grad for number, grad in grads if grad is not None}

    def working_copies(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return this rank's model weights by shard."""
        weights = self.chunk.weights.as_tensor()
        return {one.shard.parameter: weights[one.part.in_shard] for one in self.owned}

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copy the master shard into this rank's weights."""
        if self.has_copy:
            self.chunk.weights.as_tensor().copy_(self.chunk.master.as_tensor())

    def follow(self) -> None:
        """Copy externally changed weights into the master shard."""
        if self.has_copy:
            update_master(self.chunk.master.as_tensor(), self.chunk.weights.as_tensor())

    def follow_shard(self, shard: Shard) -> None:
        """Copy externally changed weights of one shard."""
        part = next(one.part for one in self.owned if one.shard is shard)
        if self.has_copy:
            weights = self.chunk.weights.as_tensor()[part.in_shard]
            update_master(shard.parameter.detach(), weights)

    # Optimizer states in a tier.

    @torch.no_grad()
    def offload_states(self, optimizer: Optimizer, tier: Tier) -> None:
        """Move per-element states to a tier, unless they are already there."""
        for key in self._new_states(optimizer):
            states = [optimizer.state[one.shard.parameter].get(key) for one in self.owned]
            dtype = next(state.dtype for state in states if state is not None)
            state_shard = self._new_state_shard(key, dtype, tier)
            memory = state_shard.as_tensor()
            for one, state in zip(self.owned, states, strict=True):
                if state is not None:
                    view = memory[one.part.in_shard]
                    view.copy_(state)
                    optimizer.state[one.shard.parameter][key] = view

    def _new_state_shard(self, key: str, dtype: torch.dtype, tier: Tier) -> ChunkShard:
        old = self.states.pop(key, None)
        if old is not None:
            old.drop()
        shard = self.states[key] = ChunkShard(self.chunk.layout.shard_numel, dtype, self.chunk.master.device)
        shard.allocate(tier)
        return shard

    def _new_states(self, optimizer: Optimizer) -> Iterator[str]:
        keys: dict[str, None] = {}
        for one in self.owned:
            for key, value in optimizer.state.get(one.shard.parameter, {}).items():
                if is_elementwise_state(value, one.shard.parameter) and not self._is_offloaded(key, value):
                    keys.setdefault(key)
        yield from keys

    def _is_offloaded(self, key: str, value: torch.Tensor) -> bool:
        shard = self.states.get(key)
        if shard is None:
            return False
        memory = shard.as_tensor()
        start = memory.data_ptr()
        return start <= value.data_ptr() < start + memory.nbytes

    @torch.no_grad()
    def fetch_states(self, optimizer: Optimizer) -> None:
        """Move the states back to memory."""
        for key, shard in self.states.items():
            for one in self.owned:
                state = optimizer.state.get(one.shard.parameter, {})
                if key in state:
                    state[key] = state[key].clone()
            shard.drop()
        self.states.clear()

    def new_state(self, parameter: torch.Tensor, key: str, dtype: torch.dtype, tier: Tier) -> torch.Tensor:
        """Allocate a state of a shard in a tier."""
        shard = self.states.get(key)
        if shard is None or shard.dtype != dtype:
            shard = self._new_state_shard(key, dtype, tier)
        part = next(one.part for one in self.owned if one.shard.parameter is parameter)
        return shard.as_tensor()[part.in_shard]

    def state_bytes(self, optimizer: Optimizer | None) -> int:
        """Return the bytes of masters and per-element states in all tiers; an estimate before the first step.

        Counts the full shard including waste, so that the result is equal on all ranks.
        """
        masters = self.chunk.master.num_bytes if self.has_copy else 0
        if optimizer is None or not optimizer.state:
            return masters + 2 * self.chunk.master.num_bytes  # Adam's two moments
        return masters + self.chunk.layout.shard_numel * _bytes_per_element(optimizer)

    def state_bytes_in_memory(self, optimizer: Optimizer) -> int:
        """Return the bytes of masters and per-element states in the compute tier."""
        masters = self.chunk.master.bytes_in_memory if self.has_copy else 0
        return masters + sum(
            int(value.nbytes)
            for one in self.owned
            for key, value in optimizer.state.get(one.shard.parameter, {}).items()
            if is_elementwise_state(value, one.shard.parameter) and not self._is_offloaded(key, value)
        )


def _bytes_per_element(optimizer: Optimizer) -> int:
    """Return the bytes of optimizer state per parameter element."""
    sizes = (
        sum(value.element_size() for value in state.values() if is_elementwise_state(value, parameter))
        for parameter, state in optimizer.state.items()
    )
    return max(sizes, default=0)


def is_elementwise_state(value: Any, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a state has one value for every element of a shard."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def all_shards(updates: Sequence[ChunkUpdate]) -> list[Shard]:
    """Return the shards of all chunks."""
    return [one.shard for update in updates for one in update.owned]


def moved_state(value: Any, before: torch.Tensor, after: torch.Tensor) -> Any:
    """Return an optimizer state moved to the device of its shard."""
    if not isinstance(value, torch.Tensor):
        return value
    is_beside = is_elementwise_state(value, before) or value.device == before.device
    return value.to(after.device) if is_beside else value


def migrate_weights(chunk: Chunk, tier: Tier | None) -> None:
    """Move a chunk's weight shard to `tier` or, if that is None, to memory. Must not run during a backward."""
    if tier is None and chunk.weights.is_offloaded:
        chunk.weights.fetch()
        if chunk.layout.num_shards == 1 and chunk.weights.tensor is not None:
            chunk.keep_gathered(chunk.weights.tensor)
    elif tier is not None and not chunk.weights.is_offloaded:
        if chunk.is_kept_gathered:
            chunk.stop_keeping_gathered()
        chunk.weights.offload(tier)


def needs_other_master(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the master shard of a chunk must change its dtype or device."""
    return chunk.master.dtype != dtype or chunk.master.device != device


def migrate_master(update: ChunkUpdate, dtype: torch.dtype, device: torch.device, tier: Tier | None) -> None:
    """Move the master shard of a chunk, unless the weights themselves are updated.

    Args:
        update: Update of the chunk.
        dtype: Dtype of the master shard.
        device: Device of the update.
        tier: Tier that stores the master shard, or None for memory.
    """
    chunk = update.chunk
    if needs_other_master(chunk, dtype, device):
        values = chunk.master.as_tensor().to(device=device, dtype=dtype)
        if dtype == chunk.layout.dtype and device == chunk.weights.device:
            chunk.master = chunk.weights  # of equal values
            return
        chunk.master = ChunkShard(chunk.layout.shard_numel, dtype, device)
        chunk.master.tensor = values
        return
    if chunk.master is chunk.weights:
        return
    if tier is None or tier.name == "host":
        chunk.master.fetch()
    elif not chunk.master.is_offloaded:
        chunk.master.offload(tier)


def migrate_states(update: ChunkUpdate, optimizer: Optimizer, tier: Tier | None) -> None:
    """Move per-element states to a disk tier or, for any other tier, to the device of the shards."""
    if tier is not None and tier.name == "disk":
        update.offload_states(optimizer, tier)
    else:
        update.fetch_states(optimizer)
