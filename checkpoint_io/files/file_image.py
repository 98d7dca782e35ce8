"""Image of a tensor file: all bytes other than tensor data, and the offset of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from booster.checkpoint_io.files.safetensors_header import encode_header
from booster.checkpoint_io.files.torch_archive import torch_archive
from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.planning.plan import PlannedFile
from booster.interface import TensorSpec

__all__ = ["FileImage", "safetensors_image", "torch_image"]


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
