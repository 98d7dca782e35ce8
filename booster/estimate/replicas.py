"""Memory of a rank that holds the whole model and updates all of it, alone or as one of many replicas."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from booster.interface import MemoryParts, MemoryQuestion, RankMemory

__all__ = ["bytes_of", "replica_memory"]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, those that share memory counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def replica_memory(
    question: MemoryQuestion, *, bucket_bytes: int = 0, sent: int = 0, views: bool = False
) -> RankMemory:
    """Return what training takes where weights, gradients and states are whole.

    Args:
        question: The model and its optimizer, whose precision may be the Booster's.
        bucket_bytes: Of buckets in which gradients are averaged.
        sent: Bytes that the rank sends in a step.
        views: Gradients lie in the buckets.
    """
    held = question.prepared_model()
    weights, buffers = bytes_of(held.parameters()), bytes_of(held.buffers())
    shapes = [tuple(one.shape) for one in question.trained]
    has_masters = question.keeps_masters
    dtype = torch.float32 if has_masters else next((one.dtype for one in question.trained), torch.float32)
    numel = sum(one.numel() for one in question.trained)
    states = question.state_bytes(shapes, dtype) + (8 * numel if has_masters else 0)  # a master and its gradient
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
