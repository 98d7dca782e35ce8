"""A copy of a user's optimizer that updates other, small parameters: to try it out without touching the user's own.

The constructor is not called: what arguments it takes, nobody knows. The copy has the attributes of the original, with
every parameter exchanged for a small one, and without hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.plugins.sharding.deep_copies import copy_with_tensors

__all__ = ["CopyError", "copy_optimizer"]

# Note [Copying an optimizer]
# `copy.deepcopy(optimizer)` copies the model's weights and states, calls Optimizer.__getstate__, which forgets the
# attributes of subclasses, and copies `optimizer.step` as torch's LR schedulers have patched it: a plain function that
# steps the original. So the attributes are copied one by one, under a memo that says beforehand what takes the place of
# parameters, lists of parameters, states, hooks, and of optimizers inside of the optimizer (such as Lookahead's).
# References to what was not copied remain in closures and weak references; nothing can be done about those.

_MAX_COPIED_NUMEL = 2**20  # tensors among the attributes; states are not copied


class CopyError(Exception):
    """The optimizer can't be copied; the text says why."""


def copy_optimizer(optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Returns a copy of an optimizer for other parameters.

    State that one of a group's parameters has is given to all of the new ones, in their shape: some optimizers make all
    states in their constructor and fail without. The copy shares nothing with the original that a step could change.

    Args:
        optimizer: The user's optimizer. Only read.
        parameters: For every param group the parameters that take the place of the group's own.

    Raises:
        CopyError: Something in the optimizer can't be copied, or is too large.
    """
    memo: dict[int, Any] = {}
    for group, replacements in zip(optimizer.param_groups, parameters, strict=True):
        memo[id(group["params"])] = list(replacements)
        for index, parameter in enumerate(group["params"]):
            memo[id(parameter)] = replacements[index % len(replacements)]
    found = list(_optimizers_in(optimizer, set()))
    copies = [_empty_copy(one, memo) for one in found]
    budget = _CopyBudget(_MAX_COPIED_NUMEL)
    for one, made in zip(found, copies, strict=True):
        for name, value in vars(one).items():
            if name != "step":  # see Note [Copying an optimizer]
                made.__dict__[name] = _copied(f"attribute {name!r}", value, memo, budget)
    _copy_states(optimizer, copies[0], parameters, memo, budget)
    for group, replacements in zip(copies[0].param_groups, parameters, strict=True):
        if names := group.get("param_names"):
            group["param_names"] = [names[index % len(names)] for index in range(len(replacements))]
    return copies[0]


def _optimizers_in(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    """Yields the optimizer and those that it holds, in attributes and containers."""
    if id(value) in seen:
        return
    seen.add(id(value))
    held: Iterable[Any] = ()
    if isinstance(value, Optimizer):
        yield value
        held = vars(value).values()
    elif isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, (list, tuple)):
        held = value
    for inner in held:
        yield from _optimizers_in(inner, seen)


def _empty_copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    cls = type(optimizer)
    if hasattr(cls, "__del__"):
        raise CopyError(f"{cls.__name__} has a __del__, and a copy's would free what the original still uses")
    made: Optimizer = object.__new__(cls)
    memo[id(optimizer)] = made
    memo.setdefault(id(optimizer.state), defaultdict(dict))  # an inner optimizer often shares it
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            memo[id(value)] = OrderedDict()
    return made


class _CopyBudget:
    """Copies tensors, up to as many elements as an optimizer has a reason to keep outside of its states."""

    def __init__(self, max_numel: int) -> None:
        self._left = max_numel

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self._left -= tensor.numel()
        if self._left < 0:
            raise CopyError(
                f"it keeps a tensor of shape {tuple(tensor.shape)} outside of its state, where it can't be divided"
                " among the ranks"
            )
        return tensor.detach().clone()


def _copied(what: str, value: Any, memo: dict[int, Any], budget: _CopyBudget) -> Any:
    try:
        return copy_with_tensors(budget.copy, value, memo)
    except CopyError:
        raise
    except Exception as error:  # whatever a foreign __deepcopy__ or __reduce__ raises
        raise CopyError(f"its {what}, a {type(value).__name__}, can't be copied ({error})") from error


def _copy_states(
    source: Optimizer,
    target: Optimizer,
    parameters: Sequence[Sequence[nn.Parameter]],
    memo: dict[int, Any],
    budget: _CopyBudget,
) -> None:
    for key, value in source.state.items():
        if not isinstance(key, torch.Tensor):
            target.state[key] = _copied(f"state {key!r}", value, memo, budget)
    for group, replacements in zip(source.param_groups, parameters, strict=True):
        stateful = next((one for one in group["params"] if _has_state(source.state.get(one))), None)
        if stateful is None or not _fits_other_shapes(source.state[stateful], stateful):
            continue  # it starts without a state, as the original did
        for replacement in replacements:
            target.state[replacement] = _state_for(replacement, source.state[stateful], stateful)


def _has_state(state: Any) -> bool:
    return state is not None and not (isinstance(state, Mapping) and not state)


def _fits_other_shapes(state: Any, parameter: torch.Tensor) -> bool:
    shapes: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    _copied_state(note, state)
    return parameter.numel() > 0 and all(shape == parameter.shape or shape.numel() == 1 for shape in shapes)


def _state_for(replacement: nn.Parameter, state: Any, parameter: torch.Tensor) -> Any:
    """Returns a parameter's state for one of another shape: tensors of its shape filled with their first number."""

    def reshaped(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.dim() == 0 or tensor.shape != parameter.shape:
            return tensor.clone()
        dtype = replacement.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.reshape(-1)[0].to(dtype).expand(replacement.shape).clone()

    return _copied_state(reshaped, state)


def _copied_state(function: Callable[[torch.Tensor], torch.Tensor], state: Any) -> Any:
    try:
        return copy_with_tensors(function, state)
    except Exception as error:  # whatever a foreign __deepcopy__ or __reduce__ raises
        raise CopyError(f"its state can't be copied ({error})") from error
