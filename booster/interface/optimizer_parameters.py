"""Parameters of a boosted optimizer, and the model's parameters that they are copies of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from booster.interface.gradient_window import AccumulationState
from booster.interface.mixed_precision import MasterWeights
from booster.interface.model import ModelWrapper
from booster.interface.optimizer_pass_through import OptimizerPassThrough

__all__ = ["OptimizerParameters"]


class OptimizerParameters(OptimizerPassThrough):
    """Optimizer whose `param_groups` may hold fp32 copies of the model's parameters."""

    model: ModelWrapper
    master_weights: MasterWeights | None
    _accumulation: AccumulationState

    def _optimized_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _model_parameters(self) -> list[nn.Parameter]:
        return [self.model_parameter(parameter) for parameter in self._optimized_parameters()]

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the model's parameter for one of `param_groups`, which may be its fp32 copy."""
        return parameter if self.master_weights is None else self.master_weights.model_parameter(parameter)

    def _model_params_by_master(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the low-precision weights by their master weights."""
        pairs = ((one, self.model_parameter(one)) for one in self._optimized_parameters())
        return {one: working.detach() for one, working in pairs if working is not one}

    def _model_grads_by_master(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the scaled gradients of the low-precision weights by their master weights."""
        pairs = ((one, self.model_parameter(one)) for one in self._optimized_parameters())
        return {one: working.grad for one, working in pairs if working is not one and working.grad is not None}

    def group_parameters(self, index: int) -> list[nn.Parameter]:
        """Return the model's full parameters of a param group, whatever shard of them this rank updates."""
        return [self.model_parameter(parameter) for parameter in self.param_groups[index]["params"]]

    def group_masters(self, index: int) -> list[nn.Parameter]:
        """Return the fp32 copies in a param group that this rank updates in place of the model's parameters."""
        return [one for one in self.param_groups[index]["params"] if self.model_parameter(one) is not one]

    def _named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's gradients with the user's names of their parameters."""
        is_scaled = self._accumulation.factors is not None
        names = {id(one): self.model.logical_name(name) for name, one in self.model.named_parameters()}
        for parameter in self._optimized_parameters():
            model_parameter = self.model_parameter(parameter)
            gradient = model_parameter.grad if is_scaled else parameter.grad
            if gradient is not None:
                yield names.get(id(model_parameter), "a parameter outside of the model"), gradient

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model_parameters())
