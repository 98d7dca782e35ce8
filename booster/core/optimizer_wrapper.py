"""Base class of boosted optimizers: backward, clipping and step with loss scaling, averaging and master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_numbers, raise_on_all_ranks
from booster.deprecation import DeprecatedAlias
from booster.errors import BoosterError, ConfigError
from booster.fault_tolerance.progress import end_step, in_phase, observers

from .accumulated_gradients import AccumulatedGradients
from .accumulation import AccumulationState, UnscaleFactors, any_nonfinite, gradient_norm
from .model_wrapper import ModelWrapper
from .optimizer_methods import OptimizerMethods
from .optimizer_state import OptimizerState
from .plain_torch import boosted_backward, clip_by_norm, clip_by_value, hook_clipping
from .precision import LossScaler, MasterWeights
from .shard_aware import FusedUpdate, StateAllocator


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


class OptimizerWrapper(OptimizerMethods):
    """Boosted optimizer.

    It is a `torch.optim.Optimizer`, so any torch LR scheduler works on it; `param_groups`, `state` and `defaults` are
    those of the user's optimizer. Gradients between `backward` and the first `clip_*`, `get_grad_norm` or `step` are
    scaled; see Note [Accumulation].

    Methods that only the user's optimizer has are called through it; see Note [Weight-writing methods].

    A plugin that shards gradients or states, or communicates elsewhere than in backward, subclasses this and overrides
    the methods under "Overridden by plugins". `_end_step` follows every step, also a skipped one. A method that writes
    weights writes those of `_optimized_parameters()` and calls `_publish_weights()`, which copies masters to the model.

    Args:
        optim: The user's optimizer.
        model: Boosted model whose parameters it updates.
        data_parallel_group: Group over which the plugin averages gradients; optional, defaults to the world.
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
        self._accumulation = AccumulationState()
        self._defers_step = False
        self._counts_next_backward = False
        self._num_microbatches = 0
        self._last_norm: torch.Tensor | None = None
        self._gradient_hooks: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._fused_update = optim if isinstance(optim, FusedUpdate) else None
        hook_clipping(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer.

        Raises:
            ConfigError: The optimizer has master weights, which are made by boost().
        """
        if self.master_weights is not None:
            raise ConfigError(
                "add_param_group() after boost() would leave the new parameters without fp32 master weights: add the"
                " group before boost()"
            )
        self.optim.add_param_group(param_group)

    @in_phase("backward")
    def backward(
        self,
        loss: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
        *,
        num_items: float | None = None,
    ) -> None:
        """Compute gradients of a scalar loss, multiplied by the loss scale if there is one.

        Args:
            loss: Tensor with one element.
            inputs: Tensors to compute gradients for; optional, defaults to every leaf.
            retain_graph: If True, keep the graph for another backward.
            num_items: Number of items (tokens, samples) that this rank's loss *sums* over. The step's gradient then is
                the sum over all ranks and backward() calls divided by the count over all ranks and calls. Optional; by
                default the gradient is the mean over ranks, and the sum over calls as in torch.

        Collective: every data-parallel rank must call it, as the plugin reduces gradients in it.

        Raises:
            ConfigError: The loss is not a scalar or requires no gradient, or the accumulated gradients are unscaled
                already.
        """
        self.model.require_open()
        check_scalar_loss(loss)
        self._begin_accumulation(num_items)
        for observer in observers():
            observer.on_loss(self, loss, num_items)
        if self.loss_scaler is not None:
            loss = loss * self.loss_scaler.scale
        with boosted_backward(), self._backward_context():
            loss.backward(inputs=inputs, retain_graph=retain_graph)
        self._unscale_in_place()

    @in_phase("backward")
    def backward_by_grad(
        self,
        tensor: torch.Tensor,
        grad: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Compute gradients from that of an inner tensor, which is multiplied by the loss scale already.

        Args:
            tensor: Tensor whose gradient is known.
            grad: Its gradient, of the same shape, from a scaled backward() elsewhere.
            inputs: Tensors to compute gradients for; optional, defaults to every leaf.
            retain_graph: If True, keep the graph for another backward.
        """
        self._begin_accumulation(None)
        with boosted_backward(), self._backward_context():
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)
        self._unscale_in_place()

    def _begin_accumulation(self, num_items: float | None) -> None:
        if self._accumulation.is_unscaled and not self._has_gradients():
            self._accumulation = AccumulationState()  # the user cleared the gradients by model.zero_grad() or directly
        if self._accumulation.is_unscaled and self._accumulation.was_unscaled:
            raise ConfigError(
                "backward() after the gradients of this step were unscaled or averaged (by clip, norm or step()): the"
                " new ones cannot be added to them. Call optimizer.zero_grad() after step(), and clip after the last"
                " backward()"
            )
        if self._accumulation.grad_factor != 1.0:
            self._multiply(self._gradients(), 1.0 / self._accumulation.grad_factor)
            self._accumulation.grad_factor = 1.0
        self._accumulation.is_unscaled = False
        self._accumulation.has_stepped = False
        self._accumulation.norm = None
        self._accumulation.count_backward(num_items)
        if self._counts_next_backward:  # a microbatch may have several backward() calls, and counts once
            self._accumulation.num_averaged += 1
            self._counts_next_backward = False

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Average gradients over the microbatches of an accumulation, and defer step and clip to the last one.

        `zero_grad` has no effect before the step.

        Args:
            is_last: If True, this microbatch ends the accumulation: `clip_*` and `step` take effect.
        """
        self._num_microbatches += 1
        self._defers_step = not is_last
        self._is_last_microbatch = is_last
        self._counts_next_backward = True
        try:
            yield
        finally:
            self._defers_step = self._is_last_microbatch = self._counts_next_backward = False
            if is_last:
                self._num_microbatches = 0

    @property
    def num_steps(self) -> int:
        """Number of steps since boost(), including skipped ones."""
        return self._num_steps

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of `Booster.accumulate` since the last step."""
        return self._num_microbatches

    @in_phase("clip")
    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor | None:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before.

        The norm is that of the unscaled gradients of all parameters of this optimizer over all ranks. It is equal on
        every rank, and equal to that of one process.

        Args:
            max_norm: Maximum norm.
            norm_type: Order of the norm; may be `float("inf")`.
            error_if_nonfinite: If True, raise a RuntimeError if the norm is inf or nan.

        Returns:
            The norm as a 0-dim tensor, or None if `Booster.accumulate` defers the step.

        Collective: every rank must call it.
        """
        if self._defers_step:
            return None
        self._unscale_gradients()
        norm = self._accumulation.norm = self._last_norm = self._total_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm of order {norm_type} is {norm.item()}: a loss or a gradient is not finite. Find it"
                " with torch.autograd.set_detect_anomaly(True), or pass error_if_nonfinite=False"
            )
        if self._accumulation.factors is not None:
            self._accumulation.factors.clip(max_norm, norm)
        elif not self._accumulation.found_nonfinite:
            clip_by_norm(self._optimized_parameters(), max_norm, norm)
        return norm

    @in_phase("clip")
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the unscaled gradients to [-clip_value, clip_value].

        Collective: every rank must call it.
        """
        if self._defers_step:
            return
        self._unscale_gradients()
        self._apply_factors()
        clip_by_value(self._optimized_parameters(), clip_value)

    @in_phase("clip")
    def get_grad_norm(self) -> float | None:
        """Return the 2-norm of the unscaled gradients before clipping, after zero_grad() that of the last step.

        If `clip_grad_by_norm` computed another norm for this step, that one is returned. None before any gradient.

        Collective: every rank must call it.
        """
        if self._accumulation.norm is None and self._accumulation.is_open:
            self._unscale_gradients()
            self._accumulation.norm = self._last_norm = self._total_norm(2.0)
        return None if self._last_norm is None else float(self._last_norm)

    def register_gradient_hook(self, hook: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Register `hook(gradients)`, called once per step with this rank's unscaled gradients."""
        self._gradient_hooks.append(hook)

    def _unscale_gradients(self) -> None:
        if self._accumulation.is_unscaled:
            return
        if self._accumulation.num_backwards == 0:
            self._check_no_plain_backward()
            return
        if self._needs_no_unscaling():
            self._accumulation.is_unscaled = True
            for observer in observers():
                observer.on_gradients(self, self._named_gradients)
            return
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        factor = self._unscale_factor(scale) * self._reduce_gradients()
        if self._can_fuse_unscaling():
            self._accumulation.factors = UnscaleFactors(factor)
        elif self.master_weights is not None:
            self.master_weights.copy_gradients()
        gradients = self._gradients()
        if factor != 1.0 and self._accumulation.factors is None:
            self._multiply(gradients, factor)
        if self.loss_scaler is not None:
            self._accumulation.found_nonfinite = self._any_nonfinite(gradients)
        has_changed = factor != 1.0 or self._accumulation.grad_factor != 1.0
        self._accumulation.was_unscaled = has_changed or self.master_weights is not None
        self._accumulation.is_unscaled = True
        for hook in self._gradient_hooks:
            hook(gradients)
        for observer in observers():
            observer.on_gradients(self, self._named_gradients)

    def _needs_no_unscaling(self) -> bool:
        """Whether unscaling would traverse the gradients and change none: the step of a plain fp32 loop."""
        accumulation = self._accumulation
        is_plain = self.loss_scaler is None and self.master_weights is None and not self._gradient_hooks
        return is_plain and accumulation.num_items is None and accumulation.num_averaged <= 1

    def _check_no_plain_backward(self) -> None:
        if (self.loss_scaler is not None or self.master_weights is not None) and self._has_gradients():
            raise ConfigError(
                "some gradients were not computed by booster.backward(loss, optimizer): with this mixed precision they"
                " lack the loss scale. Replace loss.backward() by booster.backward(loss, optimizer)"
            )

    @in_phase("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters, or skip if a loss-scaled gradient overflowed on any rank.

        `step_was_skipped` is True after a skipped step, which changes no parameter and no state but the loss scale.

        Args:
            closure: Function that recomputes the loss, for optimizers that need it (LBFGS).

        Collective: every rank must call it.

        Raises:
            ConfigError: A closure was given with loss scaling or master weights.
        """
        self.model.require_open()
        if self._defers_step:
            return None
        if closure is not None:
            return self._step_with_closure(closure)
        self._unscale_gradients()
        self.step_was_skipped = self._accumulation.found_nonfinite
        if self.step_was_skipped:
            self.num_skipped_steps += 1
        else:
            self._update_parameters()
        if self.loss_scaler is not None and self._accumulation.num_backwards > 0 and not self._accumulation.has_stepped:
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
        """Record that the step is done or skipped; the last call of every `step` that is not deferred."""
        self._accumulation.has_stepped = True
        self._num_steps += 1
        end_step(self, self._num_steps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and end the accumulation; no effect inside of `Booster.accumulate` before the step."""
        if self._is_accumulating:
            return
        if self.master_weights is not None:
            for parameter in self._model_parameters():
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()
        self.optim.zero_grad(set_to_none)
        self._accumulation = AccumulationState()

    @property
    def _is_accumulating(self) -> bool:
        """Whether `Booster.accumulate` has accumulated gradients without a step."""
        return self._accumulation.num_averaged > 0 and self._accumulation.is_open

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's `state_dict`, with the loss scaler's state under "loss_scaler"."""
        state = self.optim.state_dict()
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`."""
        state_dict = dict(state_dict)
        scaler_state = state_dict.pop("loss_scaler", None)
        self.optim.load_state_dict(state_dict)
        if self.loss_scaler is not None and scaler_state is not None:
            self.loss_scaler.load_state_dict(scaler_state)

    def checkpoint_state(self) -> OptimizerState:
        """Return the view of this optimizer's state that a CheckpointIO reads and fills."""
        return OptimizerState(self)

    def pending_gradients(self) -> AccumulatedGradients:
        """Return the view of accumulated gradients, which are part of a training state."""
        return AccumulatedGradients(self)

    @property
    def accumulation(self) -> AccumulationState:
        """State of the accumulation since the last `zero_grad()`; see Note [Accumulation]."""
        return self._accumulation

    def restore_accumulation(self, accumulation: AccumulationState, num_microbatches: int) -> None:
        """Restore the state of an accumulation; the caller fills the gradients."""
        self._accumulation = accumulation
        self._num_microbatches = num_microbatches

    window = DeprecatedAlias("accumulation")
    restore_window = DeprecatedAlias("restore_accumulation")
    micro_step = DeprecatedAlias("microbatch")
    num_micro_steps = DeprecatedAlias("num_microbatches")

    # Overridden by plugins.

    def adopt_masters(self, originals: Mapping[int, torch.Tensor]) -> bool:
        """Return True if the optimizer updates its own fp32 master weights, without `master_weights`.

        Args:
            originals: Full weights from before they were rounded, by the `id` of the user's parameter.
        """
        return False

    def _backward_context(self) -> AbstractContextManager[None]:
        """Return the context of autograd."""
        return nullcontext()

    def _reduce_gradients(self) -> float:
        """Reduce gradients over ranks at the end of an accumulation; return the factor that makes them the mean.

        By default they are averaged in backward. Collective.
        """
        return 1.0

    def _update_parameters(self) -> None:
        """Step the user's optimizer and write the result into the model."""
        if self._accumulation.factors is not None:
            pairs = [(master, self.model_parameter(master)) for master in self._optimized_parameters()]
            copies = {master: parameter for master, parameter in pairs if parameter is not master}
            weights = {master: parameter.detach() for master, parameter in copies.items()}
            gradients = {master: one.grad for master, one in copies.items() if one.grad is not None}
            self._run_on_all_ranks(lambda: self._step_fused(weights, gradients))
            return
        self._run_on_all_ranks(self.optim.step)
        if self.master_weights is not None:
            self.master_weights.copy_to_model()

    def _run_on_all_ranks(self, update: Callable[[], Any]) -> None:
        """Run `update`; a failure on any rank is raised on all, and the next call retries.

        Collective if `StateAllocator.can_fail_alone`.
        """
        if not (isinstance(self.optim, StateAllocator) and self.optim.can_fail_alone):
            update()
            return
        failure: Exception | None = None
        try:
            if not self._accumulation.was_updated_locally:
                update()
            self._accumulation.was_updated_locally = True
        except (OSError, BoosterError) as error:  # raised on all ranks below
            failure = error
        raise_on_all_ranks(failure, self.data_parallel_group)
        self._accumulation.was_updated_locally = False

    def _step_fused(
        self, model_params: Mapping[nn.Parameter, torch.Tensor], gradients: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        factors = self._accumulation.factors
        assert self._fused_update is not None
        assert factors is not None
        self._fused_update.fused_step(
            grad_scale=factors.grad_scale,
            clip_coef=factors.clip_coef,
            model_params=model_params,
            gradients=gradients,
        )

    def _can_fuse_unscaling(self) -> bool:
        """Whether the step itself may multiply the gradients; see Note [Fused unscaling]."""
        return self._fused_update is not None and self.master_weights is not None and not self._has_hooks()

    def _has_hooks(self) -> bool:
        """Whether the user's hooks read unscaled gradients, or may write weights after the update."""
        steps = (*self.optim._optimizer_step_pre_hooks.values(), *self.optim._optimizer_step_post_hooks.values())
        return bool(self._gradient_hooks) or len(steps) > self._num_own_step_hooks

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients as the optimizer will use them."""
        is_scaled = self._accumulation.factors is not None
        parameters = self._model_parameters() if is_scaled else self._optimized_parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all unscaled gradients over all ranks, as a 0-dim tensor."""
        if self._accumulation.factors is None:
            return nn.utils.get_total_norm(self._gradients(), norm_type)
        return self._accumulation.factors.unscaled_norm(gradient_norm(self._gradients(), norm_type))

    def _any_nonfinite(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether any rank of the world holds an inf or nan; see Note [Skip decision]. Collective."""
        return all_reduce_numbers([float(any_nonfinite(gradients))])[0] > 0
