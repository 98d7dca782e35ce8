"""Memory of optimizer states, measured by a step on small parameters."""

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
from booster.estimate.activations import measure_peak
from booster.estimate.fake_models import new_fake_mode
from booster.interface import FusedUpdate

__all__ = ["OptimizerMemory"]

# Dimensions of the small parameters: a state's dimension of this size is the parameter's.
_SIZES = (7, 11, 13, 17, 19, 23)
_PROBE_NUMEL = 4096
_NEGLIGIBLE = 0.05  # fraction of a parameter: small tensors such as factors


@dataclass(frozen=True, slots=True)
class _StateShape:
    """Shape of a state tensor relative to its parameter.

    Attributes:
        dims: Dimensions that it shares with the parameter.
        constant: Product of its other dimensions.
        element_bytes: Bytes per element.
    """

    dims: tuple[int, ...]
    constant: int
    element_bytes: int


class OptimizerMemory:
    """Memory of an optimizer's states and of the temporaries of its step.

    Args:
        make: Function that creates the optimizer for a list of parameters.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._make = make
        self._states: dict[tuple[int, torch.dtype], list[_StateShape]] = {}
        self._ratios: dict[torch.dtype, tuple[float, bool]] = {}
        self.is_fused = isinstance(make([nn.Parameter(torch.zeros(_SIZES[0]))]), FusedUpdate)

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerMemory:
        """Create it from an optimizer, or from a function that creates one for a list of parameters.

        Raises:
            ConfigError: The argument is neither.
        """
        if isinstance(optimizer, Optimizer):
            return cls(lambda parameters: _copy_over(optimizer, parameters))
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer={optimizer!r} is not an optimizer: give one over the model's parameters, or a function that"
                " creates one from a list of parameters, such as torch.optim.AdamW"
            )
        return cls(lambda parameters: _make_optimizer(optimizer, parameters))

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, fraction: float = 1.0) -> int:
        """See `MemoryRequest.state_bytes`."""
        total = 0.0
        for shape in shapes:
            for state in self._states_of(min(len(shape), len(_SIZES)), dtype):
                numel = state.constant * math.prod(shape[dim] for dim in state.dims)
                is_elementwise = len(state.dims) == min(len(shape), len(_SIZES))
                total += numel * state.element_bytes * (fraction if is_elementwise else 1.0)
        return round(total)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        """See `MemoryRequest.step_bytes`."""
        ratio, is_of_all = self._ratio(dtype)
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        return round(ratio * (sum(sizes) if is_of_all else max(sizes, default=0)))

    def _states_of(self, num_dims: int, dtype: torch.dtype) -> list[_StateShape]:
        key = (num_dims, dtype)
        if key not in self._states:
            self._states[key] = self._measure_states(_SIZES[:num_dims], dtype)
        return self._states[key]

    def _measure_states(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[_StateShape]:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = self._make([parameter])
        optimizer.step()
        return [
            _state_shape(value, shape)
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]

    def _ratio(self, dtype: torch.dtype) -> tuple[float, bool]:
        """Return temporary memory of a step relative to a parameter, and whether it scales with all or the largest."""
        if dtype not in self._ratios:
            try:
                single, double = (self._measure_step(number, dtype) for number in (1, 2))
            except (RuntimeError, NotImplementedError, TypeError):  # a compiled step, which rejects fake tensors
                single = double = 0.0
            is_of_all = double > 1.5 * single
            self._ratios[dtype] = (single if single > _NEGLIGIBLE else 0.0, is_of_all)
        return self._ratios[dtype]

    def _measure_step(self, num_parameters: int, dtype: torch.dtype) -> float:
        if self.is_fused:
            return 0.0
        with new_fake_mode():
            parameters = [nn.Parameter(torch.empty(_PROBE_NUMEL, dtype=dtype)) for _ in range(num_parameters)]
            optimizer = self._make(parameters)
            for _ in range(2):  # the first step allocates the states
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                states = [one for state in optimizer.state.values() for one in state.values()]
                state_tensors = [one for one in states if isinstance(one, torch.Tensor)]
                grads = [one.grad for one in parameters if one.grad is not None]
                taken = measure_peak(optimizer.step, [*parameters, *grads, *state_tensors])
        return taken / (_PROBE_NUMEL * dtype.itemsize)


def _state_shape(state: torch.Tensor, shape: tuple[int, ...]) -> _StateShape:
    dims: list[int] = []
    constant = 1
    for size in state.shape:
        if size in shape:
            dims.append(shape.index(size))
        else:
            constant *= size
    return _StateShape(tuple(dims), constant, state.element_size())


def _copy_over(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer with the settings of its first group, over other parameters."""
    first = optimizer.param_groups[0]
    memo: dict[int, Any] = {id(optimizer.state): type(optimizer.state)(dict)}
    for group in optimizer.param_groups:
        memo[id(group["params"])] = parameters if group is first else []
        for one in group["params"]:
            memo[id(one)] = parameters[0]
    made = copy.deepcopy(optimizer, memo)
    made.param_groups = [made.param_groups[0]]
    return made


def _make_optimizer(make: Callable[..., Any], parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={make!r} returned a {type(optimizer).__name__} for a list of parameters: give a function that"
            " returns a torch.optim.Optimizer"
        )
    return optimizer
