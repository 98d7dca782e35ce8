"""Buffers of the model, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from booster.comm import broadcast
from booster.plugins.sharding.compiling import not_compiled

__all__ = ["broadcast_joined"]


@not_compiled
@torch.no_grad()
def broadcast_joined(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Gives all ranks the first rank's tensors, with one message per number format. Collective."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.dtype == dtype]
        joined = torch.cat([tensor.reshape(-1) for tensor in members])
        broadcast([joined], group)
        for tensor, part in zip(members, joined.split([tensor.numel() for tensor in members]), strict=True):
            # Through `.data`: a graph that saved the buffer must not take it for changed. Where a forward changes it,
            # that forward has marked it as changed itself.
            tensor.data.copy_(part.view(tensor.shape))
