"""Lossless JSON encoding of plain Python values: tuples, int keys, inf and NaN survive a round trip."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from booster.checkpoint_io.copy_elements import bytes_of
from booster.errors import CheckpointError

from .json import parse_document
from .safetensors import to_contiguous_cpu

# Note [Tagged JSON]
# A value without a JSON equivalent is written as an object with one key that begins with "$": {"$tuple": [1, 2]}. To be
# unambiguous, a dictionary with such a key, or with keys that are not strings, is written as a list of pairs under
# "$dict".

MAX_DEPTH = 64


def dumps(value: Any, value_name: str) -> str:
    """Serialize a value to JSON text; see `encode`."""
    return json.dumps(encode(value, value_name), allow_nan=False)


def loads(raw: bytes, value_name: str) -> Any:
    """Parse JSON text written by `dumps`.

    Raises:
        CheckpointError: The text is not an output of `dumps`.
    """
    return decode(parse_document(raw, value_name), value_name)


def encode(value: Any, value_name: str) -> Any:
    """Convert None, numbers, strings, containers, tensors, dtypes and numpy scalars to JSON values.

    Args:
        value: Value; only the exact types are supported, not subclasses.
        value_name: Name of the value for messages.

    Raises:
        CheckpointError: A nested value has another type; the message names its path.
    """
    return _encode(value, value_name, 0)


def decode(encoded: Any, value_name: str) -> Any:
    """Convert a result of `encode` back; tensors are on the CPU.

    Raises:
        CheckpointError: `encoded` is not a result of `encode`.
    """
    try:
        return _decode(encoded)
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{value_name} holds a value that this library does not write ({error}): the file is damaged or from"
            " another program"
        ) from None


def _encode(value: Any, value_name: str, depth: int) -> Any:
    value_type = type(value)
    if value is None or value_type in (bool, int, str):
        return value
    if value_type is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{value_name[:200]} is nested deeper than {MAX_DEPTH} levels, or contains itself: flatten it"
        )
    if value_type is list or value_type in _SEQUENCES:
        items = [_encode(item, f"{value_name}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if value_type is list else {_SEQUENCES[value_type]: items}
    if value_type in _MAPPINGS:
        return _encode_mapping(value, value_name, depth)
    return _encode_leaf(value, value_name)


def _encode_mapping(value: dict[Any, Any], value_name: str, depth: int) -> Any:
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, f"{value_name}[{key!r}]", depth + 1) for key, item in value.items()}
    pairs = [
        [_encode(key, f"a key of {value_name}", depth + 1), _encode(item, f"{value_name}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return {_MAPPINGS[type(value)]: pairs}


def _encode_leaf(value: Any, value_name: str) -> Any:
    if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type != "meta":
        dtype_name = str(value.dtype).removeprefix("torch.")
        return {"$tensor": [dtype_name, list(value.shape), _encode_bytes(bytes_of(to_contiguous_cpu(value)))]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, _encode_bytes(value.tobytes())]}
    if isinstance(value, complex):
        return {"$complex": [_encode(value.real, value_name, 0), _encode(value.imag, value_name, 0)]}
    if isinstance(value, bytes):
        return {"$bytes": _encode_bytes(value)}
    raise CheckpointError(
        f"{value_name} is a {type(value).__module__}.{type(value).__qualname__}, and without pickle only tensors and"
        " plain values are written: use a number, a string or a container of such instead"
    )


def _encode_bytes(raw: bytes | memoryview) -> str:
    return base64.b64encode(raw).decode("ascii")


def _decode(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [_decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next((key for key in encoded if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item) for key, item in encoded.items()}
    if len(encoded) != 1 or tag not in _DECODERS:
        raise ValueError(f"unknown tag {tag[:40]!r}")
    return _DECODERS[tag](encoded[tag])


def _decode_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError("a tagged float is inf, -inf or nan")
    return float(text)


def _decode_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _decode_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:40]!r} is not a dtype")
    return dtype


def _decode_tensor(fields: list[Any]) -> torch.Tensor:
    name, shape, text = fields
    dtype, raw = _decode_dtype(name), _decode_bytes(text)
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are not a tensor of shape {str(shape)[:80]}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_numpy(fields: list[str]) -> Any:
    dtype = np.dtype(fields[0])
    if dtype.kind not in "biufc":
        raise ValueError("a numpy scalar is a number")
    (scalar,) = np.frombuffer(_decode_bytes(fields[1]), dtype=dtype)
    return scalar


def _decode_complex(fields: list[Any]) -> complex:
    real, imag = (_decode(field) for field in fields)
    return complex(real, imag)


def _decode_pairs(pairs: list[list[Any]]) -> list[tuple[Any, Any]]:
    return [(_decode(key), _decode(item)) for key, item in pairs]


_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {dict: "$dict", Counter: "$counter", OrderedDict: "$ordered_dict"}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": _decode_float,
    "$tuple": lambda items: tuple(_decode(list(items))),
    "$set": lambda items: set(_decode(list(items))),
    "$frozenset": lambda items: frozenset(_decode(list(items))),
    "$dict": lambda pairs: dict(_decode_pairs(pairs)),
    "$counter": lambda pairs: Counter(dict(_decode_pairs(pairs))),
    "$ordered_dict": lambda pairs: OrderedDict(_decode_pairs(pairs)),
    "$tensor": _decode_tensor,
    "$dtype": _decode_dtype,
    "$numpy": _decode_numpy,
    "$complex": _decode_complex,
    "$bytes": _decode_bytes,
}
