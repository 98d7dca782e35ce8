"""Blocks of memory that ranks of one host map, without any copy between them."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from .collectives import all_gather_numbers, any_rank, group_rank

_KEY_BYTES = 8
_MAX_KEY = 2**62
_NO_FILE = -1
_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # missing in Python's mmap module; Linux 6.1, also where the system makes no huge pages by itself
_MAP_FIXED = 0x10


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Blocks of shared memory that the ranks of one host map.

    Attributes:
        of_ranks: Blocks of each of these ranks, as bytes of shape (num_blocks, block_bytes).
        are_huge: Whether the blocks of all ranks of all hosts are in huge pages, as disks need them to be fast.
    """

    of_ranks: Sequence[np.ndarray]
    are_huge: bool


def share_blocks(
    num_blocks: int, block_bytes: int, host_ranks: Sequence[int], group: dist.ProcessGroup | None = None
) -> SharedBlocks | None:
    """Make blocks of shared memory on every rank, and map those of all ranks of this host.

    The memory is gone with the last process that maps it, also if all are killed.

    Args:
        num_blocks: Number of blocks per rank.
        block_bytes: Size of a block.
        host_ranks: Ranks of the group on this host, this one among them.
        group: Process group, optional; defaults to the world.

    Returns:
        The blocks; None on all ranks if it is forbidden on some host, as it may be between containers.

    Collective: every rank of the group must call it.
    """
    num_bytes, rank, key = num_blocks * block_bytes, group_rank(group), secrets.randbelow(_MAX_KEY)
    own, descriptor, is_huge = _make(num_bytes, key)
    try:
        records = all_gather_numbers([os.getpid(), descriptor, key], group)
        mapped = [own if other == rank else _attach(records[other], num_bytes) for other in host_ranks]
        found = [memory.reshape(num_blocks, block_bytes) for memory in mapped if memory is not None]
        # The key may be overwritten after it.
        is_forbidden, is_scattered = any_rank([len(found) < len(host_ranks), not is_huge], group)
        return None if is_forbidden else SharedBlocks(found, are_huge=not is_scattered)
    finally:
        if descriptor != _NO_FILE:
            os.close(descriptor)


def _make(num_bytes: int, key: int) -> tuple[np.ndarray | None, int, bool]:
    """Return new memory with the key in its first bytes, its descriptor for others, and whether it is huge pages."""
    descriptor = _NO_FILE
    try:
        descriptor = os.memfd_create("booster-blocks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _whole_huge_pages(num_bytes))
        memory, mapping, start = _map(descriptor, num_bytes)
    except (AttributeError, OSError):  # not Linux, or forbidden
        if descriptor != _NO_FILE:
            os.close(descriptor)
        return None, _NO_FILE, False
    memory[::_HUGE_PAGE_BYTES] = 0  # of a page that is there already a huge one is made at once
    try:
        mapping.madvise(_MADV_COLLAPSE, start, _whole_huge_pages(num_bytes))
        is_huge = True
    except OSError:  # an older kernel, or no free ones
        is_huge = False
    memory[:_KEY_BYTES].view(np.int64)[0] = key
    return memory, descriptor, is_huge


def _attach(record: Sequence[int], num_bytes: int) -> np.ndarray | None:
    """Return the memory of another process, or None if the system forbids it or the id means another process here."""
    process_id, file_number, key = record
    if file_number == _NO_FILE:
        return None
    try:
        descriptor = os.open(f"/proc/{process_id}/fd/{file_number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        is_expected = os.fstat(descriptor).st_size == _whole_huge_pages(num_bytes)
        memory = _map(descriptor, num_bytes)[0] if is_expected else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return memory if memory is not None and int(memory[:_KEY_BYTES].view(np.int64)[0]) == key else None


def _whole_huge_pages(num_bytes: int) -> int:
    return -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


def _map(descriptor: int, num_bytes: int) -> tuple[np.ndarray, mmap.mmap, int]:
    """Map a file so that huge pages are possible; return its bytes, and the mapping that they begin in with the offset.

    Raises:
        OSError: It is forbidden.
    """
    length = _whole_huge_pages(num_bytes)
    # Its memory is freed with all that lies in it, which an aligned address is not given for otherwise.
    mapping = mmap.mmap(-1, length + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapping, dtype=np.uint8)
    start = -everything.ctypes.data % _HUGE_PAGE_BYTES
    address = everything.ctypes.data + start
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if library.mmap(address, length, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), "shared memory can't be mapped")
    return everything[start : start + num_bytes], mapping, start
