"""Memory-mapped tensors of an open checkpoint."""

from __future__ import annotations

import mmap

import torch

from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.interface import TensorSpec

__all__ = ["mmap_tensors"]


def mmap_tensors(stored: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """Map every tensor of a checkpoint, by name; pages are read on access and can be evicted.

    The tensors stay valid after the checkpoint is closed. Writes change the process's memory, never the file.

    Args:
        stored: Open checkpoint.
    """
    mappings: dict[int, mmap.mmap] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in stored.specs.items():
        location = stored.locate(name)
        if location is None:
            tensors[name] = stored.read(name)  # .bin files are mapped by torch
            continue
        file, offset = location
        if spec.num_bytes > 0 and file.descriptor not in mappings:
            mappings[file.descriptor] = _mmap_file(stored.storage, file)
        tensors[name] = _tensor(mappings.get(file.descriptor), spec, offset)
    return tensors


def _mmap_file(storage: Storage, file: OpenFile) -> mmap.mmap:
    # One mapping per file, because the number of mappings is limited. Private: copy on write.
    return mmap.mmap(file.descriptor, storage.size(file), access=mmap.ACCESS_COPY)


def _tensor(mapping: mmap.mmap | None, spec: TensorSpec, offset: int) -> torch.Tensor:
    if mapping is None or spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(mapping, dtype=spec.dtype, count=spec.numel, offset=offset).reshape(spec.shape)
