"""Finds out by trying whether an optimizer updates every element of a parameter by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import Shard
from booster.plugins.sharding.probe.isolation import nothing_changed
from booster.plugins.sharding.probe.optimizer_copy import CopyError
from booster.plugins.sharding.probe.outcome import (
    ObstacleFound,
    Outcome,
    Place,
    check_state_shapes,
    check_tells_something,
    compare,
)
from booster.plugins.sharding.probe.steps import SmallSteps, hold_only
from booster.plugins.sharding.shard_states import shard_state

__all__ = ["find_obstacle", "large_groups"]

# Note [Probe]
# Three copies of the optimizer take the same steps: one has a few parameters whole, the other two are what two ranks
# would have, parts of them as one-dimensional parameters. An elementwise optimizer does the same in all three.
# To make others show:
# - Weights grow and gradients shrink along a parameter, so that norms, means and maxima of the parts differ much from
#   the whole's. Some steps have large gradients and some small ones, so that clipping inside acts and does not.
# - There are parameters of one, two and four dimensions, since many optimizers ask for that. The matrix is as large as
#   those ask for that factor or quantise large matrices only (128 rows, 4096 elements, whole blocks of 256).
# - One parameter is on the second rank alone, so that positions in param_groups differ.
# - The states and the numbers in param_groups are compared too: what acts after many steps only is in there before.
# - A learning rate that a warm-up has set to zero would hide everything, so it is raised.
_SHAPES = ((40,), (128, 160), (4, 3, 3, 3))
_FIRST_PART = (0, 7577, 41)  # elements that the first rank has of each
# Of hundreds of groups, one for each layer, most differ in a rate only: the large matrix is for the first of a kind.
_SMALL_SHAPES = ((40,), (16, 20), (4, 3, 3, 3))
_SMALL_FIRST_PART = (0, 117, 41)
_MAX_LARGE_GROUPS = 8

_RANDOM = (
    "its update draws random numbers, so that parts of a parameter come out different from the whole in any case, and"
    " trying says nothing"
)


def find_obstacle(optimizer: Optimizer) -> str | None:
    """Returns what keeps an optimizer from running on parts of parameters; None: it updates every element by itself.

    Neither the optimizer and its parameters, nor hooks, random numbers or class attributes are changed.

    Args:
        optimizer: The user's optimizer, with whole parameters.
    """
    with nothing_changed(optimizer):
        trial = _Trial(optimizer)
        try:
            trial.compare()
        except CopyError as error:
            return f"{error}, so it could not be tried out"
        except ObstacleFound as found:
            return _RANDOM if trial.is_random() else str(found)
    return None


class _Trial:
    """Three copies of an optimizer, see Note [Probe]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._shapes: dict[Place, tuple[int, ...]] = {}
        self._spans: tuple[dict[Place, tuple[int, int]], dict[Place, tuple[int, int]]] = ({}, {})
        for index, is_large in enumerate(large_groups(optimizer.param_groups)):
            shapes, cuts = (_SHAPES, _FIRST_PART) if is_large else (_SMALL_SHAPES, _SMALL_FIRST_PART)
            if optimizer.param_groups[index]["params"]:
                for number, (shape, cut) in enumerate(zip(shapes, cuts, strict=True)):
                    self._shapes[index, number] = shape
                    self._spans[0][index, number] = (0, cut)
                    self._spans[1][index, number] = (cut, math.prod(shape))
        self._steps = SmallSteps(optimizer, self._shapes)

    def compare(self) -> None:
        """Raises ObstacleFound if parts of parameters come out different from whole ones."""
        whole = self._steps.run()
        check_tells_something(whole)
        check_state_shapes(whole, self._shapes)
        compare(whole, [self._run_on_parts(rank) for rank in (0, 1)], self._shapes)

    def is_random(self) -> bool:
        """Returns whether the same steps end elsewhere with other random numbers."""
        try:
            first, second = (self._steps.run(seed=seed).weights for seed in (1, 2))
        except ObstacleFound:
            return False
        return any(not torch.allclose(first[place], second[place], rtol=0, atol=0, equal_nan=True) for place in first)

    def _run_on_parts(self, rank: int) -> Outcome:
        """Steps what one of two ranks would have."""
        repoint = partial(_repoint, spans=self._spans[rank])
        return self._steps.run(repoint, what="one-dimensional parts of parameters", spans=self._spans[rank])


def _repoint(
    copied: Optimizer, wholes: Mapping[Place, nn.Parameter], spans: Mapping[Place, tuple[int, int]]
) -> Mapping[Place, nn.Parameter]:
    """Puts a rank's parts into the param groups, as the plugin does, and returns them."""
    held: dict[Place, nn.Parameter] = {}
    for place, whole in wholes.items():
        shard = _shard(whole, spans[place], place[0])
        has_elements = shard.parameter.numel() > 0
        shard_state(copied, whole, [shard] if has_elements else [])
        if has_elements:
            held[place] = shard.parameter
    hold_only(copied, held)
    return held


def large_groups(groups: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Returns for every group whether it is among the first with hyperparameters of its kind, rates apart."""
    kinds: set[frozenset[tuple[str, str]]] = set()
    is_large = []
    for group in groups:
        kind = frozenset((key, _kind_of(value)) for key, value in group.items() if key not in ("params", "param_names"))
        is_large.append(kind not in kinds and len(kinds) < _MAX_LARGE_GROUPS)
        kinds.add(kind)
    return is_large


def _kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "zero" if value == 0 else "not zero"
    return repr(value) if isinstance(value, (bool, int, str, type(None))) else type(value).__name__


def _shard(whole: nn.Parameter, span: tuple[int, int], group_index: int) -> Shard:
    return Shard(
        name="probe",
        global_shape=tuple(whole.shape),
        span=span,
        parameter=nn.Parameter(whole.detach().reshape(-1)[slice(*span)].clone()),
        model_param=whole,
        group_index=group_index,
        has_master=False,
        is_primary=True,
    )
