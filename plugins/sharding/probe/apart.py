"""Finds out by trying whether an optimizer updates every parameter by itself, if not every element."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from booster.errors import ConfigError
from booster.plugins.sharding.probe.isolation import nothing_changed
from booster.plugins.sharding.probe.optimizer_copy import CopyError
from booster.plugins.sharding.probe.outcome import (
    ObstacleFound,
    Outcome,
    Place,
    check_tells_something,
    compare_exactly,
)
from booster.plugins.sharding.probe.steps import SmallSteps, hold_only
from booster.plugins.sharding.probe.trial import large_groups

__all__ = ["find_tie"]

# Note [Trying parameters apart]
# One copy of the optimizer has a few parameters of every group, as Note [Probe] has them, in shapes like those of the
# group's own: as many dimensions, in like proportions, and as large as may be needed to be treated as large. Other
# copies have some of these, as owners would: of every group each second one, of half of the groups all, or nothing. An
# optimizer that updates each parameter by itself does the same to them, bit for bit, as nothing else is computed.
_LARGE_NUMEL = 128 * 160
_SMALL_NUMEL = 16 * 20
_MOST_PARAMETERS = 8  # of a group that are all tried; of more, some of each number of dimensions
_OF_EACH_DIM = 2


def find_tie(optimizer: Optimizer) -> str | None:
    """Returns what ties an optimizer's parameters to each other; None: it updates every one of them by itself.

    What can't be tried out counts as tied, as all parameters together are always right. Neither the optimizer and its
    parameters, nor hooks, random numbers or class attributes are changed.

    Args:
        optimizer: The user's optimizer, with whole parameters.

    Raises:
        ConfigError: It doesn't step the parameters that are in its param groups, if they are others than it began with.
    """
    with nothing_changed(optimizer):
        trial = _IsolatedTrial(optimizer)
        try:
            whole = trial.run_as_they_are()
        except CopyError as error:
            return f"{error}, so it could not be tried out"
        except ObstacleFound as found:
            return str(found)
        try:
            trial.compare(whole, [trial.places])
        except ObstacleFound as found:
            raise ConfigError(
                f"{type(optimizer).__name__} does not follow its param_groups, in which sharded training puts other"
                f" parameters: when they were exchanged, {found}. Let its step() take every parameter from"
                " self.param_groups and keep none elsewhere, or use the torch_ddp plugin"
            ) from None
        try:
            trial.compare(whole, trial.parts())
        except ObstacleFound as found:
            return str(found)
    return None


class _IsolatedTrial:
    """Copies of an optimizer, see Note [Trying parameters apart]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._shapes: dict[Place, tuple[int, ...]] = {}
        self._donors: list[Sequence[int]] = []
        for index, is_large in enumerate(large_groups(optimizer.param_groups)):
            parameters: Sequence[nn.Parameter] = optimizer.param_groups[index]["params"]
            self._donors.append(_donors([parameter.dim() for parameter in parameters]))
            seen: Counter[int] = Counter()
            for number, donor in enumerate(self._donors[-1]):
                shape = parameters[donor].shape
                seen[len(shape)] += 1
                most = _LARGE_NUMEL if is_large and seen[len(shape)] <= _OF_EACH_DIM else _SMALL_NUMEL
                self._shapes[index, number] = _shrunk(shape, most)
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self._steps = SmallSteps(optimizer, self._shapes)

    @property
    def places(self) -> Collection[Place]:
        """All that are tried."""
        return self._shapes.keys()

    def parts(self) -> list[Collection[Place]]:
        """Returns which parameters the copies have that don't have all."""
        middle = len(self._donors) // 2
        alternating = [[place for place in self._shapes if place[1] % 2 == rest] for rest in (0, 1)]
        by_groups = [[place for place in self._shapes if (place[0] < middle) == is_first] for is_first in (True, False)]
        return [*alternating, *(by_groups if middle > 0 else ()), ()]

    def run_as_they_are(self) -> Outcome:
        """Returns what happens to all parameters, none of which was exchanged after the optimizer was made."""

        def keep(copied: Optimizer, wholes: Mapping[Place, nn.Parameter]) -> Mapping[Place, nn.Parameter]:
            self._rename(copied)
            return wholes

        whole = self._steps.run(keep)
        check_tells_something(whole)
        return whole

    def compare(self, whole: Outcome, parts: Iterable[Collection[Place]]) -> None:
        """Raises ObstacleFound if parameters come out different when others of them, or none, are not there."""
        for part in parts:
            compare_exactly(whole, self._run(set(part)), self._shapes)

    def _run(self, part: Collection[Place]) -> Outcome:
        def exchange(copied: Optimizer, wholes: Mapping[Place, nn.Parameter]) -> Mapping[Place, nn.Parameter]:
            self._rename(copied)
            held: dict[Place, nn.Parameter] = {}
            for place, whole in wholes.items():
                state = copied.state.pop(whole, None)
                if place in part:
                    held[place] = nn.Parameter(whole.detach().clone())
                    if state is not None:
                        copied.state[held[place]] = state
            hold_only(copied, held)
            return held

        return self._steps.run(exchange, what=f"{len(part)} of {len(self._shapes)} whole parameters")

    def _rename(self, copied: Optimizer) -> None:
        """Gives every parameter the name of the one whose shape it has."""
        for group, donors, names in zip(copied.param_groups, self._donors, self._names, strict=True):
            if names is not None:
                group["param_names"] = [names[donor] for donor in donors]


def _donors(dims: Sequence[int]) -> Sequence[int]:
    """Returns which of a group's parameters are tried, by their numbers of dimensions: two at least, so one twice."""
    if len(dims) == 1:
        return (0, 0)
    if len(dims) <= _MOST_PARAMETERS:
        return range(len(dims))
    chosen, seen = [], Counter[int]()
    for index, dim in enumerate(dims):
        seen[dim] += 1
        if seen[dim] <= _OF_EACH_DIM:
            chosen.append(index)
    return chosen


def _shrunk(shape: Sequence[int], most: int) -> tuple[int, ...]:
    sizes = [max(size, 1) for size in shape]
    while math.prod(sizes) > most:
        largest = sizes.index(max(sizes))
        sizes[largest] = (sizes[largest] + 1) // 2
    return tuple(sizes)
