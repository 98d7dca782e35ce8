"""Mixed precision, as the wrappers of model and optimizer use it: dtypes, loss scale and fp32 master weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import LOW_PRECISION

from .shard_aware import update_master
from .shard_spec import TensorSlice


class Precision(Protocol):
    """Dtypes of a model's forward; implemented and described by `booster.interface.MixedPrecision`."""

    @property
    def compute_dtype(self) -> torch.dtype | None: ...

    def describe(self) -> str: ...

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]: ...

    def convert_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

    def convert_outputs(self, outputs: Any) -> Any: ...


class LossScaler(Protocol):
    """Loss scale and its update rule.

    The optimizer wrapper multiplies a loss by `scale`, divides the gradients by it, decides whether the step is
    skipped, and calls `update` only then.
    """

    @property
    def scale(self) -> float:
        """Loss scale of the current accumulation."""
        ...

    def update(self, found_nonfinite: bool) -> None:
        """Update the scale after a step was taken (False) or skipped (True)."""
        ...

    def state_dict(self) -> dict[str, float | int]:
        """Return the state for an exact resume by `load_state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Load a result of `state_dict`."""
        ...


@dataclass(slots=True)
class _MasterPair:
    model_param: nn.Parameter
    master: nn.Parameter
    grad: torch.Tensor | None = None  # the master's gradient buffer, kept over the steps


class Fp32MasterWeights:
    """fp32 master weights of an optimizer's float16 and bfloat16 parameters.

    The constructor replaces the parameters by their masters in the optimizer's `param_groups` and existing state.
    Parameters of other dtypes are kept. Memory: 8 bytes per parameter (master and its gradient).

    Args:
        optim: Optimizer.
        originals: fp32 values of parameters before the cast, by `id(parameter)`; optional, defaults to the cast
            values. The tensors become the storage of the masters.
    """

    def __init__(self, optim: Optimizer, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        self._pairs: list[_MasterPair] = []
        self._model_params: dict[int, nn.Parameter] = {}
        originals = originals or {}
        for group in optim.param_groups:
            # In place: optimizers such as LBFGS keep the list itself.
            group["params"][:] = [self._create_master(parameter, originals) for parameter in group["params"]]
        for pair in self._pairs:
            if pair.model_param in optim.state:
                state = optim.state.pop(pair.model_param)
                optim.state[pair.master] = {
                    key: value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value
                    for key, value in state.items()
                }

    def __len__(self) -> int:
        return len(self._pairs)

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the model parameter of an optimizer parameter (itself if it has no master)."""
        return self._model_params.get(id(parameter), parameter)

    def copy_gradients(self) -> None:
        """Copy the gradients of model parameters to their masters, in fp32."""
        for pair in self._pairs:
            pair.master.grad = _fp32_gradient(pair)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy all masters to the model parameters."""
        self._copy_to_model(self._pairs)

    def end_step(self, *, is_model_updated: bool) -> None:
        """Copy the masters that had a gradient to the model parameters, unless the optimizer's step did so."""
        if not is_model_updated:  # a frozen weight belongs to the user, who may write it in a way that nothing records
            self._copy_to_model([pair for pair in self._pairs if pair.master.grad is not None])

    @torch.no_grad()
    def _copy_to_model(self, pairs: Sequence[_MasterPair]) -> None:
        if pairs:
            torch._foreach_copy_([pair.model_param for pair in pairs], [pair.master for pair in pairs])

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the masters from model parameters that were changed, by the user or by loading a checkpoint.

        Values are compared, as a write through `.data` changes no version counter. A master element that still rounds
        to the model's value keeps its precision, so weights and masters may be loaded in either order.
        """
        for pair in self._pairs:
            update_master(pair.master, pair.model_param)

    def slices(self, model: nn.Module) -> list[TensorSlice]:
        """Return the masters as slices with the names of their model parameters."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [
            TensorSlice.full(names[id(pair.model_param)], pair.master.detach(), primary=False) for pair in self._pairs
        ]

    def _create_master(self, parameter: nn.Parameter, originals: Mapping[int, torch.Tensor]) -> nn.Parameter:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        values = originals.get(id(parameter), parameter.detach())
        values = values.to(device=parameter.device, dtype=torch.float32)
        master = nn.Parameter(values, requires_grad=parameter.requires_grad)
        master.__dict__ = parameter.__dict__  # optimizers may read attributes that the user set on parameters
        self._pairs.append(_MasterPair(model_param=parameter, master=master))
        self._model_params[id(master)] = parameter
        return master


def _fp32_gradient(pair: _MasterPair) -> torch.Tensor | None:
    source = pair.model_param.grad
    if source is None:
        return None
    if source.is_sparse:  # its number of rows varies, so there is no buffer to reuse
        return source.float()
    if pair.grad is None:
        pair.grad = torch.empty_like(pair.master)
    return pair.grad.copy_(source)
