"""Finds out by trying whether an optimizer updates every element of a parameter by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface import Shard
from booster.plugins.low_level_zero.probe.isolation import nothing_changed
from booster.plugins.low_level_zero.probe.optimizer_copy import CopyError, copy_optimizer
from booster.plugins.low_level_zero.probe.outcome import ObstacleFound, Outcome, Place, check_tells_something, compare
from booster.plugins.low_level_zero.shard_states import shard_state
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
        try:
            _try_out(optimizer)
        except CopyError as error:
            return f"{error}, so it could not be tried out"
        except ObstacleFound as found:
            return _RANDOM if _is_random(optimizer) else str(found)
    return None


def _try_out(optimizer: Optimizer) -> None:
    whole = _run(optimizer, None, seed=0)
    shapes = {place: _SHAPES[place[1]] for place in whole.weights}
    check_tells_something(whole, shapes)
    compare(whole, [_run(optimizer, rank, seed=0) for rank in (0, 1)], shapes)


def _is_random(optimizer: Optimizer) -> bool:
    try:
        first, second = (_run(optimizer, None, seed=seed).weights for seed in (1, 2))
    except ObstacleFound:
        return False
    return any(not torch.allclose(first[place], second[place], rtol=0, atol=0, equal_nan=True) for place in first)


def _run(optimizer: Optimizer, rank: int | None, *, seed: int) -> Outcome:
    """Steps a copy of the optimizer: on whole parameters (None), or on the parts that one of two ranks has."""
    set_seed(seed)
    wholes = [_make_parameters(index, group["params"]) for index, group in enumerate(optimizer.param_groups)]
    trial = copy_optimizer(optimizer, wholes)
    _raise_learning_rates(trial)
    held = _whole_parameters(wholes) if rank is None else _repoint(trial, wholes, rank)
    rows = {place: [parameter.detach().reshape(-1).clone()] for place, parameter in held.items()}
    for step, scale in enumerate(_GRADIENT_SCALES):
        for place, parameter in held.items():
            gradient = (_gradient(place, step) * scale)[slice(*_span(place, rank))]
            parameter.grad = gradient.to(parameter).view(parameter.shape)
        _step(trial, "whole parameters" if rank is None else "one-dimensional parts of parameters")
        for place, parameter in held.items():
            rows[place].append(parameter.detach().reshape(-1).clone())
    outcome = Outcome({place: torch.stack(some) for place, some in rows.items()})
    outcome.note_states(trial, held)
    return outcome


def _step(trial: Optimizer, what: str) -> None:
    try:
        type(trial).step(trial)  # type: ignore[call-arg]  # an instance's own `step` is a scheduler's, which counts
    except Exception as error:
        raise ObstacleFound(f"on {what} its step() raised {type(error).__name__}: {error}") from error


def _raise_learning_rates(trial: Optimizer) -> None:
    for group in trial.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.clamp_(min=_LEAST_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEAST_LEARNING_RATE)


# Parameters and gradients, the same in every run.


def _make_parameters(group_index: int, originals: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    if not originals:
        return []
    dtype = torch.float64 if originals[0].dtype == torch.float64 else torch.float32
    return [
        nn.Parameter(_weight((group_index, number)).to(originals[0].device, dtype).view(shape))
        for number, shape in enumerate(_SHAPES)
    ]


def _weight(place: Place) -> torch.Tensor:
    return _noise(place, 0) * torch.linspace(0.1, 3.0, _numel(place), device="cpu", dtype=torch.float64)


def _gradient(place: Place, step: int) -> torch.Tensor:
    return _noise(place, step + 1) * torch.linspace(3.0, 0.1, _numel(place), device="cpu", dtype=torch.float64)


def _noise(place: Place, number: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed((place[0] * len(_SHAPES) + place[1]) * 100 + number)
    return torch.randn(_numel(place), generator=generator, device="cpu", dtype=torch.float64)


def _numel(place: Place) -> int:
    return math.prod(_SHAPES[place[1]])


# What a rank has of them.


def _span(place: Place, rank: int | None) -> tuple[int, int]:
    numel, cut = _numel(place), _FIRST_PART[place[1]]
    return {None: (0, numel), 0: (0, cut), 1: (cut, numel)}[rank]


def _whole_parameters(wholes: Sequence[Sequence[nn.Parameter]]) -> dict[Place, nn.Parameter]:
    return {
        (index, number): parameter
        for index, parameters in enumerate(wholes)
        for number, parameter in enumerate(parameters)
    }


def _repoint(trial: Optimizer, wholes: Sequence[Sequence[nn.Parameter]], rank: int) -> Mapping[Place, nn.Parameter]:
    """Puts a rank's parts into the param groups, as the plugin does, and returns them."""
    held: dict[Place, nn.Parameter] = {}
    for place, whole in _whole_parameters(wholes).items():
        shard = _shard(whole, _span(place, rank), place[0])
        has_elements = shard.parameter.numel() > 0
        shard_state(trial, whole, [shard] if has_elements else [])
        if has_elements:
            held[place] = shard.parameter
    for index, group in enumerate(trial.param_groups):
        group["params"][:] = [parameter for place, parameter in held.items() if place[0] == index]
    return held


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
