"""Moves pieces of chunks between the tiers when the placement wants them elsewhere."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from booster.plugins.gemini.chunk import Chunk
from booster.plugins.gemini.pieces import Piece
from booster.plugins.gemini.shard_update import ChunkUpdate
from booster.plugins.gemini.tiers import Tier

__all__ = ["is_updated_elsewhere", "move_main", "move_states", "move_weights"]


def move_weights(chunk: Chunk, tier: Tier | None) -> None:
    """Moves a chunk's piece of the weights to a tier, or (None) to memory; no backward is under way."""
    if tier is None and chunk.weights.is_offloaded:
        chunk.weights.fetch()
        if chunk.layout.num_shards == 1 and chunk.weights.tensor is not None:
            chunk.keep(chunk.weights.tensor)
    elif tier is not None and not chunk.weights.is_offloaded:
        if chunk.is_kept:
            chunk.stop_keeping()
        chunk.weights.offload(tier)


def is_updated_elsewhere(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether an optimizer is to update a chunk in another format or on another device than it does."""
    return chunk.main.dtype != dtype or chunk.main.device != device


def move_main(update: ChunkUpdate, dtype: torch.dtype, device: torch.device, tier: Tier | None) -> None:
    """Moves what an optimizer updates, where that is not the weights themselves.

    Args:
        update: Of the chunk.
        dtype: In which it is updated.
        device: Where.
        tier: Which holds it; None: memory.
    """
    chunk = update.chunk
    if is_updated_elsewhere(chunk, dtype, device):
        values = chunk.main.as_tensor().to(device=device, dtype=dtype)
        if dtype == chunk.layout.dtype and device == chunk.weights.device:
            chunk.main = chunk.weights  # which have the same values
            return
        chunk.main = Piece(chunk.layout.piece_numel, dtype, device)
        chunk.main.tensor = values
        return
    if chunk.main is chunk.weights:
        return
    if tier is None or tier.name == "host":
        chunk.main.fetch()
    elif not chunk.main.is_offloaded:
        chunk.main.offload(tier)


def move_states(update: ChunkUpdate, optimizer: Optimizer, tier: Tier | None) -> None:
    """Moves per-element states: to a disk, or (None, or host memory) to where the shards are."""
    if tier is not None and tier.name == "disk":
        update.offload_states(optimizer, tier)
    else:
        update.fetch_states(optimizer)
