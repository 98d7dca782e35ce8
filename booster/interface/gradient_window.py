"""The bookkeeping between two `zero_grad()` calls: what the raw gradients still have to be multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from booster.argument_checks import is_number
from booster.comm import all_reduce_numbers, group_size
from booster.errors import ConfigError
from booster.interface.gradient_factors import GradientFactors

__all__ = ["GradientWindow"]


# Note [Gradient window]
# A window is what happens between two zero_grad() calls: one or more backward() calls, then at most one step().
# Inside it the gradients are *raw*: multiplied by the loss scale, averaged over the data-parallel ranks, and neither
# divided by the number of items nor by the number of averaged micro-steps, because neither is known before the last
# backward(). The first reader (clip, norm, step) *finalises* them: one multiplication makes them the gradients that one
# process would have had. A later backward() would then mix raw with final gradients, and is refused.
# In the last micro-step of `Booster.accumulate`, where `p.grad` is what the optimizer will use, it is *shown*: it is
# multiplied right after backward(), for code that reads it. A further backward() in that micro-step divides it again.


@dataclass(slots=True)
class GradientWindow:
    """State of one window; see Note [Gradient window].

    Attributes:
        num_backwards: backward() calls so far.
        num_averaged: Micro-steps of `Booster.accumulate` over which the gradient is the mean; 0: no averaging.
        num_items: This rank's sum of `num_items`; None where backward() was called without.
        is_final: The gradients are the true ones.
        was_multiplied: Finalising changed the gradients, so a further backward() would not add up.
        has_stepped: step() was called, whether the optimizer moved or skipped.
        found_nonfinite: A loss-scaled gradient overflowed on some rank.
        norm: The norm before clipping, once it was asked for.
        was_updated_here: This rank's optimizer has done the step, and another rank's has not yet.
        shown_factor: What the gradients were multiplied with already, for those who read `p.grad`; 1.0: nothing.
        factors: What the gradients still have to be multiplied with, where the step does it; None: nothing.
    """

    num_backwards: int = 0
    num_averaged: int = 0
    num_items: float | None = None
    is_final: bool = False
    was_multiplied: bool = False
    has_stepped: bool = False
    found_nonfinite: bool = False
    norm: torch.Tensor | None = None
    was_updated_here: bool = False
    shown_factor: float = 1.0
    factors: GradientFactors | None = None

    @property
    def is_open(self) -> bool:
        """True while gradients wait for a step."""
        return self.num_backwards > 0 and not self.has_stepped

    def count_backward(self, num_items: float | None) -> None:
        """Records one backward() call.

        Raises:
            ConfigError: `num_items` is given for some backward() calls of the window and left out for others, or is
                negative.
        """
        if self.num_backwards > 0 and (num_items is None) != (self.num_items is None):
            raise ConfigError(
                f"backward() got num_items={num_items} after calls {'with' if num_items is None else 'without'}"
                " it since the last zero_grad(): the sum cannot be divided by a count of one part. Give num_items to"
                " every backward() call of a step, or to none"
            )
        if num_items is not None:
            if not is_number(num_items) or num_items < 0:
                raise ConfigError(
                    f"num_items={num_items!r} counts nothing that a sum could be divided by: give the number of items"
                    " that the loss sums over, 0 or more, or None for a mean"
                )
            self.num_items = (self.num_items or 0.0) + float(num_items)
        self.num_backwards += 1

    def multiplier(self, loss_scale: float, group: dist.ProcessGroup | None) -> float:
        """Returns what makes the raw gradients the true ones.

        Args:
            loss_scale: What every loss of the window was multiplied with.
            group: The ranks over which gradients are averaged.

        Collective over `group` if `num_items` was given.

        Raises:
            ConfigError: The items of all ranks sum to zero.
        """
        factor = 1.0 / loss_scale
        if self.num_items is not None:
            total = all_reduce_numbers([self.num_items], group)[0]
            if total == 0:
                raise ConfigError(
                    "num_items is 0 on all ranks together: there is nothing to average over. Skip the batch, or leave"
                    " num_items out"
                )
            # Averaging over the ranks divided the sum by their number; undo that and divide by the count.
            return factor * group_size(group) / total
        return factor / max(1, self.num_averaged)
