"""A copy of a user's optimizer that updates other, small parameters: to try it out without touching the user's own.

The constructor is not called: its arguments are unknown. The copy has the attributes of the original, with
every parameter exchanged for a small one, and without hooks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .deferred_init import copy_with_tensors

# `copy.deepcopy(optimizer)` copies the model's weights and states, calls Optimizer.__getstate__, which forgets the
# attributes of subclasses, and copies `optimizer.step` as torch's LR schedulers have patched it: a plain function that
# steps the original. So the attributes are copied one by one, under a memo that says beforehand what takes the place of
# parameters, lists of parameters, states, hooks, and of optimizers inside of the optimizer (such as Lookahead's).
# References to what was not copied remain in closures and weak references; nothing can be done about those.

_MAX_COPIED_NUMEL = 2**20  # tensors among the attributes; states are not copied


class CopyError(Exception):
    """The optimizer can't be copied; the text says why."""


def copy_optimizer(optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Return a copy of an optimizer for other parameters.

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
            if name != "step":  # see the head of this module
                made.__dict__[name] = _copied(f"attribute {name!r}", value, memo, budget)
    _copy_states(optimizer, copies[0], parameters, memo, budget)
    for group, replacements in zip(copies[0].param_groups, parameters, strict=True):
        if names := group.get("param_names"):
            group["param_names"] = [names[index % len(names)] for index in range(len(replacements))]
    return copies[0]


def _optimizers_in(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    """Yield the optimizer and those that it holds, in attributes and containers."""
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
    """Return a parameter's state for one of another shape: tensors of its shape filled with their first number."""

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


Place = tuple[int, int]  # param group, and number of the parameter among those that are tried

# Vector instructions round some elements in another way at the end of a tensor. One such rounding is a unit of 2**-24
# of a weight, and a few units of what a step changes.
_OF_THE_STEP = 1e-4
_OF_THE_WEIGHTS = 2e-6
_OF_A_STATE = 1e-4

_LARGEST_FREE_STATE = 32  # elements that a state may have without any relation to the parameter's shape


class ObstacleFound(Exception):
    """The text says what an optimizer did that one of the kind in question doesn't."""


@dataclass(slots=True)
class Outcome:
    """What one copy of the optimizer did.

    Attributes:
        weights: By parameter: its elements before the first step and after each, one row each.
        states: By parameter: the tensors and numbers of its state at the end, by where they are in it.
        numbers: Final numbers of each param group.
    """

    weights: dict[Place, torch.Tensor]
    states: dict[Place, dict[str, Any]] = field(default_factory=dict)
    numbers: list[dict[str, Any]] = field(default_factory=list)

    def note_states(self, optimizer: Optimizer, parameters: Mapping[Place, torch.Tensor]) -> None:
        """Keep the states and numbers that the optimizer has now."""
        for place, parameter in parameters.items():
            self.states[place] = dict(_leaves(optimizer.state.get(parameter, {})))
        self.numbers = [_numbers_of(group) for group in optimizer.param_groups]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, bool, int, float)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{key!r}]" if path else repr(key))
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def check_tells_something(whole: Outcome) -> None:
    """Raise ObstacleFound if comparing would say nothing."""
    for place, weights in whole.weights.items():
        if not bool(torch.isfinite(weights).all()):
            raise ObstacleFound(
                f"a few steps with the hyperparameters of param_groups[{place[0]}] made weights that are not finite, so"
                " it could not be tried out"
            )
    if all(torch.equal(rows[0], rows[-1]) for rows in whole.weights.values()):
        raise ObstacleFound("a few steps did not change any weight, so it could not be tried out")


def check_state_shapes(whole: Outcome, shapes: Mapping[Place, tuple[int, ...]]) -> None:
    """Raise ObstacleFound if a state can't be divided, or if trying parts could take for ever."""
    for place, states in whole.states.items():
        for key, value in states.items():
            _check_state_shape(key, value, shapes[place])


def _check_state_shape(key: str, value: Any, shape: tuple[int, ...]) -> None:
    # A naive Shampoo makes a square matrix for every dimension: of a flat part with 10^4 elements one of 10^8.
    if isinstance(value, torch.Tensor) and tuple(value.shape) != shape and value.numel() > _LARGEST_FREE_STATE:
        raise ObstacleFound(
            f"for a parameter of shape {shape} it keeps a state {key} of shape {tuple(value.shape)}, which can't be"
            " divided with the parameter's elements"
        )


def compare(whole: Outcome, ranks: Sequence[Outcome], shapes: Mapping[Place, tuple[int, ...]]) -> None:
    """Raise ObstacleFound if the ranks' parts, put together, are not what happened to the whole parameters."""
    for place, expected in whole.weights.items():
        joined = torch.cat([outcome.weights[place] for outcome in ranks if place in outcome.weights], dim=1)
        if not _are_same_weights(joined, expected):
            raise ObstacleFound(
                f"a parameter of shape {shapes[place]} came out different when two ranks updated parts of it than when"
                f" it was updated whole (hyperparameters of param_groups[{place[0]}])"
            )
        _compare_states(
            whole.states[place], [outcome.states[place] for outcome in ranks if place in outcome.states], shapes[place]
        )
    for outcome in ranks:
        for index, (expected_numbers, numbers) in enumerate(zip(whole.numbers, outcome.numbers, strict=True)):
            for key in _differing(expected_numbers, numbers):
                raise ObstacleFound(
                    f"param_groups[{index}][{key!r}] came out different on ranks with parts of parameters"
                )


def compare_exactly(whole: Outcome, part: Outcome, shapes: Mapping[Place, tuple[int, ...]]) -> None:
    """Raise ObstacleFound if what happened to some parameters is not, bit for bit, what happened to them among all.

    Args:
        whole: Changes of all parameters together.
        part: Changes of some parameters.
        shapes: Shapes of the parameters, for the message.
    """
    for place, weights in part.weights.items():
        if not _are_same_bits(weights, whole.weights[place]):
            raise ObstacleFound(
                f"a parameter of shape {shapes[place]} came out different without the others (hyperparameters of"
                f" param_groups[{place[0]}])"
            )
        for key in _not_the_same(whole.states[place], part.states[place]):
            raise ObstacleFound(
                f"its state {key} of a parameter of shape {shapes[place]} came out different without the others"
            )
    for index, (expected, found) in enumerate(zip(whole.numbers, part.numbers, strict=True)):
        for key in _not_the_same(expected, found):
            raise ObstacleFound(f"param_groups[{index}][{key!r}] came out different without some parameters")


def _not_the_same(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    both = expected.keys() & found.keys()
    alone = expected.keys() ^ found.keys()
    return sorted(alone | {key for key in both if not _are_same_bits(_tensor(found[key]), _tensor(expected[key]))})


def _are_same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    return bool(((found == expected) | ((found != found) & (expected != expected))).all())


def _are_same_weights(found: torch.Tensor, expected: torch.Tensor) -> bool:
    moved = (expected[1:] - expected[:-1]).abs().amax(dim=1)
    largest = expected.abs().amax(dim=1)[1:]
    allowed = (_OF_THE_STEP * moved + _OF_THE_WEIGHTS * largest).cummax(dim=0).values
    return bool(((found[1:] - expected[1:]).abs() <= allowed[:, None]).all())


def _compare_states(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> None:
    divided = {key for key, value in whole.items() if isinstance(value, torch.Tensor) and tuple(value.shape) == shape}
    for part in parts:
        shared = {key: value for key, value in part.items() if key not in divided}
        for key in _differing({key: value for key, value in whole.items() if key not in divided}, shared):
            raise ObstacleFound(f"its state {key} came out different for a part of a parameter of shape {shape}")
    for key in divided:
        joined = [part[key].reshape(-1) for part in parts if isinstance(part.get(key), torch.Tensor)]
        if not joined or not _is_close(torch.cat(joined), whole[key].reshape(-1)):
            raise ObstacleFound(f"its state {key} came out different for parts of a parameter of shape {shape}")


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    both = expected.keys() & found.keys()
    alone = expected.keys() ^ found.keys()
    return sorted(alone | {key for key in both if not _is_close(_tensor(found[key]), _tensor(expected[key]))})


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() > 0 else 0.0
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    return bool((is_same | ((found - expected).abs() <= _OF_A_STATE * largest)).all())


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
