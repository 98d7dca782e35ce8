"""Image of a tensor file: all bytes other than tensor data, and the offset of each tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.planning.save_plan import PlannedFile
from booster.interface import TensorSpec

from .safetensors import encode_header

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """Tensor file without the tensor data. Rank 0 writes the fragments when it creates the file, all ranks the tensors.

    Attributes:
        fragments: Offset and content of all bytes other than tensors, by offset.
        num_bytes: Size of the file.
        offsets: Offset of each tensor in the file; a multiple of its item size.
        specs: Shape and dtype of each tensor.
        is_packed: Whether tensors are contiguous, from a multiple of `PAGE_BYTES` to the end of the file.
    """

    fragments: tuple[tuple[int, bytes], ...]
    num_bytes: int
    offsets: Mapping[str, int]
    specs: Mapping[str, TensorSpec]
    is_packed: bool

    @property
    def head(self) -> bytes:
        """First fragment: in a packed file, all bytes before the tensors."""
        return self.fragments[0][1]

    @property
    def data_start(self) -> int:
        """Offset of the tensors in a packed file, 0 in others."""
        return len(self.head) if self.is_packed else 0


def safetensors_image(file: PlannedFile, metadata: Mapping[str, str]) -> FileImage:
    """Build the image of a safetensors file; the header is padded so that the data is page-aligned.

    Args:
        file: Planned file.
        metadata: Metadata strings.

    Raises:
        CheckpointError: A name or dtype that safetensors does not support, or a header above the size limit.
    """
    head, ranges = encode_header(file.tensors, metadata, alignment=PAGE_BYTES)
    starts = {name: tensor_range.start for name, tensor_range in ranges.items()}
    assert starts == file.starts, f"{file.name}: the plan puts tensors elsewhere than the file's header"
    return FileImage(
        fragments=((0, head),),
        num_bytes=len(head) + file.data_bytes,
        offsets={name: len(head) + start for name, start in starts.items()},
        specs=file.tensors,
        is_packed=True,
    )


def torch_image(file: PlannedFile, values: str | None) -> FileImage:
    """Build the image of a `torch.save` file without the tensors' data, in memory for the rest only.

    Args:
        file: Planned file.
        values: Optimizer's plain values as JSON, stored beside the tensors. Optional, defaults to a plain dictionary
            of tensors.
    """

    archive = torch_archive(file.tensors, values)
    return FileImage(
        fragments=archive.fragments,
        num_bytes=archive.num_bytes,
        offsets=archive.offsets,
        specs=file.tensors,
        is_packed=False,
    )
