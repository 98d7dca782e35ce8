"""The tensors of an open checkpoint over the pages of its files: in memory only while they are looked at."""

from __future__ import annotations

import mmap

import torch

from booster.checkpoint_io.loading.reader import Checkpoint
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.interface import TensorSpec

__all__ = ["mapped_tensors"]


def mapped_tensors(stored: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every tensor by name; the system reads its pages when they are touched and may drop them again.

    They outlive the checkpoint's being closed. Writing into one changes this process's memory, never the file.

    Args:
        stored: The checkpoint, open.
    """
    mappings: dict[int, mmap.mmap] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in stored.specs.items():
        place = stored.locate(name)
        if place is None:
            tensors[name] = stored.read(name)  # of a .bin file, which torch maps itself
            continue
        file, offset = place
        if spec.num_bytes > 0 and file.descriptor not in mappings:
            mappings[file.descriptor] = _mapping(stored.storage, file)
        tensors[name] = _tensor(mappings.get(file.descriptor), spec, offset)
    return tensors


def _mapping(storage: Storage, file: OpenFile) -> mmap.mmap:
    # One for the whole file: there may be more tensors than a process may have mappings. Private and copied on a write.
    return mmap.mmap(file.descriptor, storage.size(file), access=mmap.ACCESS_COPY)


def _tensor(mapping: mmap.mmap | None, spec: TensorSpec, offset: int) -> torch.Tensor:
    if mapping is None or spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(mapping, dtype=spec.dtype, count=spec.numel, offset=offset).reshape(spec.shape)
