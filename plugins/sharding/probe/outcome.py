"""Compares what an optimizer did to whole parameters with what it did to parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = [
    "ObstacleFound",
    "Outcome",
    "Place",
    "check_state_shapes",
    "check_tells_something",
    "compare",
    "compare_exactly",
]

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
        numbers: By param group: the numbers in it at the end.
    """

    weights: dict[Place, torch.Tensor]
    states: dict[Place, dict[str, Any]] = field(default_factory=dict)
    numbers: list[dict[str, Any]] = field(default_factory=list)

    def note_states(self, optimizer: Optimizer, parameters: Mapping[Place, torch.Tensor]) -> None:
        """Keeps the states and numbers that the optimizer has now."""
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
    """Raises ObstacleFound if comparing would say nothing."""
    for place, weights in whole.weights.items():
        if not bool(torch.isfinite(weights).all()):
            raise ObstacleFound(
                f"a few steps with the hyperparameters of param_groups[{place[0]}] made weights that are not finite, so"
                " it could not be tried out"
            )
    if all(torch.equal(rows[0], rows[-1]) for rows in whole.weights.values()):
        raise ObstacleFound("a few steps did not change any weight, so it could not be tried out")


def check_state_shapes(whole: Outcome, shapes: Mapping[Place, tuple[int, ...]]) -> None:
    """Raises ObstacleFound if a state can't be divided, or if trying parts could take for ever."""
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
    """Raises ObstacleFound if the ranks' parts, put together, are not what happened to the whole parameters."""
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
    """Raises ObstacleFound if what happened to some parameters is not, bit for bit, what happened to them among all.

    Args:
        whole: What happened to all parameters together.
        part: What happened to some of them.
        shapes: Of the parameters, for the text.
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
