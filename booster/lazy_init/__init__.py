"""Lazy initialization: models built without memory and materialized later, with the values of an ordinary build."""

from __future__ import annotations

from .context import LazyInitContext
from .materialize import (
    check_materialized,
    is_lazy,
    materialize,
    materialize_own,
    materialize_tensor,
    move_to_device,
)

__all__ = [
    "LazyInitContext",
    "check_materialized",
    "is_lazy",
    "materialize",
    "materialize_own",
    "materialize_tensor",
    "move_to_device",
]
