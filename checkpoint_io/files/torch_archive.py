"""The zip archive that `torch.save` writes, made from shapes alone: everything but the tensors' bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from booster.interface import TensorSpec

__all__ = ["TorchArchive", "torch_archive"]

# Note [Archive without data]
# `torch.serialization.skip_data` makes `torch.save` leave out the bytes of storages and step over their place in the
# file, and fake tensors need no memory for them. What is saved goes into a recorder instead of a file: it keeps what
# is written, and where the steps are. The steps come in the order of the tensors, as each tensor has a storage of its
# own; and the same tensors make the same bytes, so every rank may make them for itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchArchive:
    """An archive without its tensors.

    Attributes:
        fragments: What is not a tensor: offset and bytes, in the order of the offsets.
        num_bytes: Size of the archive.
        offsets: Where each tensor starts.
    """

    fragments: tuple[tuple[int, bytes], ...]
    num_bytes: int
    offsets: dict[str, int]


def torch_archive(specs: Mapping[str, TensorSpec], values: str | None) -> TorchArchive:
    """Return what `torch.save` writes for a dictionary of such tensors; see Note [Archive without data].

    Args:
        specs: The tensors, in the order of the dictionary.
        values: A text to go with them, as `{"state": tensors, "values": text}`; None: the tensors alone.
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
    """Takes what is written to a file, and remembers what is stepped over."""

    def __init__(self) -> None:
        self.fragments: list[tuple[int, bytearray]] = []
        self.steps: list[tuple[int, int]] = []
        self.position = 0

    def write(self, content: Any) -> int:
        if not self.fragments or self.fragments[-1][0] + len(self.fragments[-1][1]) != self.position:
            self.fragments.append((self.position, bytearray()))
        self.fragments[-1][1].extend(content)
        self.position += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_CUR, "torch.save steps forward only"
        self.steps.append((self.position, offset))
        self.position += offset
        return self.position

    def flush(self) -> None:
        """Part of what `torch.save` asks of a file; there is nothing to do."""


def _offsets(specs: Mapping[str, TensorSpec], recorder: _Recorder) -> dict[str, int]:
    steps = iter(recorder.steps)
    offsets: dict[str, int] = {}
    for name, spec in specs.items():
        offset, num_bytes = next(steps) if spec.num_bytes else (0, 0)  # nothing is stepped over for nothing
        assert num_bytes == spec.num_bytes, f"torch.save left {num_bytes} bytes for {name}, not {spec.num_bytes}"
        offsets[name] = offset
    return offsets
