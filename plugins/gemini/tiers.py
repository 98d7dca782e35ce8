"""Memory tiers: hold chunk shards outside of the compute tier. Interface, and host memory."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from booster.device import device_type


class Transfer(Protocol):
    """A copy between a block and a tensor that is in flight."""

    def wait(self) -> None:
        """Return once the copy is done; any number of times.

        Raises:
            OSError: The disk failed; a tensor that was read into is undefined. Said by every call.
        """


class TierBlock(Protocol):
    """Memory in a tier for one shard of a chunk.

    What is asked of one block happens in the order in which it is asked: a read sees every write before it, whether
    somebody waited for that or not. A call may wait for the copy before it. Copies of different blocks overlap.
    """

    @property
    def num_bytes(self) -> int:
        """Capacity in bytes."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written, so that reads give zeros."""

    def read_into(self, tensor: Tensor) -> Transfer:
        """Start to fill a tensor with the block's bytes; it must not be touched until that is waited for.

        Args:
            tensor: 1-D, contiguous, of any format, with exactly `num_bytes` bytes. For a disk it is in host memory; its
                fast way is for tensors whose address is a multiple of 4096, as of `kernels.disk_io.aligned_buffer`.
        """

    def write_from(self, tensor: Tensor) -> Transfer:
        """Start to write a tensor's bytes; it must not change until that is waited for.

        Args:
            tensor: Tensor, as of `read_into`.
        """

    def as_tensor(self, dtype: torch.dtype) -> Tensor:
        """Return the block's content as a 1-D tensor that takes no memory of the compute tier.

        The tensor is the block: what is written through it, others read from the block, and the other way round. Don't
        touch it while a copy of the block is in flight. It may outlive the block and the tier, but shows nothing of use
        then. While it lives, a disk tier goes through the system's page cache, which is slower: drop it soon.

        Raises:
            OSError: The disk lost the content.
        """

    def free(self) -> None:
        """Free the memory once nothing is in flight; nothing but another `free` may follow.

        A block of a disk tier that is dropped without it holds its memory until the tier is closed.
        """


class Tier(Protocol):
    """Where pieces of chunks go that are not needed now."""

    @property
    def name(self) -> Literal["host", "disk"]:
        """Which kind it is."""

    @property
    def bytes_held(self) -> int:
        """The bytes of all blocks that are not freed."""

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block.

        Raises:
            ConfigError: There is not enough space for it.
        """

    def close(self) -> None:
        """Wait for everything in flight and give everything back; a second call does nothing."""


def bytes_of(tensor: Tensor, num_bytes: int) -> Tensor:
    """Return the uint8 view of a tensor that is copied to or from a block of `num_bytes`."""
    assert tensor.dim() == 1, f"a tensor of shape {tuple(tensor.shape)} for a block"
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} for a block"
    assert tensor.nbytes == num_bytes, f"a tensor of {tensor.nbytes} bytes for a block of {num_bytes}"
    return tensor.detach().view(torch.uint8)


class HostTier:
    """Host memory beside an accelerator.

    Args:
        pin_memory: Whether the blocks are page-locked, so that copies run beside computation; without an accelerator
            they never are. torch may round such memory up to a power of two.
    """

    name: Literal["host"] = "host"

    def __init__(self, pin_memory: bool) -> None:
        self.bytes_held = 0
        self._is_pinned = pin_memory and device_type() != "cpu"

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block."""
        block = _HostBlock(self, torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned))
        self.bytes_held += num_bytes
        return block

    def close(self) -> None:
        """Do nothing: the memory goes with the blocks."""


class _HostTransfer:
    """A copy of which an accelerator says when it is done; None for an event: it was done at once."""

    def __init__(self, event: torch.Event | None, tensor: Tensor) -> None:
        self._event = event
        # Its memory must not be used for something else before the copy is done, if the caller drops it.
        self._tensor: Tensor | None = tensor if event is not None else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._event = self._tensor = None

    def make_stream_wait(self) -> None:
        """Let what the accelerator's current stream is given from now on run after the copy."""
        if self._event is not None:
            self._event.wait()


class _HostBlock:
    """Bytes in host memory."""

    def __init__(self, tier: HostTier, memory: Tensor) -> None:
        self.num_bytes = memory.numel()
        self.is_empty = True
        self._tier = tier
        self._memory: Tensor | None = memory
        self._last: _HostTransfer | None = None

    def read_into(self, tensor: Tensor) -> Transfer:
        data, memory = bytes_of(tensor, self.num_bytes), self._held()
        self._wait_for_last(data)
        if self.is_empty:
            data.zero_()
        else:
            data.copy_(memory, non_blocking=True)
        return self._begun(data)

    def write_from(self, tensor: Tensor) -> Transfer:
        data, memory = bytes_of(tensor, self.num_bytes), self._held()
        self._wait_for_last(data)
        memory.copy_(data, non_blocking=True)
        self.is_empty = False
        return self._begun(data)

    def as_tensor(self, dtype: torch.dtype) -> Tensor:
        memory = self._held()
        self._wait_for_last(memory)
        self.is_empty = False  # somebody may write through it
        return memory.view(dtype)

    def free(self) -> None:
        if self._memory is None:
            return
        self._wait_for_last(self._memory)
        self._memory = None
        self._tier.bytes_held -= self.num_bytes

    def _held(self) -> Tensor:
        assert self._memory is not None, "the block was freed"
        return self._memory

    def _wait_for_last(self, other_side: Tensor) -> None:
        if self._last is None:
            return
        if other_side.device.type == "cpu":
            self._last.wait()
        else:  # the stream waits, and Python continues
            self._last.make_stream_wait()

    def _begun(self, other_side: Tensor) -> Transfer:
        event = None
        if other_side.device.type != "cpu":
            event = torch.Event(device=other_side.device)
            event.record()
        self._last = _HostTransfer(event, other_side)
        return self._last
