"""What this rank owns of a chunk, in memory or in the offload tier."""

from __future__ import annotations

import torch

from booster.plugins.gemini.tiers import Block, Tier, Transfer

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
            self._block = tier.new_block(self.num_bytes)

    def start_load(self, target: torch.Tensor) -> Transfer:
        """Starts to copy it from the offload tier into a flat tensor."""
        assert self._block is not None, "it is in memory"
        return self._block.read_into(target)

    def start_store(self, source: torch.Tensor) -> Transfer:
        """Starts to copy a flat tensor over it in the offload tier."""
        assert self._block is not None, "it is in memory"
        return self._block.write_from(source)

    def load(self, target: torch.Tensor) -> None:
        """Copies it into a flat tensor, from wherever it is."""
        if self.tensor is not None:
            target.copy_(self.tensor)
        else:
            self.start_load(target).wait()

    def store(self, source: torch.Tensor) -> None:
        """Copies a flat tensor over it, wherever it is."""
        if self.tensor is not None:
            self.tensor.copy_(source)
        else:
            self.start_store(source).wait()

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
            block = tier.new_block(self.num_bytes)
            block.write_from(self.tensor).wait()
            self.tensor, self._block = None, block

    def fetch(self) -> None:
        """Moves it to memory."""
        if self._block is not None:
            tensor = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self._block.read_into(tensor).wait()
            self.drop()
            self.tensor = tensor

    def drop(self) -> None:
        """Forgets it and gives its room back."""
        self.tensor = self._mapped = None
        if self._block is not None:
            self._block.free()
            self._block = None
