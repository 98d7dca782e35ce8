"""A dictionary of tensors in place of a model: any names, formats and strides."""

from __future__ import annotations

from oracles.faulting_storage import UnsyncedStorage
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.copy_elements import bytes_of
from booster.checkpoint_io.formats.safetensors import to_contiguous_cpu
from booster.interface import ModelWrapper, TensorSlice


class TensorsModel(ModelWrapper):
    """Wraps tensors by name; a load fills them."""

    def __init__(self, tensors):
        super().__init__(nn.Module())
        self.tensors = dict(tensors)

    def tensor_slices(self):
        """Returns all of them, whole."""
        return [TensorSlice.full(name, tensor, primary=True) for name, tensor in self.tensors.items()]

    def tied_names(self):
        """Returns none."""
        return {}


def save_tensors(path, tensors, *, shard_bytes=None, storage=None, **options):
    """Writes tensors as the engine does; with `shard_bytes`, into a directory of such shards."""
    io = GeneralCheckpointIO(storage=storage or UnsyncedStorage())
    if shard_bytes is not None:
        options |= {"shard": True, "size_per_shard": shard_bytes / 10**6}
    io.save_model(TensorsModel(tensors), path, **options)


def load_tensors(path, tensors, *, storage=None, **options):
    """Fills tensors from a checkpoint."""
    GeneralCheckpointIO(storage=storage or UnsyncedStorage()).load_model(TensorsModel(tensors), path, **options)


def bits(tensor):
    """Returns the bytes of a tensor in row-major order."""
    return bytes(bytes_of(to_contiguous_cpu(tensor)))
