"""Tensors over a file whose addresses stay, while their contents move between places of the file."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

__all__ = ["PlaneMapping"]

# Note [Views of the file]
# `optimizer.state` holds tensors over a mapping of the file: who reads them (state_dict, a checkpoint) gets pages from
# the disk as they are touched, and memory is the page cache's, which the system takes back. A step writes a chunk's new
# states to another place of the file. So that the tensors need not be made anew, and a parameter that spans several
# chunks is one stretch of addresses, the addresses of the chunk are then mapped to the new place (MAP_FIXED), or to
# memory where it can't be written. Reads and writes past the page cache and the mapping may be mixed: the system
# writes a changed page to the disk before a direct read of it, and forgets cached pages when they are directly written.
_MAP_FIXED = 0x10  # the same on every system; Python has no name for it
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _system_mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    return function


_mmap = _system_mmap()


class PlaneMapping:
    """Addresses that show the first bytes of a file at first, and then what they are told to.

    They are given back when the object and all its tensors are gone.

    Args:
        descriptor: The file, open for reading and writing.
        num_bytes: How many, whole pages.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns `numel` elements from byte `start` on, with a storage of their own: saving it saves nothing else."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def show_file(self, start: int, num_bytes: int, descriptor: int, offset: int) -> None:
        """Lets the bytes from `start` on be those of the file at `offset`; all are whole pages."""
        self._map(start, num_bytes, mmap.MAP_SHARED, descriptor, offset)

    def show_memory(self, start: int, num_bytes: int) -> None:
        """Lets the bytes from `start` on be zeros in memory."""
        self._map(start, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

    def _map(self, start: int, num_bytes: int, flags: int, descriptor: int, offset: int) -> None:
        address = self._address + start
        if _mmap(address, num_bytes, _READ_WRITE, flags | _MAP_FIXED, descriptor, offset) != address:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {num_bytes} bytes: {os.strerror(code)}")
