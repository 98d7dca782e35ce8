"""Which of a layer's arguments go along the sequence, and are split with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["argument_name", "map_tensors", "parameter_names", "token_dim"]

# Note [Arguments along the sequence]
# Beside hidden states, layers take rotary tables (.., tokens, features), position ids (batch, tokens) and the like,
# of which a rank needs its own tokens' part; attention masks, of which its attention needs all; and another sequence to
# attend to, as an encoder's states, which stays whole. Names decide where they tell, else shapes: numbers with as many
# rows as there are tokens go along the sequence, unless the columns are tokens too.
_WHOLE = ("mask", "bias", "encoder", "memory", "cross", "key_value", "cu_seq")
_TABLES = ("position", "rotary", "rope", "cos", "sin", "freqs")


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the positional parameters of a module's forward."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def argument_name(names: Sequence[str], position: int) -> str:
    """Returns what the positional argument is called; "" where the forward takes any number of them."""
    return names[position] if position < len(names) else ""


def token_dim(name: str, tensor: torch.Tensor, length: int) -> int | None:
    """Returns the dimension of an argument that is the sequence; None: it stays whole.

    Args:
        name: Of the layer's parameter.
        tensor: What is given for it.
        length: Tokens of the whole sequence.

    See Note [Arguments along the sequence].
    """
    if tensor.dtype == torch.bool or any(word in name for word in _WHOLE):
        return None
    sizes, count = tensor.shape, tensor.dim()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return count - 1 if 1 <= count <= 3 and sizes[-1] == length else None
    if count >= 2 and sizes[-2] == length and (sizes[-1] != length or any(word in name for word in _TABLES)):
        return count - 2
    if count == 4 and sizes[1] == length and sizes[-1] != length:
        return 1
    if count == 3 and sizes[0] == length and sizes[1] == 1:
        return 0
    return None


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns an argument with every tensor changed, also of those in its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(one, change) for one in value)
    if type(value) is dict:
        return {key: map_tensors(one, change) for key, one in value.items()}
    return value
