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
        return getattr(owner if instance is None else instance, self.name)


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


class ConfigFingerprint:
    """Base class of objects whose config is compared over ranks.

    `agreement_facts` is the deprecated name of `config_fingerprint`: a subclass that overrides it is used as if it
    overrode `config_fingerprint`. It is removed in version 0.2.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "agreement_facts" in vars(cls) and "config_fingerprint" not in vars(cls):
            warnings.warn(
                f"{cls.__qualname__}.agreement_facts() is deprecated: rename it to config_fingerprint()",
                DeprecationWarning,
                stacklevel=2,
            )
            cls.config_fingerprint = vars(cls)["agreement_facts"]  # type: ignore[method-assign]

    def config_fingerprint(self) -> list[str]:
        """Return lines of text that must be equal on all ranks, compared by every boost(); none by default."""
        return []

    def agreement_facts(self) -> list[str]:
        """Deprecated: use `config_fingerprint`."""
        warnings.warn("agreement_facts() is deprecated: call config_fingerprint()", DeprecationWarning, stacklevel=2)
        for cls in type(self).__mro__:  # the first that is not itself an alias, for calls by super()
            own = vars(cls).get("config_fingerprint")
            if own is not None and own is not vars(cls).get("agreement_facts"):
                return list(own(self))
        return []
