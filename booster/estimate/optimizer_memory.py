"""How much an optimizer keeps for a parameter, found by a step of a small copy of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.errors import ConfigError
from booster.estimate.activations import peak_of
from booster.estimate.fake_models import new_fake_mode
from booster.interface import FusedUpdate

__all__ = ["OptimizerMemory"]

# Sizes of the small parameters' dimensions: where a state has one of them, it has that dimension of the parameter.
_SIZES = (7, 11, 13, 17, 19, 23)
_TRIAL_NUMEL = 4096
_NEGLIGIBLE = 0.05  # of a parameter: small tensors such as factors


@dataclass(frozen=True, slots=True)
class _State:
    """A state tensor of a parameter.

    Attributes:
        dims: Which of the parameter's dimensions it has; None: none of its own, `constant` elements.
        constant: Further factor of its number of elements.
        element_bytes: Of its format.
    """

    dims: tuple[int, ...]
    constant: int
    element_bytes: int


class OptimizerMemory:
    """What an optimizer keeps and computes with.

    Args:
        make: Returns the optimizer for some parameters.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._make = make
        self._states: dict[tuple[int, torch.dtype], list[_State]] = {}
        self._ratios: dict[torch.dtype, tuple[float, bool]] = {}
        self.is_fused = isinstance(make([nn.Parameter(torch.zeros(_SIZES[0]))]), FusedUpdate)

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerMemory:
        """Return it for an optimizer, or for a function that makes one.

        Raises:
            ConfigError: It is neither.
        """
        if isinstance(optimizer, Optimizer):
            return cls(lambda parameters: _alike(optimizer, parameters))
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer={optimizer!r} is no optimizer: give one over the model's parameters, or what makes one of a"
                " list of parameters, such as torch.optim.AdamW"
            )
        return cls(lambda parameters: _made(optimizer, parameters))

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        """See `MemoryQuestion.state_bytes`."""
        total = 0.0
        for shape in shapes:
            for state in self._states_of(min(len(shape), len(_SIZES)), dtype):
                numel = state.constant * math.prod(shape[dim] for dim in state.dims)
                is_elementwise = len(state.dims) == min(len(shape), len(_SIZES))
                total += numel * state.element_bytes * (share if is_elementwise else 1.0)
        return round(total)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        """See `MemoryQuestion.step_bytes`."""
        ratio, is_of_all = self._ratio(dtype)
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        return round(ratio * (sum(sizes) if is_of_all else max(sizes, default=0)))

    def _states_of(self, num_dims: int, dtype: torch.dtype) -> list[_State]:
        key = (num_dims, dtype)
        if key not in self._states:
            self._states[key] = self._try_out(_SIZES[:num_dims], dtype)
        return self._states[key]

    def _try_out(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[_State]:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = self._make([parameter])
        optimizer.step()
        return [
            _described(value, shape)
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]

    def _ratio(self, dtype: torch.dtype) -> tuple[float, bool]:
        """Return what a step takes for a moment, in parameters, and whether that is of all of them or the largest."""
        if dtype not in self._ratios:
            try:
                one, two = (self._taken_by_step(number, dtype) for number in (1, 2))
            except (RuntimeError, NotImplementedError, TypeError):  # a compiled step, which knows no fake tensors
                one = two = 0.0
            is_of_all = two > 1.5 * one
            self._ratios[dtype] = (one if one > _NEGLIGIBLE else 0.0, is_of_all)
        return self._ratios[dtype]

    def _taken_by_step(self, num_parameters: int, dtype: torch.dtype) -> float:
        if self.is_fused:
            return 0.0
        with new_fake_mode():
            parameters = [nn.Parameter(torch.empty(_TRIAL_NUMEL, dtype=dtype)) for _ in range(num_parameters)]
            optimizer = self._make(parameters)
            for _ in range(2):  # the states are there from the first on
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                states = [one for state in optimizer.state.values() for one in state.values()]
                before = [one for one in states if isinstance(one, torch.Tensor)]
                grads = [one.grad for one in parameters if one.grad is not None]
                taken = peak_of(optimizer.step, [*parameters, *grads, *before])
        return taken / (_TRIAL_NUMEL * dtype.itemsize)


def _described(state: torch.Tensor, shape: tuple[int, ...]) -> _State:
    dims: list[int] = []
    constant = 1
    for size in state.shape:
        if size in shape:
            dims.append(shape.index(size))
        else:
            constant *= size
    return _State(tuple(dims), constant, state.element_size())


def _alike(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same class and settings as the first group has, over other parameters."""
    first = optimizer.param_groups[0]
    memo: dict[int, Any] = {id(optimizer.state): type(optimizer.state)(dict)}
    for group in optimizer.param_groups:
        memo[id(group["params"])] = parameters if group is first else []
        for one in group["params"]:
            memo[id(one)] = parameters[0]
    made = copy.deepcopy(optimizer, memo)
    made.param_groups = [made.param_groups[0]]
    return made


def _made(make: Callable[..., Any], parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={make!r} made a {type(optimizer).__name__} of a list of parameters: give what makes a"
            " torch.optim.Optimizer"
        )
    return optimizer
