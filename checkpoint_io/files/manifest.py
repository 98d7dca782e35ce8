"""Manifest of a checkpoint: size and checksums of every file, range and document, and of itself."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from booster.checkpoint_io.files.range_records import (
    RangeRecord,
    check_ranges_cover,
    decode_ranges,
    encode_ranges,
)
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES, parse_json
from booster.errors import CheckpointError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_KEY",
    "DocumentRecord",
    "FileRecord",
    "Manifest",
    "RangeRecord",
    "check_ranges_cover",
    "decode_ranges",
    "encode_ranges",
]

R = TypeVar("R")

_FORMAT = "booster.manifest"
MANIFEST_KEY = "booster_manifest"  # in a tensor file's metadata: name of the manifest with its checksums
FORMAT_VERSION = 1
_MAX_NAME = 255  # limit of file systems per path component
# The last member is the checksum of all bytes before the comma that separates it.
_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}')
_CHECKSUM_BYTES = len(b',"crc32":"00000000"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Record of a tensor file.

    Attributes:
        num_bytes: Size of the file.
        head_bytes: Number of bytes before the data.
        head_crc32: Checksum of these bytes.
        ranges: Checksums of the data.
    """

    num_bytes: int
    head_bytes: int
    head_crc32: int
    ranges: tuple[RangeRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRecord:
    """Size and checksum of a file without tensors."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        kind: Kind of checkpoint: "model", "optimizer" ...
        files: Tensor files by name.
        documents: Other files by name, in directories separated by "/".
        facts: JSON metadata of the save, of at most six levels: plugin, world_size, versions, step ...
    """

    kind: str
    files: dict[str, FileRecord]
    documents: dict[str, DocumentRecord] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Total size of files and documents."""
        return sum(file.num_bytes for file in self.files.values()) + sum(
            document.num_bytes for document in self.documents.values()
        )

    def encode(self) -> bytes:
        """Serialize the manifest as JSON, with its own checksum last.

        Raises:
            CheckpointError: It could not be parsed again: a name is not valid Unicode, `metadata` are not JSON values, or
                it exceeds 64 MiB.
        """
        self._check_metadata()
        document = {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "files": {name: _encode_file(record) for name, record in self.files.items()},
            "documents": {
                name: {"num_bytes": record.num_bytes, "crc32": f"{record.crc32:08x}"}
                for name, record in self.documents.items()
            },
            "facts": self.metadata,
        }
        try:
            body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")[:-1]
        except UnicodeEncodeError as error:
            raise CheckpointError(f"a tensor's name is not valid Unicode ({error}): rename the parameter") from None
        raw = body + b',"crc32":"%08x"}' % zlib.crc32(body)
        if len(raw) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"the checksums of {len(self.files)} files take {len(raw)} bytes, but a manifest has at most"
                f" {MAX_JSON_BYTES}: save in fewer, larger files"
            )
        return raw

    @classmethod
    def parse(cls, raw: bytes, source_name: str) -> Manifest:
        """Parse the output of `encode`.

        Args:
            raw: Content of the file, untrusted.
            source_name: File name for messages.

        Raises:
            CheckpointError: Not a manifest, modified, or with names outside of the checkpoint's directory.
        """
        document = _parse_checksummed(raw, source_name)
        if document.get("format") != _FORMAT or type(document.get("version")) is not int:
            raise _format_error(source_name, "it is not a manifest of this library")
        if document["version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{source_name} is of version {document['version']}, but this release reads {FORMAT_VERSION}: update"
                " torch-booster"
            )
        if set(document) != {"format", "version", "kind", "files", "documents", "facts", "crc32"}:
            raise _format_error(source_name, "members are missing or unknown")
        if not isinstance(document["kind"], str) or not isinstance(document["facts"], dict):
            raise _format_error(source_name, "kind or facts are of the wrong type")
        return cls(
            kind=document["kind"],
            files=_parse_table(document["files"], source_name, _parse_file, max_depth=1),
            documents=_parse_table(document["documents"], source_name, _parse_document),
            metadata=document["facts"],
        )

    def _check_metadata(self) -> None:
        try:
            raw = json.dumps({"facts": self.metadata}, allow_nan=False).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the facts of a manifest are not JSON values: {error}") from None
        parse_json(raw, "what goes into the manifest as facts")


def _encode_file(record: FileRecord) -> dict[str, Any]:
    return {
        "num_bytes": record.num_bytes,
        "head_bytes": record.head_bytes,
        "head_crc32": f"{record.head_crc32:08x}",
        "ranges": encode_ranges(record.ranges),
    }


def _parse_checksummed(raw: bytes, source_name: str) -> dict[str, Any]:
    """Parse the document after verifying its checksum."""
    if len(raw) > MAX_JSON_BYTES:
        raise _format_error(source_name, f"it has {len(raw)} bytes, but a manifest has at most {MAX_JSON_BYTES}")
    body, checksum = raw[:-_CHECKSUM_BYTES], _CHECKSUM.fullmatch(raw[-_CHECKSUM_BYTES:])
    if checksum is None:
        raise _format_error(source_name, "it does not end with its own checksum")
    if zlib.crc32(body) != int(checksum[1], 16):
        raise _format_error(source_name, "its content and its own checksum do not match")
    document = parse_json(raw, source_name)
    if not isinstance(document, dict):
        raise _format_error(source_name, "it is not a JSON object")
    return document


def _parse_table(
    value: Any, source_name: str, parse: Callable[[Any, str], R], max_depth: int | None = None
) -> dict[str, R]:
    if not isinstance(value, dict):
        raise _format_error(source_name, "files or documents are not a JSON object")
    for name in value:
        parts = name.split("/")
        if not all(map(_is_safe_name, parts)) or len(parts) > (max_depth or len(parts)):
            raise CheckpointError(
                f"{source_name} names the file {name[:200]!r}: it may name only files in its own directory. Do not trust this"
                " checkpoint"
            )
    return {name: parse(record, f"{source_name}, in the record of {name},") for name, record in value.items()}


def _is_safe_name(component: str) -> bool:
    """Return whether the path component is printable and has no special meaning on any system."""
    return (
        0 < len(component.encode("utf-8")) <= _MAX_NAME
        and not component.startswith(".")
        and all(character not in '\\:*?"<>|' and character.isprintable() for character in component)
    )


def _parse_file(record: Any, source_name: str) -> FileRecord:
    if not isinstance(record, dict) or set(record) != {"num_bytes", "head_bytes", "head_crc32", "ranges"}:
        raise _format_error(source_name, "members are missing or unknown")
    num_bytes, head_bytes = _size(record["num_bytes"], source_name), _size(record["head_bytes"], source_name)
    if head_bytes > num_bytes:
        raise _format_error(source_name, f"{head_bytes} bytes of head do not fit into {num_bytes} bytes")
    return FileRecord(
        num_bytes=num_bytes,
        head_bytes=head_bytes,
        head_crc32=_crc32(record["head_crc32"], source_name),
        ranges=decode_ranges(record["ranges"], source_name),
    )


def _parse_document(record: Any, source_name: str) -> DocumentRecord:
    if not isinstance(record, dict) or set(record) != {"num_bytes", "crc32"}:
        raise _format_error(source_name, "members are missing or unknown")
    return DocumentRecord(num_bytes=_size(record["num_bytes"], source_name), crc32=_crc32(record["crc32"], source_name))


def _size(value: Any, source_name: str) -> int:
    if type(value) is not int or value < 0:
        raise _format_error(source_name, f"{str(value)[:40]!r} is not a size")
    return value


def _crc32(value: Any, source_name: str) -> int:
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{8}", value) is None:
        raise _format_error(source_name, f"{str(value)[:40]!r} is not a checksum")
    return int(value, 16)


def _format_error(source_name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source_name} is damaged or not a manifest: {reason}. Take another copy of the checkpoint")
