"""How a batch becomes a model's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from booster.errors import ConfigError
from booster.interface.model import ModelWrapper

__all__ = ["call_with_batch"]


def call_with_batch(model: Callable[..., Any], batch: Any) -> Any:
    """Returns what a model makes of a batch: a mapping of keyword arguments, a sequence, or the only argument.

    Raises:
        ConfigError: The batch is empty, or has entries that the model's forward does not take.
    """
    args, kwargs = _arguments(batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        users = model.unwrap() if isinstance(model, ModelWrapper) else model  # the wrapper's forward takes anything
        signature = inspect.signature(getattr(users, "forward", users))
        try:
            signature.bind(*args, **kwargs)
        except TypeError as mismatch:
            given = f"the keys {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} entries"
            raise ConfigError(
                f"a batch with {given} was given to {type(users).__name__}, whose forward takes {signature}"
                f" ({mismatch}): a batch goes there as a whole, a dict by keyword, a tuple by position, with labels."
                " Let forward take them all (forward(self, x, y=None)), or let the data iterator give what it takes"
            ) from error
        raise


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    if not batch:
        raise ConfigError(
            "the data iterator gave an empty batch, with which the model can't be called: let it give the model's"
            " arguments, a tensor alone, or a dict or a tuple of them"
        )
    return tuple(batch), {}
