"""What a file of tensors looks like before its data: every byte around the tensors, and where each of them goes."""

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
    """A file without its tensors. Whoever creates the file writes the fragments; the ranks write the tensors.

    Attributes:
        fragments: What is not a tensor: offset and bytes, in the order of the offsets.
        num_bytes: Size of the file.
        offsets: Where each tensor starts, from the beginning of the file; a multiple of its elements' size.
        specs: Shape and number format of each tensor.
        is_packed: The tensors follow each other without gaps, from a multiple of `PAGE_BYTES` to the end.
    """

    fragments: tuple[tuple[int, bytes], ...]
    num_bytes: int
    offsets: Mapping[str, int]
    specs: Mapping[str, TensorSpec]
    is_packed: bool

    @property
    def head(self) -> bytes:
        """The bytes that the file begins with, up to the first tensor where it is packed."""
        return self.fragments[0][1]

    @property
    def data_start(self) -> int:
        """Where the tensors start, in a packed file; 0 in others."""
        return len(self.head) if self.is_packed else 0


def safetensors_image(file: PlannedFile, metadata: Mapping[str, str]) -> FileImage:
    """Return a safetensors file whose header is padded so that the data starts on a page.

    Args:
        file: Its tensors.
        metadata: Texts that go with them.

    Raises:
        CheckpointError: A name or a number format that the file format has no place for, or a header beyond its limit.
    """
    head, ranges = encode_header(file.tensors, metadata, alignment=PAGE_BYTES)
    starts = {name: part.start for name, part in ranges.items()}
    assert starts == file.starts, f"{file.name}: the plan puts tensors elsewhere than the file's header"
    return FileImage(
        fragments=((0, head),),
        num_bytes=len(head) + file.data_bytes,
        offsets={name: len(head) + start for name, start in starts.items()},
        specs=file.tensors,
        is_packed=True,
    )


def torch_image(file: PlannedFile, values: str | None) -> FileImage:
    """Return a file as `torch.save` writes it, made without the tensors' data: it needs memory for the rest only.

    Args:
        file: Its tensors.
        values: An optimizer's plain values as JSON, which go beside the tensors into a file of both; None: the file
            is a plain dictionary of tensors.
    """
    archive = torch_archive(file.tensors, values)
    return FileImage(
        fragments=archive.fragments,
        num_bytes=archive.num_bytes,
        offsets=archive.offsets,
        specs=file.tensors,
        is_packed=False,
    )
