"""What this rank owns of a chunk, in memory or in the offload tier."""

from __future__ import annotations

import torch

from booster.plugins.gemini.tiers import Block, Tier

__all__ = ["Piece"]


class Piece:
    """One flat piece of weights, gradients or states, in one of two places.

    Args:
        numel: Number of elements.
        dtype: Their format.
        device: Where it is while it is in memory.

    Attributes:
        tensor: The elements while they are in memory; None: they are in the offload tier, or nothing was made yet.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self.dtype = dtype
        self.device = device
        self.tensor: torch.Tensor | None = None
        self._block: Block | None = None
        self._takes_host_memory = False
        self._mapped: torch.Tensor | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether the offload tier has it."""
        return self._block is not None

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the compute tier that it takes."""
        return 0 if self.tensor is None else self.tensor.nbytes

    @property
    def num_bytes(self) -> int:
        """Its size, wherever it is."""
        return self.numel * self.dtype.itemsize

    def allocate(self, tier: Tier | None) -> None:
        """Makes room for it, with any content: in the tier, or (None) in memory."""
        if tier is None:
            self.tensor = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        else:
            self._use_block(tier)

    def _use_block(self, tier: Tier) -> Block:
        self._takes_host_memory = tier.name == "disk"
        self._block = tier.new_block(self.num_bytes)
        return self._block

    def load(self, target: torch.Tensor) -> None:
        """Copies it into a flat tensor, from wherever it is."""
        if self.tensor is not None:
            target.copy_(self.tensor)
            return
        assert self._block is not None, "nothing was made yet"
        if self._takes_host_memory and target.device.type != "cpu":
            host = torch.empty_like(target, device="cpu")
            self._block.read_into(host).wait()
            target.copy_(host)
        else:
            self._block.read_into(target).wait()

    def store(self, source: torch.Tensor) -> None:
        """Copies a flat tensor over it, wherever it is."""
        if self.tensor is not None:
            self.tensor.copy_(source)
            return
        assert self._block is not None, "nothing was made yet"
        self._block.write_from(source.cpu() if self._takes_host_memory else source).wait()

    def as_tensor(self) -> torch.Tensor:
        """Returns it as live memory: itself, or a mapping of the offload tier that takes no memory of its own."""
        if self.tensor is not None:
            return self.tensor
        assert self._block is not None, "nothing was made yet"
        if self._mapped is None:
            self._mapped = self._block.as_tensor(self.dtype)
        return self._mapped

    def offload(self, tier: Tier) -> None:
        """Moves it to the offload tier."""
        if self.tensor is not None:
            tensor, self.tensor = self.tensor, None
            self._use_block(tier)
            self.store(tensor)

    def fetch(self) -> None:
        """Moves it to memory."""
        if self._block is not None:
            tensor = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.load(tensor)
            self.drop()
            self.tensor = tensor

    def drop(self) -> None:
        """Forgets it and gives its room back."""
        self.tensor = self._mapped = None
        if self._block is not None:
            self._block.free()
            self._block = None
