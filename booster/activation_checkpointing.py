"""Activation checkpointing under every plugin: layers, by operation, in a budget, by a schedule, with offload."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from booster.core.activation_budget import ActivationBudget
from booster.core.activation_offload import ActivationOffload
from booster.core.activation_policy import (
    ActivationPolicy,
    RecomputeCheapOperations,
    RecomputeLayers,
    checkpoint_layer,
    is_checkpointed_by_transformers,
    policy_of,
)
from booster.core.activation_schedule import ActivationSchedule, RecomputeBySchedule, names_of
from booster.core.layer_stacks import STACK_ADVICE, layers_of
from booster.errors import ConfigError
from booster.interface import ModelWrapper
from booster.validation import is_count

_POLICIES = ("layers", "selective", "budget", "schedule")


def checkpoint_activations(
    model: nn.Module,
    policy: str = "layers",
    *,
    budget_bytes: int | None = None,
    schedule: ActivationSchedule | Sequence[Any] | None = None,
    offload: str | None = None,
) -> nn.Module:
    """Recompute activations of a model's layers in backward, in place; call it before `boost`.

    The numbers of the training do not change: random numbers repeat. It holds for the layers of every stack (a list of
    equal layers) in training with gradients, under every plugin, and with `Booster(compile=...)`.

    Args:
        model: The user's model.
        policy: "layers": each layer keeps its inputs only. "selective": it also keeps the outputs of matrix products,
            convolutions and fused attention, and repeats what is cheap. "budget": as little as possible is recomputed;
            two steps, in which all layers are, measure what fits. "schedule": as `schedule` says.
        budget_bytes: Bytes of activations per rank, for "budget": inputs of layers, what layers that are not recomputed
            save for backward, and what a recomputation keeps.
        schedule: For "schedule": layers in the order of forward. A name is a layer that keeps its activations. A list
            of names is a segment, of which only the first layer's input is kept; lists in it are recomputed again.
            Layers that are left out are kept.
        offload: "cpu" moves the inputs of recomputed layers to pinned host memory, and back ahead of their use. No
            effect on a CPU, whose memory they are in. Optional.

    Returns:
        The model.

    Raises:
        ConfigError: An argument is invalid, the model is boosted or has no layers or not those of the schedule, or they
            are checkpointed already.

    Collective: no. With "budget" the second step sends one small message, and raises `ConfigError` on all ranks if
    nothing fits `budget_bytes`.

    Examples:
        >>> import torch
        >>> from booster import checkpoint_activations
        >>> layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
        >>> model = checkpoint_activations(torch.nn.Sequential(*layers))
    """
    _check_arguments(model, policy, budget_bytes, schedule, offload)
    layers = layers_without_policy(model)
    chosen = _policy(policy, list(layers), budget_bytes, schedule, None if offload is None else ActivationOffload())
    for name, layer in layers.items():
        checkpoint_layer(layer, chosen, name)
    return model


def layers_without_policy(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of all stacks by name, in order; raise `ConfigError` without, or if they have a policy."""
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"checkpoint_activations(): {type(model).__name__} has no stack of equal layers to recompute:"
            f" {STACK_ADVICE}, or call torch.utils.checkpoint in the model's forward"
        )
    for name, layer in layers.items():
        if policy_of(layer) is not None or is_checkpointed_by_transformers(layer):
            raise ConfigError(
                f"checkpoint_activations(): {name!r} is checkpointed already: call it once, and leave out"
                " gradient_checkpointing_enable() and gradient_checkpoint_config"
            )
    return layers


def _policy(
    policy: str,
    names: list[str],
    budget_bytes: int | None,
    schedule: ActivationSchedule | Sequence[Any] | None,
    offload: ActivationOffload | None,
) -> ActivationPolicy:
    if policy == "layers":
        return RecomputeLayers(offload)
    if policy == "selective":
        return RecomputeCheapOperations()
    if policy == "schedule":
        parsed = ActivationSchedule.from_json(schedule)
        _check_names(parsed, names)
        return RecomputeBySchedule(parsed, offload)
    assert budget_bytes is not None
    return ActivationBudget(names, budget_bytes, offload)


def _check_names(schedule: ActivationSchedule, names: list[str]) -> None:
    """Raise `ConfigError` if a schedule names other layers, or names them in another order."""
    unknown = [name for name in schedule.names if name not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"checkpoint_activations(schedule=...) names {unknown[0]!r}, which is not a layer of a stack of the model:"
            f" its layers are {names[0]!r} to {names[-1]!r}.{hint}"
        )
    for item in schedule.items:
        inside = [] if isinstance(item, str) else [names.index(name) for name in names_of(item)]
        for before, after in pairwise(inside):
            if after != before + 1 or names[before].rpartition(".")[0] != names[after].rpartition(".")[0]:
                raise ConfigError(
                    f"checkpoint_activations(schedule=...) has a segment with {names[after]!r} behind"
                    f" {names[before]!r}: the layers of a segment follow each other in one stack"
                )


def _check_arguments(
    model: nn.Module,
    policy: str,
    budget_bytes: int | None,
    schedule: ActivationSchedule | Sequence[Any] | None,
    offload: str | None,
) -> None:
    if isinstance(model, ModelWrapper):
        raise ConfigError("checkpoint_activations() was given a boosted model: call it before boost()")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"checkpoint_activations() got a {type(model).__name__}: give a torch.nn.Module")
    if policy not in _POLICIES:
        raise ConfigError(f"checkpoint_activations(policy={policy!r}): give one of {', '.join(map(repr, _POLICIES))}")
    if (policy == "budget") != (budget_bytes is not None):
        wrong = "without budget_bytes" if budget_bytes is None else f"with budget_bytes={budget_bytes!r}"
        raise ConfigError(
            f"checkpoint_activations(policy={policy!r}) {wrong}: write policy='budget', budget_bytes=8 * 2**30 for 8"
            " GiB"
        )
    if (policy == "schedule") != (schedule is not None):
        wrong = "without schedule" if schedule is None else "with schedule=..."
        raise ConfigError(
            f"checkpoint_activations(policy={policy!r}) {wrong}: write policy='schedule', schedule=['layers.0',"
            " ['layers.1']], which recomputes the second of two layers"
        )
    if budget_bytes is not None and not is_count(budget_bytes):
        raise ConfigError(
            f"checkpoint_activations(budget_bytes={budget_bytes!r}) is not a number of bytes: give an int such as"
            " 8 * 2**30"
        )
    if offload not in (None, "cpu"):
        raise ConfigError(f"checkpoint_activations(offload={offload!r}): give 'cpu', or leave it out")
    if offload is not None and policy == "selective":
        raise ConfigError(
            "checkpoint_activations(policy='selective', offload='cpu'): what is kept of operations is needed at once in"
            " the recomputation, too early to come from the host: write policy='layers', 'budget' or 'schedule' to"
            " offload"
        )
