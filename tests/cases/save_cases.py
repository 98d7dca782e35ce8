"""Saves small enough to be made thousands of times, by any number of ranks, and readers that say what a save left.

A version is a number, and every element of every tensor says which version it is of: so a mixture of two shows.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from oracles.faulting_storage import UnsyncedStorage
from safetensors.torch import load_file
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.errors import CheckpointError
from booster.interface import ModelWrapper, TensorSlice

SHARD_MB = 500e-6  # three shards of 4 KiB
OLD, NEW, NEXT = 1, 2, 3
NAMES = {OLD: "old", NEW: "new", NEXT: "next"}


class Net(nn.Module):
    """Tensors of several formats and sizes; each element is its number plus 10,000 times the version."""

    def __init__(self, version):
        super().__init__()
        self.weight = nn.Parameter(_numbers(4, 8, version=version))
        self.bias = nn.Parameter(_numbers(7, version=version))
        self.wide = nn.Parameter(_numbers(8, 9, version=version).to(torch.float64))
        self.scalar = nn.Parameter(_numbers(version=version))
        self.empty = nn.Parameter(torch.zeros(0, 3))


def _numbers(*shape, version):
    return (torch.arange(float(torch.Size(shape).numel())) + 10_000 * version).reshape(shape)


class SplitModel(ModelWrapper):
    """A model of which every rank holds a part of each tensor, cut anywhere, and of one a column."""

    def __init__(self, version):
        super().__init__(Net(version))
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def tensor_slices(self):
        """Returns the parts of this rank."""
        found = [self._span(name, parameter.data) for name, parameter in self.module.named_parameters()]
        if 8 % self.num_ranks == 0:
            found[0] = self._columns("weight", self.module.weight.data)
        return found

    def _span(self, name, tensor):
        start, stop = (tensor.numel() * part // self.num_ranks for part in (self.rank, self.rank + 1))
        whole = TensorSlice.full(name, tensor, primary=True)
        if self.num_ranks == 1 or not tensor.numel():
            return TensorSlice.full(name, tensor, primary=self.rank == 0)
        part = tensor.view(-1)[start:stop]
        return TensorSlice(
            name=name,
            dtype=tensor.dtype,
            global_shape=whole.global_shape,
            box=whole.box,
            span=(start, stop),
            tensor=part,
            primary=True,
        )

    def _columns(self, name, tensor):
        width = tensor.shape[1] // self.num_ranks
        box = ((0, tensor.shape[0]), (self.rank * width, width))
        part = tensor[:, self.rank * width : (self.rank + 1) * width]
        return TensorSlice(
            name=name,
            dtype=tensor.dtype,
            global_shape=tuple(tensor.shape),
            box=box,
            span=(0, part.numel()),
            tensor=part,
            primary=True,
        )


# How each kind of save is called: the name below the root, and the options.
SAVES = {
    "directory": ("m", {"shard": True, "size_per_shard": SHARD_MB}),
    "one shard": ("m", {"shard": True, "size_per_shard": 1000 * SHARD_MB}),
    "bin directory": ("m", {"shard": True, "size_per_shard": SHARD_MB, "use_safetensors": False}),
    "file": ("m.safetensors", {}),
    "bin file": ("m.bin", {"use_safetensors": False}),
}


def save(root, version, case="directory", *, storage=None, use_async=False, **io_options):
    """Saves a version on all ranks that run, or on this process alone, and waits for it."""
    name, options = SAVES[case]
    io = GeneralCheckpointIO(storage=storage or UnsyncedStorage(), **io_options)
    io.save_model(SplitModel(version), root / name, use_async=use_async, **options)
    io.wait()


def read(root, case="directory", group=None, storage=None):
    """Returns the name of the version that is there, "nothing" where no checkpoint is, and else what is wrong."""
    path = root / SAVES[case][0]
    model = ModelWrapper(Net(0))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    try:
        GeneralCheckpointIO(group, storage or UnsyncedStorage()).load_model(model, path)
    except CheckpointError as error:
        is_nothing = "does not exist" in str(error) or "holds no model" in str(error)
        return "nothing" if is_nothing else f"error: {error}"
    return version_of(model)


def read_as_transformers(path):
    """As `read` of a directory, by the rules of `from_pretrained`: a single file, else what an index names."""
    for single, load in (("model.safetensors", load_file), ("pytorch_model.bin", _torch_load)):
        index = path / f"{single}.index.json"
        if (path / single).exists():
            files = [single]
        elif index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            continue
        model = ModelWrapper(Net(0))
        try:
            model.load_state_dict({name: one for file in files for name, one in load(path / file).items()})
        except Exception as error:
            return f"error: {error}"
        return version_of(model)
    return "nothing"


def _torch_load(path):
    return torch.load(path, weights_only=True)


def version_of(model):
    """Returns the name of the version that all elements of a model are of, or "mixture"."""
    version = int(model.module.scalar) // 10_000
    expected = Net(version).state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, expected[name]):
            return f"mixture: {name}"
    return NAMES.get(version, str(version))


def names_below(root):
    """Returns the paths of everything below a directory."""
    return sorted(
        os.path.relpath(os.path.join(directory, name), root)
        for directory, directories, files in os.walk(root)
        for name in directories + files
    )


def usual_names_below(root):
    """Returns the same with the usual names of shards that have second ones; as it is if some have both."""
    names = names_below(root)
    usual = sorted(name.replace(".b.", ".") for name in names)
    return usual if len(set(usual)) == len(names) else names
