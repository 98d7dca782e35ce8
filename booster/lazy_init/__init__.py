"""Lazy initialization: models built without memory and materialized later, with the values of an ordinary build."""

from __future__ import annotations

from .context import LazyInitContext
from .materialize import is_lazy, materialize, materialize_own, materialize_tensor

__all__ = ["LazyInitContext", "is_lazy", "materialize", "materialize_own", "materialize_tensor"]
