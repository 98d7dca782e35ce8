"""Open tensor file for reading: safetensors, or `torch.save` output without unpickling code."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from booster.checkpoint_io.files.file_record import embedded_record
from booster.checkpoint_io.files.manifest import FileRecord
from booster.checkpoint_io.files.safetensors_header import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from booster.checkpoint_io.files.tensor_bytes import bytes_of
from booster.checkpoint_io.layout import SAFETENSORS_SUFFIXES, SINGLE_FILE_SUFFIXES
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["GROUPS_KEY", "TensorFile", "open_tensor_file"]

GROUPS_KEY = "optimizer_groups"
_ZIP_MAGIC = b"PK\x03\x04"


class TensorFile(Protocol):
    """Tensors of one file by name.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the file.
        specs: Shape and dtype of every tensor, known without reading the data.
        metadata: Metadata strings.
        own_record: Embedded sizes and checksums, or None if there are none.
    """

    path: Path
    num_bytes: int
    specs: dict[str, TensorSpec]
    metadata: dict[str, str]
    embedded_record: FileRecord | None

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        """Return file and offset of a tensor stored in row-major order, or None if only `read` can access it."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU. The caller must not modify it."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


def open_tensor_file(
    storage: Storage, path: Path, *, inside: Path | None = None, expected: FileRecord | None = None
) -> TensorFile:
    """Open a tensor file according to its suffix.

    Args:
        storage: Storage of the file.
        path: File.
        inside: Directory that links must not leave. Optional, defaults to no restriction.
        expected: Record in the manifest; size and head are compared before anything else is read. Optional.

    Raises:
        CheckpointError: The file is missing, not a regular file, has an unknown suffix, or is damaged.
    """
    if path.suffix not in SINGLE_FILE_SUFFIXES:
        raise CheckpointError(
            f"{path} ends in {path.suffix!r}, which is not a known format: a checkpoint file ends in one of"
            f" {', '.join(SINGLE_FILE_SUFFIXES)}; rename it"
        )
    file = storage.open_regular(path, inside=inside)
    try:
        if expected is not None:
            _check_expected(storage, file, expected)
        return (_SafetensorsFile if path.suffix in SAFETENSORS_SUFFIXES else _TorchFile)(storage, file)
    except BaseException:
        file.close()
        raise


class _SafetensorsFile:
    def __init__(self, storage: Storage, file: OpenFile) -> None:
        self.path = file.path
        self.num_bytes = storage.size(file)
        self._storage = storage
        self._file = file
        head = self._read_head()
        self._data_start = len(head)
        self._ranges, self.metadata = parse_header(
            head[HEADER_LENGTH_BYTES:], self.num_bytes - len(head), str(self.path)
        )
        self.specs = {name: tensor_range.spec for name, tensor_range in self._ranges.items()}
        self.embedded_record = embedded_record(head, self.num_bytes, self.metadata, self.specs, str(self.path))

    def _read_head(self) -> bytes:
        if self.num_bytes < HEADER_LENGTH_BYTES:
            raise CheckpointError(f"{self.path} is truncated: it has {self.num_bytes} bytes. Take another copy of it")
        length = _read_bytes(self._storage, self._file, 0, HEADER_LENGTH_BYTES)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > MAX_HEADER_BYTES or HEADER_LENGTH_BYTES + header_bytes > self.num_bytes:
            raise CheckpointError(
                f"{self.path} is truncated or not a safetensors file: its header should have {header_bytes} bytes. Take"
                " another copy of it"
            )
        return length + _read_bytes(self._storage, self._file, HEADER_LENGTH_BYTES, header_bytes)

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        return self._file, self._data_start + self._ranges[name].start

    def read(self, name: str) -> torch.Tensor:
        tensor_range = self._ranges[name]
        tensor = torch.empty(tensor_range.spec.shape, dtype=tensor_range.spec.dtype)
        self._storage.read_at(self._file, bytes_of(tensor), self._data_start + tensor_range.start)
        return tensor

    def close(self) -> None:
        self._file.close()


class _TorchFile:
    def __init__(self, storage: Storage, file: OpenFile) -> None:
        self.path = file.path
        self.num_bytes = storage.size(file)
        content = _load_torch(storage, file)
        file.close()  # the mapped tensors keep the file open
        self.metadata: dict[str, str] = {}
        if isinstance(content, Mapping) and set(content) == {"state", "values"} and isinstance(content["values"], str):
            self.metadata = {GROUPS_KEY: content["values"]}
            content = content["state"]
        self._tensors = _checked_tensors(content, str(self.path))
        self.specs = {
            name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()
        }
        self.embedded_record: FileRecord | None = None

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        return None

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}


def _check_expected(storage: Storage, file: OpenFile, expected: FileRecord) -> None:
    num_bytes = storage.size(file)
    if num_bytes != expected.num_bytes:
        raise CheckpointError(
            f"{file.path} has {num_bytes} bytes, but its manifest records {expected.num_bytes}: it is truncated or from"
            " another save. Take another copy of the checkpoint"
        )
    if not 0 <= expected.head_bytes <= min(num_bytes, HEADER_LENGTH_BYTES + MAX_HEADER_BYTES):
        raise CheckpointError(f"the manifest of {file.path} records an invalid head of {expected.head_bytes} bytes")
    head = _read_bytes(storage, file, 0, expected.head_bytes)
    if zlib.crc32(head) != expected.head_crc32:
        raise CheckpointError(
            f"{file.path} is damaged or from another save: the checksum of its head, the first {expected.head_bytes}"
            " bytes, is not the one that was saved. Take another copy of the checkpoint"
        )


def _read_bytes(storage: Storage, file: OpenFile, offset: int, num_bytes: int) -> bytes:
    raw = bytearray(num_bytes)
    storage.read_at(file, raw, offset)
    return bytes(raw)


def _load_torch(storage: Storage, file: OpenFile) -> Any:
    is_zip = _read_bytes(storage, file, 0, min(len(_ZIP_MAGIC), storage.size(file))) == _ZIP_MAGIC
    try:
        with warnings.catch_warnings():
            # torch warns about its own storage classes in old files; users cannot act on that.
            warnings.simplefilter("ignore")
            # By descriptor, because the path may by now refer to another file.
            reopened = f"/proc/self/fd/{file.descriptor}"
            if is_zip and storage.kind(Path(reopened)) is not None:
                return torch.load(reopened, map_location="cpu", weights_only=True, mmap=True)
            with FileIO(file.descriptor, "rb", closefd=False) as content:
                return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{file.path} cannot be loaded without running code from it, or is damaged: {_reason(error)}. Save it again"
            " as safetensors, or as a plain dictionary of tensors"
        ) from error


def _reason(error: Exception) -> str:
    # Only part of torch's message: the rest recommends loading without weights_only, which would run the code.
    match = re.search(r"(Trying to load unsupported|Unsupported)(?:(?!\. Please use)[^\n])*", str(error))
    text = match[0] if match is not None else next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text[:300].rstrip(' .')}"


def _checked_tensors(content: Any, source_name: str) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{source_name} holds a {type(content).__name__}: save a state_dict, tensors by name")
    for name, tensor in content.items():
        if not isinstance(name, str) or not _is_dense_cpu_tensor(tensor):
            raise CheckpointError(
                f"{source_name} holds a {type(tensor).__name__} under {str(name)[:200]!r}: save a plain state_dict, tensors by"
                " name, for example torch.save(model.state_dict(), path)"
            )
    return {name: tensor.detach() for name, tensor in content.items()}


def _is_dense_cpu_tensor(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
