"""Outputs of layers that transformers captures by hooks: hidden states, attentions, router logits."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def captured_lists() -> dict[str, list[Any]]:
    """Return the lists that the innermost running model of transformers captures outputs in, by their names."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    captured = (collector.get() if collector is not None else None) or {}
    return {key: value for key, value in captured.items() if isinstance(value, list)}


def captures(model: nn.Module, name: str) -> bool:
    """Return whether a model of transformers within a model captures an output by hooks.

    Args:
        model: The user's model.
        name: Name of the output, such as "router_logits".
    """
    return any(name in (getattr(one, "_can_record_outputs", None) or {}) for one in model.modules())
