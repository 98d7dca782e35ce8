"""Sharding of a layer's arguments along the sequence."""

from __future__ import annotations

import torch

# Besides hidden states, layers take rotary tables (.., tokens, features), position ids (batch, tokens) and the like,
# which are sharded; attention masks, which attention needs in full; and other sequences to attend to, such as encoder
# states, which stay unsharded. Names decide if they are known, otherwise shapes: a number with one row per token is
# sharded, unless it also has one column per token.
_UNSHARDED_NAMES = ("mask", "bias", "encoder", "memory", "cross", "key_value", "cu_seq")
_POSITION_NAMES = ("position", "rotary", "rope", "cos", "sin", "freqs")


def token_dim(name: str, tensor: torch.Tensor, length: int) -> int | None:
    """Return the dimension of an argument along which it is sharded, or None.

    Args:
        name: Name of the layer's parameter.
        tensor: The argument.
        length: Tokens of the full sequence.
    """
    if tensor.dtype == torch.bool or any(word in name for word in _UNSHARDED_NAMES):
        return None
    sizes, count = tensor.shape, tensor.dim()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return count - 1 if 1 <= count <= 3 and sizes[-1] == length else None
    if count >= 2 and sizes[-2] == length and (sizes[-1] != length or any(word in name for word in _POSITION_NAMES)):
        return count - 2
    if count == 4 and sizes[1] == length and sizes[-1] != length:
        return 1
    if count == 3 and sizes[0] == length and sizes[1] == 1:
        return 0
    return None
