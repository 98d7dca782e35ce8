"""One file of tensors, open for reading: safetensors, or what `torch.save` wrote, without ever running a pickle."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from booster.checkpoint_io.files.file_record import own_record
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
        path: The file.
        num_bytes: Its size.
        specs: Shape and format of every tensor, known without reading any.
        metadata: Texts that go with them.
        own_record: Sizes and checksums that the file carries of itself; None where it carries none.
    """

    path: Path
    num_bytes: int
    specs: dict[str, TensorSpec]
    metadata: dict[str, str]
    own_record: FileRecord | None

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        """Return where a tensor's bytes lie row by row; None where only `read` can tell."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, on the CPU. The caller must not write into it."""
        ...

    def close(self) -> None:
        """Releases the file."""
        ...


def open_tensor_file(
    storage: Storage, path: Path, *, inside: Path | None = None, expected: FileRecord | None = None
) -> TensorFile:
    """Open a file of tensors by its suffix.

    Args:
        storage: Where the file is.
        path: The file.
        inside: The directory that links may not leave; None: links are followed.
        expected: What a manifest says of it; its size and head are compared before anything else is read from it.

    Raises:
        CheckpointError: Missing, no regular file, another suffix, or damaged.
    """
    if path.suffix not in SINGLE_FILE_SUFFIXES:
        raise CheckpointError(
            f"{path} ends in {path.suffix!r}, which says no format: a checkpoint file ends in one of"
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
        self.specs = {name: part.spec for name, part in self._ranges.items()}
        self.own_record = own_record(head, self.num_bytes, self.metadata, self.specs, str(self.path))

    def _read_head(self) -> bytes:
        if self.num_bytes < HEADER_LENGTH_BYTES:
            raise CheckpointError(f"{self.path} is cut: it has {self.num_bytes} bytes. Take another copy of it")
        length = _read_bytes(self._storage, self._file, 0, HEADER_LENGTH_BYTES)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > MAX_HEADER_BYTES or HEADER_LENGTH_BYTES + header_bytes > self.num_bytes:
            raise CheckpointError(
                f"{self.path} is cut or no safetensors file: its header should have {header_bytes} bytes. Take another"
                " copy of it"
            )
        return length + _read_bytes(self._storage, self._file, HEADER_LENGTH_BYTES, header_bytes)

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        return self._file, self._data_start + self._ranges[name].start

    def read(self, name: str) -> torch.Tensor:
        part = self._ranges[name]
        tensor = torch.empty(part.spec.shape, dtype=part.spec.dtype)
        self._storage.read_at(self._file, bytes_of(tensor), self._data_start + part.start)
        return tensor

    def close(self) -> None:
        self._file.close()


class _TorchFile:
    def __init__(self, storage: Storage, file: OpenFile) -> None:
        self.path = file.path
        self.num_bytes = storage.size(file)
        content = _load_torch(storage, file)
        file.close()  # the tensors keep their own hold of it
        self.metadata: dict[str, str] = {}
        if isinstance(content, Mapping) and set(content) == {"state", "values"} and isinstance(content["values"], str):
            self.metadata = {GROUPS_KEY: content["values"]}
            content = content["state"]
        self._tensors = _checked_tensors(content, str(self.path))
        self.specs = {
            name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()
        }
        self.own_record: FileRecord | None = None

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
            f"{file.path} has {num_bytes} bytes, and its manifest says {expected.num_bytes}: it is cut or of another"
            " save. Take another copy of the checkpoint"
        )
    if not 0 <= expected.head_bytes <= min(num_bytes, HEADER_LENGTH_BYTES + MAX_HEADER_BYTES):
        raise CheckpointError(f"the manifest of {file.path} says that its first {expected.head_bytes} bytes are a head")
    head = _read_bytes(storage, file, 0, expected.head_bytes)
    if zlib.crc32(head) != expected.head_crc32:
        raise CheckpointError(
            f"{file.path} is damaged or of another save: the checksum of its first {expected.head_bytes} bytes, which"
            " say what it holds, is not the one that was saved. Take another copy of the checkpoint"
        )


def _read_bytes(storage: Storage, file: OpenFile, offset: int, num_bytes: int) -> bytes:
    raw = bytearray(num_bytes)
    storage.read_at(file, raw, offset)
    return bytes(raw)


def _load_torch(storage: Storage, file: OpenFile) -> Any:
    is_zip = _read_bytes(storage, file, 0, min(len(_ZIP_MAGIC), storage.size(file))) == _ZIP_MAGIC
    try:
        with warnings.catch_warnings():
            # Old files make torch warn about its own storage classes, and nobody can act on that.
            warnings.simplefilter("ignore")
            # By its descriptor: under its name there may be another file by now.
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
    # Not all that torch says: it goes on to recommend loading without weights_only, which would run the code.
    told = re.search(r"(Trying to load unsupported|Unsupported)(?:(?!\. Please use)[^\n])*", str(error))
    text = told[0] if told is not None else next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text[:300].rstrip(' .')}"


def _checked_tensors(content: Any, what: str) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{what} holds a {type(content).__name__}: save a state_dict, tensors by name")
    for name, tensor in content.items():
        if not isinstance(name, str) or not _is_plain(tensor):
            raise CheckpointError(
                f"{what} holds a {type(tensor).__name__} under {str(name)[:200]!r}: save a plain state_dict, tensors by"
                " name, for example torch.save(model.state_dict(), path)"
            )
    return {name: tensor.detach() for name, tensor in content.items()}


def _is_plain(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
