"""Interface of memory estimates: requests to a plugin, and its estimate of the memory of a rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from .mixed_precision import MixedPrecision


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Memory of a rank at one time, in bytes.

    Attributes:
        parameters: Weights that the model computes with, as the rank stores them between steps.
        gradients: Gradients of parameters.
        optimizer_states: Optimizer states and fp32 master weights.
        activations: Tensors that forward and backward save and compute; in the optimizer's step, its temporaries.
        buffers: The model's buffers, gathered weights, and communication buffers.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of training on the rank that needs the most.

    Attributes:
        backward: Peak of forward and backward.
        step: Peak of the optimizer's step.
        steady_state: Steady state between steps.
        sent: Bytes that the rank sends in a step.
        offloaded: Bytes offloaded to another tier: host memory beside an accelerator, or files.
    """

    backward: MemoryParts
    step: MemoryParts
    steady_state: MemoryParts
    sent: int
    offloaded: int = 0

    @property
    def peak(self) -> MemoryParts:
        """Peak of all."""
        return max((self.backward, self.step, self.steady_state), key=lambda parts: parts.total)


@dataclass(frozen=True, slots=True)
class MemoryInterval:
    """Interval of a forward and backward, from one event to the next.

    Attributes:
        event: Event at its start: "enter" and "leave" of a module's forward, also by an exception; "backward" when the
            gradient of a module's output is computed; "gradient" when that of a parameter is, which no longer counts as
            an activation. With activation checkpointing modules enter and leave again during backward.
        name: First name of the module or parameter in the model.
        begin: Bytes of activations at its start.
        activations: Peak bytes of activations until the next event.
        returned: Bytes of the tensors that the module returned, for "leave".
    """

    event: str
    name: str
    begin: int
    activations: int
    returned: int = 0


@dataclass(frozen=True, slots=True)
class ActivationProfile:
    """Memory of a forward and backward of one batch beside the model's tensors, in bytes.

    Attributes:
        peaks: Pareto-maximal pairs of (activations, parameters' gradients) over time.
        kept: Activations at the end of the forward.
        gradients: Parameters' gradients at the end of the backward.
        sent: Bytes that this rank sent meanwhile, if the model communicates.
        intervals: All intervals, in order of time.
    """

    peaks: tuple[tuple[int, int], ...]
    kept: int
    gradients: int
    sent: int = 0
    intervals: tuple[MemoryInterval, ...] = ()

    def worst_peak(self, share_of_gradients: float = 1.0) -> tuple[int, int]:
        """Return the pair with the largest sum of activations and this share of the gradients."""
        return max(self.peaks, key=lambda moment: moment[0] + share_of_gradients * moment[1])


class MemoryRequest(ABC):
    """Request for a plugin's memory estimate, with measurements that the plugin may call.

    Attributes:
        model: The user's full model on the meta device; must not be changed.
        trained: Parameters that the optimizer updates, tied ones once.
        precision: Precision of the Booster, or None.
    """

    model: nn.Module
    trained: Sequence[nn.Parameter]
    precision: MixedPrecision | None

    @abstractmethod
    def state_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, share: float = 1.0) -> int:
        """Return the bytes of optimizer states, without step counters.

        Args:
            shapes: Shapes of the full parameters.
            dtype: Dtype of the updated tensors: of master weights, if there are any.
            share: Fraction of the elements that the rank updates. States of full parameters, such as means over rows,
                are stored by every rank.
        """

    @abstractmethod
    def step_bytes(self, shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> int:
        """Return the bytes of temporaries of the optimizer's step.

        Args:
            shapes: Shapes of the entries of its param groups: of shards, if parameters are sharded.
            dtype: Dtype of the entries.
        """

    @abstractmethod
    def prepared_model(self) -> nn.Module:
        """Return a copy of the model, prepared by the Booster's precision."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of samples of this rank's batch."""

    @property
    def keeps_masters(self) -> bool:
        """Whether the Booster's precision uses fp32 master weights."""
        return self.precision is not None and self.precision.keeps_masters

    @property
    @abstractmethod
    def is_fused(self) -> bool:
        """Whether the optimizer unscales, updates and rounds into the weights in one pass."""

    @abstractmethod
    def activations(
        self,
        dtype: torch.dtype | None = None,
        *,
        shard: Callable[[nn.Module], None] | None = None,
        sharding_key: Hashable = None,
        num_microbatches: int = 1,
        outputs_fp32: bool = True,
    ) -> ActivationProfile:
        """Return the memory of a forward and backward of this rank's batch.

        Args:
            dtype: Dtype that the plugin casts the model and its inputs to, optional.
            shard: Function that shards a copy of the full model in place, optional.
            sharding_key: Key of this sharding, so that it is measured once; optional, by default it is measured each
                time.
            num_microbatches: Number of microbatches; the largest one is measured.
            outputs_fp32: Whether a plugin that casts the model passes fp32 outputs to the criterion.
        """


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; shared storages are counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def replica_memory(
    request: MemoryRequest, *, bucket_bytes: int = 0, sent: int = 0, gradient_as_bucket_view: bool = False
) -> RankMemory:
    """Return the memory of training with unsharded weights, gradients and optimizer states.

    Args:
        request: Model, optimizer and batch, possibly with a precision of the Booster.
        bucket_bytes: Size of the buckets for gradient reduction.
        sent: Bytes sent by the rank in a step.
        gradient_as_bucket_view: If True, gradients are views of the buckets.
    """
    model = request.prepared_model()
    weights, buffers = storage_bytes(model.parameters()), storage_bytes(model.buffers())
    shapes = [tuple(one.shape) for one in request.trained]
    has_masters = request.keeps_masters
    dtype = torch.float32 if has_masters else next((one.dtype for one in request.trained), torch.float32)
    numel = sum(one.numel() for one in request.trained)
    states = request.state_bytes(shapes, dtype) + (8 * numel if has_masters else 0)  # fp32 masters and gradients
    profile = request.activations()
    activations, gradients = profile.worst_peak(0.0 if gradient_as_bucket_view else 1.0)
    fixed = {"parameters": weights, "optimizer_states": states, "buffers": buffers + bucket_bytes}
    own = 0 if gradient_as_bucket_view else 1
    return RankMemory(
        backward=MemoryParts(**fixed, gradients=own * gradients, activations=activations),
        step=MemoryParts(**fixed, gradients=own * profile.gradients, activations=request.step_bytes(shapes, dtype)),
        steady_state=MemoryParts(**fixed),
        sent=sent,
    )
