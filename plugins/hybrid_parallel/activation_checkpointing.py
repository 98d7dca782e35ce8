"""Activation checkpointing of the layers of a stack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from booster.core.activation_policy import (
    RecomputeLayers,
    checkpoint_layer,
    is_checkpointed_by_transformers,
    policy_of,
)
from booster.errors import ConfigError
from booster.validation import is_count, is_non_nan_number

_DIGITS = 9  # decimals of ratio * num_layers before rounding up, so that 0.1 * 30 is 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointConfig:
    """Which layers of a stack are recomputed in backward, to save the memory of their activations.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The cost is one more forward of these layers,
    including its communication.

    Attributes:
        ratio: Fraction of the layers of each stack (with pipeline stages: of a stage's layers) to recompute, from the
            first, rounded up; 0 to 1. Optional, defaults to all layers or to `num_layers_per_stage`.
        num_layers_per_stage: Number of layers to recompute per stage, from the first, instead of a ratio. Larger
            numbers than a stage has mean all. Early stages hold activations of more microbatches than late ones.
        use_reentrant: Must be False: reentrant checkpointing runs backward inside of backward, where gradient hooks
            would run too early.
    """

    ratio: float | None = None
    use_reentrant: bool = False
    num_layers_per_stage: Sequence[int] | None = None

    def num_layers(self, num_layers: int, stage: int | None = None) -> int:
        """Return how many of the layers of a stack, or of a pipeline stage, are recomputed."""
        if self.num_layers_per_stage is not None:
            return min(self.num_layers_per_stage[stage or 0], num_layers)
        return math.ceil(round((1.0 if self.ratio is None else self.ratio) * num_layers, _DIGITS))


def parse_checkpoint_config(
    given: GradientCheckpointConfig | Mapping[str, Any] | bool | None, num_stages: int = 1
) -> GradientCheckpointConfig | None:
    """Return the config of an argument `gradient_checkpoint_config`, or None if no layer is recomputed.

    Args:
        given: Config, dict of its fields, True for all layers, or False for none; optional, defaults to none.
        num_stages: Number of pipeline stages.

    Raises:
        ConfigError: The argument is invalid.
    """
    if given is None or given is False:
        return None
    config = _config(given)
    if config.ratio is not None and not (is_non_nan_number(config.ratio) and 0 <= config.ratio <= 1):
        raise ConfigError(
            f"gradient_checkpoint_config: ratio must be a number from 0 to 1, got {config.ratio!r}: give the fraction"
            " of a stack's layers to recompute"
        )
    if config.use_reentrant is not False:
        raise ConfigError(
            f"gradient_checkpoint_config: use_reentrant={config.use_reentrant!r} runs backward inside of backward,"
            " which reduces gradients too early: leave it out, or set use_reentrant=False"
        )
    if config.num_layers_per_stage is None:
        return config if config.ratio is None or config.ratio > 0 else None
    _check_num_layers_per_stage(config, config.num_layers_per_stage, num_stages)
    return config if any(config.num_layers_per_stage) else None


def checkpoint_layers(
    model: nn.Module, layer_names: Sequence[str], config: GradientCheckpointConfig, stage: int | None = None
) -> None:
    """Checkpoint the layers of a stack, in place.

    Parameter names and `isinstance` are unchanged, and `copy.deepcopy` works. Layers that are checkpointed already, by
    `checkpoint_activations` or by transformers, are left as they are.

    Args:
        model: Model of the layers.
        layer_names: Names of the layers of one stack, or of a pipeline stage, in execution order.
        config: Config that selects the layers to recompute.
        stage: Pipeline stage, which may hold no layer. Optional, defaults to no pipeline.

    Collective: no.
    """
    policy = RecomputeLayers()
    for name in layer_names[: config.num_layers(len(layer_names), stage)]:
        layer = model.get_submodule(name)
        if policy_of(layer) is None and not is_checkpointed_by_transformers(layer):
            checkpoint_layer(layer, policy, name)


def _config(given: GradientCheckpointConfig | Mapping[str, Any] | bool) -> GradientCheckpointConfig:
    if isinstance(given, GradientCheckpointConfig):
        return given
    if given is True:
        return GradientCheckpointConfig()
    known = [field.name for field in fields(GradientCheckpointConfig)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ConfigError(
            f"gradient_checkpoint_config={given!r} is not a checkpointing config: give True, a"
            f" GradientCheckpointConfig, or a dict with {', '.join(known)}"
        )
    return GradientCheckpointConfig(**given)


def _check_num_layers_per_stage(config: GradientCheckpointConfig, numbers: Sequence[int], num_stages: int) -> None:
    given = f"gradient_checkpoint_config: num_layers_per_stage={numbers!r}"
    if config.ratio is not None:
        raise ConfigError(
            f"{given} and ratio={config.ratio!r} both set the number of recomputed layers: leave one of them out"
        )
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str | bytes)
    if not is_list or any(not is_count(one, minimum=0) for one in numbers):
        raise ConfigError(
            f"{given} must be a list of non-negative integers: give the number of recomputed layers of each pipeline"
            " stage"
        )
    if len(numbers) != num_stages:
        raise ConfigError(
            f"{given} has {len(numbers)} numbers for pp_size={num_stages} stages: give {num_stages}, or a ratio, which"
            " fits any number of stages"
        )
