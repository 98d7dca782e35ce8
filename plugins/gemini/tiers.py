"""Memory tiers: hold chunk shards outside of the compute tier. Interface, and host memory."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from booster.comm import offloaded_memory
from booster.device import device_type


class Transfer(Protocol):
    """Copy in flight between a block and a tensor."""

    def wait(self) -> None:
        """Wait for the copy. Idempotent.

        Raises:
            OSError: The disk failed; the target of a read is undefined. Raised by every call.
        """


class TierBlock(Protocol):
    """Memory in a tier for one shard of a chunk.

    Operations on one block run in call order: a read sees all earlier writes, even without a wait. A call may wait for
    the previous copy. Copies of different blocks overlap.
    """

    @property
    def num_bytes(self) -> int:
        """Capacity in bytes."""

    @property
    def is_empty(self) -> bool:
        """Whether the block was never written; reads then return zeros."""

    def read_into(self, tensor: Tensor) -> Transfer:
        """Start a read into a tensor, which must not be accessed before the wait.

        Args:
            tensor: 1-D contiguous tensor of any dtype with exactly `num_bytes` bytes, in host memory for a disk. Disk
                reads are fastest at addresses that are multiples of 4096, as of `kernels.disk_io.aligned_buffer`.
        """

    def write_from(self, tensor: Tensor) -> Transfer:
        """Start a write of a tensor, which must not change before the wait.

        Args:
            tensor: Source; requirements as for `read_into`.
        """

    def as_tensor(self, dtype: torch.dtype) -> Tensor:
        """Return the block as a 1-D tensor without memory in the compute tier.

        The tensor shares the block's memory. It must not be accessed while a copy of the block is in flight. Its
        content is undefined after the block or the tier is freed. While it exists, a disk tier uses the system's page
        cache, which is slower: drop it soon.

        Raises:
            OSError: The disk lost the content.
        """

    def free(self) -> None:
        """Free the memory after all copies have finished; only another `free` may follow.

        A dropped block of a disk tier keeps its space until the tier is closed if `free` was not called.
        """


class Tier(Protocol):
    """Memory tier for offloaded shards."""

    @property
    def name(self) -> Literal["host", "disk"]:
        """Kind of the tier."""

    @property
    def bytes_held(self) -> int:
        """Bytes of all blocks that are not freed."""

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block.

        Raises:
            ConfigError: There is not enough space for it.
        """

    def close(self) -> None:
        """Wait for all copies in flight and free all memory. Idempotent."""


def bytes_of(tensor: Tensor, num_bytes: int) -> Tensor:
    """Return the uint8 view of a tensor that is copied to or from a block of `num_bytes`."""
    assert tensor.dim() == 1, f"a tensor of shape {tuple(tensor.shape)} for a block"
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} for a block"
    assert tensor.nbytes == num_bytes, f"a tensor of {tensor.nbytes} bytes for a block of {num_bytes}"
    return tensor.detach().view(torch.uint8)


class HostTier:
    """Tier in the host memory of an accelerator.

    Args:
        pin_memory: If True, blocks are pinned, so that copies overlap with computation; no effect without an
            accelerator. torch may round pinned memory up to a power of two.
        name: Kind of the tier; "disk" for fake memory in place of files, in a simulation.
    """

    def __init__(self, pin_memory: bool, name: Literal["host", "disk"] = "host") -> None:
        self.name = name
        self.bytes_held = 0
        self._is_pinned = pin_memory and device_type() != "cpu"

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block."""
        with offloaded_memory():
            memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        block = _HostBlock(self, memory)
        self.bytes_held += num_bytes
        return block

    def close(self) -> None:
        """Do nothing: memory is freed with the blocks."""


class _HostTransfer:
    """Copy with an accelerator event, or None if it was synchronous."""

    def __init__(self, event: torch.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        # Behind a wait for a later copy, all earlier ones of the stream are done.
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        self._event = None

    def make_stream_wait(self) -> None:
        """Make the accelerator's current stream wait for the copy."""
        if self._event is not None:
            self._event.wait()


class _HostBlock:
    """Block in host memory."""

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
        self.is_empty = False  # the caller may write through it
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
        else:  # the stream waits, not Python
            self._last.make_stream_wait()

    def _begun(self, other_side: Tensor) -> Transfer:
        event = None
        if other_side.device.type != "cpu":
            event = torch.Event(device=other_side.device)
            event.record()
        self._last = _HostTransfer(event)
        return self._last
