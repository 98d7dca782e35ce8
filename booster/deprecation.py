"""Deprecated names of public attributes."""

from __future__ import annotations

import warnings
from typing import Any


class DeprecatedAlias:
    """Class attribute that stands for another one, and warns when it is used. Removed in version 0.2.

    Args:
        name: Current name of the method or property.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._old_name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        message = f"{owner.__name__}.{self._old_name} is deprecated: use {self.name}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(owner if instance is None else instance, self.name)
