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
        ratio: Share of the layers of each stack, from its first, rounded up; 0 to 1.
        use_reentrant: Has to be False: torch's older way runs backward inside of backward, where hooks that reduce
            gradients would run too early.
    """

    ratio: float = 1.0
    use_reentrant: bool = False

    def num_layers(self, num_layers: int) -> int:
        """Returns how many of the layers of a stack are computed again."""
        return math.ceil(round(self.ratio * num_layers, _DIGITS))


def checkpointing_of(
    given: GradientCheckpointConfig | Mapping[str, Any] | bool | None,
) -> GradientCheckpointConfig | None:
    """Returns what an argument `gradient_checkpoint_config` means; None: nothing is computed again.

    Args:
        given: A config, a dict of its fields, True for all layers, or False or None for none.

    Raises:
        ConfigError: It can't be.
    """
    if given is None or given is False:
        return None
    config = _config(given)
    if not is_number(config.ratio) or not 0 <= config.ratio <= 1:
        raise ConfigError(
            f"gradient_checkpoint_config: ratio={config.ratio!r} is no share of a stack's layers: give a number from 0"
            " to 1"
        )
    if config.use_reentrant is not False:
        raise ConfigError(
            f"gradient_checkpoint_config: use_reentrant={config.use_reentrant!r} would run backward inside of backward,"
            " where gradients are reduced too early: leave it out, or set use_reentrant=False"
        )
    return config if config.ratio > 0 else None


def checkpoint_layers(model: nn.Module, layer_names: Sequence[str], config: GradientCheckpointConfig) -> None:
    """Has the layers of a stack computed again in backward, in place; see Note [What is computed again].

    Names of parameters and what `isinstance` says of the layers stay; `copy.deepcopy` works. A layer that transformers
    checkpoints already is left to it. Not collective.

    Args:
        model: Holds the layers.
        layer_names: Of the layers of one stack, in the order in which they run.
        config: Which of them.

    Raises:
        ConfigError: There is no layer.
    """
    require_stacks(model, [layer_names])
    for name in layer_names[: config.num_layers(len(layer_names))]:
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
            f" GradientCheckpointConfig, or a dict with {' and '.join(known)}"
        )
    return GradientCheckpointConfig(**given)


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
