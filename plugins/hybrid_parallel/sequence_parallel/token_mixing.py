"""Check that only attention mixes tokens in a stack's layers."""

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

from .layer_context import no_attention_error

# Names by which transformers models call replaceable attention; other models implement it with plain matmuls.
_ATTENTION = re.compile(r"ALL_ATTENTION_FUNCTIONS|scaled_dot_product_attention|multi_head_attention_forward")
_MIXES_TOKENS: tuple[type[nn.Module], ...] = (_ConvNd, _BatchNorm, nn.RNNBase, nn.InstanceNorm1d, nn.AvgPool1d)


def check_only_attention_mixes_tokens(model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
    """Check that no module in a stack's layers mixes tokens, except for replaceable attention.

    Functions that mix tokens are only detected in the first batch. Irreplaceable attention of transformers layers is
    detected here.

    Args:
        model: The user's model.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: There is such a module.
    """
    for name in (name for stack in stacks for name in stack):
        if _has_plain_attention(model.get_submodule(name)):
            raise no_attention_error(name)
        for inner, module in model.get_submodule(name).named_modules():
            if isinstance(module, _MIXES_TOKENS):
                raise ConfigError(
                    f"{name}.{inner} is a {type(module).__name__}, which mixes tokens, but sequence parallelism"
                    " communicates in attention only: shard the layers instead (tp_size), or move the module out of"
                    " the stack of layers"
                )


def _has_plain_attention(layer: nn.Module) -> bool:
    """Whether a layer's code is in transformers files only, none of which calls replaceable attention."""
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
        return True  # no source code; the first batch detects it
