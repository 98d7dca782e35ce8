"""Gathering of intermediate outputs that leave a stack of layers besides the last hidden states.

transformers models optionally return intermediate outputs of their layers, and compute losses from them: router logits,
hidden states. Most of them capture these with hooks and read them after the layers have run. Other models, such as
users' own, keep the layers' outputs themselves. Captured outputs are gathered at the end of the stack, before they are
used. Kept outputs are gathered in the model's output; a loss that a model computes from them on this rank's tokens is
detected when the ranks compare their losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.core.compiling import not_compiled
from booster.errors import ConfigError
from booster.pytree import iter_tensors, map_tensors

_GATHER = "_gather_tokens"


def captured_lists() -> dict[str, list[Any]]:
    """Return the lists that the innermost running model of transformers captures outputs in, by their names."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    captured = (collector.get() if collector is not None else None) or {}
    return {key: value for key, value in captured.items() if isinstance(value, list)}


def captures(model: nn.Module, name: str) -> bool:
    """Return whether a model of transformers within a model captures an output by hooks.

    Args:
        model: The user's model.
        name: Name of the output, such as "router_logits".
    """
    return any(name in (getattr(one, "_can_record_outputs", None) or {}) for one in model.modules())


class CapturedOutputs:
    """Outputs that transformers' hooks capture between creation and the end of a stack.

    Args:
        sees_all_tokens: Whether attention sees all tokens and examples, so that its weights can be captured.
        divided_by: What else divides them, for the error.

    Raises:
        ConfigError: Attention weights are requested, but no rank computes them in full.
    """

    def __init__(
        self, *, sees_all_tokens: bool, divided_by: str = "a grid of ranks (tp_mode='2d', '2.5d' or '3d')"
    ) -> None:
        self._lists = captured_lists()
        self._lengths_before = {key: len(value) for key, value in self._lists.items()}
        if not sees_all_tokens and any("attentions" in key for key in self._lists):
            raise ConfigError(
                f"output_attentions=True requests attention weights, which no rank computes in full with {divided_by}:"
                " leave it out, also in the config, or use tp_size alone, whose ranks compute those of their heads"
            )

    def gather(self, local_shape: torch.Size, gather_tokens: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Gather the captured tensors that are sharded over tokens.

        Args:
            local_shape: Shape of this rank's hidden states.
            gather_tokens: Function that gathers a tensor along a dimension of tokens.

        Collective: yes.
        """
        num_sequences, num_tokens = local_shape[:2]

        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() >= 3 and tensor.shape[:2] == local_shape[:2]:
                return gather_tokens(tensor, 1)
            if tensor.dim() <= 2 and tensor.shape[:1] == (num_sequences * num_tokens,):
                return gather_tokens(tensor.unflatten(0, (num_sequences, num_tokens)), 1).flatten(0, 1)
            return tensor

        for key, values in self._lists.items():
            values[self._lengths_before[key] :] = [
                map_tensors(gathered, value) for value in values[self._lengths_before[key] :]
            ]


def mark_sharded(output: Any, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Attach the gathering function to a layer's hidden states, for `gather_returned_outputs`. Collective: no."""
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(hidden, torch.Tensor):
        setattr(hidden, _GATHER, gather)


def has_sharded(output: Any) -> bool:
    """Whether a model's output has hidden states that `gather_returned_outputs` gathers."""
    return any(hasattr(one, _GATHER) for one in iter_tensors(output))


@not_compiled
def gather_returned_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Gather sharded hidden states of layers in a model's output; a forward hook. Collective: yes."""
    return map_tensors(lambda one: getattr(one, _GATHER)(one) if hasattr(one, _GATHER) else one, output)
