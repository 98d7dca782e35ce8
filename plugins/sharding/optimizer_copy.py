"""Copies of a user's optimizer with small parameters, for trials, and comparison of their results.

The constructor is not called, because its arguments are unknown. The copy has the attributes of the original, with
every parameter replaced by a small one, and no hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.pytree import copy_with_tensors

# `copy.deepcopy(optimizer)` is not usable. It copies the model's weights and states, calls Optimizer.__getstate__,
# which drops attributes of subclasses, and copies `optimizer.step` as patched by torch's LR schedulers, a function that
# steps the original. Attributes are therefore copied one by one, with a deepcopy memo that replaces parameters, lists
# of parameters, states, hooks, and inner optimizers (such as Lookahead's). Closures and weak references may still
# refer to the original.

_MAX_COPIED_NUMEL = 2**20  # tensors among the attributes; states are not copied
_UNTRIED = "so it could not be tried out"


class CheckFailed(Exception):
    """The optimizer is not of the tested kind, or can't be copied; the message has the reason."""


def copy_optimizer(
    optimizer: Optimizer,
    parameters: Sequence[Sequence[nn.Parameter]],
    donors: Sequence[Sequence[int]] | None = None,
) -> Optimizer:
    """Return a copy of an optimizer for other parameters.

    The state of one parameter of a group is copied to all new ones, in their shapes, because some optimizers create
    states in their constructor and require them. The copy shares no mutable state with the original.

    Args:
        optimizer: The user's optimizer; not modified.
        parameters: New parameters of every param group.
        donors: Indices of the old parameters that the new ones have the names of; optional, defaults to all in turn.

    Raises:
        CheckFailed: Something in the optimizer can't be copied, or is too large.
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
            if name != "step":  # see the head of this module
                made.__dict__[name] = _copied(f"attribute {name!r}", value, budget.copy, memo)
    _copy_states(optimizer, copies[0], parameters, memo, budget)
    indices = [range(len(replacements)) for replacements in parameters] if donors is None else donors
    for group, of_group in zip(copies[0].param_groups, indices, strict=True):
        if names := group.get("param_names"):
            group["param_names"] = [names[index % len(names)] for index in of_group]
    return copies[0]


def _optimizers_in(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    """Yield the optimizer and the optimizers in its attributes and containers."""
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
        raise CheckFailed(
            f"{cls.__name__} has a __del__, and a copy's would free what the original still uses, {_UNTRIED}"
        )
    made: Optimizer = object.__new__(cls)
    memo[id(optimizer)] = made
    memo.setdefault(id(optimizer.state), defaultdict(dict))  # an inner optimizer often shares it
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            memo[id(value)] = OrderedDict()
    return made


class _CopyBudget:
    """Copies tensors, up to the number of elements that an optimizer can be expected to keep outside of its states."""

    def __init__(self, max_numel: int) -> None:
        self._left = max_numel

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self._left -= tensor.numel()
        if self._left < 0:
            raise CheckFailed(
                f"it keeps a tensor of shape {tuple(tensor.shape)} outside of its state, where it can't be divided"
                f" among the ranks, {_UNTRIED}"
            )
        return tensor.detach().clone()


def _copied(
    what: str, value: Any, function: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any] | None = None
) -> Any:
    try:
        return copy_with_tensors(function, value, memo)
    except CheckFailed:
        raise
    except Exception as error:  # a foreign __deepcopy__ or __reduce__ may raise anything
        raise CheckFailed(f"its {what}, a {type(value).__name__}, can't be copied ({error}), {_UNTRIED}") from error


def _copy_states(
    source: Optimizer,
    target: Optimizer,
    parameters: Sequence[Sequence[nn.Parameter]],
    memo: dict[int, Any],
    budget: _CopyBudget,
) -> None:
    for key, value in source.state.items():
        if not isinstance(key, torch.Tensor):
            target.state[key] = _copied(f"state {key!r}", value, budget.copy, memo)
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

    _copied("state", state, note)
    return parameter.numel() > 0 and all(shape == parameter.shape or shape.numel() == 1 for shape in shapes)


def _state_for(replacement: nn.Parameter, state: Any, parameter: torch.Tensor) -> Any:
    """Return a parameter's state for another shape, with tensors of its shape filled with their first element."""

    def reshaped(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.dim() == 0 or tensor.shape != parameter.shape:
            return tensor.clone()
        dtype = replacement.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.reshape(-1)[0].to(dtype).expand(replacement.shape).clone()

    return _copied("state", state, reshaped)


ParamKey = tuple[int, int]  # (param group, index among the parameters of the trial)

# Vector instructions round elements at the end of a tensor differently: by 2**-24 of a weight, and by a few units of
# the change of a step.
_STEP_TOLERANCE = 1e-4
_WEIGHT_TOLERANCE = 2e-6
_STATE_TOLERANCE = 1e-4

_LARGEST_FREE_STATE = 32  # maximum elements of a state whose shape is unrelated to the parameter's


@dataclass(slots=True)
class TrialResult:
    """Result of stepping one copy of the optimizer.

    Attributes:
        weights: Elements of each parameter, one row before the first step and one after each step.
        states: Final state tensors and numbers of each parameter, by path in the state.
        numbers: Final numbers of each param group.
    """

    weights: dict[ParamKey, torch.Tensor]
    states: dict[ParamKey, dict[str, Any]] = field(default_factory=dict)
    numbers: list[dict[str, Any]] = field(default_factory=list)

    def record_states(self, optimizer: Optimizer, parameters: Mapping[ParamKey, torch.Tensor]) -> None:
        """Record the optimizer's current states and numbers."""
        for param_key, parameter in parameters.items():
            self.states[param_key] = dict(_leaves(optimizer.state.get(parameter, {})))
        for group in optimizer.param_groups:
            numbers: dict[str, Any] = {}
            for key, value in group.items():
                if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                    numbers[key] = value
            self.numbers.append(numbers)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, bool, int, float)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{key!r}]" if path else repr(key))
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")


def check_is_conclusive(full: TrialResult) -> None:
    """Raise CheckFailed if a comparison would be meaningless."""
    for param_key, weights in full.weights.items():
        if not bool(torch.isfinite(weights).all()):
            raise CheckFailed(
                f"a few steps with the hyperparameters of param_groups[{param_key[0]}] made non-finite weights,"
                f" {_UNTRIED}"
            )
    if all(torch.equal(rows[0], rows[-1]) for rows in full.weights.values()):
        raise CheckFailed(f"a few steps did not change any weight, {_UNTRIED}")


def check_state_shapes(full: TrialResult, shapes: Mapping[ParamKey, tuple[int, ...]]) -> None:
    """Raise CheckFailed if a state can't be sharded, or if a trial on shards could take too long."""
    for param_key, states in full.states.items():
        shape = shapes[param_key]
        for key, value in states.items():
            # A naive Shampoo allocates a square matrix per dimension: 10^8 elements for a flat shard of 10^4.
            if isinstance(value, torch.Tensor) and tuple(value.shape) != shape and value.numel() > _LARGEST_FREE_STATE:
                raise CheckFailed(
                    f"for a parameter of shape {shape} it keeps a state {key} of shape {tuple(value.shape)}, which"
                    " can't be divided with the parameter's elements"
                )


def compare(full: TrialResult, ranks: Sequence[TrialResult], shapes: Mapping[ParamKey, tuple[int, ...]]) -> None:
    """Raise CheckFailed if the concatenated shards of the ranks differ from the full parameters."""
    for param_key, expected in full.weights.items():
        joined = torch.cat([result.weights[param_key] for result in ranks if param_key in result.weights], dim=1)
        if not _are_same_weights(joined, expected):
            raise CheckFailed(
                f"a parameter of shape {shapes[param_key]} came out different when two ranks updated shards of it"
                f" (hyperparameters of param_groups[{param_key[0]}])"
            )
        _compare_states(
            full.states[param_key],
            [result.states[param_key] for result in ranks if param_key in result.states],
            shapes[param_key],
        )
    for result in ranks:
        for index, (expected_numbers, numbers) in enumerate(zip(full.numbers, result.numbers, strict=True)):
            for key in _differing(expected_numbers, numbers, _is_close):
                raise CheckFailed(
                    f"param_groups[{index}][{key!r}] came out different on ranks with shards of parameters"
                )


def compare_exactly(full: TrialResult, part: TrialResult, shapes: Mapping[ParamKey, tuple[int, ...]]) -> None:
    """Raise CheckFailed if a subset of the parameters is not bitwise equal to the same parameters among all.

    Args:
        full: Result of all parameters.
        part: Result of the subset.
        shapes: Shapes of the parameters, for the message.
    """
    for param_key, weights in part.weights.items():
        if not _are_same_bits(weights, full.weights[param_key]):
            raise CheckFailed(
                f"a parameter of shape {shapes[param_key]} came out different without the others (hyperparameters of"
                f" param_groups[{param_key[0]}])"
            )
        for key in _differing(full.states[param_key], part.states[param_key], _are_same_bits):
            raise CheckFailed(
                f"its state {key} of a parameter of shape {shapes[param_key]} came out different without the others"
            )
    for index, (expected, found) in enumerate(zip(full.numbers, part.numbers, strict=True)):
        for key in _differing(expected, found, _are_same_bits):
            raise CheckFailed(f"param_groups[{index}][{key!r}] came out different without some parameters")


def _are_same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    return bool(((found == expected) | ((found != found) & (expected != expected))).all())


def _are_same_weights(found: torch.Tensor, expected: torch.Tensor) -> bool:
    moved = (expected[1:] - expected[:-1]).abs().amax(dim=1)
    largest = expected.abs().amax(dim=1)[1:]
    allowed = (_STEP_TOLERANCE * moved + _WEIGHT_TOLERANCE * largest).cummax(dim=0).values
    return bool(((found[1:] - expected[1:]).abs() <= allowed[:, None]).all())


def _compare_states(full: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> None:
    divided = {key for key, value in full.items() if isinstance(value, torch.Tensor) and tuple(value.shape) == shape}
    for part in parts:
        shared = {key: value for key, value in part.items() if key not in divided}
        for key in _differing({key: full[key] for key in full.keys() - divided}, shared, _is_close):
            raise CheckFailed(f"its state {key} came out different for a shard of a parameter of shape {shape}")
    for key in divided:
        joined = [part[key].reshape(-1) for part in parts if isinstance(part.get(key), torch.Tensor)]
        if not joined or not _is_close(torch.cat(joined), full[key].reshape(-1)):
            raise CheckFailed(f"its state {key} came out different for shards of a parameter of shape {shape}")


def _differing(
    expected: Mapping[str, Any], found: Mapping[str, Any], is_same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> list[str]:
    both = expected.keys() & found.keys()
    alone = expected.keys() ^ found.keys()
    return sorted(alone | {key for key in both if not is_same(_tensor(found[key]), _tensor(expected[key]))})


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() > 0 else 0.0
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    return bool((is_same | ((found - expected).abs() <= _STATE_TOLERANCE * largest)).all())


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
