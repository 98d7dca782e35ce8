"""float16 weights with fp32 master weights and dynamic loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster.comm import LOW_PRECISION
from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.core.precision import Fp32MasterWeights
from booster.errors import ConfigError
from booster.interface.mixed_precision import MixedPrecision
from booster.lazy_init import materialize
from booster.logger import log_rank_zero
from booster.pytree import map_tensors
from booster.validation import check_flag

from .loss_scaler import DynamicLossScaler, LossScaleConfig

OriginalWeights: TypeAlias = dict[nn.Parameter, torch.Tensor]
"""Full fp32 values of parameters from before they were cast."""


def attach_masters(model: ModelWrapper, optimizer: OptimizerWrapper, originals: OriginalWeights | None) -> None:
    """Make the optimizer update fp32 master weights, initialized with the values before the cast.

    Args:
        model: Boosted model.
        optimizer: Boosted optimizer.
        originals: Result of `cast_weights`.

    Raises:
        ConfigError: `originals` is None: master weights would begin at rounded values.
    """
    if originals is None:
        raise ConfigError(
            "configure() got prepared=None, and fp32 master weights would begin at rounded values: pass what prepare()"
            " returned, also from an override of prepare()"
        )
    values = {id(parameter): value for parameter, value in originals.items()}
    if optimizer.use_master_weights(values):
        return
    masters = Fp32MasterWeights(optimizer.unwrap(), values)
    optimizer.master_weights = masters
    model.register_load_hook(masters.refresh)
    model.register_master_slices(lambda: masters.slices(model))


def cast_weights(
    model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool = False, keep_originals: bool = True
) -> OriginalWeights:
    """Cast all floating-point parameters and buffers of a model in place; Parameter objects are kept.

    Args:
        model: User's model.
        dtype: Dtype after the cast.
        keep_batchnorm_fp32: If True, parameters and statistics of batch norms are not cast.
        keep_originals: If True, return the values before the cast, else nothing.
    """
    originals: OriginalWeights = {}
    materialize(model)  # lazily initialized tensors have no values to cast
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm):  # includes the synchronized ones of plugins
            continue
        for parameter in module.parameters(recurse=False):
            if keep_originals and parameter.is_floating_point() and parameter.dtype != dtype:
                originals[parameter] = parameter.detach().to(torch.float32)
            _cast_in_place(parameter, dtype)
        for buffer in module.buffers(recurse=False):
            _cast_in_place(buffer, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs contiguous weights, which the cast has separated
    return originals


def _cast_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.to(dtype)


def cast_floats(dtype: torch.dtype, tree: Any) -> Any:
    """Cast all floating-point tensors of a pytree to `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def low_precision_to_fp32(tree: Any) -> Any:
    """Cast all float16 and bfloat16 tensors of a pytree to fp32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in LOW_PRECISION else tensor, tree)


class FP16NaiveMixedPrecision(MixedPrecision):
    """float16 model with fp32 master weights, which are initialized with the values before the cast.

    Memory per parameter: 2 bytes for the weight, 2 for its gradient, 8 for the master and its gradient.

    Args:
        initial_scale: Initial loss scale.
        min_scale: Lower limit of the scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale when overflows reduce it.
        growth_interval: Number of consecutive steps without overflow before the scale grows.
        hysteresis: Number of overflows before the scale is reduced.
        max_scale: Upper limit of the scale.
        log_num_zeros_in_grad: If True, count the zeros of each step's gradients before clipping, log them on rank 0,
            and set `num_zeros_in_grad`.
        verbose: If True, log skipped steps and changes of the scale on rank 0.

    Attributes:
        num_zeros_in_grad: Number of zeros in this rank's gradients of the last step; None if not counted.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        log_num_zeros_in_grad: bool = False,
        verbose: bool = False,
    ) -> None:
        check_flag("log_num_zeros_in_grad", log_num_zeros_in_grad)
        check_flag("verbose", verbose)
        self._loss_scale = LossScaleConfig(
            initial_scale=initial_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        self._loss_scale.check()
        self._report = log_rank_zero if verbose else None
        self._counts_zeros = log_num_zeros_in_grad
        self.num_zeros_in_grad: int | None = None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of matrix multiplications."""
        return torch.float16

    def config_fingerprint(self) -> list[str]:
        return [
            *super().config_fingerprint(),
            *self._loss_scale.fingerprint,
            f"log_num_zeros_in_grad={self._counts_zeros}",
        ]

    @property
    def keeps_masters(self) -> bool:
        return True

    def prepare(self, model: nn.Module) -> OriginalWeights:
        """Cast the model to float16 in place; return its fp32 values.

        Args:
            model: User's model; its Parameter objects are kept.
        """
        return cast_weights(model, torch.float16)

    def configure(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper | None,
        criterion: Callable[..., Any] | None,
        prepared: OriginalWeights | None = None,
    ) -> tuple[ModelWrapper, OptimizerWrapper | None, Callable[..., Any] | None]:
        """Install casts, master weights and the loss scaler; return model, optimizer and criterion."""
        super().configure(model, optimizer, criterion)
        if optimizer is None:
            return model, optimizer, criterion
        attach_masters(model, optimizer, prepared)
        optimizer.loss_scaler = DynamicLossScaler(self._loss_scale, self._report)
        if self._counts_zeros:
            optimizer.register_gradient_hook(self._count_zeros)
        return model, optimizer, criterion

    def convert_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast floating-point arguments of the forward to float16."""
        return cast_floats(torch.float16, args), cast_floats(torch.float16, kwargs)

    def convert_outputs(self, outputs: Any) -> Any:
        """Cast float16 and bfloat16 outputs to fp32."""
        return low_precision_to_fp32(outputs)

    def _count_zeros(self, gradients: Sequence[torch.Tensor]) -> None:
        num_zeros = 0
        for gradient in gradients:
            stored = gradient.coalesce().values() if gradient.is_sparse else gradient
            num_zeros += gradient.numel() - int(torch.count_nonzero(stored))
        self.num_zeros_in_grad = num_zeros
        log_rank_zero(f"zeros in the gradients: {self.num_zeros_in_grad}")
