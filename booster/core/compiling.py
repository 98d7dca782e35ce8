"""Functions that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Exclude a function and all functions that it calls from torch.compile.

    Required for functions that communicate or keep state between calls, because a compiled graph replays neither.
    """
    return cast(_Function, torch.compiler.disable(function))


def calls_compiled(function: _Function) -> _Function:
    """Exclude a function from torch.compile, but not the functions that it calls."""
    return cast(_Function, torch.compiler.disable(function, recursive=False))
