"""What torch.compile must not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Have torch.compile break its graph at a function, and not look into it.

    For what communicates, or keeps what it is given from call to call: a graph would be replayed without either.
    """
    return cast(_Function, torch.compiler.disable(function))


def calls_compiled(function: _Function) -> _Function:
    """Have torch.compile not look into a function itself, but into what it calls."""
    return cast(_Function, torch.compiler.disable(function, recursive=False))
