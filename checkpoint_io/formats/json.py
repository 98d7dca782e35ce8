"""Strict parser for untrusted JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from booster.errors import CheckpointError

# The cost of a text is bounded before it is parsed, by its size, its depth and its number of values: two bytes of text
# ("1,") can become an object of forty. A million tensors stay far below these limits.
MAX_JSON_BYTES = 64 * 2**20
MAX_DEPTH = 8
MAX_DOCUMENT_DEPTH = 256
MAX_VALUES = 12_000_000
_MAX_INT_DIGITS = 400
_INT64 = range(-(2**63), 2**63)
_AS_ZEROS = bytes(ord("0") if ord("0") <= byte <= ord("9") else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * 19  # numbers of fewer digits fit into 64 bits
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'{}[]",')
_SCAN_BYTES = 2**20
# Change of the depth, by byte.
_DEPTH_CHANGES = np.zeros(256, dtype=np.int8)
_DEPTH_CHANGES[list(b"{[")] = 1
_DEPTH_CHANGES[list(b"}]")] = -1


def parse_json(raw: bytes, source_name: str) -> Any:
    """Parse an index, a manifest or a header.

    Args:
        raw: UTF-8 text.
        source_name: Name of the file for messages.

    Raises:
        CheckpointError: Invalid JSON, or JSON that parsers interpret differently: duplicate keys, NaN and infinities,
            numbers beyond fp64 or 64 bits, lone surrogates, nesting deeper than 8 levels, or too many values.
    """
    # The parser has a fast path for `int`, and bytes are scanned faster than by an expression.
    parse_int = _parse_int64 if _LONG_NUMBER in raw.translate(_AS_ZEROS) else int
    value = _parse(raw, source_name, MAX_DEPTH, parse_int)
    if b"\\u" in raw and _SURROGATE.search(raw) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise _parse_error(source_name, f"it holds half of a surrogate pair ({error.reason})") from None
    return value


def parse_document(raw: bytes, source_name: str) -> Any:
    """Parse JSON with user values: deeper nesting, integers of any size and any strings.

    Raises:
        CheckpointError: Invalid JSON, duplicate keys, NaN and infinities, floats beyond fp64, excessive size or depth.
    """
    return _parse(raw, source_name, MAX_DOCUMENT_DEPTH, _parse_bounded_int)


def _parse(raw: bytes, source_name: str, max_depth: int, parse_int: Callable[[str], int]) -> Any:
    try:
        _check_structure(raw, max_depth)
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite,
            parse_int=parse_int,
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _parse_error(source_name, reason) from None


def _parse_error(source_name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{source_name} cannot be read as JSON: {reason}. The file is damaged or was not written by a checkpoint"
        " writer: take another copy"
    )


def _check_structure(raw: bytes, max_depth: int) -> None:
    """Check depth and number of values in a few passes, without building any value."""
    depth = num_values = 0
    in_string = False
    for structure in _structure(raw):
        codes = np.frombuffer(structure, dtype=np.uint8)
        quotes = codes == ord('"')
        # A byte is inside a string if the number of quotes before it is odd; an overflow does not change that.
        outside = (np.cumsum(quotes, dtype=np.uint8) & 1) == in_string
        outside &= ~quotes
        depths = depth + np.cumsum(np.where(outside, _DEPTH_CHANGES[codes], 0), dtype=np.int32)
        if depths.max() > max_depth:
            raise ValueError(f"it is nested deeper than {max_depth} levels")
        num_values += int(np.count_nonzero(outside & (_DEPTH_CHANGES[codes] >= 0)))
        if num_values > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} values")
        in_string ^= bool(np.count_nonzero(quotes) % 2)
        depth = int(depths[-1])


def _structure(raw: bytes) -> Iterator[bytes]:
    """Yield the quotes, brackets and commas of a text, in chunks; escaped quotes are omitted."""
    start = 0
    while start < len(raw):
        stop = min(start + _SCAN_BYTES, len(raw))
        chunk = raw[start:stop]
        num_escapes = len(chunk) - len(chunk.rstrip(b"\\"))
        if num_escapes % 2 == 1 and stop < len(raw):  # do not end a chunk within an escape sequence
            chunk, stop = chunk[:-1], stop - 1
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = chunk.translate(None, _NOT_STRUCTURE)
        if structure:
            yield structure
        start = stop


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {duplicate[:200]!r} is given twice")
    return found


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond the range of a number")
    return number


def _parse_bounded_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:  # int() is quadratic in the number of digits
        raise ValueError(f"an integer of {len(text)} digits is beyond the range of a number")
    return int(text)


def _parse_int64(text: str) -> int:
    if len(text) > 20 or int(text) not in _INT64:
        raise ValueError(f"the integer {text[:40]} does not fit into 64 bits")
    return int(text)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Serialize a document: indented, in the given key order, UTF-8."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode("utf-8")
