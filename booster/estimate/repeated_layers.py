"""Repeated layers of a model: a deep model's memory follows from two shallower ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from booster.core.activation_budget import ActivationBudget
from booster.core.activation_policy import policy_of
from booster.core.activation_schedule import RecomputeBySchedule

# Note [Layer extrapolation]
# A model of eighty identical layers is simulated with a few of them, twice. The full model has more of everything by
# what each of the further layers adds. That holds at one point of a step, but not for the peak of all points: with more
# layers another point may have it. So forward and backward are divided into segments, which begin where the first
# layer, the layers between, and the last layer begin and end. The peak of each segment is extrapolated, and the largest
# is taken: between the first and the last layer memory changes evenly, so its peak is at one of the ends.
# Numbers of layers differ by an even number, as buffers alternate.
# If the layers differ in any visible attribute, or fewer of them can't be trained, the full model is simulated. So it
# is with a budget or a schedule for activations, by which layers keep different ones.
MIN_LAYERS = 13
MIN_NUMEL = 2**28  # smaller models are simulated in full: their communication buffers are not full yet
_COMPARABLE_TYPES = (int, float, str, bool, type(None), torch.dtype, torch.device, tuple)


def find_repeated_layers(model: nn.Module) -> str | None:
    """Return the name of the longest `ModuleList` of identical layers that is worth extrapolating, or None."""
    if sum(parameter.numel() for parameter in model.parameters()) < MIN_NUMEL:
        return None
    if any(isinstance(policy_of(module), (ActivationBudget, RecomputeBySchedule)) for module in model.modules()):
        return None
    lists = {name: one for name, one in model.named_modules() if type(one) is nn.ModuleList and len(one) >= MIN_LAYERS}
    alike = [name for name, one in lists.items() if _are_identical(list(one)) and _are_untied(model, one)]
    name = max(alike, key=lambda one: len(lists[one]), default=None)
    return None if name is None or _has_per_layer_settings(model, len(lists[name])) else name


def truncate_layers(model: nn.Module, name: str, num_layers: int) -> None:
    """Remove all but the first layers of a list, in place; a call of a removed one raises RuntimeError."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("a removed layer was called")

    stack = model.get_submodule(name)
    for key in list(stack._modules)[num_layers:]:
        removed = stack._modules.pop(key)
        assert removed is not None
        removed.register_forward_pre_hook(refuse)


def extrapolate(few: Any, more: Any, share: float) -> Any:
    """Return values at `share` of the way from those of a shallower model to those of a deeper one, or beyond them.

    Values are numbers, None, and mappings and dataclasses of these; none becomes negative.
    """
    if few is None or more is None:
        return None
    if isinstance(few, Mapping):
        return {name: extrapolate(one, more[name], share) for name, one in few.items()}
    if is_dataclass(few) and not isinstance(few, type):
        names = [one.name for one in fields(few)]
        return replace(few, **{name: extrapolate(getattr(few, name), getattr(more, name), share) for name in names})
    value = max(0.0, few + (more - few) * share)
    return round(value) if isinstance(few, int) else value


def _are_identical(layers: Sequence[nn.Module]) -> bool:
    described = [_description(layer) for layer in layers]
    if any(one.keys() != described[0].keys() for one in described):
        return False
    return all(_is_equal_or_index([one[key] for one in described]) for key in described[0])


def _description(layer: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        found[name, "type"] = type(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found[name, "hooks"] = tuple(len(one) for one in hooks)
        for key, value in vars(module).items():
            if not key.startswith("_"):
                found[name, f"attribute {key}"] = value if isinstance(value, _COMPARABLE_TYPES) else type(value)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found[name, f"tensor {key}"] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    return found


def _is_equal_or_index(values: Sequence[Any]) -> bool:
    if all(type(one) is type(values[0]) and one == values[0] for one in values):
        return True
    return all(type(one) is int and one - values[0] == index for index, one in enumerate(values))


def _are_untied(model: nn.Module, stack: nn.Module) -> bool:
    uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return all(uses[id(one)] == 1 for one in stack.parameters())


def _has_per_layer_settings(model: nn.Module, num_layers: int) -> bool:
    """Return whether the model or its config has a list of settings that differ by layer, such as attention types."""
    holders = [vars(one) for one in model.modules()]
    configs = {id(one["config"]): one["config"] for one in holders if hasattr(one.get("config"), "__dict__")}
    for holder in [*holders, *map(vars, configs.values())]:
        for value in holder.values():
            is_list = isinstance(value, (list, tuple)) and len(value) == num_layers
            if is_list and any(type(one) is not type(value[0]) or one != value[0] for one in value):
                return True
    return False
