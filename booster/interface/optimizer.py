"""The optimizer side of a plugin: backward, clip and step by one rule, whatever is scaled, averaged or copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_numbers, raise_on_all_ranks
from booster.errors import BoosterError, ConfigError
from booster.interface.fused_update import FusedUpdate
from booster.interface.gradient_factors import GradientFactors
from booster.interface.gradient_norm import any_nonfinite, gradient_norm
from booster.interface.gradient_window import GradientWindow
from booster.interface.loss import require_scalar_loss
from booster.interface.mixed_precision import LossScaler, MasterWeights
from booster.interface.model import ModelWrapper
from booster.interface.optimizer_methods import OptimizerMethods
from booster.interface.optimizer_state import OptimizerState
from booster.interface.pending_gradients import PendingGradients
from booster.interface.plain_torch import boosted_backward, clip_by_norm, clip_by_value, watch_clipping
from booster.interface.state_allocation import AllocatesStates
from booster.phases import end_step, in_phase, observers

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper(OptimizerMethods):
    """The boosted optimizer.

    It is a `torch.optim.Optimizer`, so any torch LR scheduler works on it; `param_groups`, `state` and `defaults` are
    those of the user's optimizer. Gradients between `backward` and the first `clip_*`, `get_grad_norm` or `step` are
    raw; see Note [Gradient window].

    Methods that only the user's optimizer has are called on this one; see Note [Methods that write weights].

    A plugin that shards gradients or states subclasses this and overrides the methods under "What a plugin overrides".

    Args:
        optim: The user's optimizer.
        model: The boosted model whose parameters it updates.
        data_parallel_group: The ranks over which the plugin averages gradients; None: the world, or this process
            alone where nothing was launched.
        is_primary: True on exactly one of the ranks that hold the same optimizer states.
    """

    def __init__(
        self,
        optim: Optimizer,
        model: ModelWrapper,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
        is_primary: bool = True,
    ) -> None:
        super().__init__(optim)
        self.model = model
        self.data_parallel_group = data_parallel_group
        self.is_primary = is_primary
        self.loss_scaler: LossScaler | None = None
        self.master_weights: MasterWeights | None = None
        self.step_was_skipped = False
        self.num_skipped_steps = 0
        self._num_steps = 0
        self._window = GradientWindow()
        self._defers_step = False
        self._counts_next_backward = False
        self._num_micro_steps = 0
        self._last_norm: torch.Tensor | None = None
        self._gradient_hooks: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._fused_update = optim if isinstance(optim, FusedUpdate) else None
        watch_clipping(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the user's optimizer.

        Raises:
            ConfigError: The parameters are kept in fp32 copies, which were made when the optimizer was boosted.
        """
        if self.master_weights is not None:
            raise ConfigError(
                "add_param_group() after boost() would leave the new parameters without fp32 master weights: add the"
                " group before boost()"
            )
        self.optim.add_param_group(param_group)

    # Backward.

    @in_phase("backward")
    def backward(
        self,
        loss: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
        *,
        num_items: float | None = None,
    ) -> None:
        """Computes gradients of a scalar loss, multiplied by the loss scale if there is one.

        Args:
            loss: A tensor with one element.
            inputs: Tensors to compute gradients for; None: every leaf.
            retain_graph: Keep the graph for another backward.
            num_items: How many items (tokens, samples) this rank's loss *sums* over. The step's gradient then is the
                sum over all ranks and backward() calls divided by the count over all ranks and calls. None: the
                gradient is the mean over ranks, and the sum over calls as in torch.

        Collective: every data-parallel rank must call it, as the plugin reduces gradients in it.

        Raises:
            ConfigError: The loss is no scalar or needs no gradient, or the gradients of the window are final already.
        """
        self.model.require_open()
        require_scalar_loss(loss)
        self._open_window(num_items)
        for observer in observers():
            observer.loss_given(self, loss, num_items)
        if self.loss_scaler is not None:
            loss = loss * self.loss_scaler.scale
        with boosted_backward(), self._collecting_gradients():
            loss.backward(inputs=inputs, retain_graph=retain_graph)
        self._show_mean()

    @in_phase("backward")
    def backward_by_grad(
        self,
        tensor: torch.Tensor,
        grad: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Computes gradients from that of an inner tensor, which carries the loss scale already.

        Args:
            tensor: The tensor whose gradient is known.
            grad: Its gradient, of the same shape, as a scaled backward() elsewhere gave it.
            inputs: Tensors to compute gradients for; None: every leaf.
            retain_graph: Keep the graph for another backward.
        """
        self._open_window(None)
        with boosted_backward(), self._collecting_gradients():
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)
        self._show_mean()

    def _open_window(self, num_items: float | None) -> None:
        if self._window.is_final and not self._has_gradients():
            self._window = GradientWindow()  # the user cleared them by model.zero_grad() or by hand
        if self._window.is_final and self._window.was_multiplied:
            raise ConfigError(
                "backward() after the gradients of this step were unscaled or averaged (by clip, norm or step()): the"
                " new ones would not add up with them. Call optimizer.zero_grad() after step(), and clip after the last"
                " backward()"
            )
        self._hide_mean()
        self._window.is_final = False
        self._window.has_stepped = False
        self._window.norm = None
        self._window.count_backward(num_items)
        if self._counts_next_backward:  # a micro-step may have several backward() calls, and counts once
            self._window.num_averaged += 1
            self._counts_next_backward = False

    @contextmanager
    def micro_step(self, is_last: bool) -> Iterator[None]:
        """Averages gradients over the micro-steps of a window, and holds back step and clip until the last one.

        Args:
            is_last: This micro-step ends the window: `clip_*` and `step` act.

        `zero_grad` is held back while gradients wait for their step.
        """
        self._num_micro_steps += 1
        self._defers_step = not is_last
        self._ends_micro_steps = is_last
        self._counts_next_backward = True
        try:
            yield
        finally:
            self._defers_step = self._ends_micro_steps = self._counts_next_backward = False
            if is_last:
                self._num_micro_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps since it was boosted, skipped ones among them."""
        return self._num_steps

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of `Booster.accumulate` since the last step."""
        return self._num_micro_steps

    # Gradients.

    @in_phase("clip")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor | None:
        """Scales the gradients so that their norm is at most `max_norm`; returns the norm before that.

        The norm is that of all parameters of this optimizer over all ranks, of unscaled gradients: equal on every rank
        and to what one process would compute.

        Args:
            max_norm: Largest norm allowed.
            norm_type: Order of the norm, `float("inf")` included.
            error_if_nonfinite: Raise a RuntimeError if the norm is inf or nan.

        Returns:
            The norm as a 0-dim tensor; None where `Booster.accumulate` holds the step back.

        Collective: every rank must call it.
        """
        if self._defers_step:
            return None
        self._finalize_gradients()
        norm = self._remember_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm of order {norm_type} is {norm.item()}: a loss or a gradient is not finite. Find it"
                " with torch.autograd.set_detect_anomaly(True), or pass error_if_nonfinite=False"
            )
        if self._window.factors is not None:
            self._window.factors.clip(max_norm, norm)
        elif not self._window.found_nonfinite:
            clip_by_norm(self._optimized_parameters(), max_norm, norm)
        return norm

    @in_phase("clip")
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamps every element of the true gradients to [-clip_value, clip_value].

        Collective: every rank must call it.
        """
        if self._defers_step:
            return
        self._finalize_gradients()
        self._apply_factors()
        clip_by_value(self._optimized_parameters(), clip_value)

    @in_phase("clip")
    def get_grad_norm(self) -> float | None:
        """Returns the 2-norm of the window's true gradients before clipping, or of the last step's after zero_grad().

        If `clip_grad_by_norm` computed another norm in this window, that one is returned. None before any gradient.

        Collective: every rank must call it.
        """
        if self._window.norm is None and self._window.is_open:
            self._finalize_gradients()
            self._remember_norm(2.0)
        return None if self._last_norm is None else float(self._last_norm)

    def register_gradient_hook(self, hook: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Has `hook(gradients)` called once a window, with the true gradients that this rank holds."""
        self._gradient_hooks.append(hook)

    def _remember_norm(self, norm_type: float) -> torch.Tensor:
        norm = self._total_norm(norm_type)
        self._window.norm = self._last_norm = norm
        return norm

    def _finalize_gradients(self) -> None:
        if self._window.is_final:
            return
        if self._window.num_backwards == 0:
            self._check_nothing_bypassed()
            return
        if self._gradients_are_true():
            self._window.is_final = True
            self._tell_of_gradients()
            return
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        multiplier = self._multiplier(scale) * self._reduce_gradients()
        if self._defers_factors():
            self._window.factors = GradientFactors(multiplier)
        elif self.master_weights is not None:
            self.master_weights.take_gradients()
        gradients = self._gradients()
        if multiplier != 1.0 and self._window.factors is None:
            self._multiply(gradients, multiplier)
        if self.loss_scaler is not None:
            self._window.found_nonfinite = self._any_nonfinite(gradients)
        has_changed = multiplier != 1.0 or self._window.shown_factor != 1.0
        self._window.was_multiplied = has_changed or self.master_weights is not None
        self._window.is_final = True
        for hook in self._gradient_hooks:
            hook(gradients)
        self._tell_of_gradients()

    def _tell_of_gradients(self) -> None:
        for observer in observers():
            observer.gradients_known(self, self._named_gradients)

    def _gradients_are_true(self) -> bool:
        """True where finalising would look at every gradient and change none: the step of a plain fp32 loop."""
        window = self._window
        is_plain = self.loss_scaler is None and self.master_weights is None and not self._gradient_hooks
        return is_plain and window.num_items is None and window.num_averaged <= 1

    def _check_nothing_bypassed(self) -> None:
        if (self.loss_scaler is not None or self.master_weights is not None) and self._has_gradients():
            raise ConfigError(
                "some gradients did not come from booster.backward(loss, optimizer): with this mixed precision"
                " they lack the loss scale. Replace loss.backward() by booster.backward(loss, optimizer)"
            )

    # Step.

    @in_phase("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters, or skips if a loss-scaled gradient overflowed on any rank.

        `step_was_skipped` tells which; a skipped step changes no parameter and no state but the loss scale.

        Args:
            closure: Recomputes the loss, for optimizers that need it (LBFGS).

        Collective: every rank must call it.

        Raises:
            ConfigError: A closure together with loss scaling or master weights.
        """
        self.model.require_open()
        if self._defers_step:
            return None
        if closure is not None:
            return self._step_with_closure(closure)
        self._finalize_gradients()
        self.step_was_skipped = self._window.found_nonfinite
        if self.step_was_skipped:
            self.num_skipped_steps += 1
        else:
            self._update_parameters()
        if self.loss_scaler is not None and self._window.num_backwards > 0 and not self._window.has_stepped:
            self.loss_scaler.update(self.step_was_skipped)
        self._end_step()
        return None

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        if self.loss_scaler is not None or self.master_weights is not None:
            raise ConfigError(
                f"{type(self.optim).__name__}.step(closure) computes gradients inside of the step, where they cannot be"
                " unscaled: use fp32 or mixed_precision='bf16' with an optimizer that needs a closure"
            )
        result = self.optim.step(closure)
        self._end_step()
        return result

    def _end_step(self) -> None:
        """Notes that the step is done, or was skipped; last in every `step` that is not held back."""
        self._window.has_stepped = True
        self._num_steps += 1
        end_step(self, self._num_steps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients and ends the window; held back while `Booster.accumulate` collects micro-steps."""
        if self._holds_gradients:
            return
        if self.master_weights is not None:
            for parameter in self._working_parameters():
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()
        self.optim.zero_grad(set_to_none)
        self._window = GradientWindow()

    @property
    def _holds_gradients(self) -> bool:
        """True while micro-steps of `Booster.accumulate` wait for their step."""
        return self._window.num_averaged > 0 and self._window.is_open

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Returns the user's optimizer's `state_dict`, with the loss scaler's state under "loss_scaler"."""
        state = self.optim.state_dict()
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        state_dict = dict(state_dict)
        scaler_state = state_dict.pop("loss_scaler", None)
        self.optim.load_state_dict(state_dict)
        if self.loss_scaler is not None and scaler_state is not None:
            self.loss_scaler.load_state_dict(scaler_state)

    def checkpoint_state(self) -> OptimizerState:
        """Returns the view of this optimizer's state that a CheckpointIO reads and fills."""
        return OptimizerState(self)

    def pending_gradients(self) -> PendingGradients:
        """Returns the view of gradients that wait for their step, which are part of a whole training state."""
        return PendingGradients(self)

    @property
    def window(self) -> GradientWindow:
        """What happened since the last `zero_grad()`; see Note [Gradient window]."""
        return self._window

    def restore_window(self, window: GradientWindow, num_micro_steps: int) -> None:
        """Goes on as after these backward() calls and micro-steps; the gradients are filled by the caller."""
        self._window = window
        self._num_micro_steps = num_micro_steps

    # What a plugin overrides.

    def adopt_masters(self, originals: Mapping[int, torch.Tensor]) -> bool:
        """Returns True if the optimizer updates fp32 copies of low-precision weights without `master_weights`.

        Args:
            originals: Whole weights from before they were rounded, by the `id` of the user's parameter.
        """
        return False

    def _collecting_gradients(self) -> AbstractContextManager[None]:
        """Returns the context that autograd runs in."""
        return nullcontext()

    def _reduce_gradients(self) -> float:
        """Brings the gradients of all ranks together when the window ends; returns what makes of them the mean.

        Here backward has averaged them. Collective.
        """
        return 1.0

    def _update_parameters(self) -> None:
        """Steps the user's optimizer and brings the result into the model."""
        if self._window.factors is not None:
            self._run_together(lambda: self._step_fused(self._working_copies(), self._working_gradients()))
            return
        self._run_together(self.optim.step)
        if self.master_weights is not None:
            self.master_weights.write_working()

    def _run_together(self, update: Callable[[], Any]) -> None:
        """Runs the update; one that may fail on this rank alone then fails on all, and is made up for by the next call.

        Collective where `AllocatesStates.can_fail_alone`.
        """
        if not (isinstance(self.optim, AllocatesStates) and self.optim.can_fail_alone):
            update()
            return
        failure: Exception | None = None
        try:
            if not self._window.was_updated_here:
                update()
            self._window.was_updated_here = True
        except (OSError, BoosterError) as error:  # raised by all ranks below
            failure = error
        raise_on_all_ranks(failure, self.data_parallel_group)
        self._window.was_updated_here = False

    def _step_fused(
        self, working_copies: Mapping[nn.Parameter, torch.Tensor], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        factors = self._window.factors
        assert self._fused_update is not None
        assert factors is not None
        self._fused_update.fused_step(
            multiplier=factors.multiplier,
            multiplier_tensor=factors.coefficient,
            working_copies=working_copies,
            gradients=gradients,
        )

    def _defers_factors(self) -> bool:
        """True where the step itself may multiply the gradients; see Note [Gradient factors]."""
        return self._fused_update is not None and self.master_weights is not None and not self._has_hooks()

    def _has_hooks(self) -> bool:
        """Whether hooks of the user's look at true gradients, or may write weights after the update."""
        steps = (*self.optim._optimizer_step_pre_hooks.values(), *self.optim._optimizer_step_post_hooks.values())
        return bool(self._gradient_hooks) or len(steps) > self._num_own_step_hooks

    def _gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank holds, as the optimizer will use them."""
        is_raw = self._window.factors is not None
        parameters = self._working_parameters() if is_raw else self._optimized_parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        """Returns the norm of all true gradients over all ranks, as a 0-dim tensor."""
        if self._window.factors is None:
            return nn.utils.get_total_norm(self._gradients(), norm_type)
        return self._window.factors.true_norm(gradient_norm(self._gradients(), norm_type))

    def _any_nonfinite(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Returns whether any rank of the world holds an inf or nan; see Note [One decision]. Collective."""
        return all_reduce_numbers([float(any_nonfinite(gradients))])[0] > 0
