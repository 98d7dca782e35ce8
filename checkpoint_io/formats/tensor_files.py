"""Open tensor file for reading: safetensors, or `torch.save` output without unpickling code."""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from booster.checkpoint_io.copy_elements import bytes_of
from booster.checkpoint_io.layout import SAFETENSORS_SUFFIXES, SINGLE_FILE_SUFFIXES
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError
from booster.interface import TensorSpec

from .json import parse_json
from .manifest import FileRecord, RangeRecord, check_ranges_cover, decode_ranges, encode_ranges
from .optimizer_values import from_torch_state_dict
from .safetensors import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES, parse_header

# A directory has a manifest; a single file embeds its checksums. Its metadata holds the ranges with their checksums
# under RECORD_KEY, and the checksum of the full head, up to the first byte of data, under HEAD_KEY. Every checksum has
# eight hex digits, so the head is laid out and the data written before any checksum is known, and filling them in moves
# nothing. The head's checksum is computed with its own digits as zeros.


RECORD_KEY = "booster_record"
HEAD_KEY = "booster_head_crc32"
_NUM_DIGITS = 8
_ZEROS = b"0" * _NUM_DIGITS
_HEAD_DIGITS = b'"' + HEAD_KEY.encode() + b'":"'  # cannot occur within a JSON string, where quotes are escaped


def with_placeholder(metadata: Mapping[str, str], ranges: Sequence[RangeRecord]) -> dict[str, str]:
    """Return the metadata of a file with embedded checksums, all zeros.

    Args:
        metadata: Other metadata of the file.
        ranges: All ranges of the file; their checksums are ignored.
    """
    return {**metadata, RECORD_KEY: _encode(ranges, [0] * len(ranges)), HEAD_KEY: _ZEROS.decode()}


def completed_head(head: bytes, crcs: Sequence[int]) -> bytes:
    """Return the head with all checksums filled in, at unchanged length.

    Args:
        head: First bytes of the file up to the data, with the placeholder, as compact JSON.
        crcs: Checksum of every range, in the order given to `with_placeholder`.
    """
    document = parse_json(head[8:], "the header of the new file")
    text = document["__metadata__"][RECORD_KEY]
    ranges = decode_ranges(parse_json(text.encode(), "the record of the new file"), "the record of the new file")
    old, new = (json.dumps(each, ensure_ascii=False).encode() for each in (text, _encode(ranges, crcs)))
    if head.count(old) != 1 or len(new) != len(old):
        raise AssertionError("the placeholder of the record is not in the head as it was laid out")
    completed = head.replace(old, new)
    start = completed.index(_HEAD_DIGITS + _ZEROS) + len(_HEAD_DIGITS)
    return completed[:start] + b"%08x" % zlib.crc32(completed) + completed[start + _NUM_DIGITS :]


def embedded_record(
    head: bytes, num_bytes: int, metadata: Mapping[str, str], specs: Mapping[str, TensorSpec], source_name: str
) -> FileRecord | None:
    """Return the checksums embedded in a file, or None if there are none.

    Args:
        head: First bytes of the file up to the data.
        num_bytes: Size of the file.
        metadata: Metadata in the head.
        specs: Tensors in the head.
        source_name: File name for messages.

    Raises:
        CheckpointError: The head differs from its checksum, or its ranges do not tile its tensors.
    """
    if RECORD_KEY not in metadata and HEAD_KEY not in metadata:
        return None
    if RECORD_KEY not in metadata or HEAD_KEY not in metadata:
        raise _checksum_error(source_name)
    start = head.find(_HEAD_DIGITS) + len(_HEAD_DIGITS)
    stop = start + _NUM_DIGITS
    expected = b"%08x" % zlib.crc32(head[:start] + _ZEROS + head[stop:])
    if start < len(_HEAD_DIGITS) or head[start:stop] != expected or metadata[HEAD_KEY] != expected.decode():
        raise _checksum_error(source_name)
    text = metadata[RECORD_KEY].encode("utf-8", "surrogatepass")
    ranges = decode_ranges(parse_json(text, f"the record of {source_name}"), f"the record of {source_name}")
    check_ranges_cover(specs, ranges)
    return FileRecord(num_bytes=num_bytes, head_bytes=len(head), head_crc32=zlib.crc32(head), ranges=ranges)


def _encode(ranges: Sequence[RangeRecord], crcs: Sequence[int]) -> str:
    filled = [replace(each, crc32=crc) for each, crc in zip(ranges, crcs, strict=True)]
    return json.dumps(encode_ranges(filled), separators=(",", ":"))


def _checksum_error(source_name: str) -> CheckpointError:
    return CheckpointError(
        f"{source_name} is damaged: the checksum of its header is not the one that was saved. Take another copy of it,"
        f" or, if another tool wrote it and copied our metadata, write it again without {RECORD_KEY!r} and {HEAD_KEY!r}"
    )


GROUPS_KEY = "optimizer_groups"
_ZIP_MAGIC = b"PK\x03\x04"


class TensorFile(Protocol):
    """Tensors of one file by name.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the file.
        specs: Shape and dtype of every tensor, known without reading the data.
        metadata: Metadata strings.
        embedded_record: Embedded sizes and checksums, or None if there are none.
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
        if self.num_bytes < HEADER_LENGTH_BYTES:
            raise CheckpointError(f"{self.path} is truncated: it has {self.num_bytes} bytes. Take another copy of it")
        length = _read_bytes(storage, file, 0, HEADER_LENGTH_BYTES)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > MAX_HEADER_BYTES or HEADER_LENGTH_BYTES + header_bytes > self.num_bytes:
            raise CheckpointError(
                f"{self.path} is truncated or not a safetensors file: its header should have {header_bytes} bytes. Take"
                " another copy of it"
            )
        head = length + _read_bytes(storage, file, HEADER_LENGTH_BYTES, header_bytes)
        self._data_start = len(head)
        self._ranges, self.metadata = parse_header(
            head[HEADER_LENGTH_BYTES:], self.num_bytes - len(head), str(self.path)
        )
        self.specs = {name: tensor_range.spec for name, tensor_range in self._ranges.items()}
        self.embedded_record = embedded_record(head, self.num_bytes, self.metadata, self.specs, str(self.path))

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
        elif isinstance(content, Mapping) and {"state", "param_groups"} <= set(content):
            content, self.metadata[GROUPS_KEY] = from_torch_state_dict(content, str(self.path))
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
        # Only part of torch's message: the rest recommends loading without weights_only, which would run the code.
        match = re.search(r"(Trying to load unsupported|Unsupported)(?:(?!\. Please use)[^\n])*", str(error))
        text = match[0] if match is not None else next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {text[:300].rstrip(' .')}"
        raise CheckpointError(
            f"{file.path} cannot be loaded without running code from it, or is damaged: {reason}. Save it again as"
            " safetensors, or as a plain dictionary of tensors"
        ) from error


def _checked_tensors(content: Any, source_name: str) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{source_name} holds a {type(content).__name__}: save a state_dict, tensors by name")
    for name, tensor in content.items():
        is_dense_on_cpu = (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
        )
        if not isinstance(name, str) or not is_dense_on_cpu:
            plain = (
                f"torch.load(path, weights_only=True)[{name!r:.200}]"
                if isinstance(tensor, Mapping)
                else "model.state_dict()"
            )
            raise CheckpointError(
                f"{source_name} holds a {type(tensor).__name__} under {str(name)[:200]!r}: save a plain state_dict,"
                f" tensors by name, for example torch.save({plain}, new_path)"
            )
    return {name: tensor.detach() for name, tensor in content.items()}
