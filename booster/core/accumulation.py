"""State of a gradient accumulation between two `zero_grad()` calls."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import all_gather_numbers, all_reduce_numbers, group_size, host_value, is_fake_world, sum_dtype
from booster.errors import ConfigError, DesyncError
from booster.kernels.flat_buffers import sum_of_squares, supports_sum_of_squares
from booster.validation import is_number

# Note [Fused unscaling]
# Unscaling gradients, dividing them by the number of items and clipping them are multiplications by one number each,
# and each would read and write all of them once more: a third of a memory-bound step. An optimizer that is a
# `FusedUpdate` multiplies while it reads the gradients anyway, so they stay scaled and the factors are kept here.
# Readers of unscaled gradients (clipping by value, hooks) have them multiplied first. Only gradients that are invisible
# to users stay scaled: shards, and those of low-precision weights with master weights.

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_


@dataclass(slots=True)
class UnscaleFactors:
    """Factors of one accumulation.

    Attributes:
        grad_scale: Factor that unscales and averages.
        clip_coef: Clip coefficient as a 0-dim tensor (no device sync), or None.
    """

    grad_scale: float = 1.0
    clip_coef: torch.Tensor | None = None

    def unscaled_norm(self, scaled_norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of the unscaled gradients, from that of the scaled ones."""
        norm = scaled_norm * abs(self.grad_scale)
        return norm if self.clip_coef is None else norm * self.clip_coef

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Set the clip coefficient for gradients of this norm and `max_norm`."""
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
        coefficient = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
        self.clip_coef = coefficient if self.clip_coef is None else self.clip_coef * coefficient

    @torch.no_grad()
    def apply_to(self, gradients: Sequence[torch.Tensor]) -> None:
        if self.grad_scale != 1.0:
            multiply(gradients, self.grad_scale)
        if self.clip_coef is not None:
            for device in {gradient.device for gradient in gradients}:  # some may be on the host
                multiply([one for one in gradients if one.device == device], self.clip_coef.to(device))


def multiply(gradients: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients in place, by one kernel for all."""
    if gradients:
        torch._foreach_mul_(list(gradients), factor)


# Note [Accumulation]
# An accumulation is one or more backward() calls between two zero_grad() calls, followed by at most one step(). Before
# the step the gradients are *scaled*: multiplied by the loss scale, averaged over the data-parallel ranks (summed where
# they are sharded), and neither divided by the number of items nor by the number of microbatches, because neither is
# known before the last backward().
# The first reader (clip, norm, step) *unscales* them: one multiplication makes them the gradients of one process. A
# later backward() would mix scaled with unscaled gradients, and is refused.
# With the last microbatch of `Booster.accumulate`, if the optimizer uses `p.grad`, it is unscaled right after
# backward(), for code that reads it. A further backward() of that microbatch reverts it.


@dataclass(slots=True)
class AccumulationState:
    """State of one accumulation; see Note [Accumulation].

    Attributes:
        num_backwards: Number of backward() calls.
        num_averaged: Number of microbatches of `Booster.accumulate` that the gradient is the mean of; 0 without
            averaging.
        num_items: This rank's sum of `num_items`, or None if backward() was called without.
        is_unscaled: Whether the gradients are unscaled.
        was_unscaled: Whether unscaling changed the gradients, so that a further backward() cannot be added.
        has_stepped: Whether step() was called, also if it was skipped.
        found_nonfinite: Whether a loss-scaled gradient overflowed on some rank.
        norm: Norm before clipping, once computed.
        was_updated_locally: Whether this rank's optimizer has stepped, and another rank's has not yet.
        grad_factor: Factor that `p.grad` is multiplied by already; 1.0 for none.
        factors: Factors that the step multiplies the gradients by, or None.
    """

    num_backwards: int = 0
    num_averaged: int = 0
    num_items: float | None = None
    is_unscaled: bool = False
    was_unscaled: bool = False
    has_stepped: bool = False
    found_nonfinite: bool = False
    norm: torch.Tensor | None = None
    was_updated_locally: bool = False
    grad_factor: float = 1.0
    factors: UnscaleFactors | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are accumulated gradients without a step."""
        return self.num_backwards > 0 and not self.has_stepped

    def count_backward(self, num_items: float | None) -> None:
        """Record one backward() call, whose gradients are scaled.

        Raises:
            ConfigError: The gradients before are unscaled, or `num_items` is negative, or given for some backward()
                calls of the accumulation only.
        """
        if self.is_unscaled and self.was_unscaled:
            raise ConfigError(
                "backward() after the gradients of this step were unscaled or averaged (by clip, norm or step()): the"
                " new ones cannot be added to them. Call optimizer.zero_grad() after step(), and clip after the last"
                " backward()"
            )
        if self.num_backwards > 0 and (num_items is None) != (self.num_items is None):
            raise ConfigError(
                f"backward() got num_items={num_items} after calls {'with' if num_items is None else 'without'} it"
                " since the last zero_grad(), and the sum needs the count of all of them: give num_items to every"
                " backward() call of a step, or to none"
            )
        if num_items is not None:
            if not is_number(num_items) or num_items < 0:
                raise ConfigError(
                    f"num_items={num_items!r} is not a number of items: give the number that the loss sums over, 0 or"
                    " more, or None for a mean"
                )
            self.num_items = (self.num_items or 0.0) + float(num_items)
        self.num_backwards += 1
        self.is_unscaled = self.has_stepped = False
        self.norm = None

    def unscale_factor(
        self, loss_scale: float, group: dist.ProcessGroup | None, first_model_rank: int | None = None
    ) -> float:
        """Return the factor that unscales the gradients.

        Args:
            loss_scale: Loss scale of the accumulation.
            group: Group over which gradients are averaged.
            first_model_rank: First of the ranks that get the same batch as this one; optional, defaults to no others.

        Collective if `num_items` was given: over `group`, or over the world with `first_model_rank`.

        Raises:
            ConfigError: The items of all ranks sum to zero.
            DesyncError: Ranks that get the same batch were given other `num_items`.
        """
        if self.grad_factor != 1.0:  # they are unscaled already
            return 1.0
        factor = 1.0 / loss_scale
        if self.num_items is not None:
            total = _sum_of_items(self.num_items, group, first_model_rank)
            if total == 0:
                raise ConfigError(
                    "num_items is 0 on all ranks together, so there is nothing to average over: skip the batch, or"
                    " leave num_items out"
                )
            # Averaging over the ranks divided the sum by their number: undo that and divide by the count.
            return factor * group_size(group) / total
        return factor / max(1, self.num_averaged)


def _sum_of_items(num_items: float, group: dist.ProcessGroup | None, first_model_rank: int | None) -> float:
    """Return the sum over the group of each rank's number of items; see `AccumulationState.unscale_factor`."""
    if first_model_rank is None or is_fake_world():
        return all_reduce_numbers([num_items], group)[0]
    rows = all_gather_numbers([first_model_rank, int.from_bytes(struct.pack("<d", num_items), "little")])
    items: list[float] = [struct.unpack("<d", bits.to_bytes(8, "little"))[0] for _, bits in rows]
    for rank, (first, _) in enumerate(rows):
        if items[rank] != items[first]:
            raise DesyncError(
                f"backward() got num_items={items[first]:g} on rank {first} and num_items={items[rank]:g} on rank"
                f" {rank}, in sum over a step, which share the layers of one model and get the same batch: give the"
                " number of items of the whole batch on all of them"
            )
    return math.fsum(items[rank] for rank in dist.get_process_group_ranks(group))


# Note [Skip decision]
# All ranks of the world, of all axes of a mesh, decide together whether a step is skipped, from every gradient of every
# rank, also from those that should be equal on several ranks. A rank that steps where others skip would have other
# weights, another loss scale, and soon other collectives. So no rank decides alone: bad memory, a hook or a parameter
# outside of the averaging may make its gradients differ.


@torch.no_grad()
def gradient_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all elements, as a 0-dim fp32 or fp64 tensor on the gradients' device.

    Args:
        gradients: Gradients; low-precision ones are summed in fp32.
        norm_type: Order of the norm; may be `float("inf")`.
    """
    if norm_type == 2.0 and supports_sum_of_squares(gradients):
        return torch.tensor(math.sqrt(sum_of_squares(gradients)), dtype=torch.float32)
    return nn.utils.get_total_norm([one.to(sum_dtype(one.dtype)) for one in gradients], norm_type)


@torch.no_grad()
def any_nonfinite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether an element is inf or nan.

    Args:
        gradients: Dense or sparse gradients.
    """
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    dense = [gradient for gradient in dense if gradient.numel() > 0]
    if not dense:
        return False
    if supports_sum_of_squares(dense):
        return not math.isfinite(sum_of_squares(dense))
    maxima = torch.stack([norm.float() for norm in torch._foreach_norm(dense, float("inf"))])
    return not host_value(torch.isfinite(maxima).all())


@torch.no_grad()
def nonfinite_mark(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor of one nan if an element is inf or nan, else none, or a zero where the host would have to wait.

    Args:
        gradients: Gradients as in `any_nonfinite`.
    """
    if not gradients or gradients[0].device.type == "cpu":
        return [gradients[0].new_full((1,), math.nan)] if any_nonfinite(gradients) else []
    dense = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [norm.float() for norm in torch._foreach_norm([one for one in dense if one.numel() > 0], float("inf"))]
    is_finite = torch.stack([norms[0].new_zeros(()), *norms]).isfinite().all() if norms else None
    return [] if is_finite is None else [torch.zeros_like(norms[0]).masked_fill(~is_finite, math.nan).reshape(1)]


def check_scalar_loss(loss: Any) -> None:
    """Raise `ConfigError` unless the loss is a tensor with one element that requires a gradient."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"the loss is a {type(loss).__name__}, not a tensor: pass the tensor that the criterion returned"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)}, and backward() needs one number: reduce it, for example with"
            " loss.mean()"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "the loss does not depend on any parameter that requires a gradient: compute it outside of torch.no_grad()"
            " and without detach(), and check requires_grad of the parameters"
        )
