"""What a model's own forward does between the layers of its stacks, where hidden states are this rank's tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from booster.core.compiling import EagerHook, not_compiled
from booster.errors import BoosterError, ConfigError, first_line

from .layer_context import is_in_backward
from .layer_stack import LayerStack
from .recorded_outputs import gather_returned_outputs, has_sharded

_STACKS = "_sequence_stacks"  # attribute of a model
_SHAPES_DIFFER = re.compile("match|equal size|invalid for input|expected input|expected size", re.IGNORECASE)


def attach_to_model(model: nn.Module, stacks: Sequence[LayerStack], layers: Collection[nn.Module]) -> None:
    """Make a model gather the hidden states that it returns, and refuse to leave out the last layer of a stack.

    Dropout modules between layers draw a mask of this rank's tokens.

    Args:
        model: The user's model.
        stacks: Its stacks, attached to their layers.
        layers: The layers of all stacks.

    Collective: no; the model's calls are.
    """
    model.__dict__[_STACKS] = tuple(stacks)
    within = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if stacks and isinstance(module, _DropoutNd) and id(module) not in within:
            module.register_forward_pre_hook(EagerHook(partial(_enter_stream, stacks[0])))
            module.register_forward_hook(EagerHook(partial(_share_stream, stacks[0])))
    model.register_forward_pre_hook(_begin)
    model.register_forward_hook(_check_ended)
    model.register_forward_hook(gather_returned_outputs)


def _enter_stream(stack: LayerStack, module: nn.Module, args: Any) -> None:
    if module.training and stack.splitter.rng.is_shared:
        stack.splitter.rng.enter()


def _share_stream(stack: LayerStack, module: nn.Module, args: Any, output: Any) -> None:
    if module.training:
        stack.splitter.rng.share()


@not_compiled
def _begin(model: nn.Module, args: Any) -> None:
    for stack in model.__dict__[_STACKS]:
        stack.drop_forward()


@not_compiled
def _check_ended(model: nn.Module, args: Any, output: Any) -> None:
    """Check that the last layer of each stack has run, or that the model returns what the last one that ran returned.

    Raises:
        ConfigError: It has not.
    """
    if any(stack.is_open for stack in model.__dict__[_STACKS]) and not (is_in_backward() or has_sharded(output)):
        raise ConfigError(
            "the last layer of a stack did not run, but sequence parallelism gathers the tokens of hidden states behind"
            " it: do not drop the last layer (layerdrop=0), return the hidden states of the last one that runs, or"
            " disable it"
        )


@contextmanager
def explained_errors(model: nn.Module) -> Iterator[None]:
    """Context of a model's forward, in which errors of shapes say that tokens are sharded between layers.

    Args:
        model: The user's model, whose stacks were attached.

    Raises:
        ConfigError: Shapes differ by this rank's and all tokens.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for stack in model.__dict__.get(_STACKS, ()):
            local, full = stack.last_lengths
            if isinstance(error, BoosterError) or not _differ_by(str(error), local, full, stack.num_sequences):
                continue
            instead = "pass it to the layers as an argument, of which each rank gets its tokens, and combine them there"
            if not stack.shards_attention:
                instead = "use sequence_parallelism_mode='all_to_all', whose layers take it as an argument in shards"
            raise ConfigError(
                f"the forward of {type(model).__name__} failed ({first_line(error)}), probably as it combines this"
                f" rank's {local} tokens with all {full}: hidden states have all tokens before the first and after the"
                " last layer of a stack, in and between the layers each rank has its own. For what comes from before"
                f" the layers, {instead}; for what layers return, let the model return it, which gathers it, and"
                " combine it outside; do not leave out the last layer (layerdrop=0), nor normalize over tokens"
            ) from error
        raise


def _differ_by(message: str, local: int, full: int, num_sequences: int) -> bool:
    """Whether an error's text is about shapes, of which one has this rank's tokens and one has all."""
    numbers = {int(number) for number in re.findall(r"\d+", message)}
    pairs = ({local, full}, {local * num_sequences, full * num_sequences})
    return local != full and _SHAPES_DIFFER.search(message) is not None and any(pair <= numbers for pair in pairs)
