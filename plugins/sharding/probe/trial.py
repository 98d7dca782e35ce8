"""Finds out by trying whether an optimizer updates every element of a parameter by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import Shard
from booster.plugins.sharding.probe.isolation import nothing_changed
from booster.plugins.sharding.probe.optimizer_copy import CopyError, copy_optimizer
from booster.plugins.sharding.probe.outcome import ObstacleFound, Outcome, Place, check_tells_something, compare
from booster.plugins.sharding.shard_states import shard_state
from booster.random_state import set_seed

__all__ = ["find_obstacle"]

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

_GRADIENT_SCALES = (1.0, 1e-3, 0.1, 1.0, 10.0, 1.0, 1e3, 1.0)
_LEAST_LEARNING_RATE = 1e-2

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
    """Steps copies of an optimizer on parameters and gradients that are the same in every run."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shapes: dict[Place, tuple[int, ...]] = {}
        self._spans: dict[Place, tuple[tuple[int, int], tuple[int, int]]] = {}
        for index, is_large in enumerate(_large_groups(optimizer.param_groups)):
            shapes, cuts = (_SHAPES, _FIRST_PART) if is_large else (_SMALL_SHAPES, _SMALL_FIRST_PART)
            if optimizer.param_groups[index]["params"]:
                for number, (shape, cut) in enumerate(zip(shapes, cuts, strict=True)):
                    self._shapes[index, number] = shape
                    self._spans[index, number] = ((0, cut), (cut, math.prod(shape)))
        self._noise = torch.randn(
            math.prod(_SHAPES[1]), generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float32
        )

    def compare(self) -> None:
        """Raises ObstacleFound if parts of parameters come out different from whole ones."""
        whole = self._run(None, seed=0)
        check_tells_something(whole, self._shapes)
        compare(whole, [self._run(rank, seed=0) for rank in (0, 1)], self._shapes)

    def is_random(self) -> bool:
        """Returns whether the same steps end elsewhere with other random numbers."""
        try:
            first, second = (self._run(None, seed=seed).weights for seed in (1, 2))
        except ObstacleFound:
            return False
        return any(not torch.allclose(first[place], second[place], rtol=0, atol=0, equal_nan=True) for place in first)

    def _run(self, rank: int | None, *, seed: int) -> Outcome:
        """Steps a copy: on whole parameters (None), or on the parts that one of two ranks has."""
        set_seed(seed)
        wholes = {place: self._make_parameter(place) for place in self._shapes}
        groups = range(len(self._optimizer.param_groups))
        copied = copy_optimizer(self._optimizer, [_of_group(wholes, index) for index in groups])
        _raise_learning_rates(copied)
        held = wholes if rank is None else self._repoint(copied, wholes, rank)
        rows = {place: [parameter.detach().reshape(-1).clone()] for place, parameter in held.items()}
        for step, scale in enumerate(_GRADIENT_SCALES):
            for place, parameter in held.items():
                gradient = self._gradient(place, step) * scale
                gradient = gradient if rank is None else gradient[slice(*self._spans[place][rank])]
                parameter.grad = gradient.to(parameter).view(parameter.shape)
            _step(copied, "whole parameters" if rank is None else "one-dimensional parts of parameters")
            for place, parameter in held.items():
                rows[place].append(parameter.detach().reshape(-1).clone())
        outcome = Outcome({place: torch.stack(some) for place, some in rows.items()})
        outcome.note_states(copied, held)
        return outcome

    def _make_parameter(self, place: Place) -> nn.Parameter:
        original = self._optimizer.param_groups[place[0]]["params"][0]
        dtype = torch.float64 if original.dtype == torch.float64 else torch.float32
        noise = self._noise_for(place, 0)
        weight = noise * torch.linspace(0.1, 3.0, noise.numel(), device="cpu", dtype=torch.float32)
        return nn.Parameter(weight.to(original.device, dtype).view(self._shapes[place]))

    def _gradient(self, place: Place, step: int) -> torch.Tensor:
        noise = self._noise_for(place, step + 1)
        return noise * torch.linspace(3.0, 0.1, noise.numel(), device="cpu", dtype=torch.float32)

    def _noise_for(self, place: Place, number: int) -> torch.Tensor:
        return self._noise.roll(997 * number + 101 * place[0] + 11 * place[1])[: math.prod(self._shapes[place])]

    def _repoint(
        self, copied: Optimizer, wholes: Mapping[Place, nn.Parameter], rank: int
    ) -> Mapping[Place, nn.Parameter]:
        """Puts a rank's parts into the param groups, as the plugin does, and returns them."""
        held: dict[Place, nn.Parameter] = {}
        for place, whole in wholes.items():
            shard = _shard(whole, self._spans[place][rank], place[0])
            has_elements = shard.parameter.numel() > 0
            shard_state(copied, whole, [shard] if has_elements else [])
            if has_elements:
                held[place] = shard.parameter
        for index, group in enumerate(copied.param_groups):
            group["params"][:] = _of_group(held, index)
        return held


def _large_groups(groups: Sequence[Mapping[str, Any]]) -> list[bool]:
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


def _of_group(parameters: Mapping[Place, nn.Parameter], index: int) -> list[nn.Parameter]:
    return [parameter for place, parameter in parameters.items() if place[0] == index]


def _step(copied: Optimizer, what: str) -> None:
    try:
        type(copied).step(copied)  # type: ignore[call-arg]  # an instance's own `step` is a scheduler's, which counts
    except Exception as error:
        raise ObstacleFound(f"on {what} its step() raised {type(error).__name__}: {error}") from error


def _raise_learning_rates(copied: Optimizer) -> None:
    for group in copied.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.clamp_(min=_LEAST_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEAST_LEARNING_RATE)


def _shard(whole: nn.Parameter, span: tuple[int, int], group_index: int) -> Shard:
    return Shard(
        name="probe",
        global_shape=tuple(whole.shape),
        span=span,
        parameter=nn.Parameter(whole.detach().reshape(-1)[slice(*span)].clone()),
        working=whole,
        group_index=group_index,
        has_master=False,
        is_primary=True,
    )
