"""A model whose weights are kept in a low-precision format, with the fp32 values remembered for the masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.lazy_init import materialize
from booster.mixed_precision.master_weights import LOW_PRECISION, Fp32MasterWeights
from booster.tensor_tree import map_tensors

__all__ = ["HalfWeights", "cast_floats", "low_precision_to_fp32"]

BATCH_NORMS = _BatchNorm  # also what plugins put in its place to normalise over ranks


class HalfWeights:
    """Casts models, and makes fp32 masters from the exact values that they had before.

    Args:
        dtype: The format that floating parameters and buffers are cast to; None: they stay.
        keep_batchnorm_fp32: Leave batch norms' parameters and statistics as they are.
        remember: Keep the values from before the cast, for `attach_masters`.
    """

    def __init__(self, dtype: torch.dtype | None, *, keep_batchnorm_fp32: bool = False, remember: bool = True) -> None:
        self.dtype = dtype
        self._keep_batchnorm_fp32 = keep_batchnorm_fp32
        self._remember = remember
        # The parameter goes along so that its id stays taken as long as it is a key.
        self._originals: WeakKeyDictionary[nn.Module, dict[int, tuple[nn.Parameter, torch.Tensor]]] = (
            WeakKeyDictionary()
        )

    def cast(self, model: nn.Module) -> None:
        """Casts every floating parameter and buffer of the model in place; the Parameter objects stay the same ones.

        Args:
            model: The model.
        """
        if self.dtype is None:
            return
        materialize(model)  # what was built lazily has no values to round yet
        originals: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        for module in model.modules():
            if self._keep_batchnorm_fp32 and isinstance(module, BATCH_NORMS):
                continue
            for parameter in module.parameters(recurse=False):
                if self._remember and self._is_rounded(parameter):
                    originals[id(parameter)] = (parameter, parameter.detach().to(torch.float32))
                _cast_in_place(parameter, self.dtype)
            for buffer in module.buffers(recurse=False):
                _cast_in_place(buffer, self.dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # cuDNN wants its weights in one block, which the cast took apart
        if originals:
            self._originals[model] = originals

    def forget(self, model: ModelWrapper) -> None:
        """Frees the values from before the cast."""
        self._originals.pop(model.unwrap(), None)

    def attach_masters(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
        """Has the optimizer update fp32 masters, which begin at the values from before the cast.

        Args:
            model: The boosted model.
            optimizer: The boosted optimizer.
        """
        originals = {key: value for key, (_, value) in self._originals.pop(model.unwrap(), {}).items()}
        if optimizer.adopt_masters(originals):
            return
        masters = Fp32MasterWeights(optimizer.unwrap(), originals)
        optimizer.master_weights = masters
        model.register_load_hook(masters.refresh)
        model.register_exact_copies(lambda: masters.slices(model))

    def _is_rounded(self, parameter: nn.Parameter) -> bool:
        return parameter.is_floating_point() and parameter.dtype != self.dtype


def _cast_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.to(dtype)


def cast_floats(dtype: torch.dtype, tree: Any) -> Any:
    """Returns the tree with every floating tensor in `dtype`."""
    return map_tensors(_caster(lambda tensor: tensor.is_floating_point(), dtype), tree)


def low_precision_to_fp32(tree: Any) -> Any:
    """Returns the tree with every float16 and bfloat16 tensor in fp32."""
    return map_tensors(_caster(lambda tensor: tensor.dtype in LOW_PRECISION, torch.float32), tree)


def _caster(is_cast: Callable[[torch.Tensor], bool], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if is_cast(tensor) else tensor
