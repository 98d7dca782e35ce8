"""What a plugin is asked: a model, an optimizer and a batch, and what their forward and backward take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from booster.comm import imagine_others
from booster.errors import BoosterError, ConfigError
from booster.estimate.fake_models import fake_batch, fake_copy, meta_copy, new_fake_mode
from booster.estimate.optimizer_memory import OptimizerMemory
from booster.estimate.repeated_layers import measure_activations
from booster.interface import ActivationProfile, MemoryQuestion, MixedPrecision
from booster.interface.batch_call import call_with_batch
from booster.mixed_precision.half_weights import cast_floats
from booster.tensor_tree import map_tensors

__all__ = ["Question", "loss_of"]

_Key = tuple[Any, ...]


def loss_of(outputs: Any, batch: Any) -> torch.Tensor:
    """Return the loss that a model gives itself: `outputs.loss`, or its only output where that is one number.

    Raises:
        ConfigError: There is none.
    """
    loss = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    loss = outputs if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1 else loss
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the model returned a {_kind(outputs)} without a loss, so there is nothing to go backward from: give"
            " criterion=, a function of (outputs, batch) that returns the loss, as to execute_pipeline; or let the"
            " function that `booster estimate` calls return (model, batch, criterion)"
        )
    return loss


def _kind(outputs: Any) -> str:
    return "tensor" if isinstance(outputs, torch.Tensor) else type(outputs).__name__


class Question(MemoryQuestion):
    """See `MemoryQuestion`.

    Args:
        model: The user's; real, on the meta device or built lazily.
        optimizer: What it keeps.
        batch: Of one rank, as `execute_pipeline` takes it; only shapes and formats count.
        criterion: Returns the loss of (outputs, batch).
        trained: The `id`s of the parameters that the optimizer updates; None: all that require gradients.
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
        divide: Callable[[nn.Module], None] | None = None,
        divided_as: Hashable = None,
        num_micro_batches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        key = (dtype, divided_as, num_micro_batches, self.precision, outputs_fp32 or dtype is None)
        is_known = divide is None or divided_as is not None
        if is_known and key in self._profiles:
            return self._profiles[key]
        profile = self._measured(dtype, divide, num_micro_batches, outputs_fp32)
        if is_known:
            self._profiles[key] = profile
        return profile

    def _measured(
        self,
        dtype: torch.dtype | None,
        divide: Callable[[nn.Module], None] | None,
        num_micro_batches: int,
        outputs_fp32: bool,
    ) -> ActivationProfile:
        model = fake_copy(self.model, self._mode)
        model.train()
        with self._mode, imagine_others():
            if self.precision is not None:
                self.precision.prepare(model)
            if divide is not None:
                divide(model)
            if dtype is not None:
                _cast(model, dtype)
            batch = _part(self._batch, num_micro_batches)
            before: list[torch.Tensor] = []
            map_tensors(lambda tensor: before.append(tensor), batch)
            try:
                return measure_activations(model, lambda: self._loss(model, batch, dtype, outputs_fp32), before=before)
            except BoosterError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"{type(model).__name__} could not be run on tensors without values, so what its activations take"
                    f" is not known ({type(error).__name__}: {_first_line(error)}): {_advice(error)}"
                ) from error

    def _loss(self, model: nn.Module, batch: Any, dtype: torch.dtype | None, outputs_fp32: bool) -> torch.Tensor:
        precision = self.precision
        inputs = batch if dtype is None else cast_floats(dtype, batch)
        if precision is None:
            outputs = call_with_batch(model, inputs)
            if dtype is not None and outputs_fp32:  # not kept beside what is made of them
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


def _part(batch: Any, num_parts: int) -> Any:
    """Return the largest of so many parts of a batch, cut along dimension 0."""
    if num_parts == 1:
        return batch
    return map_tensors(lambda one: one[: -(-one.shape[0] // num_parts)].clone() if one.dim() else one, batch)


def _advice(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return (
            "a forward whose course depends on numbers that it computed can't be measured; give a batch with which it"
            " does not"
        )
    return "look whether it runs on a real batch of these shapes, and with this criterion"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
