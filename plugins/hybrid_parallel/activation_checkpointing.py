"""Layers that keep their inputs instead of their activations, and compute them again in backward."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.errors import ConfigError
from booster.plugins.sharding.checks import is_number

__all__ = ["GradientCheckpointConfig", "checkpoint_layers", "checkpointing_of", "require_stacks"]

# Note [What is computed again]
# Only a layer's forward, not its hooks: a hook that divides hidden states among ranks runs once, outside. Collectives
# inside of the forward run again, on all ranks alike. Random numbers are the same again: torch restores the default
# generator, and the streams of split regions are a function of its state.
_checkpoint = functools.partial(checkpoint, use_reentrant=False)
_classes: dict[type[nn.Module], type[nn.Module]] = {}
_DIGITS = 9  # beyond which a product is taken for a whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointConfig:
    """Which layers of a stack are computed again in backward, to save the memory of their activations.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Costs one more forward of these layers, with
    its communication.

    Attributes:
        ratio: Share of the layers of each stack (with pipeline stages: of those that a stage holds), from the first,
            rounded up; 0 to 1. None: all, or as `num_layers_per_stage` says.
        num_layers_per_stage: Instead of a share, how many of the layers that a stage holds, from the first (all, if it
            holds fewer), one number per stage: early stages keep the activations of more micro-batches than late ones.
        use_reentrant: Has to be False: torch's older way runs backward inside of backward, where hooks that reduce
            gradients would run too early.
    """

    ratio: float | None = None
    use_reentrant: bool = False
    num_layers_per_stage: Sequence[int] | None = None

    def num_layers(self, num_layers: int, stage: int | None = None) -> int:
        """Returns how many of the layers of a stack, or of those that a pipeline stage holds, are computed again."""
        if self.num_layers_per_stage is not None:
            return min(self.num_layers_per_stage[stage or 0], num_layers)
        return math.ceil(round((1.0 if self.ratio is None else self.ratio) * num_layers, _DIGITS))


def checkpointing_of(
    given: GradientCheckpointConfig | Mapping[str, Any] | bool | None, num_stages: int = 1
) -> GradientCheckpointConfig | None:
    """Returns what an argument `gradient_checkpoint_config` means; None: nothing is computed again.

    Args:
        given: A config, a dict of its fields, True for all layers, or False or None for none.
        num_stages: Of the pipeline.

    Raises:
        ConfigError: It can't be.
    """
    if given is None or given is False:
        return None
    config = _config(given)
    if config.ratio is not None and not (is_number(config.ratio) and 0 <= config.ratio <= 1):
        raise ConfigError(
            f"gradient_checkpoint_config: ratio={config.ratio!r} is no share of a stack's layers: give a number from 0"
            " to 1"
        )
    if config.use_reentrant is not False:
        raise ConfigError(
            f"gradient_checkpoint_config: use_reentrant={config.use_reentrant!r} would run backward inside of backward,"
            " where gradients are reduced too early: leave it out, or set use_reentrant=False"
        )
    if config.num_layers_per_stage is None:
        return config if config.ratio is None or config.ratio > 0 else None
    _check_numbers_of_stages(config, config.num_layers_per_stage, num_stages)
    return config if any(config.num_layers_per_stage) else None


def checkpoint_layers(
    model: nn.Module, layer_names: Sequence[str], config: GradientCheckpointConfig, stage: int | None = None
) -> None:
    """Has the layers of a stack computed again in backward, in place; see Note [What is computed again].

    Names of parameters and what `isinstance` says of the layers stay; `copy.deepcopy` works. A layer that transformers
    checkpoints already is left to it. Not collective.

    Args:
        model: Holds the layers.
        layer_names: Of the layers of one stack, or of those that the pipeline stage holds, in the order in which they
            run.
        config: Which of them.
        stage: Of the pipeline, which may hold none of the layers; None: there is no pipeline.

    Raises:
        ConfigError: There is no layer, and no pipeline.
    """
    if stage is None:
        require_stacks(model, [layer_names])
    for name in layer_names[: config.num_layers(len(layer_names), stage)]:
        _checkpoint_layer(model.get_submodule(name))


def require_stacks(model: nn.Module, stacks: Sequence[Sequence[str]]) -> None:
    """Returns if there are layers that could be computed again.

    Args:
        model: Holds the layers.
        stacks: Names of the layers of each stack.

    Raises:
        ConfigError: There are none.
    """
    if not any(stacks):
        raise ConfigError(
            f"gradient_checkpoint_config was given, but {type(model).__name__} has no stack of like layers whose"
            " forward could be computed again: leave it out, or hold the layers in an nn.ModuleList"
        )


def _config(given: GradientCheckpointConfig | Mapping[str, Any] | bool) -> GradientCheckpointConfig:
    if isinstance(given, GradientCheckpointConfig):
        return given
    if given is True:
        return GradientCheckpointConfig()
    known = [field.name for field in fields(GradientCheckpointConfig)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ConfigError(
            f"gradient_checkpoint_config={given!r} does not say which layers are computed again: give True, a"
            f" GradientCheckpointConfig, or a dict with {', '.join(known)}"
        )
    return GradientCheckpointConfig(**given)


def _check_numbers_of_stages(config: GradientCheckpointConfig, numbers: Sequence[int], num_stages: int) -> None:
    given = f"gradient_checkpoint_config: num_layers_per_stage={numbers!r}"
    if config.ratio is not None:
        raise ConfigError(
            f"{given} and ratio={config.ratio!r} both say how many layers are computed again: leave one of them out"
        )
    whole = isinstance(numbers, Sequence) and not isinstance(numbers, str | bytes)
    if not whole or any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in numbers):
        raise ConfigError(
            f"{given} does not say how many layers of each stage are computed again: give a list of whole numbers from"
            " 0, one per pipeline stage"
        )
    if len(numbers) != num_stages:
        raise ConfigError(
            f"{given} has {len(numbers)} numbers for pp_size={num_stages} stages, of which each holds layers of"
            f" its own: give {num_stages}, or a ratio, which holds for any number of stages"
        )


def _checkpoint_layer(layer: nn.Module) -> None:
    if _knows_checkpointing(layer):
        # Its own way also keeps a cache of keys and values from being filled twice.
        if not getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = True  # type: ignore[assignment]
            layer._gradient_checkpointing_func = _checkpoint  # type: ignore[assignment]
    elif type(layer) not in _classes.values():
        layer.__class__ = _checkpointed_class(type(layer))


def _knows_checkpointing(layer: nn.Module) -> bool:
    """Returns whether transformers' own checkpointing works for the layer; asked without importing transformers."""
    layers = sys.modules.get("transformers.modeling_layers")
    kind = getattr(layers, "GradientCheckpointingLayer", None)
    return kind is not None and isinstance(layer, kind)


def _checkpointed_class(base: type[nn.Module]) -> type[nn.Module]:
    if base in _classes:
        return _classes[base]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        return _checkpoint(functools.partial(base.forward, self), *args, **kwargs)

    _classes[base] = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    return _classes[base]
