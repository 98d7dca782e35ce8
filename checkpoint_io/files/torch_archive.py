"""Layout of the zip archive that `torch.save` writes, computed from shapes without the tensors' bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from booster.interface import TensorSpec

__all__ = ["TorchArchive", "torch_archive"]

# `torch.serialization.skip_data` makes `torch.save` seek over the bytes of storages instead of writing them, and fake
# tensors need no memory. The archive is written to a recorder that keeps the written bytes and the seeks. Seeks come in
# the order of the tensors, because each tensor has its own storage. The result is deterministic, so every rank can
# compute it.


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchArchive:
    """Archive without its tensors.

    Attributes:
        fragments: Offset and content of all bytes other than tensors, by offset.
        num_bytes: Size of the archive.
        offsets: Offset of each tensor.
    """

    fragments: tuple[tuple[int, bytes], ...]
    num_bytes: int
    offsets: dict[str, int]


def torch_archive(specs: Mapping[str, TensorSpec], values: str | None) -> TorchArchive:
    """Compute the archive that `torch.save` writes for a dictionary of such tensors.

    Args:
        specs: Tensors, in the order of the dictionary.
        values: Text to store as `{"state": tensors, "values": text}`. Optional, defaults to the tensors alone.
    """
    with FakeTensorMode():
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for name, spec in specs.items()}
    recorder = _Recorder()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensors if values is None else {"state": tensors, "values": values}, cast("IO[bytes]", recorder))
    return TorchArchive(
        fragments=tuple((offset, bytes(content)) for offset, content in recorder.fragments),
        num_bytes=recorder.position,
        offsets=_offsets(specs, recorder),
    )


class _Recorder:
    """File object that records writes and forward seeks."""

    def __init__(self) -> None:
        self.fragments: list[tuple[int, bytearray]] = []
        self.seeks: list[tuple[int, int]] = []
        self.position = 0

    def write(self, content: Any) -> int:
        if not self.fragments or self.fragments[-1][0] + len(self.fragments[-1][1]) != self.position:
            self.fragments.append((self.position, bytearray()))
        self.fragments[-1][1].extend(content)
        self.position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR, "torch.save steps forward only"
        self.seeks.append((self.position, offset))
        self.position += offset
        return self.position

    def flush(self) -> None:
        """Do nothing; `torch.save` requires the method."""


def _offsets(specs: Mapping[str, TensorSpec], recorder: _Recorder) -> dict[str, int]:
    seeks = iter(recorder.seeks)
    offsets: dict[str, int] = {}
    for name, spec in specs.items():
        offset, num_bytes = next(seeks) if spec.num_bytes else (0, 0)  # empty storages cause no seek
        assert num_bytes == spec.num_bytes, f"torch.save left {num_bytes} bytes for {name}, not {spec.num_bytes}"
        offsets[name] = offset
    return offsets
