"""fp32 copies of low-precision parameters: the optimizer updates the copies, the model computes with the rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface.model import ModelWrapper
from booster.interface.tensor_slice import TensorSlice

__all__ = ["LOW_PRECISION", "Fp32MasterWeights"]

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Pair:
    working: nn.Parameter
    master: nn.Parameter
    grad: torch.Tensor | None = None  # the master's gradient buffer, kept over the steps


class Fp32MasterWeights:
    """The fp32 copies of an optimizer's float16 and bfloat16 parameters.

    Creating it re-points the optimizer's `param_groups`, and the states that it has already, to the copies. Parameters
    in other formats stay as they are. Costs 8 bytes a parameter: the copy and its gradient.

    Args:
        optim: The optimizer.
        originals: The fp32 values that parameters had before they were rounded, by `id(parameter)`; a parameter that
            is missing here begins at its rounded value. The tensors become the copies' memory.
    """

    def __init__(self, optim: Optimizer, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        self._pairs: list[_Pair] = []
        self._working_of: dict[int, nn.Parameter] = {}
        originals = originals or {}
        for group in optim.param_groups:
            # In place: optimizers such as LBFGS keep the list itself.
            group["params"][:] = [self._adopt(parameter, originals) for parameter in group["params"]]
        for pair in self._pairs:
            _move_state(optim, pair)

    def __len__(self) -> int:
        return len(self._pairs)

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter for one of the optimizer's (itself where there is no copy)."""
        return self._working_of.get(id(parameter), parameter)

    def copy_gradients(self) -> None:
        """Gives every master the gradient of its working parameter, in fp32; None where there is none."""
        for pair in self._pairs:
            pair.master.grad = _fp32_gradient(pair)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Rounds the masters into the working parameters, after a step."""
        if self._pairs:
            torch._foreach_copy_([pair.working for pair in self._pairs], [pair.master for pair in self._pairs])

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over working parameters that were changed from outside.

        An element that still rounds to its working value keeps its extra digits, so the order of loading weights and
        masters does not matter.
        """
        for pair in self._pairs:
            is_same = pair.master.to(pair.working.dtype) == pair.working
            pair.master.copy_(torch.where(is_same, pair.master, pair.working.float()))

    def slices(self, model: ModelWrapper) -> list[TensorSlice]:
        """Returns the masters by the names of their parameters in the model."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [TensorSlice.whole(names[id(pair.working)], pair.master.detach(), primary=False) for pair in self._pairs]

    def _adopt(self, parameter: nn.Parameter, originals: Mapping[int, torch.Tensor]) -> nn.Parameter:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        values = originals.get(id(parameter), parameter.detach())
        values = values.to(device=parameter.device, dtype=torch.float32)
        master = nn.Parameter(values, requires_grad=parameter.requires_grad)
        master.__dict__ = parameter.__dict__  # the optimizer may ask for what the user has marked parameters with
        self._pairs.append(_Pair(working=parameter, master=master))
        self._working_of[id(master)] = parameter
        return master


def _fp32_gradient(pair: _Pair) -> torch.Tensor | None:
    source = pair.working.grad
    if source is None:
        return None
    if source.is_sparse:  # its number of rows changes from step to step: nothing to keep
        return source.float()
    if pair.grad is None:
        pair.grad = torch.empty_like(pair.master)
    return pair.grad.copy_(source)


def _move_state(optim: Optimizer, pair: _Pair) -> None:
    if pair.working in optim.state:
        state = optim.state.pop(pair.working)
        optim.state[pair.master] = {key: _fp32_state(value) for key, value in state.items()}


def _fp32_state(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value
