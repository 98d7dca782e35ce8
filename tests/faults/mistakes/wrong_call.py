"""What a wrong call is: its name, and how it is made ready so that nothing but the call itself is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CallSite", "WrongCall", "call_text", "calling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """Where a wrong call is made."""

    rank: int
    directory: Path  # holds the same files on all ranks; nothing may be added to it

    @property
    def is_wrong(self) -> bool:
        """True on the one rank that is wrong alone, where the others do right."""
        return self.rank == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongCall:
    """A call that can't work.

    Args:
        name: Says in the list of messages what is wrong, as code where that is short.
        prepare: Makes what the call needs, and returns the call; only the latter is watched.
        refusal: The class of the error; a command ends with exit code 2 instead.
    """

    name: str
    prepare: Callable[[CallSite], Callable[[], Any]]
    refusal: str = "ConfigError"


def calling(function: Callable[..., Any], *args: Any, **arguments: Any) -> WrongCall:
    """Returns the wrong call of a function with plain values, called as it is written."""
    return WrongCall(
        name=call_text(function, *args, **arguments), prepare=lambda _: lambda: function(*args, **arguments)
    )


def call_text(function: Callable[..., Any], *args: Any, **arguments: Any) -> str:
    """Returns a call as a user would write it, shortly."""
    given = [_shown(value) for value in args]
    given += [f"{name}={_shown(value)}" for name, value in arguments.items()]
    return f"{function.__qualname__}({', '.join(given)})"


def _shown(value: Any) -> str:
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)
