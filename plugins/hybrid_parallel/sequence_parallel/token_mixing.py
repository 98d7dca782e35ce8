"""What in a stack's layers would see the tokens of one rank only, though it needs its neighbours or all."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.running import no_attention

__all__ = ["check_attention_alone_mixes_tokens"]

# By these names transformers' models call attention that can be exchanged; the others multiply matrices themselves.
_ATTENTION = re.compile(r"ALL_ATTENTION_FUNCTIONS|scaled_dot_product_attention|multi_head_attention_forward")
_MIXES_TOKENS: tuple[type[nn.Module], ...] = (_ConvNd, _BatchNorm, nn.RNNBase, nn.InstanceNorm1d, nn.AvgPool1d)


def check_attention_alone_mixes_tokens(model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
    """Returns if no module in the layers of a stack is of a kind that combines tokens, but for attention.

    Functions that do are found at the first batch; of transformers' layers it is known now that their attention can't
    be exchanged.

    Args:
        model: The user's.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: There is one.
    """
    for name in (name for stack in stacks for name in stack):
        if _attends_by_hand(model.get_submodule(name)):
            raise no_attention(name)
        for inner, module in model.get_submodule(name).named_modules():
            if isinstance(module, _MIXES_TOKENS):
                raise ConfigError(
                    f"{name}.{inner} is a {type(module).__name__}, which combines tokens, and sequence parallelism"
                    " gives each rank some of them, which only attention exchanges: split the layers instead (tp_size),"
                    " or move the module out of the stack of layers"
                )


def _attends_by_hand(layer: nn.Module) -> bool:
    """Returns whether all of a layer's code is transformers' own, in files that nowhere call known attention."""
    files = {type(module).__module__ for module in layer.modules()}
    if any(isinstance(module, nn.MultiheadAttention) for module in layer.modules()):
        return False
    own = [name for name in files if not name.startswith("torch.")]
    is_transformers = all(name.startswith("transformers.") for name in own)
    return is_transformers and bool(own) and not any(_calls_attention(name) for name in own)


@functools.cache
def _calls_attention(module_name: str) -> bool:
    try:
        return _ATTENTION.search(inspect.getsource(sys.modules[module_name])) is not None
    except OSError:
        return True  # installed without sources, so that the first batch has to tell
