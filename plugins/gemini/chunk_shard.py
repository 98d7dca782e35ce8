"""This rank's shard of a chunk, in memory or in the offload tier."""

from __future__ import annotations

import torch

from .tiers import Tier, TierBlock


class ChunkShard:
    """Flat shard of weights, gradients or optimizer states, in memory or in the offload tier.

    Args:
        numel: Number of elements.
        dtype: Dtype of the elements.
        device: Device of the shard while it is in memory.

    Attributes:
        num_bytes: Size in bytes, in memory or offloaded.
        tensor: The elements while they are in memory. None if they are offloaded or not allocated yet.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self.dtype = dtype
        self.num_bytes = numel * dtype.itemsize
        self.device = device
        self.tensor: torch.Tensor | None = None
        self._block: TierBlock | None = None
        self._needs_host_copy = False
        self._mapped: torch.Tensor | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is in the offload tier."""
        return self._block is not None

    @property
    def bytes_in_memory(self) -> int:
        """Bytes in the compute tier."""
        return 0 if self.tensor is None else self.tensor.nbytes

    def allocate(self, tier: Tier | None) -> None:
        """Allocate the shard uninitialized, in `tier` or, if that is None, in memory."""
        if tier is None:
            self.tensor = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        else:
            self._needs_host_copy = tier.name == "disk"
            self._block = tier.new_block(self.num_bytes)

    def load(self, target: torch.Tensor) -> None:
        """Copy the shard into a flat tensor."""
        if self.tensor is not None:
            target.copy_(self.tensor)
            return
        assert self._block is not None, "nothing was made yet"
        if self._needs_host_copy and target.device.type != "cpu":
            host = torch.empty_like(target, device="cpu")
            self._block.read_into(host).wait()
            target.copy_(host)
        else:
            self._block.read_into(target).wait()

    def store(self, source: torch.Tensor) -> None:
        """Overwrite the shard with a flat tensor."""
        if self.tensor is not None:
            self.tensor.copy_(source)
            return
        assert self._block is not None, "nothing was made yet"
        self._block.write_from(source.cpu() if self._needs_host_copy else source).wait()

    def as_tensor(self) -> torch.Tensor:
        """Return the shard as writable memory: its tensor, or a mapping of the offload tier without a copy."""
        if self.tensor is not None:
            return self.tensor
        assert self._block is not None, "nothing was made yet"
        if self._mapped is None:
            self._mapped = self._block.as_tensor(self.dtype)
        return self._mapped

    def offload(self, tier: Tier) -> None:
        """Move the shard to the offload tier."""
        if self.tensor is not None:
            tensor, self.tensor = self.tensor, None
            self.allocate(tier)
            self.store(tensor)

    def fetch(self) -> None:
        """Move the shard to memory."""
        if self._block is not None:
            tensor = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.load(tensor)
            self.drop()
            self.tensor = tensor

    def drop(self) -> None:
        """Free the memory or the block of the shard."""
        self.tensor = self._mapped = None
        if self._block is not None:
            self._block.free()
            self._block = None
