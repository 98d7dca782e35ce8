"""Steps copies of an optimizer on small parameters, the same ones with the same gradients every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from booster.device import current_device
from booster.plugins.sharding.probe.optimizer_copy import copy_optimizer
from booster.plugins.sharding.probe.outcome import ObstacleFound, Outcome, Place
from booster.random_state import set_seed

__all__ = ["Exchange", "SmallSteps", "hold_only"]

Span = tuple[int, int]
# Puts other parameters into a copy's param groups in the place of whole ones, and returns them.
Exchange = Callable[[Optimizer, Mapping[Place, nn.Parameter]], Mapping[Place, nn.Parameter]]

_GRADIENT_SCALES = (1.0, 1e-3, 0.1, 1.0, 10.0, 1.0, 1e3, 1.0)
_LEAST_LEARNING_RATE = 1e-2
_LEAST_NOISE = 128 * 160  # so that small parameters have numbers of their own


class SmallSteps:
    """Runs of one optimizer that differ in what its copies hold alone; see Note [Probe] about the numbers.

    Args:
        optimizer: The user's optimizer. Only read.
        shapes: By place the shapes of the whole parameters that are tried.
    """

    def __init__(self, optimizer: Optimizer, shapes: Mapping[Place, tuple[int, ...]]) -> None:
        self._optimizer = optimizer
        self._shapes = shapes
        self._noise = torch.randn(
            max([_LEAST_NOISE, *(math.prod(shape) for shape in shapes.values())]),
            generator=torch.Generator("cpu").manual_seed(0),
            device="cpu",
            dtype=torch.float32,
        )

    def run(
        self,
        exchange: Exchange | None = None,
        *,
        what: str = "whole parameters",
        spans: Mapping[Place, Span] | None = None,
        seed: int = 0,
    ) -> Outcome:
        """Returns what a copy did.

        Args:
            exchange: Called before the first step; None: it holds the whole parameters.
            what: What it holds then, for the text of errors.
            spans: Which elements of the whole those are, where they are not all.
            seed: Of the process's random numbers.

        Raises:
            CopyError: The optimizer can't be copied.
            ObstacleFound: Its step raised.
        """
        set_seed(seed)
        wholes = {place: self._make_parameter(place) for place in self._shapes}
        groups = range(len(self._optimizer.param_groups))
        copied = copy_optimizer(self._optimizer, [_of_group(wholes, index) for index in groups])
        _raise_learning_rates(copied)
        held = wholes if exchange is None else exchange(copied, wholes)
        rows = {place: [parameter.detach().reshape(-1).clone()] for place, parameter in held.items()}
        _call_own(copied, "train", what)
        for step, scale in enumerate(_GRADIENT_SCALES):
            for place, parameter in held.items():
                gradient = self._gradient(place, step) * scale
                gradient = gradient if spans is None else gradient[slice(*spans[place])]
                parameter.grad = gradient.to(parameter).view(parameter.shape)
            _call(copied, "step", what)
            for place, parameter in held.items():
                rows[place].append(parameter.detach().reshape(-1).clone())
        if _call_own(copied, "eval", what):
            for place, parameter in held.items():
                rows[place].append(parameter.detach().reshape(-1).clone())
        outcome = Outcome({place: torch.stack(some) for place, some in rows.items()})
        outcome.note_states(copied, held)
        return outcome

    def _make_parameter(self, place: Place) -> nn.Parameter:
        original = self._optimizer.param_groups[place[0]]["params"][0]
        device = current_device() if original.device.type == "meta" else original.device
        dtype = torch.float64 if original.dtype == torch.float64 else torch.float32
        noise = self._noise_for(place, 0)
        weight = noise * torch.linspace(0.1, 3.0, noise.numel(), device="cpu", dtype=torch.float32)
        return nn.Parameter(weight.to(device, dtype).view(self._shapes[place]))

    def _gradient(self, place: Place, step: int) -> torch.Tensor:
        noise = self._noise_for(place, step + 1)
        return noise * torch.linspace(3.0, 0.1, noise.numel(), device="cpu", dtype=torch.float32)

    def _noise_for(self, place: Place, number: int) -> torch.Tensor:
        return self._noise.roll(997 * number + 101 * place[0] + 11 * place[1])[: math.prod(self._shapes[place])]


def hold_only(copied: Optimizer, held: Mapping[Place, nn.Parameter]) -> None:
    """Puts parameters into a copy's param groups in the place of all others, in the same lists."""
    for index, group in enumerate(copied.param_groups):
        numbers = [number for (of_group, number) in held if of_group == index]
        if "param_names" in group:
            names = group["param_names"]
            group["param_names"] = [names[number] for number in numbers]
        group["params"][:] = _of_group(held, index)


def _of_group(parameters: Mapping[Place, nn.Parameter], index: int) -> Sequence[nn.Parameter]:
    return [parameter for place, parameter in parameters.items() if place[0] == index]


def _call_own(copied: Optimizer, name: str, what: str) -> bool:
    """Calls the `train` or `eval` of an optimizer that swaps its weights; returns whether there is one."""
    if not callable(getattr(type(copied), name, None)):
        return False
    _call(copied, name, what)
    return True


def _call(copied: Optimizer, name: str, what: str) -> None:
    try:
        getattr(type(copied), name)(copied)  # an instance's own `step` is a scheduler's, which counts
    except Exception as error:
        raise ObstacleFound(f"on {what} its {name}() raised {type(error).__name__}: {error}") from error


def _raise_learning_rates(copied: Optimizer) -> None:
    for group in copied.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.clamp_(min=_LEAST_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEAST_LEARNING_RATE)
