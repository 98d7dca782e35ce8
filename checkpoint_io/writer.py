"""Writes one file: tensors as safetensors or by `torch.save`, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from booster.checkpoint_io.safetensors_header import encode_header
from booster.checkpoint_io.tensor_bytes import bytes_of, num_bytes, plain
from booster.checkpoint_io.tensor_files import GROUPS_KEY
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["check_storable", "write_json", "write_tensors"]


def check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises if a tensor has no plain elements to write.

    Raises:
        CheckpointError: A sparse or quantized tensor, or one on the meta device.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            layout = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(
                f"{name!r} is a {layout} tensor on {tensor.device}, without plain elements to write: materialise it"
                " before saving"
            )


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], *, is_safetensors: bool, groups: str | None = None
) -> None:
    """Writes tensors, in either format, one at a time through host memory.

    Args:
        file: Where to write.
        tensors: Strided tensors on any device.
        is_safetensors: False writes a dictionary by `torch.save`, which keeps all of them in host memory until the end.
        groups: An optimizer's plain values as JSON, to go into the same file.

    Raises:
        CheckpointError: A name or number format that safetensors has no place for.
    """
    if is_safetensors:
        _write_safetensors(file, tensors, {"format": "pt"} | ({} if groups is None else {GROUPS_KEY: groups}))
        return
    state = {name: _own_memory(tensor) for name, tensor in tensors.items()}
    torch.save(state if groups is None else {"state": state, "values": groups}, file)


def write_json(file: BinaryIO, document: Mapping[str, Any]) -> None:
    """Writes a document as transformers does: indented, in the order given."""
    file.write((json.dumps(document, indent=2, allow_nan=False) + "\n").encode("utf-8"))


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    specs = {name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()}
    header, ranges = encode_header(specs, metadata)
    file.write(header)
    file.writelines(bytes_of(plain(tensors[name])) for name in ranges)


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    # torch.save writes the whole storage of a view: a part of a flat buffer would drag all of it along.
    ours = plain(tensor)
    return ours if ours.untyped_storage().nbytes() == num_bytes(ours) else ours.clone()
