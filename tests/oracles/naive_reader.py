"""A loader as most are: what a glob finds, structure at best, no checksums. The detectors must find fault with it."""

from __future__ import annotations

import math

import torch
from safetensors import safe_open


def naive_tensors(path):
    """Returns all tensors of a file, or of all files of tensors in a directory, in the order of their names."""
    found = {}
    for file in sorted(path.glob("model*.safetensors")) if path.is_dir() else [path]:
        with safe_open(file, framework="pt") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (no mapping)
    return found


def naive_load(path, targets):
    """Fills tensors by name, one after the other, with what is there."""
    stored = naive_tensors(path)
    with torch.no_grad():
        for name, tensor in targets.items():
            if name in stored:
                tensor.copy_(stored[name])


def naive_part(logical, box, span):
    """Returns the elements of a slice, from the whole tensor."""
    block = logical[tuple(slice(offset, offset + length) for offset, length in box)]
    assert block.numel() == math.prod(length for _, length in box)
    return block.reshape(-1)[span[0] : span[1]]
