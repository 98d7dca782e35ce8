"""Call of a model with a batch as its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from booster.errors import ConfigError
from booster.interface.model import ModelWrapper

__all__ = ["call_with_batch"]


def call_with_batch(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch: a mapping of keyword arguments, a sequence of positional ones, or the only one.

    Raises:
        ConfigError: The batch is empty, or does not match the signature of the model's forward.
    """
    args, kwargs = _arguments(batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        users = model.unwrap() if isinstance(model, ModelWrapper) else model  # the wrapper's forward accepts anything
        signature = inspect.signature(getattr(users, "forward", users))
        try:
            signature.bind(*args, **kwargs)
        except TypeError as mismatch:
            given = f"the keys {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} entries"
            raise ConfigError(
                f"a batch with {given} was given to {type(users).__name__}, whose forward has the signature {signature}"
                f" ({mismatch}): the full batch is passed, a dict by keyword, a tuple by position, with labels. Let"
                " forward accept them all (forward(self, x, y=None)), or let the data iterator yield its arguments only"
            ) from error
        raise


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}
    if not batch:
        raise ConfigError(
            "the data iterator yielded an empty batch, and the model needs arguments: yield a tensor, or a dict or a"
            " tuple of the model's arguments"
        )
    return tuple(batch), {}
