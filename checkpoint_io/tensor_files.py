"""One file of tensors, open for reading: safetensors, or what `torch.save` wrote, without ever running a pickle."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from booster.checkpoint_io.layout import SAFETENSORS_SUFFIXES, SINGLE_FILE_SUFFIXES
from booster.checkpoint_io.safetensors_header import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES, TensorRange, parse_header
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tensor_bytes import bytes_of
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["GROUPS_KEY", "TensorFile", "open_tensor_file"]

GROUPS_KEY = "optimizer_groups"
_ZIP_MAGIC = b"PK\x03\x04"


class TensorFile(Protocol):
    """Tensors of one file by name.

    Attributes:
        specs: Shape and format of every tensor, known without reading any.
        metadata: Texts that go with them.
    """

    specs: dict[str, TensorSpec]
    metadata: dict[str, str]

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor, on the CPU. The caller must not write into it."""
        ...

    def close(self) -> None:
        """Releases the file."""
        ...


def open_tensor_file(storage: Storage, path: Path, *, inside: Path | None = None) -> TensorFile:
    """Opens a file of tensors by its suffix.

    Args:
        storage: Where the file is.
        path: The file.
        inside: The directory that links may not leave; None: links are followed.

    Raises:
        CheckpointError: Missing, no regular file, another suffix, or damaged.
    """
    if path.suffix not in SINGLE_FILE_SUFFIXES:
        raise CheckpointError(
            f"{path} ends in {path.suffix!r}, which says no format: a checkpoint file ends in one of"
            f" {', '.join(SINGLE_FILE_SUFFIXES)}; rename it"
        )
    if path.suffix in SAFETENSORS_SUFFIXES:
        return _SafetensorsFile(storage.open_regular(path, inside=inside), str(path))
    return _TorchFile(storage.open_regular(path, inside=inside), str(path))


class _SafetensorsFile:
    def __init__(self, file: FileIO, what: str) -> None:
        self._file = file
        self._what = what
        try:
            self._ranges, self.metadata, self._data_start = self._read_header()
        except BaseException:
            file.close()
            raise
        self.specs = {name: part.spec for name, part in self._ranges.items()}

    def _read_header(self) -> tuple[dict[str, TensorRange], dict[str, str], int]:
        file_bytes = os.fstat(self._file.fileno()).st_size
        if file_bytes < HEADER_LENGTH_BYTES:
            raise CheckpointError(f"{self._what} is cut: it has {file_bytes} bytes. Take another copy of it")
        header_bytes = int.from_bytes(self._read_at(0, HEADER_LENGTH_BYTES), "little")
        data_start = HEADER_LENGTH_BYTES + header_bytes
        if header_bytes > MAX_HEADER_BYTES or data_start > file_bytes:
            raise CheckpointError(
                f"{self._what} is cut or no safetensors file: its header should have {header_bytes} bytes. Take another"
                " copy of it"
            )
        raw = self._read_at(HEADER_LENGTH_BYTES, header_bytes)
        return *parse_header(raw, file_bytes - data_start, self._what), data_start

    def read(self, name: str) -> torch.Tensor:
        part = self._ranges[name]
        tensor = torch.empty(part.spec.shape, dtype=part.spec.dtype)
        self._read_into(bytes_of(tensor), self._data_start + part.start)
        return tensor

    def close(self) -> None:
        self._file.close()

    def _read_at(self, offset: int, num_bytes: int) -> bytes:
        raw = bytearray(num_bytes)
        self._read_into(memoryview(raw), offset)
        return bytes(raw)

    def _read_into(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):  # one call reads 2 GiB at most
            count = os.preadv(self._file.fileno(), [target[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self._what} became shorter while it was read: another process writes it")
            done += count


class _TorchFile:
    def __init__(self, file: FileIO, what: str) -> None:
        try:
            content = _load_torch(file, what)
        finally:
            file.close()
        self.metadata: dict[str, str] = {}
        if isinstance(content, Mapping) and set(content) == {"state", "values"} and isinstance(content["values"], str):
            self.metadata = {GROUPS_KEY: content["values"]}
            content = content["state"]
        self._tensors = _checked_tensors(content, what)
        self.specs = {
            name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}


def _load_torch(file: FileIO, what: str) -> Any:
    is_zip = os.pread(file.fileno(), len(_ZIP_MAGIC), 0) == _ZIP_MAGIC
    try:
        with warnings.catch_warnings():
            # Old files make torch warn about its own storage classes, and nobody can act on that.
            warnings.simplefilter("ignore")
            # By its descriptor: under its name there may be another file by now.
            reopened = f"/proc/self/fd/{file.fileno()}"
            if is_zip and os.path.exists(reopened):
                return torch.load(reopened, map_location="cpu", weights_only=True, mmap=True)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{what} cannot be loaded without running code from it, or is damaged: {error}. Save it again as"
            " safetensors, or as a plain dictionary of tensors"
        ) from error


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
