"""JSON from a file that nobody vouches for: one meaning or an error, whatever the bytes are."""

from __future__ import annotations

import json
import math
from typing import Any

from booster.errors import CheckpointError

__all__ = ["parse_json"]

MAX_INT_DIGITS = 400


def parse_json(raw: bytes, what: str) -> Any:
    """Returns the value of a JSON text.

    Args:
        raw: The text, in UTF-8.
        what: The file or part of a file, for messages.

    Raises:
        CheckpointError: No JSON, or JSON that readers disagree about: keys given twice, NaN and infinities, numbers
            beyond fp64, or nesting beyond what the parser takes.
    """
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{what} cannot be read as JSON: {reason}. The file is damaged or was not written by a checkpoint writer:"
            " take another copy"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"key {twice[:200]!r} is given twice")
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond the range of a number")
    return number


def _bounded(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:  # int() is quadratic in the digits
        raise ValueError(f"an integer of {len(text)} digits is beyond the range of a number")
    return int(text)
