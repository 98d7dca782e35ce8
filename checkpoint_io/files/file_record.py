"""Checksums embedded in a single safetensors file: of its ranges and of its head."""

# A directory has a manifest; a single file embeds its checksums. Its metadata holds the ranges with their checksums
# under RECORD_KEY, and the checksum of the full head, up to the first byte of data, under HEAD_KEY. Every checksum has
# eight hex digits, so the head is laid out and the data written before any checksum is known, and filling them in moves
# nothing. The head's checksum is computed with its own digits as zeros.

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from booster.checkpoint_io.files.manifest import (
    FileRecord,
    RangeRecord,
    check_ranges_cover,
    decode_ranges,
    encode_ranges,
)
from booster.checkpoint_io.files.strict_json import parse_json
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["HEAD_KEY", "RECORD_KEY", "completed_head", "embedded_record", "with_placeholder"]

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
    completed = _replace_once(head, _as_json(text), _as_json(_encode(ranges, crcs)))
    start = completed.index(_HEAD_DIGITS + _ZEROS) + len(_HEAD_DIGITS)
    return completed[:start] + _digits(zlib.crc32(completed)) + completed[start + _NUM_DIGITS :]


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
    expected = _digits(zlib.crc32(head[:start] + _ZEROS + head[stop:]))
    if start < len(_HEAD_DIGITS) or head[start:stop] != expected or metadata[HEAD_KEY] != expected.decode():
        raise _checksum_error(source_name)
    text = metadata[RECORD_KEY].encode("utf-8", "surrogatepass")
    ranges = decode_ranges(parse_json(text, f"the record of {source_name}"), f"the record of {source_name}")
    check_ranges_cover(specs, ranges)
    return FileRecord(num_bytes=num_bytes, head_bytes=len(head), head_crc32=zlib.crc32(head), ranges=ranges)


def _encode(ranges: Sequence[RangeRecord], crcs: Sequence[int]) -> str:
    filled = [replace(each, crc32=crc) for each, crc in zip(ranges, crcs, strict=True)]
    return json.dumps(encode_ranges(filled), separators=(",", ":"))


def _as_json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def _replace_once(head: bytes, old: bytes, new: bytes) -> bytes:
    if head.count(old) != 1 or len(new) != len(old):
        raise AssertionError("the placeholder of the record is not in the head as it was laid out")
    return head.replace(old, new)


def _digits(crc32: int) -> bytes:
    return b"%08x" % crc32


def _checksum_error(source_name: str) -> CheckpointError:
    return CheckpointError(
        f"{source_name} is damaged: the checksum of its header is not the one that was saved. Take another copy of it, or, if"
        f" another tool wrote it and copied our metadata, write it again without {RECORD_KEY!r} and {HEAD_KEY!r}"
    )
