"""The number format that a model's config names, changed where its weights were converted."""

from __future__ import annotations

import json
from typing import Any

from booster.errors import CheckpointError

__all__ = ["with_dtype"]

_KEYS = ("dtype", "torch_dtype")  # transformers 5 and before
_SUB_CONFIG = "_config"
_OTHER_FORMATS = "quantization_config"  # speaks of how some weights are packed, not of all of them


def with_dtype(raw: bytes, dtype: str, what: str) -> bytes:
    """Return a config with the format in place of the one it names, the same bytes where it names it already or none.

    Args:
        raw: The JSON text; infinities are taken as they are, since some models' configs have them.
        dtype: The new format, as torch calls it without "torch.".
        what: The file, for messages.

    Raises:
        CheckpointError: The text is no JSON table.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no JSON ({error}): take another copy of it") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{what} is no JSON table: take another copy of it")
    if not _replace(config, dtype):
        return raw
    return (json.dumps(config, indent=2) + "\n").encode("utf-8")


def _replace(config: dict[str, Any], dtype: str) -> bool:
    has_changed = False
    for key, value in config.items():
        if key in _KEYS and isinstance(value, str) and value != dtype:
            config[key] = dtype
            has_changed = True
        elif key.endswith(_SUB_CONFIG) and key != _OTHER_FORMATS and isinstance(value, dict):
            has_changed = _replace(value, dtype) or has_changed
    return has_changed
