"""Models that are built without memory and filled later, piece by piece, with the numbers of an ordinary build."""

from __future__ import annotations

from .context import LazyInitContext
from .materialize import is_lazy, materialize, materialize_own, materialize_tensor

__all__ = ["LazyInitContext", "is_lazy", "materialize", "materialize_own", "materialize_tensor"]
