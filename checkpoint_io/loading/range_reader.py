"""Parallel reading of the bytes of this rank's slices, in place where possible."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from booster.checkpoint_io.files.tensor_bytes import bytes_of
from booster.checkpoint_io.loading.stored_checkpoint import StoredCheckpoint
from booster.checkpoint_io.loading.stored_elements import ElementReader, assign_elements
from booster.checkpoint_io.worker_threads import run_in_threads
from booster.interface import TensorSlice

__all__ = ["read_slices"]

# A slice in contiguous CPU memory with the stored dtype is read in place. All others (other dtype, strides or device)
# go through a staging buffer in several reads. Four threads hold 4 * (STAGING_BYTES + SCRATCH_BYTES) = 32 MiB, for any
# model size.
READ_BYTES = 16 * 2**20
STAGING_BYTES = 6 * 2**20


@dataclass(frozen=True, slots=True)
class _FillTarget:
    """Slice to fill, with its memory as bytes if it can be read in place."""

    stored_name: str
    destination: TensorSlice
    tensor: torch.Tensor
    dtype: torch.dtype
    memory: np.ndarray | None


@dataclass(frozen=True, slots=True)
class _ReadRange:
    """Range of elements of a slice, counted from its first."""

    target: _FillTarget
    start: int
    stop: int


def read_slices(
    stored: StoredCheckpoint, named_slices: Sequence[tuple[str, TensorSlice]], *, num_threads: int = 4
) -> None:
    """Fill slices from a checkpoint. Not collective.

    Peak extra memory is 32 MiB with four threads, for any tensor size.

    Args:
        stored: Open checkpoint; its checksums are verified before, by `verify_ranges`.
        named_slices: Stored name and slice to fill; floats are converted to the dtype of the slice's memory.
        num_threads: Number of reader threads.

    Raises:
        CheckpointError: A file is truncated, or changed since it was opened.
    """
    targets = [_target(stored, name, tensor_slice) for name, tensor_slice in named_slices]
    batches = list(_batches(targets))
    run_in_threads(_SliceReader(stored).fill, batches, min(num_threads, len(batches)))
    for target in targets:
        if target.memory is not None and not target.tensor.is_inference():
            torch.autograd.graph.increment_version(target.tensor)  # as a copy_ would


class _SliceReader(threading.local):
    """Fills ranges with buffers per thread."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._reader = ElementReader(stored)
        self._staging: np.ndarray | None = None

    def fill(self, batch: Sequence[_ReadRange]) -> None:
        for read_range in batch:
            target = read_range.target
            itemsize = target.dtype.itemsize
            if target.memory is not None:
                self._read(read_range, target.memory[read_range.start * itemsize : read_range.stop * itemsize])
                continue
            if self._staging is None:
                self._staging = np.empty(STAGING_BYTES, dtype=np.uint8)
            staged = self._staging[: (read_range.stop - read_range.start) * itemsize]
            self._read(read_range, staged)
            assign_elements(target.tensor, read_range.start, torch.from_numpy(staged).view(target.dtype))

    def _read(self, read_range: _ReadRange, out: np.ndarray) -> None:
        tensor_slice = read_range.target.destination
        first = tensor_slice.span[0]
        self._reader.read(
            read_range.target.stored_name, tensor_slice.box, (first + read_range.start, first + read_range.stop), out
        )


def _target(stored: StoredCheckpoint, name: str, tensor_slice: TensorSlice) -> _FillTarget:
    tensor, dtype = tensor_slice.tensor.detach(), stored.specs[name].dtype
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )
    memory = np.frombuffer(bytes_of(tensor), dtype=np.uint8) if is_plain else None
    return _FillTarget(name, tensor_slice, tensor, dtype, memory)


def _batches(targets: Sequence[_FillTarget]) -> Iterator[list[_ReadRange]]:
    """Group the ranges into batches for the threads: large slices are split, small ones combined."""

    batch: list[_ReadRange] = []
    free_bytes = READ_BYTES
    for target in targets:
        itemsize = target.dtype.itemsize
        step = (READ_BYTES if target.memory is not None else STAGING_BYTES) // itemsize
        for start in range(0, target.tensor.numel(), step):
            stop = min(start + step, target.tensor.numel())
            batch.append(_ReadRange(target, start, stop))
            free_bytes -= (stop - start) * itemsize
            if free_bytes <= 0:
                yield batch
                batch, free_bytes = [], READ_BYTES
    if batch:
        yield batch
