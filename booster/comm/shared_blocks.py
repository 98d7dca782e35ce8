"""Blocks of memory that ranks of one host map, without any copy between them."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from .collectives import all_gather_numbers, any_rank, group_rank

_KEY_BYTES = 8
_MAX_KEY = 2**62
_NO_FILE = -1


def share_blocks(
    num_blocks: int, block_bytes: int, host_ranks: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[np.ndarray] | None:
    """Make blocks of shared memory on every rank, and map those of all ranks of this host.

    The memory is gone with the last process that maps it, also if all are killed.

    Args:
        num_blocks: Number of blocks per rank.
        block_bytes: Size of a block.
        host_ranks: Ranks of the group on this host, this one among them.
        group: Process group, optional; defaults to the world.

    Returns:
        Blocks of each of these ranks, as bytes of shape (num_blocks, block_bytes); None on all ranks if it is forbidden
        on some host, as it may be between containers.

    Collective: every rank of the group must call it.
    """
    num_bytes, rank, key = num_blocks * block_bytes, group_rank(group), secrets.randbelow(_MAX_KEY)
    own, descriptor = _make(num_bytes, key)
    try:
        records = all_gather_numbers([os.getpid(), descriptor, key], group)
        mapped = [own if other == rank else _attach(records[other], num_bytes) for other in host_ranks]
        found = [memory.reshape(num_blocks, block_bytes) for memory in mapped if memory is not None]
        # The key may be overwritten after it.
        return None if any_rank([len(found) < len(host_ranks)], group)[0] else found
    finally:
        if descriptor != _NO_FILE:
            os.close(descriptor)


def _make(num_bytes: int, key: int) -> tuple[np.ndarray | None, int]:
    """Return new memory with the key in its first bytes, and the descriptor by which other processes open it."""
    descriptor = _NO_FILE
    try:
        descriptor = os.memfd_create("booster-blocks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        memory = _map(descriptor, num_bytes)
    except (AttributeError, OSError):  # not Linux, or forbidden
        if descriptor != _NO_FILE:
            os.close(descriptor)
        return None, _NO_FILE
    memory[:_KEY_BYTES].view(np.int64)[0] = key
    return memory, descriptor


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
        memory = _map(descriptor, num_bytes) if os.fstat(descriptor).st_size == num_bytes else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return memory if memory is not None and int(memory[:_KEY_BYTES].view(np.int64)[0]) == key else None


def _map(descriptor: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
