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

from .build import load_kernel

MAX_RANKS = 64
# Size of a slot: large enough to amortize synchronization, small enough that the slots of a few ranks fit into a cache.
_SLOT_BYTES = 256 * 2**10
_MOST_BYTES = 16 * 2**20  # limit for all slots, two per rank
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
_TIMED_OUT, _PEER_ENDED, _DIFFERS, _INTERRUPTED = 1, 2, 3, 4


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
class Ticket:
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
    ) -> tuple[SharedMemory, Ticket]:
        """Create the shared memory; return rank 0's endpoint, and the handle by which the other ranks attach.

        Raises:
            RuntimeError: The memory could not be allocated; the message names the system call that failed.
        """
        slot_bytes, key = _slot_bytes(num_ranks), secrets.randbits(63)
        native = _module().create(num_ranks, slot_bytes, key, timeout_seconds, instruction_set)
        ticket = Ticket(os.getpid(), native.file_number(), key, slot_bytes)
        return cls(native, num_ranks, 0, timeout_seconds), ticket

    @classmethod
    def attach(
        cls, ticket: Ticket, num_ranks: int, rank: int, timeout_seconds: float, *, instruction_set: str = ""
    ) -> SharedMemory:
        """Attach to the shared memory; return this rank's endpoint.

        Raises:
            RuntimeError: The memory can't be attached; the message names the system call that failed.
        """
        native = _module().attach(
            ticket.process_id,
            ticket.file_number,
            num_ranks,
            rank,
            ticket.slot_bytes,
            ticket.key,
            timeout_seconds,
            instruction_set,
        )
        return cls(native, num_ranks, rank, timeout_seconds)

    def begin(self) -> None:
        """Enable this endpoint; call it after all ranks have attached. No communication."""
        self._native.begin()

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of this rank's later collectives. Any thread may call it. No communication."""
        self._timeout_seconds = seconds
        self._native.set_timeout(seconds)

    def all_reduce(self, tensor: torch.Tensor, operator: Literal["sum", "max"], number: int) -> None:
        """Reduce a tensor in place, in rank order, bitwise equal on all ranks; 16-bit dtypes are summed in fp32."""
        _require_flat(tensor)
        arguments = tensor.data_ptr(), tensor.numel(), _ELEMENT_TYPES[tensor.dtype], _OPERATORS[operator]
        self._require_done(self._native.all_reduce(number, *arguments))

    def reduce_scatter(
        self, payload: torch.Tensor, output: torch.Tensor, number: int, *, accumulate: bool = False
    ) -> None:
        """Sum this rank's shard over the ranks, and store the sum in `output` or add it to it.

        16-bit dtypes are summed in fp32: this rank's shard first, then those of the next ranks.

        Args:
            payload: Equal shards, one per rank.
            output: Tensor of the size of a shard, of the payload's dtype, or fp32 if that has 16 bits. It may alias
                this rank's shard of the payload.
            number: Sequence number among the group's reduce_scatter calls.
            accumulate: If True, the sum is added to `output`.
        """
        _require_flat(payload, output)
        is_widened = output.dtype == torch.float32 and payload.dtype in (torch.bfloat16, torch.float16)
        if payload.numel() != self._num_ranks * output.numel() or not (is_widened or payload.dtype == output.dtype):
            raise AssertionError(f"{payload.numel()} {payload.dtype} into {output.numel()} {output.dtype}")
        types = _ELEMENT_TYPES[payload.dtype], _ELEMENT_TYPES[output.dtype]
        addresses = payload.data_ptr(), output.data_ptr()
        self._require_done(self._native.reduce_scatter(number, *addresses, output.numel(), *types, accumulate))

    def all_gather(self, buffer: torch.Tensor, own: torch.Tensor, number: int) -> None:
        """Gather the ranks' shards into a buffer. `own` may alias this rank's shard in it."""
        _require_flat(buffer, own)
        self._require_pieces(buffer, own)
        self._require_done(self._native.all_gather(number, buffer.data_ptr(), own.data_ptr(), own.nbytes))

    def all_to_all(self, output: torch.Tensor, payload: torch.Tensor, number: int) -> None:
        """Send shard r of the payload to rank r, which stores it at this rank's index. The tensors must not overlap."""
        _require_flat(output, payload)
        if (output.numel(), output.dtype) != (payload.numel(), payload.dtype) or payload.numel() % self._num_ranks:
            raise AssertionError(
                f"{payload.numel()} {payload.dtype} into {output.numel()} {output.dtype} of {self._num_ranks} ranks"
            )
        piece_bytes = payload.nbytes // self._num_ranks
        self._require_done(self._native.all_to_all(number, output.data_ptr(), payload.data_ptr(), piece_bytes))

    def broadcast(self, tensor: torch.Tensor, source: int, number: int) -> None:
        """Broadcast the tensor of group rank `source`, in place."""
        _require_flat(tensor)
        if not 0 <= source < self._num_ranks:
            raise AssertionError(f"rank {source} of {self._num_ranks}")
        self._require_done(self._native.broadcast(number, tensor.data_ptr(), tensor.nbytes, source))

    def abort(self) -> None:
        """Make current and later collectives fail on all ranks. Any thread may call it at any time."""
        self._native.abort()

    def _require_pieces(self, buffer: torch.Tensor, own: torch.Tensor) -> None:
        if (buffer.numel(), buffer.dtype) != (self._num_ranks * own.numel(), own.dtype):
            raise AssertionError(
                f"{buffer.numel()} {buffer.dtype} are not {self._num_ranks} shards of {own.numel()} {own.dtype}"
            )

    def _require_done(self, failure: tuple[int, int] | None) -> None:
        if failure is not None:
            raise self._error(*failure)

    def _error(self, reason: int, rank: int) -> SharedMemoryError:
        if reason == _TIMED_OUT:
            return SharedMemoryError(f"rank {rank} of the group timed out after {self._timeout_seconds:g} s")
        if reason == _PEER_ENDED:
            return SharedMemoryError(f"the connection is lost: the process of rank {rank} of the group has ended", rank)
        if reason == _DIFFERS:
            return SharedMemoryError(f"aborted, as the ranks are in different calls: {self._calls()}")
        if reason == _INTERRUPTED:
            return SharedMemoryError(f"aborted, as rank {rank} of the group was interrupted")
        if rank == self._rank:
            return SharedMemoryError("aborted by this rank", is_own_abort=True)
        return SharedMemoryError(f"aborted by rank {rank} of the group")

    def _calls(self) -> str:
        """Return a description of the ranks' current calls; ranks in equal calls are listed together."""
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(self._native.facts_of_ranks()):
            ranks.setdefault(_call_text(*facts), []).append(rank)
        return ", ".join(f"{text} on {_listed(those)} of the group" for text, those in ranks.items())


def _module() -> ModuleType:
    module = load_kernel("shm_collectives")
    if module is None:
        raise RuntimeError("the kernel 'shm_collectives' is not available")
    return module


def _slot_bytes(num_ranks: int) -> int:
    return min(_SLOT_BYTES, _MOST_BYTES // (2 * num_ranks)) // _PAGE_BYTES * _PAGE_BYTES


def _require_flat(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise AssertionError(f"a tensor on {tensor.device} with stride {tensor.stride()}")


def _call_text(operation: int, number: int, length: int, element_type: int, detail: int) -> str:
    name = _OPERATIONS[operation]
    text = f"{name} number {number} of {length} "
    if name not in _REDUCTIONS:
        return text + "bytes" + (f" from rank {detail}" if name == "broadcast" else "")
    dtype = str(_DTYPES[element_type]).removeprefix("torch.")
    return text + dtype + (" (max)" if detail == _OPERATORS["max"] else "")


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
