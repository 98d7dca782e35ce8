"""Small JSON files in the style of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["json_bytes"]


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """Serialize a document: indented, in the given key order, UTF-8."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode("utf-8")
