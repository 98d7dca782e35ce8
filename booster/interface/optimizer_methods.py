"""Methods that only the user's optimizer has, as `train` and `eval` of a schedule-free one, called on the wrapper."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import raise_on_all_ranks
from booster.errors import ConfigError
from booster.interface.mixed_precision import LossScaler
from booster.interface.optimizer_parameters import OptimizerParameters
from booster.kernels.checksum import crc32

__all__ = ["OptimizerMethods"]

# Note [Methods that write weights]
# An optimizer may have methods that write weights outside of step(): `train` and `eval` of a schedule-free one swap
# them, `first_step` of SAM moves them. Where the optimizer updates shards or fp32 copies, the model must follow. Which
# methods write is not known before, and what a rank sees of it are its own shards. So all ranks call every method that
# the wrapper lacks, compare a checksum of their shards before and after, agree, and publish if any rank's has changed.
# The method finds the gradients that step() would use; if it clears them all, the window has ended.


class OptimizerMethods(OptimizerParameters):
    """An optimizer whose further methods see true gradients, and whose model follows the weights that they write."""

    data_parallel_group: dist.ProcessGroup | None
    loss_scaler: LossScaler | None
    _defers_step: bool
    _ends_micro_steps = False
    _is_stepping = False
    _num_own_step_hooks = 0

    @abstractmethod
    def _finalize_gradients(self) -> None:
        """Makes raw gradients the true ones, or says what they are still to be multiplied with. Collective."""

    @abstractmethod
    def _gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank holds."""

    # Gradients.

    def _apply_factors(self) -> None:
        """Makes the gradients the true ones where that was left to the step; see Note [Gradient factors]."""
        factors, self._window.factors = self._window.factors, None
        if factors is None:
            return
        if self.master_weights is not None:
            self.master_weights.take_gradients()
        factors.apply_to(self._gradients())

    def _multiply(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        if gradients:
            torch._foreach_mul_(list(gradients), factor)

    def _multiplier(self, loss_scale: float) -> float:
        """Returns what makes of the gradients, as they are now, the true ones. Collective if num_items was given."""
        window = self._window
        return 1.0 if window.shown_factor != 1.0 else window.multiplier(loss_scale, self.data_parallel_group)

    def _show_mean(self) -> None:
        """Makes `p.grad` the true gradient after the last micro-step's backward(). Collective if num_items was given.

        A further backward() in the same micro-step takes it back.
        """
        if self._ends_micro_steps and self._leaves_gradients():
            self._window.shown_factor = self._multiplier(1.0)
            if self._window.shown_factor != 1.0:
                self._multiply(self._gradients(), self._window.shown_factor)

    def _hide_mean(self) -> None:
        if self._window.shown_factor != 1.0:
            self._multiply(self._gradients(), 1.0 / self._window.shown_factor)
            self._window.shown_factor = 1.0

    def _leaves_gradients(self) -> bool:
        """Whether the gradients that the optimizer uses are those that backward() leaves in `p.grad`."""
        return self.loss_scaler is None and self.master_weights is None

    # What torch's own clipping asks; see Note [Plain torch].

    def _holds_any(self, parameters: frozenset[int]) -> bool:
        """Returns whether any of these is one of the optimizer's, or stands for one; by their `id`."""
        own = (*self._optimized_parameters(), *self._working_parameters())
        return any(id(one) in parameters for one in own)

    def _show_gradients(self, parameters: frozenset[int]) -> None:
        """Makes `p.grad` of these the true gradients. Collective if backward() was given num_items.

        Raises:
            ConfigError: They are elsewhere, or a part of a sum.
        """
        if self._defers_step:
            raise ConfigError(
                "torch's clipping was called inside of accumulate() before the last micro-batch, where gradients are a"
                " part of a sum: write booster.clip_grad_norm_(optimizer, max_norm), which waits for the last one, or"
                " clip where accumulate() yields True"
            )
        pairs = ((one, self.working_parameter(one)) for one in self._optimized_parameters())
        if any(id(working) in parameters for one, working in pairs if working is not one):
            raise ConfigError(
                "torch's clipping was given parameters that have fp32 master weights, which other gradients update: it"
                " would change nothing. Write booster.clip_grad_norm_(optimizer, max_norm)"
            )
        self._finalize_gradients()
        self._apply_factors()

    # Methods.

    def _call_own(self, method: Callable[[], Any]) -> Any:
        """Calls the method with true gradients, and brings weights that it wrote into the model.

        Collective where ranks hold shards: every rank must call it.

        Raises:
            ConfigError: It updates weights from loss-scaled gradients, where an overflow could not be skipped.
        """
        has_gradients = self._window.is_open and not self._defers_step
        if has_gradients:
            self._finalize_gradients()
            self._apply_factors()
        if not self._has_copies():
            return method()
        self._fetch_weights()
        digest, result, failure = self._weights_digest(), None, None
        try:
            result = method()
        except Exception as error:  # raised on all ranks below
            failure = error
        self._restore_memory()
        has_written = digest != self._weights_digest()
        has_cleared = has_gradients and all(one.grad is None for one in self._optimized_parameters())
        has_written, has_failed, has_gradients_left = self._any_rank(
            [has_written, failure is not None, has_gradients and not has_cleared]
        )
        if has_written:
            self._publish_weights()
        if has_failed:
            raise_on_all_ranks(failure, self.data_parallel_group)
        if has_written and has_gradients and self.loss_scaler is not None:
            raise ConfigError(
                f"a method of {type(self.optim).__name__} updates weights from gradients with a loss scale outside of"
                " step(), where an overflow can't be skipped: use bf16 or fp32"
            )
        if has_gradients and not has_gradients_left:
            self.zero_grad()
        return result

    def _weights_digest(self) -> int:
        """Returns a checksum of what the optimizer updates on this rank; writes to `.data` leave no other trace."""
        digest = 0
        for parameter in self._optimized_parameters():
            if parameter.requires_grad:
                content = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
                digest = crc32(content.numpy().data, digest)
        return digest

    # What a plugin overrides.

    def _has_copies(self) -> bool:
        """Whether the model computes with copies of what the optimizer updates."""
        return self.master_weights is not None

    def _fetch_weights(self) -> None:
        """Brings the model's weights to where the optimizer updates them, if they were changed or moved. Collective."""

    def _restore_memory(self) -> None:
        """Brings back what an optimizer has replaced by `p.data = ...` to the memory that the model follows."""

    def _publish_weights(self) -> None:
        """Brings what the optimizer has updated into the model, on all ranks. Collective."""
        if self.master_weights is not None:
            self.master_weights.write_working()

    def _any_rank(self, facts: Sequence[bool]) -> list[bool]:
        """Returns for each fact whether it holds on any rank that might differ. Collective where some might."""
        return list(facts)
