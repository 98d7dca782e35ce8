"""Memory tiers, which hold shards of chunks outside of the compute tier: interface, host memory, and the shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from booster.comm import offloaded_memory
from booster.device import device_type
from booster.plugins.sharding.pinned_memory import PinnedBlock, PinnedMemory

Direction: TypeAlias = Literal["load", "store"]
"""Of a copy: from a tier, or to it."""


class Transfer(Protocol):
    """Copy in flight between a block and a tensor."""

    def wait(self) -> None:
        """Wait for the copy: on the host, or in the current stream for an accelerator's tensor. Idempotent.

        Raises:
            OSError: The disk failed; the target of a read is undefined. Raised by every call.
        """


class TierBlock(Protocol):
    """Memory in a tier for one shard of a chunk.

    Operations on one block run in call order: a read sees all earlier writes, even without a wait. A call may wait for
    the previous copy. Copies of different blocks overlap. Reads of a block that was never written return zeros.
    """

    def read_into(self, tensor: Tensor) -> Transfer:
        """Start a read into a tensor, which must not be accessed before the wait.

        Args:
            tensor: 1-D contiguous tensor of any dtype with exactly the block's bytes, in host memory for a disk. Disk
                reads are fastest at addresses that are multiples of 4096, as of `kernels.disk_io.aligned_buffer`.
        """

    def write_from(self, tensor: Tensor) -> Transfer:
        """Start a write of a tensor, which must not change before the wait.

        Args:
            tensor: Source; requirements as for `read_into`.
        """

    def as_tensor(self, dtype: torch.dtype, *, waits: bool = True) -> Tensor:
        """Return the block as a 1-D tensor without memory in the compute tier.

        Args:
            dtype: Dtype of the tensor.
            waits: If False, do not wait for copies in flight: the next call does. No effect on a disk.

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
    def has_streams(self) -> bool:
        """Whether an accelerator's copies run in streams of their own."""

    def stream(self, direction: Direction, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of the stream of an accelerator's copies; an empty one if there is none.

        The stream waits for the current one when the context is entered.

        Args:
            direction: Direction of the copies.
            device: Device of the tensors.
        """

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block.

        Raises:
            ConfigError: There is not enough space for it.
        """


def bytes_of(tensor: Tensor, num_bytes: int) -> Tensor:
    """Return the uint8 view of a tensor that is copied to or from a block of `num_bytes`."""
    assert tensor.dim() == 1, f"a tensor of shape {tuple(tensor.shape)} for a block"
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} for a block"
    assert tensor.nbytes == num_bytes, f"a tensor of {tensor.nbytes} bytes for a block of {num_bytes}"
    return tensor.detach().view(torch.uint8)


# Note [Copies of an accelerator]
# Loads and stores run in a stream each, so that they overlap with computation and with each other. A copy is ordered
# behind everything that was in the current stream when it was started, which may have used the memory of its tensor,
# and behind the last copy of its block. What is started in the current stream later runs beside it. `Transfer.wait`
# ends that: the tensor, or its memory, may be used in the current stream. Only `as_tensor` and `free` make the host
# wait. Memory that is not pinned is copied in the current stream, as the host waits for such copies anyway.


class HostTier:
    """Tier in the host memory of an accelerator; see Note [Copies of an accelerator].

    Args:
        pin_memory: If True, blocks are pinned, so that copies overlap with computation; no effect without an
            accelerator.
        name: Kind of the tier; "disk" for fake memory in place of files, in a simulation.
    """

    def __init__(self, pin_memory: bool, name: Literal["host", "disk"] = "host") -> None:
        self.name = name
        self.bytes_held = 0
        self._pinned = PinnedMemory() if pin_memory and device_type() != "cpu" else None
        self._streams: dict[tuple[Direction, torch.device], torch.Stream] = {}

    @property
    def has_streams(self) -> bool:
        """See `Tier.has_streams`."""
        return self._pinned is not None

    @contextmanager
    def stream(self, direction: Direction, device: torch.device) -> Iterator[None]:
        """See `Tier.stream`."""
        if self._pinned is None or device.type == "cpu":
            yield
            return
        key = (direction, device)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device=device)
        self._streams[key].wait_stream(torch.accelerator.current_stream(device))
        with self._streams[key]:
            yield

    def new_block(self, num_bytes: int) -> TierBlock:
        """Return an empty block."""
        if self._pinned is not None:
            block = _HostBlock(self, self._pinned.allocate(num_bytes))
        else:
            with offloaded_memory():
                block = _HostBlock(self, torch.empty(num_bytes, dtype=torch.uint8))
        self.bytes_held += num_bytes
        return block


class _HostTransfer:
    """Copy with an accelerator event, or None if it was synchronous."""

    def __init__(self, event: torch.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()

    def wait_on_host(self) -> None:
        """Make the host wait for the copy."""
        # Behind a wait for a later copy, all earlier ones of the stream are done.
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        self._event = None


class _HostBlock:
    """Block in host memory."""

    def __init__(self, tier: HostTier, memory: Tensor | PinnedBlock) -> None:
        self._tier = tier
        self._pinned = None if isinstance(memory, Tensor) else memory
        self._memory: Tensor | None = memory if isinstance(memory, Tensor) else memory.memory
        self.num_bytes = self._memory.numel()
        self.is_empty = True
        self._last: _HostTransfer | None = None

    def read_into(self, tensor: Tensor) -> Transfer:
        data, memory = bytes_of(tensor, self.num_bytes), self._held()
        if self.is_empty:
            data.zero_()
            return _HostTransfer(None)
        return self._copy(data, memory, data.device, "load")

    def write_from(self, tensor: Tensor) -> Transfer:
        data, memory = bytes_of(tensor, self.num_bytes), self._held()
        self.is_empty = False
        return self._copy(memory, data, data.device, "store")

    def as_tensor(self, dtype: torch.dtype, *, waits: bool = True) -> Tensor:
        memory = self._held()
        if waits:
            self._wait_on_host()
        if self.is_empty:
            memory.zero_()
        self.is_empty = False  # the caller may write through it
        return memory.view(dtype)

    def free(self) -> None:
        if self._memory is None:
            return
        self._wait_on_host()
        self._memory = None
        if self._pinned is not None:
            self._pinned.free()
        self._tier.bytes_held -= self.num_bytes

    def _held(self) -> Tensor:
        assert self._memory is not None, "the block was freed"
        return self._memory

    def _wait_on_host(self) -> None:
        if self._last is not None:
            self._last.wait_on_host()

    def _copy(self, target: Tensor, source: Tensor, device: torch.device, direction: Direction) -> Transfer:
        if device.type == "cpu":
            self._wait_on_host()
            target.copy_(source)
            self._last = _HostTransfer(None)
            return self._last
        with self._tier.stream(direction, device):
            if self._last is not None:
                self._last.wait()
            target.copy_(source, non_blocking=True)
            event = torch.Event(device=device)
            event.record()
        self._last = _HostTransfer(event)
        return self._last


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
        self._tier: Tier | None = None
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
            self._tier, self._block = tier, tier.new_block(self.num_bytes)

    @property
    def has_streams(self) -> bool:
        """Whether copies to and from the offload tier run beside computation."""
        return self._tier is not None and self._tier.has_streams and self.device.type != "cpu"

    def stream(self, direction: Direction) -> AbstractContextManager[object]:
        """Return the context of the stream in which the shard is copied; see Note [Copies of an accelerator]."""
        return nullcontext() if self._tier is None else self._tier.stream(direction, self.device)

    def load(self, target: torch.Tensor) -> Transfer | None:
        """Start a copy of the shard into a flat tensor, which must not be used before the wait for it, if there is one.

        Returns:
            Transfer of an accelerator's tensor; None if the copy is in the current stream, or done.
        """
        if self.tensor is not None:
            target.copy_(self.tensor)
            return None
        if self._goes_through_host(target):
            host = torch.empty_like(target, device="cpu")
            self._held().read_into(host).wait()
            target.copy_(host)
            return None
        return _in_flight(self._held().read_into(target), target)

    def store(self, source: torch.Tensor) -> Transfer | None:
        """Start to overwrite the shard with a flat tensor, which must not be changed before the wait, as for `load`."""
        if self.tensor is not None:
            self.tensor.copy_(source)
            return None
        source = source.cpu() if self._goes_through_host(source) else source
        return _in_flight(self._held().write_from(source), source)

    def copy_to(self, other: ChunkShard) -> None:
        """Copy the elements into another shard, as its dtype; the accelerator converts those that come from the host.

        The memory of a shard in the host tier must not be written before the next `as_tensor`.
        """
        target = other.as_tensor()
        if self.tensor is not None or target.device == self.device or self._goes_through_host(target):
            target.copy_(self.as_tensor())
            return
        loaded = target if self.dtype == target.dtype else torch.empty_like(target, dtype=self.dtype)
        finish_transfer(self.load(loaded))
        target.copy_(loaded)

    def as_tensor(self, *, waits: bool = True) -> torch.Tensor:
        """Return the shard as writable memory: its tensor, or a mapping of the offload tier without a copy.

        Args:
            waits: If True, the host waits for copies of the shard in flight; if False, the next call does.
        """
        if self.tensor is not None:
            return self.tensor
        self._mapped = self._held().as_tensor(self.dtype, waits=waits)  # kept: a mapping of a file is costly
        return self._mapped

    def offload(self, tier: Tier) -> None:
        """Move the shard to the offload tier."""
        if self.tensor is not None:
            tensor, self.tensor = self.tensor, None
            self.allocate(tier)
            finish_transfer(self.store(tensor))

    def fetch(self) -> None:
        """Move the shard to memory."""
        if self._block is not None:
            tensor = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            finish_transfer(self.load(tensor))
            self.drop()
            self.tensor = tensor

    def drop(self) -> None:
        """Free the memory or the block of the shard."""
        self.tensor = self._mapped = None
        if self._block is not None:
            self._block.free()
            self._block = self._tier = None

    def _held(self) -> TierBlock:
        assert self._block is not None, "nothing was made yet"
        return self._block

    def _goes_through_host(self, tensor: torch.Tensor) -> bool:
        return self._tier is not None and self._tier.name == "disk" and tensor.device.type != "cpu"


def _in_flight(transfer: Transfer, tensor: torch.Tensor) -> Transfer | None:
    if tensor.device.type == "cpu":
        transfer.wait()
        return None
    return transfer


def finish_transfer(transfer: Transfer | None) -> None:
    """Wait for a transfer, if there is one."""
    if transfer is not None:
        transfer.wait()
