"""Collectives of CPU tensors between processes of one host, through shared memory. Linux only.

There is no reference implementation: gloo is used if the kernel is not available (see `booster.comm.shared_memory`).
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from booster.errors import format_ranks

from .loader import load_kernel

MAX_RANKS = 64
# Size of a slot: large enough to amortize synchronization, small enough that the slots of a few ranks fit into a cache.
_SLOT_BYTES = 256 * 2**10
_MAX_BYTES = 16 * 2**20  # limit for all slots, two per rank
_PAGE_BYTES = 4096

_ELEMENT_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.uint8: 4,
    torch.int32: 5,
    torch.int64: 6,
}
_DTYPES = {code: dtype for dtype, code in _ELEMENT_TYPES.items()}
_OPERATORS = {"sum": 0, "max": 1}
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_REDUCTIONS = _OPERATIONS[:2]
_TIMED_OUT, _PEER_ENDED, _MISMATCH, _INTERRUPTED = 1, 2, 3, 4


class SharedMemoryError(RuntimeError):
    """A collective failed; all later ones of the group fail as well, on every rank.

    Attributes:
        ended_rank: Group rank whose process has exited, or None if that is not the cause.
        is_own_abort: Whether this rank called `abort`.
    """

    def __init__(self, message: str, ended_rank: int | None = None, *, is_own_abort: bool = False) -> None:
        super().__init__(message)
        self.ended_rank = ended_rank
        self.is_own_abort = is_own_abort


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """Handle by which a process attaches to memory created by another one.

    Attributes:
        process_id: Process that created the memory.
        file_number: File descriptor of the memory in that process.
        key: Random number stored in the memory, to verify the attachment.
        slot_bytes: Size of a slot.
    """

    process_id: int
    file_number: int
    key: int
    slot_bytes: int


def is_available() -> bool:
    """Return whether the kernel is available; the first call on a machine builds it, which takes some seconds."""
    return load_kernel("shm_collectives") is not None


def can_reduce(dtype: torch.dtype) -> bool:
    """Return whether reductions support this dtype; the other collectives support every dtype."""
    return dtype in _ELEMENT_TYPES


class SharedMemory:
    """Endpoint of one rank in the shared memory of a group; made by `create` on rank 0 and by `attach` on the others.

    Every method but `abort` and `set_timeout` is collective: all ranks call the same methods in the same order, from
    one thread at a time, with equal lengths, dtypes and sequence numbers. Tensors are contiguous and on the CPU.

    With `only_publishes` an operation lets the others have what it can without waiting for them. A second call
    completes it, before any other operation; until then its output is undefined, and its input must not change.

    Raises:
        SharedMemoryError: Raised by all collectives: a rank has exited, timed out, or called another collective.
    """

    def __init__(self, native: Any, num_ranks: int, rank: int, timeout_seconds: float) -> None:
        self._native = native
        self._num_ranks, self._rank = num_ranks, rank
        self._timeout_seconds = timeout_seconds

    @classmethod
    def create(
        cls, num_ranks: int, timeout_seconds: float, *, instruction_set: str = ""
    ) -> tuple[SharedMemory, SharedMemoryHandle]:
        """Create the shared memory; return rank 0's endpoint, and the handle by which the other ranks attach.

        Raises:
            RuntimeError: The memory could not be allocated; the message names the system call that failed.
        """
        slot_bytes, key = _slot_bytes(num_ranks), secrets.randbits(63)
        native = _module().create(num_ranks, slot_bytes, key, timeout_seconds, instruction_set)
        handle = SharedMemoryHandle(os.getpid(), native.file_number(), key, slot_bytes)
        return cls(native, num_ranks, 0, timeout_seconds), handle

    @classmethod
    def attach(
        cls, handle: SharedMemoryHandle, num_ranks: int, rank: int, timeout_seconds: float, *, instruction_set: str = ""
    ) -> SharedMemory:
        """Attach to the shared memory; return this rank's endpoint.

        Raises:
            RuntimeError: The memory can't be attached; the message names the system call that failed.
        """
        native = _module().attach(
            handle.process_id,
            handle.file_number,
            num_ranks,
            rank,
            handle.slot_bytes,
            handle.key,
            timeout_seconds,
            instruction_set,
        )
        return cls(native, num_ranks, rank, timeout_seconds)

    def enable(self) -> None:
        """Enable this endpoint; call it after all ranks have attached. No communication."""
        self._native.begin()

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of this rank's later collectives. Any thread may call it. No communication."""
        self._timeout_seconds = seconds
        self._native.set_timeout(seconds)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        operator: Literal["sum", "max"],
        sequence_number: int,
        *,
        only_publishes: bool = False,
    ) -> None:
        """Reduce a tensor in place, in rank order, bitwise equal on all ranks; 16-bit dtypes are summed in fp32."""
        _check_contiguous(tensor)
        arguments = tensor.data_ptr(), tensor.numel(), _ELEMENT_TYPES[tensor.dtype], _OPERATORS[operator]
        self._check_result(self._native.all_reduce(sequence_number, *arguments, only_publishes))

    def reduce_scatter(
        self,
        send_buffer: torch.Tensor,
        output: torch.Tensor,
        sequence_number: int,
        *,
        accumulate: bool = False,
        only_publishes: bool = False,
    ) -> None:
        """Sum this rank's shard over the ranks, and store the sum in `output` or add it to it.

        16-bit dtypes are summed in fp32: this rank's shard first, then those of the next ranks.

        Args:
            send_buffer: Equal shards, one per rank.
            output: Tensor of the size of a shard, of the buffer's dtype, or fp32 if that has 16 bits. It may alias
                this rank's shard of `send_buffer`.
            sequence_number: Sequence number among the group's reduce_scatter calls.
            accumulate: If True, the sum is added to `output`.
            only_publishes: See the class; the output may be another one when it is completed.
        """
        _check_contiguous(send_buffer, output)
        is_widened = output.dtype == torch.float32 and send_buffer.dtype in (torch.bfloat16, torch.float16)
        if send_buffer.numel() != self._num_ranks * output.numel() or not (
            is_widened or send_buffer.dtype == output.dtype
        ):
            raise AssertionError(f"{send_buffer.numel()} {send_buffer.dtype} into {output.numel()} {output.dtype}")
        types = _ELEMENT_TYPES[send_buffer.dtype], _ELEMENT_TYPES[output.dtype]
        addresses = send_buffer.data_ptr(), output.data_ptr()
        arguments = *addresses, output.numel(), *types, accumulate, only_publishes
        self._check_result(self._native.reduce_scatter(sequence_number, *arguments))

    def all_gather(
        self, buffer: torch.Tensor, local_shard: torch.Tensor, sequence_number: int, *, only_publishes: bool = False
    ) -> None:
        """Gather the ranks' shards into a buffer. `local_shard` may alias this rank's shard in it."""
        _check_contiguous(buffer, local_shard)
        if (buffer.numel(), buffer.dtype) != (self._num_ranks * local_shard.numel(), local_shard.dtype):
            raise AssertionError(
                f"{buffer.numel()} {buffer.dtype} are not {self._num_ranks} shards of"
                f" {local_shard.numel()} {local_shard.dtype}"
            )
        arguments = buffer.data_ptr(), local_shard.data_ptr(), local_shard.nbytes, only_publishes
        self._check_result(self._native.all_gather(sequence_number, *arguments))

    def all_to_all(
        self, output: torch.Tensor, send_buffer: torch.Tensor, sequence_number: int, *, only_publishes: bool = False
    ) -> None:
        """Send shard r of `send_buffer` to rank r, which stores it at this rank's index. No overlap is allowed."""
        _check_contiguous(output, send_buffer)
        if (output.numel(), output.dtype) != (
            send_buffer.numel(),
            send_buffer.dtype,
        ) or send_buffer.numel() % self._num_ranks:
            raise AssertionError(
                f"{send_buffer.numel()} {send_buffer.dtype} into {output.numel()} {output.dtype} of"
                f" {self._num_ranks} ranks"
            )
        shard_bytes = send_buffer.nbytes // self._num_ranks
        arguments = output.data_ptr(), send_buffer.data_ptr(), shard_bytes, only_publishes
        self._check_result(self._native.all_to_all(sequence_number, *arguments))

    def broadcast(self, tensor: torch.Tensor, source: int, sequence_number: int) -> None:
        """Broadcast the tensor of group rank `source`, in place."""
        _check_contiguous(tensor)
        if not 0 <= source < self._num_ranks:
            raise AssertionError(f"rank {source} of {self._num_ranks}")
        self._check_result(self._native.broadcast(sequence_number, tensor.data_ptr(), tensor.nbytes, source))

    def abort(self) -> None:
        """Make current and later collectives fail on all ranks. Any thread may call it at any time."""
        self._native.abort()

    def _check_result(self, failure: tuple[int, int] | None) -> None:
        if failure is not None:
            raise self._error(*failure)

    def _error(self, reason: int, rank: int) -> SharedMemoryError:
        if reason == _TIMED_OUT:
            return SharedMemoryError(f"rank {rank} of the group timed out after {self._timeout_seconds:g} s")
        if reason == _PEER_ENDED:
            return SharedMemoryError(f"the connection is lost: the process of rank {rank} of the group has ended", rank)
        if reason == _MISMATCH:
            return SharedMemoryError(f"aborted, as the ranks are in different calls: {self._describe_calls()}")
        if reason == _INTERRUPTED:
            return SharedMemoryError(f"aborted, as rank {rank} of the group was interrupted")
        if rank == self._rank:
            return SharedMemoryError("aborted by this rank", is_own_abort=True)
        return SharedMemoryError(f"aborted by rank {rank} of the group")

    def _describe_calls(self) -> str:
        """Return a description of the ranks' current calls; ranks in equal calls are listed together."""
        ranks_of: dict[str, list[int]] = {}
        for rank, call in enumerate(self._native.calls_of_ranks()):
            operation, sequence_number, length, element_type, detail = call
            name = _OPERATIONS[operation]
            text = f"{name} number {sequence_number} of {length} "
            if name in _REDUCTIONS:
                text += str(_DTYPES[element_type]).removeprefix("torch.")
                text += " (max)" if detail == _OPERATORS["max"] else ""
            else:
                text += "bytes" + (f" from rank {detail}" if name == "broadcast" else "")
            ranks_of.setdefault(text, []).append(rank)
        calls: list[str] = []
        for text, ranks in ranks_of.items():
            calls.append(f"{text} on {format_ranks(ranks)} of the group")
        return ", ".join(calls)


def _module() -> ModuleType:
    module = load_kernel("shm_collectives")
    if module is None:
        raise RuntimeError("the kernel 'shm_collectives' is not available")
    return module


def _slot_bytes(num_ranks: int) -> int:
    return min(_SLOT_BYTES, _MAX_BYTES // (2 * num_ranks)) // _PAGE_BYTES * _PAGE_BYTES


def _check_contiguous(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise AssertionError(f"a tensor on {tensor.device} with stride {tensor.stride()}")
