"""Activation memory of many identical layers, extrapolated from a few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.estimate.activations import Event, Recording, profile_of, record
from booster.interface.rank_memory import ActivationProfile

__all__ = ["find_stack", "join_recordings", "measure_activations"]

# Note [Layer extrapolation]
# A model of eighty identical layers is run with the first three, four and five of them, and all memory events are
# recorded. If each additional layer inserts the same events at the same position, between any two events of the rest
# of the model, the events of the full model follow without running it. If anything else changes, or the layers differ
# in any visible attribute, the full model is run.
_DEPTHS = (3, 4, 5)
_FEWEST = 1 + sum(_DEPTHS)
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, tuple)


def measure_activations(
    model: nn.Module, run: Callable[[], torch.Tensor], *, before: Sequence[torch.Tensor] = ()
) -> ActivationProfile:
    """Measure the memory of `run` and of the backward of its loss. Must be called within a `FakeTensorMode`.

    Args:
        model: Model whose parameters get the gradients.
        run: Function that runs the model's forward on fake tensors and returns the loss.
        before: Further existing tensors, such as the batch.
    """
    before = [*model.parameters(), *model.buffers(), *before]
    name = find_stack(model)
    whole = None if name is None else _from_few(model, name, run, before)
    return profile_of(record(model, run, before=before) if whole is None else whole)


def find_stack(model: nn.Module) -> str | None:
    """Return the name of the longest `ModuleList` of identical layers that is worth extrapolating, or None."""
    lists = {name: one for name, one in model.named_modules() if type(one) is nn.ModuleList and len(one) >= _FEWEST}
    alike = [name for name, one in lists.items() if _are_alike(list(one)) and _are_apart(model, one)]
    name = max(alike, key=lambda one: len(lists[one]), default=None)
    return None if name is None or _is_told_apart(model, len(lists[name])) else name


def join_recordings(few: Sequence[Recording], name: str, num_layers: int) -> Recording | None:
    """Extrapolate to the full model; None if its events do not follow from those of fewer layers.

    Args:
        few: Recordings with three, four and five layers.
        name: Name of the list of layers.
        num_layers: Number of layers of the full model.
    """
    halves: list[list[Event]] = []
    for half in ("forward", "backward"):
        whole: list[Event] = []
        stretches = [_stretches([_split(event, name) for event in getattr(one, half)]) for one in few]
        if len({len(one) for one in stretches}) > 1:
            return None
        for three, four, five in zip(*stretches, strict=True):
            found = _repeated(three, four, num_layers, half == "forward")
            if found is None or _repeated(three, four, 5, half == "forward") != five:
                return None
            whole += [_joined(event, name) for event in found]
        halves.append(whole)
    sent = [one.sent for one in few]
    if sent[2] - sent[1] != sent[1] - sent[0]:
        return None
    return Recording(halves[0], halves[1], sent[0] + (num_layers - 3) * (sent[1] - sent[0]))


def _from_few(
    model: nn.Module, name: str, run: Callable[[], torch.Tensor], before: Sequence[torch.Tensor]
) -> Recording | None:
    stack = model.get_submodule(name)
    num_layers = len(stack._modules)
    few: list[Recording] = []
    for depth in _DEPTHS:
        try:
            with _shortened(stack, depth):
                few.append(record(model, run, before=before))
        except Exception:  # any error of a model that depends on its layers: the full run reports real ones
            return None
    return join_recordings(few, name, num_layers)


@contextmanager
def _shortened(stack: nn.Module, depth: int) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise RuntimeError("a removed layer was called")

    layers = stack._modules
    kept = dict(list(layers.items())[:depth])
    left_out = [one for key, one in layers.items() if one is not None and key not in kept]
    hooks = [one.register_forward_pre_hook(refuse) for one in left_out]
    stack._modules = kept
    try:
        yield
    finally:
        stack._modules = layers
        for hook in hooks:
            hook.remove()


# An event whose name is split into the layer's index (-1 if of no layer) and the rest.
_Split = tuple[str, int, str, int, int]


def _split(event: Event, name: str) -> _Split:
    kind, whole, activations, gradients = event
    if whole.startswith(f"{name}."):
        number, dot, rest = whole[len(name) + 1 :].partition(".")
        if number.isdecimal():
            return kind, int(number), dot + rest, activations, gradients
    return kind, -1, whole, activations, gradients


def _joined(event: _Split, name: str) -> Event:
    kind, number, rest, activations, gradients = event
    return kind, rest if number < 0 else f"{name}.{number}{rest}", activations, gradients


def _stretches(events: Sequence[_Split]) -> list[list[_Split]]:
    """Split the events at those of the rest of the model."""
    found: list[list[_Split]] = [[]]
    for event in events:
        if event[0] and event[1] < 0:
            found.append([])
        found[-1].append(event)
    return found


def _repeated(
    three: Sequence[_Split], four: Sequence[_Split], num_layers: int, is_forward: bool
) -> list[_Split] | None:
    """Return the events of `num_layers` layers; None if those of four layers do not extend those of three."""
    size = len(four) - len(three)
    if size < 0:
        return None
    place = next((at for at, pair in enumerate(zip(three, four, strict=False)) if not _is_same(*pair)), len(three))
    if not all(_is_same(*pair) for pair in zip(three[place:], four[place + size :], strict=True)):
        return None
    more = num_layers - 4
    head, block, tail = four[:place], four[place : place + size], four[place + size :]
    whole = [_moved(one, 0 if is_forward else more) for one in head]
    for copy in range(more + 1):
        whole += [_moved(one, copy if is_forward else more - copy) for one in block]
    return whole + [_moved(one, more if is_forward else 0) for one in tail]


def _is_same(one: _Split, other: _Split) -> bool:
    return (one[0], one[1] < 0, *one[2:]) == (other[0], other[1] < 0, *other[2:])


def _moved(event: _Split, by: int) -> _Split:
    return event if event[1] < 0 else (event[0], event[1] + by, *event[2:])


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers differ in their index only."""
    described = [_description(layer) for layer in layers]
    if any(one.keys() != described[0].keys() for one in described):
        return False
    return all(_is_equal_or_counts([one[key] for one in described]) for key in described[0])


def _description(layer: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        found[name, "type"] = type(module)
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        found[name, "hooks"] = tuple(len(one) for one in hooks)
        for key, value in vars(module).items():
            if not key.startswith("_"):
                found[name, f"attribute {key}"] = value if isinstance(value, _PLAIN) else type(value)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found[name, f"tensor {key}"] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    return found


def _is_equal_or_counts(values: Sequence[Any]) -> bool:
    if all(type(one) is type(values[0]) and one == values[0] for one in values):
        return True
    return all(type(one) is int and one - values[0] == index for index, one in enumerate(values))


def _are_apart(model: nn.Module, stack: nn.Module) -> bool:
    """Return whether no parameter of the layers is tied."""
    uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return all(uses[id(one)] == 1 for one in stack.parameters())


def _is_told_apart(model: nn.Module, num_layers: int) -> bool:
    """Return whether the model or its config has a list of settings that differ by layer, such as attention types."""
    holders = [vars(one) for one in model.modules()]
    configs = {id(one["config"]): one["config"] for one in holders if hasattr(one.get("config"), "__dict__")}
    for holder in [*holders, *map(vars, configs.values())]:
        for value in holder.values():
            is_list = isinstance(value, (list, tuple)) and len(value) == num_layers
            if is_list and any(type(one) is not type(value[0]) or one != value[0] for one in value):
                return True
    return False
