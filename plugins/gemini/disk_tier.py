"""A tier of memory on a disk: blocks in one file of this process."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Literal

import torch
from torch import Tensor

from booster.errors import ConfigError
from booster.kernels.disk_io import DiskQueue
from booster.optim.offload.directory import OwnDirectory
from booster.plugins.gemini.block_file import BlockFile, DiskTransfer, whole_pages
from booster.plugins.gemini.tiers import TierBlock, Transfer, bytes_of

__all__ = ["DiskTier"]


class DiskTier:
    """Blocks in a file of this process, which is removed with the tier or the process.

    A tier that is dropped with all its blocks is closed. In a forked process it can't be used, and closing it does
    nothing.

    Args:
        directory: Under which the file goes, made if it is not there; None: the system's one for temporary files.
        num_threads: How many reads and writes run at once, where the system has no queue of its own.

    Raises:
        ConfigError: No file can be made there, or there are no threads.
    """

    name: Literal["disk"] = "disk"

    def __init__(self, directory: str | None, num_threads: int = 2) -> None:
        self.bytes_held = 0
        queue = DiskQueue(num_threads)
        try:
            if directory is not None:
                os.makedirs(directory, exist_ok=True)
            own = OwnDirectory(directory, contents="model data", setting="offload_dir")
            self._file = BlockFile(own.path / "pieces.bin", queue)
        except OSError as error:
            queue.close()
            raise ConfigError(
                f"the file for model data can't be made: {error}. Give an offload_dir that can be written to"
            ) from error
        self._finalizer = weakref.finalize(self, _close, queue, self._file, own, os.getpid())

    def new_block(self, num_bytes: int) -> TierBlock:
        """Returns an empty block, whose room on the disk is reserved.

        Raises:
            ConfigError: The disk is full, or the tier is closed or another process's.
            OSError: The disk failed.
        """
        offset, is_zero = self._file.allocate(whole_pages(num_bytes))
        self.bytes_held += num_bytes
        return _DiskBlock(self, self._file, num_bytes, offset, is_zero)

    def close(self) -> None:
        """Waits for everything under way and removes the file; a second call does nothing."""
        self._finalizer()


def _close(queue: DiskQueue, file: BlockFile, directory: OwnDirectory, process: int) -> None:
    """Closes a tier; a function of its own, so that it also runs when the tier is dropped."""
    if os.getpid() == process:
        queue.close()
        file.close()
        directory.remove()


class _DiskBlock:
    """Bytes of the file from an offset on."""

    def __init__(self, tier: DiskTier, file: BlockFile, num_bytes: int, offset: int, is_zero: bool) -> None:
        self.num_bytes = num_bytes
        self.is_empty = True
        self._tier = tier  # with which the file would be closed
        self._file = file
        self._offset = offset
        self._is_zero = is_zero  # what the file has there, as long as the block is empty
        self._is_freed = False
        self._last: DiskTransfer | None = None
        self._last_write: DiskTransfer | None = None
        self._mapped: weakref.ref[mmap.mmap] | None = None

    def read_into(self, tensor: Tensor) -> Transfer:
        data = self._begin(tensor)
        if self.is_empty:
            data.zero_()
            return DiskTransfer([])
        error = self._lost()
        if error is not None:
            return DiskTransfer([], error=error)
        self._last = self._file.read(data, self._offset)
        return self._last

    def write_from(self, tensor: Tensor) -> Transfer:
        data = self._begin(tensor)
        self.is_empty = False
        self._last = self._last_write = self._file.write(data, self._offset)
        return self._last

    def as_tensor(self, dtype: torch.dtype) -> Tensor:
        assert not self._is_freed, "the block was freed"
        self._wait_for_transfers()
        error = self._lost()
        if error is not None:
            raise error.with_traceback(None)
        if self.num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        memory = None if self._mapped is None else self._mapped()
        if memory is None:
            memory = self._file.map(self._offset, self.num_bytes)
            self._mapped = weakref.ref(memory)
        start = self._offset % mmap.ALLOCATIONGRANULARITY
        tensor = torch.frombuffer(memory, dtype=dtype, count=self.num_bytes // dtype.itemsize, offset=start)
        if self.is_empty and not self._is_zero:
            tensor.zero_()
        self.is_empty = False  # somebody may write through it
        return tensor

    def free(self) -> None:
        if self._is_freed:
            return
        self._wait_for_transfers()
        self._is_freed = True
        self._tier.bytes_held -= self.num_bytes
        extent = (self._offset, whole_pages(self.num_bytes))
        memory = None if self._mapped is None else self._mapped()
        if memory is None:
            self._file.free(extent)
        else:  # another block there would show up in the tensor
            weakref.finalize(memory, self._file.free, extent).atexit = False

    def _begin(self, tensor: Tensor) -> Tensor:
        assert not self._is_freed, "the block was freed"
        assert tensor.device.type == "cpu", f"a tensor on {tensor.device} for a block on a disk"
        data = bytes_of(tensor, self.num_bytes)
        self._wait_for_transfers()
        return data

    def _wait_for_transfers(self) -> None:
        if self._last is not None:
            self._last.settle()

    def _lost(self) -> OSError | None:
        """Returns the error of the last write, if it failed and the content is undefined."""
        return None if self._last_write is None else self._last_write.error
