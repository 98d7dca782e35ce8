"""Migration of chunk shards between memory and the offload tiers."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from booster.plugins.gemini.chunk import Chunk
from booster.plugins.gemini.pieces import ChunkShard
from booster.plugins.gemini.shard_update import ChunkUpdate
from booster.plugins.gemini.tiers import Tier

__all__ = ["migrate_master", "migrate_states", "migrate_weights", "needs_other_master"]


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
            chunk.master = chunk.weights  # which have the same values
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
