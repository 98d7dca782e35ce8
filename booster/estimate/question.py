"""Memory request to a plugin: model, optimizer and batch, with measured states and activations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from booster.comm import fake_collectives
from booster.errors import BoosterError, ConfigError
from booster.estimate.fake_models import fake_batch, fake_copy, meta_copy, new_fake_mode
from booster.estimate.optimizer_memory import OptimizerMemory
from booster.estimate.repeated_layers import measure_activations
from booster.interface import ActivationProfile, MemoryRequest, MixedPrecision
from booster.interface.batch_call import call_with_batch
from booster.mixed_precision.half_weights import cast_floats
from booster.tensor_tree import map_tensors

__all__ = ["FakeTensorMemoryRequest", "default_criterion"]

_Key = tuple[Any, ...]


def default_criterion(outputs: Any, batch: Any) -> torch.Tensor:
    """Return the model's own loss: `outputs.loss`, or its output if that is a single number.

    Raises:
        ConfigError: The outputs have no loss.
    """
    loss = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    loss = outputs if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1 else loss
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the model returned a {_type_name(outputs)} without a loss to run backward from: give criterion=, a function of"
            " (outputs, batch) that returns the loss, as for execute_pipeline; or return (model, batch, criterion) from"
            " the function that `booster estimate` calls"
        )
    return loss


def _type_name(outputs: Any) -> str:
    return "tensor" if isinstance(outputs, torch.Tensor) else type(outputs).__name__


class FakeTensorMemoryRequest(MemoryRequest):
    """Implementation of `MemoryRequest` by fake tensors.

    Args:
        model: User's model; with real values, on the meta device or lazily initialized.
        optimizer: Memory of the optimizer.
        batch: Batch of one rank, as for `execute_pipeline`; only shapes and dtypes matter.
        criterion: Function of (outputs, batch) that returns the loss.
        trained: `id`s of the parameters that the optimizer updates; optional, defaults to all that require gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMemory,
        batch: Any,
        criterion: Callable[[Any, Any], torch.Tensor],
        trained: set[int] | None = None,
    ) -> None:
        self._mode = new_fake_mode()
        self._optimizer = optimizer
        self._batch = fake_batch(batch, self._mode)
        self._criterion = criterion
        self.model = meta_copy(model)
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        is_trained = [copied for own, copied in pairs if own.requires_grad and (trained is None or id(own) in trained)]
        self.trained: Sequence[nn.Parameter] = is_trained
        self.precision: MixedPrecision | None = None
        self._profiles: dict[_Key, ActivationProfile] = {}

    @property
    def is_fused(self) -> bool:
        return self._optimizer.is_fused

    @property
    def batch_size(self) -> int:
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(tensor.shape[0] if tensor.dim() else 1), self._batch)
        return max(sizes, default=1)

    def prepared_model(self) -> nn.Module:
        model = fake_copy(self.model, self._mode)
        if self.precision is not None:
            with self._mode:
                self.precision.prepare(model)
        return model

    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        return self._optimizer.state_bytes(shapes, dtype, share)

    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        return self._optimizer.step_bytes(shapes, dtype)

    def activations(
        self,
        dtype: torch.dtype | None = None,
        *,
        shard: Callable[[nn.Module], None] | None = None,
        sharding_key: Hashable = None,
        num_microbatches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        key = (dtype, sharding_key, num_microbatches, self.precision, outputs_fp32 or dtype is None)
        is_known = shard is None or sharding_key is not None
        if is_known and key in self._profiles:
            return self._profiles[key]
        profile = self._measure(dtype, shard, num_microbatches, outputs_fp32)
        if is_known:
            self._profiles[key] = profile
        return profile

    def _measure(
        self,
        dtype: torch.dtype | None,
        divide: Callable[[nn.Module], None] | None,
        num_microbatches: int,
        outputs_fp32: bool,
    ) -> ActivationProfile:
        model = fake_copy(self.model, self._mode)
        model.train()
        with self._mode, fake_collectives():
            if self.precision is not None:
                self.precision.prepare(model)
            if divide is not None:
                divide(model)
            if dtype is not None:
                _cast(model, dtype)
            batch = _largest_microbatch(self._batch, num_microbatches)
            before: list[torch.Tensor] = []
            map_tensors(lambda tensor: before.append(tensor), batch)
            try:
                return measure_activations(
                    model, lambda: self._loss(model, batch, dtype, outputs_fp32), existing=before
                )
            except BoosterError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"{type(model).__name__} can't be run on fake tensors to measure its activations"
                    f" ({type(error).__name__}: {_first_line(error)}): {_advice(error)}"
                ) from error

    def _loss(self, model: nn.Module, batch: Any, dtype: torch.dtype | None, outputs_fp32: bool) -> torch.Tensor:
        precision = self.precision
        inputs = batch if dtype is None else cast_floats(dtype, batch)
        if precision is None:
            outputs = call_with_batch(model, inputs)
            if dtype is not None and outputs_fp32:  # replaced, so that the uncast outputs are freed
                outputs = cast_floats(torch.float32, outputs)
            return self._criterion(outputs, batch)
        _, kwargs = precision.convert_inputs((), {"batch": inputs})
        with precision.forward_context("cpu"):
            outputs = precision.convert_outputs(call_with_batch(model, kwargs["batch"]))
        return self._criterion(outputs, batch)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _largest_microbatch(batch: Any, num_microbatches: int) -> Any:
    """Return the largest microbatch of a batch split along dimension 0."""
    if num_microbatches == 1:
        return batch
    return map_tensors(lambda one: one[: -(-one.shape[0] // num_microbatches)].clone() if one.dim() else one, batch)


def _advice(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return "a forward with data-dependent control flow can't be measured; give a batch for which it has none"
    return "check that it runs on a real batch of these shapes and with this criterion"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
