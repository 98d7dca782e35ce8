"""Models that are built without memory and filled later, piece by piece, with the numbers of an ordinary build."""

from __future__ import annotations

from booster.lazy_init.context import LazyInitContext
from booster.lazy_init.filling import materialize, materialize_own, materialize_tensor
from booster.lazy_init.guard import is_lazy

__all__ = ["LazyInitContext", "is_lazy", "materialize", "materialize_own", "materialize_tensor"]
