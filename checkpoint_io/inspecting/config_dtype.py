"""Dtype in a model's config, updated after its weights were converted."""

from __future__ import annotations

import json
from typing import Any

from booster.errors import CheckpointError

__all__ = ["with_dtype"]

_KEYS = ("dtype", "torch_dtype")  # transformers 5, and earlier versions
_SUB_CONFIG = "_config"
_QUANTIZATION_CONFIG = "quantization_config"  # describes how some weights are packed, not the dtype of all weights


def with_dtype(raw: bytes, dtype: str, source_name: str) -> bytes:
    """Replace the dtype in a config; return the same bytes if it does not change or the config has none.

    Args:
        raw: JSON text; infinities are accepted, because some models' configs have them.
        dtype: New dtype, as torch's name without "torch.".
        source_name: File name for messages.

    Raises:
        CheckpointError: The text is not a JSON object.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source_name} is not JSON ({error}): take another copy of it") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{source_name} is not a JSON object: take another copy of it")
    if not _replace(config, dtype):
        return raw
    return (json.dumps(config, indent=2) + "\n").encode("utf-8")


def _replace(config: dict[str, Any], dtype: str) -> bool:
    has_changed = False
    for key, value in config.items():
        if key in _KEYS and isinstance(value, str) and value != dtype:
            config[key] = dtype
            has_changed = True
        elif key.endswith(_SUB_CONFIG) and key != _QUANTIZATION_CONFIG and isinstance(value, dict):
            has_changed = _replace(value, dtype) or has_changed
    return has_changed
