"""What in a stack's layers would see the tokens of one rank only, though it needs its neighbours or all."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from booster.errors import ConfigError

__all__ = ["check_attention_alone_mixes_tokens"]

_MIXES_TOKENS: tuple[type[nn.Module], ...] = (_ConvNd, _BatchNorm, nn.RNNBase, nn.InstanceNorm1d, nn.AvgPool1d)


def check_attention_alone_mixes_tokens(model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
    """Returns if no module in the layers of a stack is of a kind that combines tokens, but for attention.

    Functions that do, as a cumulative sum, can't be seen from outside.

    Args:
        model: The user's.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: There is one.
    """
    for name in (name for stack in stacks for name in stack):
        for inner, module in model.get_submodule(name).named_modules():
            if isinstance(module, _MIXES_TOKENS):
                raise ConfigError(
                    f"{name}.{inner} is a {type(module).__name__}, which combines tokens, and sequence parallelism"
                    " gives each rank some of them, which only attention exchanges: split the layers instead (tp_size),"
                    " or move the module out of the stack of layers"
                )
