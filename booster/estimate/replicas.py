"""Memory of a rank with a full replica of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from booster.interface import MemoryParts, MemoryQuestion, RankMemory

__all__ = ["bytes_of", "replica_memory"]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; shared storages are counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def replica_memory(
    question: MemoryQuestion, *, bucket_bytes: int = 0, sent: int = 0, views: bool = False
) -> RankMemory:
    """Return the memory of training with unsharded weights, gradients and optimizer states.

    Args:
        question: Model, optimizer and batch, possibly with a precision of the Booster.
        bucket_bytes: Size of the buckets for gradient reduction.
        sent: Bytes sent by the rank in a step.
        views: If True, gradients are views of the buckets.
    """
    held = question.prepared_model()
    weights, buffers = bytes_of(held.parameters()), bytes_of(held.buffers())
    shapes = [tuple(one.shape) for one in question.trained]
    has_masters = question.keeps_masters
    dtype = torch.float32 if has_masters else next((one.dtype for one in question.trained), torch.float32)
    numel = sum(one.numel() for one in question.trained)
    states = question.state_bytes(shapes, dtype) + (8 * numel if has_masters else 0)  # fp32 masters and gradients
    profile = question.activations()
    activations, gradients = profile.worst_moment(0.0 if views else 1.0)
    fixed = {"parameters": weights, "optimizer_states": states, "buffers": buffers + bucket_bytes}
    own = 0 if views else 1
    return RankMemory(
        backward=MemoryParts(**fixed, gradients=own * gradients, activations=activations),
        step=MemoryParts(**fixed, gradients=own * profile.gradients, activations=question.step_bytes(shapes, dtype)),
        kept=MemoryParts(**fixed),
        sent=sent,
    )
