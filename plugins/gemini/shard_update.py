"""Optimizer update of a chunk: this rank's shards and their optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from booster.core.shard_aware import update_master
from booster.interface import Shard
from booster.plugins.sharding.step_in_parts import Arrival

from .chunk import Chunk, ChunkParam, ChunkShard
from .chunk_layout import ShardRegionInChunk
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
        self.owned: list[OwnedShard] = []
        main = chunk.master.as_tensor()
        for part in chunk.layout.parts(chunk.rank):
            param = chunk.params[part.region_index]
            shard = Shard(
                name=param.name,
                global_shape=param.region.shape,
                span=part.span,
                parameter=nn.Parameter(main[part.in_shard], requires_grad=True),
                model_param=param.parameter,
                group_index=group_of[id(param.parameter)],
                has_master=chunk.master.dtype != chunk.layout.dtype,
                is_primary=is_primary,
            )
            self.owned.append(OwnedShard(shard, part, param))

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

    def point_gradients(self, *, waits: bool = True) -> Arrival | None:
        """Set `.grad` of every used shard to its reduced gradient, and clear those of the others.

        Args:
            waits: If True, the host waits for gradients in flight.

        Returns:
            Gradients that are still in flight, if any.
        """
        shard, main = self.chunk.grad_shard, self.chunk.master
        is_arriving = not waits and self.chunk.has_grad_shard and shard.has_streams
        is_arriving = is_arriving and (main.dtype, main.device.type) == (shard.dtype, "cpu")  # else they are copied
        sums = shard.as_tensor(waits=not is_arriving) if self.chunk.has_grad_shard else None
        main.as_tensor(waits=not is_arriving)  # the update writes it: copies of it have ended
        for one in self.owned:
            parameter = one.shard.parameter
            if not one.param.is_used:
                parameter.grad = None
            elif sums is None:  # no backward since zero_grad(set_to_none=False)
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            else:
                parameter.grad = sums[one.part.in_shard].to(device=parameter.device, dtype=parameter.dtype)
        if not is_arriving:
            return None
        return Arrival([one.shard.parameter for one in self.owned], lambda: (shard.as_tensor(), main.as_tensor()))

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copy the master shard into this rank's weights."""
        if self.has_copy:
            self.chunk.master.copy_to(self.chunk.weights)

    def refresh_master(self) -> None:
        """Update the master shard from weights that were changed outside of the optimizer."""
        update_master(self.chunk.master.as_tensor(), self.chunk.weights.as_tensor())

    # Optimizer states in a tier.

    @torch.no_grad()
    def offload_states(self, optimizer: Optimizer, tier: Tier) -> None:
        """Move per-element states to a tier, unless they are already there."""
        keys: dict[str, None] = {}
        for one in self.owned:
            for key, value in optimizer.state.get(one.shard.parameter, {}).items():
                if is_elementwise_state(value, one.shard.parameter) and not self._is_offloaded(key, value):
                    keys.setdefault(key)
        for key in keys:
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
        # An optimizer may keep more in its states than those of parameters.
        bytes_per_element = [
            sum(value.element_size() for value in state.values() if is_elementwise_state(value, parameter))
            for parameter, state in ({} if optimizer is None else optimizer.state).items()
            if isinstance(parameter, torch.Tensor) and isinstance(state, Mapping)
        ]
        if not bytes_per_element:
            return masters + 2 * self.chunk.master.num_bytes  # Adam's two moments
        return masters + self.chunk.layout.shard_numel * max(bytes_per_element)


def adam_state_bytes(chunk: Chunk) -> int:
    """Estimate the bytes of Adam states and master weights of a chunk on this rank."""
    if not chunk.layout.trains:
        return 0
    return chunk.layout.shard_numel * (8 if chunk.layout.dtype.itemsize == 4 else 12)


def is_elementwise_state(value: Any, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a state has one value for every element of a shard."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def migrate_master(update: ChunkUpdate, dtype: torch.dtype, device: torch.device, tier: Tier | None) -> bool:
    """Move the master shard of a chunk, unless the weights themselves are updated.

    Args:
        update: Update of the chunk.
        dtype: Dtype of the master shard.
        device: Device of the update.
        tier: Tier that stores the master shard, or None for memory.

    Returns:
        True if the dtype or the device has changed, so that the update needs new shards.
    """
    chunk = update.chunk
    if chunk.master.dtype != dtype or chunk.master.device != device:
        before = chunk.master
        values = before.as_tensor().to(device=device, dtype=dtype)
        if dtype == chunk.layout.dtype and device == chunk.weights.device:
            chunk.master = chunk.weights  # of equal values
        else:
            chunk.master = ChunkShard(chunk.layout.shard_numel, dtype, device)
            chunk.master.tensor = values
            if tier is not None:
                chunk.master.offload(tier)
        if before is not chunk.weights:
            before.drop()
        return True
    if chunk.master is chunk.weights:
        return False
    if tier is None:
        chunk.master.fetch()
    elif not chunk.master.is_offloaded:
        chunk.master.offload(tier)
    return False
