"""Deprecated names of public attributes and arguments."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


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
        if instance is None:
            return getattr(owner, self.name)
        # An override of the old name has both names; if there is one, it called super().
        overrides = [cls for cls in owner.__mro__ if vars(cls).get(self.name, self) is vars(cls).get(self._old_name)]
        return getattr(super(overrides[-1], instance) if overrides else instance, self.name)


class DeprecatedOverrides:
    """Base class under which an override of a `DeprecatedAlias` is used as one of the current name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = [item for base in cls.__mro__[1:] for item in vars(base).items()]
        aliases = {name: alias for name, alias in inherited if isinstance(alias, DeprecatedAlias)}
        for name in aliases.keys() & vars(cls).keys():
            alias, override = aliases[name], vars(cls)[name]
            if not isinstance(override, DeprecatedAlias) and alias.name not in vars(cls):
                message = f"{cls.__qualname__}.{name} is deprecated: rename it to {alias.name}"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                setattr(cls, alias.name, override)


def renamed_arguments(**names: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator of functions that take keyword arguments by their old names, too, and warn then.

    Args:
        names: Current name by old name. Removed in version 0.2.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            for old in names.keys() & kwargs.keys():
                message = f"the argument {old} of {function.__qualname__} is deprecated: use {names[old]}"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


class ConfigFingerprint(DeprecatedOverrides):
    """Base class of objects whose config is compared over ranks."""

    def config_fingerprint(self) -> list[str]:
        """Return lines of text that must be equal on all ranks, compared by every boost(); none by default."""
        return []

    agreement_facts = DeprecatedAlias("config_fingerprint")
