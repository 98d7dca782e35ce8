"""What leaves a stack of layers beside the hidden states of the last one: whole, as everything outside of the stack is.

Note [Recorded outputs]
transformers' models return on demand what their layers compute on the way, and compute losses of it: logits of routers,
hidden states. Most of them have hooks note it, whose notes are read when the layers have run; the others, as models
that users write, keep the layers' outputs themselves. Notes are joined where the stack ends, before anything is
computed of them. Kept outputs are joined in what the model returns; that a loss was computed of this rank's tokens
alone is found when the ranks compare their losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.sequence_parallel.arguments import map_tensors as map_noted
from booster.plugins.sharding.compiling import not_compiled
from booster.tensor_tree import map_tensors

__all__ = ["Notes", "join_kept_outputs", "keep_joinable"]

Join = Callable[[torch.Tensor], torch.Tensor]
_JOIN = "_join_tokens"


class Notes:
    """What transformers' hooks note from now on, until a stack ends; see Note [Recorded outputs].

    Args:
        sees_all_tokens: Whether attention sees all tokens, so that its weights can be noted.

    Raises:
        ConfigError: Weights of attention are to be noted that no rank has.
    """

    def __init__(self, *, sees_all_tokens: bool) -> None:
        capturing = sys.modules.get("transformers.utils.output_capturing")
        collector = getattr(capturing, "_active_collector", None)
        noted = (collector.get() if collector is not None else None) or {}
        self._lists: dict[str, list[Any]] = {key: value for key, value in noted.items() if isinstance(value, list)}
        self._before = {key: len(value) for key, value in self._lists.items()}
        if not sees_all_tokens and any("attentions" in key for key in self._lists):
            raise ConfigError(
                "output_attentions=True asks for attention weights, which sequence parallelism never has in one place:"
                " leave it out, of the config too"
            )

    def join(self, local_shape: torch.Size, join: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Makes the notes whole of tensors that have this rank's tokens. Collective.

        Args:
            local_shape: Of this rank's hidden states.
            join: Returns the whole of a tensor whose given dimension is this rank's tokens.
        """
        num_sequences, num_tokens = local_shape[:2]

        def joined(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() >= 3 and tensor.shape[:2] == local_shape[:2]:
                return join(tensor, 1)
            if tensor.dim() <= 2 and tensor.shape[:1] == (num_sequences * num_tokens,):
                return join(tensor.unflatten(0, (num_sequences, num_tokens)), 1).flatten(0, 1)
            return tensor

        for key, values in self._lists.items():
            values[self._before[key] :] = [map_noted(value, joined) for value in values[self._before[key] :]]


def keep_joinable(output: Any, join: Join) -> None:
    """Notes on a layer's hidden states how they become whole, for `join_kept_outputs`. No communication."""
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(hidden, torch.Tensor):
        setattr(hidden, _JOIN, join)


def join_kept_outputs(model: nn.Module) -> None:
    """Has a model return layers' hidden states whole that it kept; see Note [Recorded outputs].

    Its forward is collective then. No communication.
    """
    model.register_forward_hook(_join_kept)


@not_compiled
def _join_kept(module: nn.Module, args: Any, output: Any) -> Any:
    return map_tensors(lambda one: getattr(one, _JOIN)(one) if hasattr(one, _JOIN) else one, output)
