"""Memory of a rank with a full replica of the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from booster.interface import MemoryParts, MemoryRequest, RankMemory

__all__ = ["replica_memory", "storage_bytes"]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; shared storages are counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def replica_memory(
    request: MemoryRequest, *, bucket_bytes: int = 0, sent: int = 0, gradient_as_bucket_view: bool = False
) -> RankMemory:
    """Return the memory of training with unsharded weights, gradients and optimizer states.

    Args:
        request: Model, optimizer and batch, possibly with a precision of the Booster.
        bucket_bytes: Size of the buckets for gradient reduction.
        sent: Bytes sent by the rank in a step.
        gradient_as_bucket_view: If True, gradients are views of the buckets.
    """
    model = request.prepared_model()
    weights, buffers = storage_bytes(model.parameters()), storage_bytes(model.buffers())
    shapes = [tuple(one.shape) for one in request.trained]
    has_masters = request.keeps_masters
    dtype = torch.float32 if has_masters else next((one.dtype for one in request.trained), torch.float32)
    numel = sum(one.numel() for one in request.trained)
    states = request.state_bytes(shapes, dtype) + (8 * numel if has_masters else 0)  # fp32 masters and gradients
    profile = request.activations()
    activations, gradients = profile.worst_peak(0.0 if gradient_as_bucket_view else 1.0)
    fixed = {"parameters": weights, "optimizer_states": states, "buffers": buffers + bucket_bytes}
    own = 0 if gradient_as_bucket_view else 1
    return RankMemory(
        backward=MemoryParts(**fixed, gradients=own * gradients, activations=activations),
        step=MemoryParts(**fixed, gradients=own * profile.gradients, activations=request.step_bytes(shapes, dtype)),
        steady_state=MemoryParts(**fixed),
        sent=sent,
    )
