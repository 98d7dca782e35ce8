"""Base class of boosted optimizers: backward, clipping and step with loss scaling, averaging and master weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_numbers, raise_on_all_ranks
from booster.deprecation import DeprecatedAlias, DeprecatedOverrides
from booster.errors import BoosterError, ConfigError
from booster.fault_tolerance.progress import current_thread, end_step, in_phase
from booster.kernels.checksum import tensor_crc32
from booster.validation import error_of

from .accumulated_gradients import AccumulatedGradients
from .accumulation import (
    AccumulationState,
    UnscaleFactors,
    any_nonfinite,
    check_scalar_loss,
    gradient_norm,
    multiply,
)
from .model_wrapper import ModelWrapper
from .optimizer_state import OptimizerState, TensorSpec
from .precision import Fp32MasterWeights, LossScaler
from .shard_aware import FusedUpdate

_NO_CONTEXT = nullcontext()
# torch's functions, without the check of Note [Plain torch]
_clip_by_norm = torch.no_grad()(inspect.unwrap(nn.utils.clip_grads_with_norm_))
_clip_by_value = torch.no_grad()(inspect.unwrap(nn.utils.clip_grad_value_))

# Note [Weight-writing methods]
# An optimizer may have methods that write weights outside of step(): `train` and `eval` of a schedule-free one swap
# them, `first_step` of SAM moves them. If the optimizer updates shards or master weights, the model must follow. Which
# methods write is unknown, and a rank sees its own shards only. So all ranks call every method that the wrapper lacks,
# compare a checksum of their shards before and after, and update the model if any rank's has changed. The method gets
# the gradients of step(); if it clears them all, the accumulation has ended.


class OptimizerWrapper(DeprecatedOverrides, Optimizer):
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
    """

    _is_stepping = _runs_closure = False
    _num_own_step_hooks = 0

    def __init__(
        self,
        optim: Optimizer,
        model: ModelWrapper,
        *,
        data_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would make a second set of groups, states and hooks.
        self.optim = optim
        self.model = model
        self.data_parallel_group = data_parallel_group
        self.loss_scaler: LossScaler | None = None
        self.master_weights: Fp32MasterWeights | None = None
        self.step_was_skipped = False
        self.num_skipped_steps = 0
        self._num_steps = self._num_microbatches = 0
        self._accumulation = AccumulationState()
        self._defers_step = False
        self._is_last_microbatch = False
        self._counts_next_backward = self._has_failed = False
        self._last_norm: torch.Tensor | None = None
        self._gradient_hooks: list[Callable[[Sequence[torch.Tensor]], None]] = []
        self._step_hooks: list[Callable[[], None]] = []
        self._fused_update = optim if isinstance(optim, FusedUpdate) else None
        self._may_fail_locally = bool(getattr(optim, "may_fail_locally", False))  # see `StateAllocator`
        model.register_optimizer(self)

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
        self.model.require_usable()
        check_scalar_loss(loss)
        if inputs is not None:
            self._check_inputs(inputs)
        self.model._check_loss(loss)
        self._begin_accumulation(num_items)
        for observer in current_thread.state.observers:
            observer.on_loss(self, loss, num_items)
        if self.loss_scaler is not None:
            loss = loss * self.loss_scaler.scale
        with self._backward_context():
            loss.backward(inputs=inputs, retain_graph=retain_graph)
        if self._is_last_microbatch:
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
        if inputs is not None:
            self._check_inputs(inputs)
        self._begin_accumulation(None)
        with self._backward_context():
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)
        if self._is_last_microbatch:
            self._unscale_in_place()

    def _begin_accumulation(self, num_items: float | None) -> None:
        if num_items is not None and self._runs_closure:
            raise ConfigError(
                f"backward() got num_items={num_items} inside of step(closure), where gradients are used at once, and"
                " the loss that the closure returns would be a sum of another scale: write a mean without num_items"
            )
        if self._accumulation.is_unscaled and not self._has_gradients():
            self._accumulation = AccumulationState()  # the user cleared the gradients by model.zero_grad() or directly
        self._accumulation.count_backward(num_items)
        if self._accumulation.grad_factor != 1.0:
            multiply(self._gradients(), 1.0 / self._accumulation.grad_factor)
            self._accumulation.grad_factor = 1.0
        if self._counts_next_backward:  # a microbatch may have several backward() calls, and counts once
            self._accumulation.num_averaged += 1
            self._counts_next_backward = False

    def _unscale_in_place(self) -> None:
        """Unscale `p.grad` after the last microbatch's backward(). Collective if num_items was given.

        A further backward() of the same microbatch reverts it, see `_begin_accumulation`.
        """
        if self.loss_scaler is None and not self._has_copies():
            self._accumulation.grad_factor = self._accumulation.unscale_factor(
                1.0, self.data_parallel_group, self.model.first_model_rank
            )
            if self._accumulation.grad_factor != 1.0:
                multiply(self._gradients(), self._accumulation.grad_factor)

    @contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Average gradients over the microbatches of an accumulation, and defer step and clip to the last one.

        `zero_grad` has no effect before the step.

        Args:
            is_last: If True, this microbatch ends the accumulation: `clip_*` and `step` take effect.

        Raises:
            ConfigError: It was entered inside of another one of this optimizer.
        """
        if self._defers_step or self._is_last_microbatch:
            raise ConfigError(
                "accumulate() was entered inside of another accumulate() block of the same optimizer, which counts the"
                " microbatches already: write one block around forward, backward and step of each microbatch"
            )
        self._num_microbatches += 1
        self._defers_step = not is_last
        self._is_last_microbatch = is_last
        self._counts_next_backward, self._has_failed = True, False
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
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

    # Clipping.

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
        self._note_clipping(max_norm)
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
            _clip_by_norm(self._optimized_parameters(), max_norm, norm)
        return norm

    @in_phase("clip")
    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the unscaled gradients to [-clip_value, clip_value].

        Collective: every rank must call it.
        """
        if self._defers_step:
            return
        self._note_clipping(clip_value)
        self._unscale_gradients()
        self._apply_factors()
        parameters = [one for one in self._optimized_parameters() if one.grad is not None]
        if parameters:  # this rank may have no shard, and torch's function fails without gradients
            _clip_by_value(parameters, clip_value)

    @in_phase("clip")
    def get_grad_norm(self) -> float | None:
        """Return the 2-norm of the unscaled gradients before clipping, after zero_grad() that of the last step.

        If `clip_grad_by_norm` computed another norm for this step, that one is returned. None before any gradient.
        Until the last microbatch of `Booster.accumulate`, it is that of the last step.

        Collective: every rank must call it.
        """
        if self._accumulation.norm is None and self._has_complete_gradients():
            self._unscale_gradients()
            self._accumulation.norm = self._last_norm = self._total_norm(2.0)
        return None if self._last_norm is None else float(self._last_norm)

    def register_gradient_hook(self, hook: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Register `hook(gradients)`, called once per step with this rank's unscaled gradients, which it may change."""
        self._gradient_hooks.append(hook)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's gradients with the user's names of their parameters: shards where the plugin shards them.

        In a gradient hook they are the unscaled ones of the step.
        """
        is_scaled = self._accumulation.factors is not None
        names = {id(one): self.model.logical_name(name) for name, one in self.model.named_parameters()}
        for parameter in self._optimized_parameters():
            model_parameter = self.model_parameter(parameter)
            gradient = model_parameter.grad if is_scaled else parameter.grad
            if gradient is not None:
                yield names.get(id(model_parameter), "a parameter outside of the model"), gradient

    def register_step_hook(self, hook: Callable[[], None]) -> None:
        """Register `hook()`, called on every rank at the end of every step, also of a skipped one."""
        self._step_hooks.append(hook)

    # Step.

    @in_phase("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters, or skip if a loss-scaled gradient overflowed on any rank.

        `step_was_skipped` is True after a skipped step, which changes no parameter and no state but the loss scale.

        Args:
            closure: Function that recomputes the loss, for optimizers that need it (LBFGS). Under `TorchDDPPlugin`
                the optimizer gets, and this returns, the mean of the ranks' losses.

        Collective: every rank must call it.

        Raises:
            ConfigError: A closure was given with loss scaling or master weights, or calls backward() with num_items.
        """
        self.model.require_usable()
        if self._counts_next_backward and self._accumulation.num_backwards == 0:
            self._check_own_backward()
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

    def _check_own_backward(self) -> None:
        """Check that a microbatch in which this optimizer had no backward() has no gradients: they are not averaged."""
        if self._has_gradients():  # not collective, as a rank may skip a microbatch
            raise ConfigError(
                "accumulate() averages the gradients of booster.backward(loss, optimizer) with its own optimizer, and"
                " this one's came from another backward, as of a loss through two models: write"
                " booster.backward(loss / steps, other) without accumulate(), in booster.no_sync(model, optimizer) of"
                " each model before the last microbatch"
            )

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        if self.loss_scaler is not None or self.master_weights is not None:
            raise ConfigError(
                f"{type(self.optim).__name__}.step(closure) computes gradients inside of the step, where they cannot be"
                " unscaled: use fp32 or mixed_precision='bf16' with an optimizer that needs a closure"
            )
        self._runs_closure = True
        try:
            result = self.optim.step(closure)
        finally:
            self._runs_closure = False
        self._end_step()
        return result

    def _end_step(self) -> None:
        """Record that the step is done or skipped; the last call of every `step` that is not deferred."""
        self._accumulation.has_stepped = True
        if not self._is_last_microbatch:  # else the block ends the accumulation
            self._num_microbatches = 0
        self._num_steps += 1
        end_step(self, self._num_steps)
        for hook in self._step_hooks:
            hook()

    def wait_for_weights(self) -> None:
        """Wait until the parameters of `param_groups` may be read after a step. Does nothing by default.

        Overridden by plugins whose shards are part of weights in flight.
        """

    def write_weights(self, write: Callable[[], Any]) -> None:
        """Call a function that writes the parameters of `param_groups`, and update the model.

        Args:
            write: Function without arguments; the parameters may be shards or fp32 copies of the model's.

        Collective: every rank must call it, also one without shards.
        """
        self._call_user_method(write)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients and end the accumulation.

        No effect from the first backward in `Booster.accumulate` to that of the last microbatch, so it may be called in
        every iteration. Later, and after an exception in a microbatch, it discards the accumulation.

        Args:
            set_to_none: If True, gradients are set to None, else to zero; optional, defaults to True, or to the
                attribute `set_grad_none` of optimizers such as LAMB.
        """
        if self._has_failed:
            self._num_microbatches, self._has_failed = 0, False
        elif self._accumulation.num_averaged > 0 and self._accumulation.is_open and self._is_within_accumulation():
            return
        if set_to_none is None:
            set_to_none = getattr(self.optim, "set_grad_none", True)
        self._clear_gradients(set_to_none)
        self._accumulation = AccumulationState()

    def _is_within_accumulation(self) -> bool:
        """Whether this is behind a backward of `Booster.accumulate` and before that of the last microbatch."""
        if self._counts_next_backward:  # before the backward of a microbatch
            return self._num_microbatches > 1
        return self._num_microbatches > 0 and not self._is_last_microbatch

    def _clear_gradients(self, set_to_none: bool) -> None:
        if self.master_weights is not None:
            for parameter in self._model_parameters():
                _clear_gradient(parameter, set_to_none)
        self.optim.zero_grad(set_to_none)

    def zero_model_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of all parameters of the model; `model.zero_grad()` calls it."""
        own = {id(one) for index in range(len(self.param_groups)) for one in self.group_parameters(index)}
        for parameter in self.model.parameters():
            if id(parameter) not in own:
                _clear_gradient(parameter, set_to_none)
        self.zero_grad(set_to_none)

    # Unscaling; see Note [Accumulation] and Note [Fused unscaling].

    def _unscale_gradients(self) -> None:
        if self._accumulation.is_unscaled:
            return
        if self._accumulation.num_backwards == 0:
            self._check_no_plain_backward()
            return
        accumulation = self._accumulation
        # The step of a plain fp32 loop would traverse the gradients and change none.
        is_plain = self.loss_scaler is None and not self._gradient_hooks and not self._has_copies()
        needs_none = is_plain and accumulation.num_items is None and accumulation.num_averaged <= 1
        gradients = [] if needs_none else self._reduce_and_unscale()
        accumulation.is_unscaled = True
        for hook in self._gradient_hooks:
            hook(gradients)
        if self._gradient_hooks:
            self._on_gradients_changed()
        for observer in current_thread.state.observers:
            observer.on_gradients(self, self.named_gradients)

    def _reduce_and_unscale(self) -> list[torch.Tensor]:
        accumulation = self._accumulation
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        factor = self._finish_reduction()  # first: in it, ranks compare what the factor follows from
        factor *= accumulation.unscale_factor(scale, self.data_parallel_group, self.model.first_model_rank)
        if self._can_fuse_unscaling():
            accumulation.factors = UnscaleFactors(factor)
        elif self.master_weights is not None:
            self.master_weights.copy_gradients()
        gradients = self._gradients()
        if factor != 1.0 and accumulation.factors is None:
            multiply(gradients, factor)
        if self.loss_scaler is not None:
            accumulation.found_nonfinite = self._any_nonfinite(gradients)
        has_changed = factor != 1.0 or accumulation.grad_factor != 1.0
        accumulation.was_unscaled = has_changed or self.master_weights is not None
        return gradients

    def _check_no_plain_backward(self) -> None:
        if (self.loss_scaler is not None or self.master_weights is not None) and self._has_gradients():
            raise ConfigError(
                "some gradients were not computed by booster.backward(loss, optimizer): with this mixed precision they"
                " lack the loss scale. Replace loss.backward() by booster.backward(loss, optimizer)"
            )

    def _can_fuse_unscaling(self) -> bool:
        """Whether the step itself may multiply the gradients; see Note [Fused unscaling]."""
        return self._fused_update is not None and self._has_copies() and not self._has_hooks()

    def _has_hooks(self) -> bool:
        """Whether the user's hooks read unscaled gradients, or may write weights after the update."""
        steps = (*self.optim._optimizer_step_pre_hooks.values(), *self.optim._optimizer_step_post_hooks.values())
        return bool(self._gradient_hooks) or len(steps) > self._num_own_step_hooks

    def _apply_factors(self) -> None:
        """Unscale gradients where that was left to the step; see Note [Fused unscaling]."""
        factors, self._accumulation.factors = self._accumulation.factors, None
        if factors is None:
            return
        if self.master_weights is not None:
            self.master_weights.copy_gradients()
        factors.apply_to(self._gradients())

    # Parameters, of which `param_groups` may hold fp32 copies.

    def model_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the model's parameter for one of `param_groups`, which may be its fp32 copy."""
        return parameter if self.master_weights is None else self.master_weights.model_parameter(parameter)

    working_parameter = DeprecatedAlias("model_parameter")

    def group_parameters(self, index: int) -> list[nn.Parameter]:
        """Return the model's full parameters of a param group, whatever shard of them this rank updates."""
        return [self.model_parameter(parameter) for parameter in self.param_groups[index]["params"]]

    def group_masters(self, index: int) -> list[nn.Parameter]:
        """Return the fp32 copies in a param group that this rank updates in place of the model's parameters."""
        return [one for one in self.param_groups[index]["params"] if self.model_parameter(one) is not one]

    def _optimized_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _model_parameters(self) -> list[nn.Parameter]:
        return [self.model_parameter(parameter) for parameter in self._optimized_parameters()]

    def _has_complete_gradients(self) -> bool:
        """Whether a step would use gradients that no step has used: not between microbatches of an accumulation.

        Collective if ranks hold shards.
        """
        is_incomplete = self._defers_step or (self._num_microbatches > 0 and not self._is_last_microbatch)
        if is_incomplete or self._accumulation.has_stepped:
            return False
        return self._accumulation.num_backwards > 0 or self._any_rank([self._has_gradients()])[0]

    def _check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `ConfigError` if gradients of some tensors can't be computed alone; does nothing by default."""

    def _note_clipping(self, limit: float) -> None:
        """Called with the norm or value that gradients are clipped to, also by torch's functions."""

    def _on_gradients_changed(self) -> None:
        """Called after gradient hooks, which may have changed the gradients; does nothing by default."""

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model_parameters())

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients as the optimizer will use them."""
        is_scaled = self._accumulation.factors is not None
        parameters = self._model_parameters() if is_scaled else self._optimized_parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    # The user's optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's optimizer's groups, which LR schedulers change."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The user's optimizer's states."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's optimizer's default hyperparameters."""
        return self.optim.defaults

    def unwrap(self) -> Optimizer:
        """Return the user's optimizer."""
        return self.optim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "a boosted optimizer was copied or pickled, as torch.save(optimizer, path) does, and it belongs to its"
            " boosted model: write booster.save_optimizer(optimizer, path), or boost another model with an optimizer"
            " of its own"
        )

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

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: __init__ did not run
            raise AttributeError(name)
        value = getattr(self.optim, name)
        if not (inspect.isroutine(value) or isinstance(value, functools.partial)):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call_user_method(functools.partial(value, *args, **kwargs))

        return call

    def _call_user_method(self, method: Callable[[], Any]) -> Any:
        """Call the method with unscaled gradients, and update the model if it wrote weights.

        Collective if ranks hold shards: every rank must call it.

        Raises:
            ConfigError: It updates weights from loss-scaled gradients, where an overflow cannot be skipped.
        """
        has_gradients = self._has_complete_gradients()
        if has_gradients:
            self._unscale_gradients()
            self._apply_factors()
        if not self._has_copies():
            return method()
        self._fetch_weights()
        digest, result, failure = self._checksum(), None, None
        try:
            result = method()
        except Exception as error:  # raised on all ranks below
            failure = error
        self._restore_memory()
        has_written = digest != self._checksum()
        has_cleared = has_gradients and all(one.grad is None for one in self._optimized_parameters())
        has_written, has_failed, keeps_gradients = self._any_rank(
            [has_written, failure is not None, has_gradients and not has_cleared]
        )
        if has_written:
            self._publish_weights()
        if has_failed:
            raise_on_all_ranks(failure, self.data_parallel_group)
        if has_written and has_gradients and self.loss_scaler is not None:
            raise ConfigError(
                f"a method of {type(self.optim).__name__} updates weights from gradients with a loss scale outside of"
                " step(), where an overflow cannot be skipped: use bf16 or fp32"
            )
        if has_gradients and not keeps_gradients:
            self.zero_grad()
        return result

    def _checksum(self) -> int:
        """Return a checksum of the trained parameters; writes to `.data` change no version counter."""
        return tensor_crc32(*(one for one in self._optimized_parameters() if one.requires_grad))

    # torch's own clipping and loss scaling; see Note [Plain torch].

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a step of torch's GradScaler, of which the user's optimizer would not see the scale."""
        if self.loss_scaler is None and not self._has_copies():
            return False
        raise ConfigError(
            "a step by torch's GradScaler, which unscales `p.grad`, and this optimizer has its gradients elsewhere, or"
            " a loss scale of its own: leave the GradScaler out, and write booster.backward(loss, optimizer) and"
            " optimizer.step(); losses are scaled by Booster(mixed_precision='fp16') or a plugin's precision='fp16'"
        )

    def _holds_any(self, parameters: frozenset[int]) -> bool:
        """Return whether any of these, by `id`, is a parameter of the optimizer or of the model it updates."""
        own = (*self._optimized_parameters(), *self._model_parameters())
        return any(id(one) in parameters for one in own)

    def _unscale_param_grads(self, parameters: frozenset[int]) -> None:
        """Unscale `p.grad` of these parameters. Collective if backward() was given num_items.

        Raises:
            ConfigError: Their gradients are stored elsewhere, or the accumulation has not ended.
        """
        if self._defers_step:
            raise ConfigError(
                "torch's clipping was called inside of accumulate() before the last microbatch, where gradients are"
                " incomplete: write booster.clip_grad_norm_(optimizer, max_norm), which takes effect with the last one,"
                " or clip where accumulate() yields True"
            )
        pairs = ((one, self.model_parameter(one)) for one in self._optimized_parameters())
        if any(id(working) in parameters for one, working in pairs if working is not one):
            raise ConfigError(
                "torch's clipping was given parameters with fp32 master weights, which have other gradients: it would"
                " change nothing. Write booster.clip_grad_norm_(optimizer, max_norm)"
            )
        self._unscale_gradients()
        self._apply_factors()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the user's optimizer's `state_dict`, with the loss scaler's state under "loss_scaler"."""
        self.model.require_complete()
        state = self.optim.state_dict()
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`: of this rank's shards where the plugin shards parameters.

        Raises:
            ConfigError: The ranks hold shards, and the state is of other ones or of full parameters, as torch's own
                is; on all ranks, and nothing was changed.

        Collective if ranks hold shards.
        """
        if type(self)._any_rank is not OptimizerWrapper._any_rank:  # the plugin shards parameters
            raise_on_all_ranks(error_of(lambda: self._check_shards_in(state_dict)))
        state_dict = dict(state_dict)
        scaler_state = state_dict.pop("loss_scaler", None)
        self.optim.load_state_dict(state_dict)
        if self.loss_scaler is not None and scaler_state is not None:
            self.loss_scaler.load_state_dict(scaler_state)

    def _check_shards_in(self, state_dict: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless a state dict has the parameters and shapes of this rank's shards."""
        groups: Any = state_dict.get("param_groups")
        if not isinstance(groups, list) or not all("params" in group for group in groups):
            return  # torch says what it lacks
        given, own = ([len(group["params"]) for group in one] for one in (groups, self.param_groups))
        if given != own:
            raise _other_shards_error(f"param groups with {given} parameters", f"{own} shards of parameters")
        view = self.checkpoint_state()
        keys = [key for group in groups for key in group["params"]]
        for key, parameter in zip(keys, self._optimized_parameters(), strict=True):
            for name, value in state_dict.get("state", {}).get(key, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and not self._fits(view, parameter, name, value):
                    raise _other_shards_error(
                        f"{name!r} of shape {tuple(value.shape)} for parameter {key}",
                        f"a shard of shape {tuple(parameter.shape)}",
                    )

    def _fits(self, view: OptimizerState, parameter: nn.Parameter, name: str, value: torch.Tensor) -> bool:
        """Return whether a state has the shape that it has for this parameter, which may be a shard."""
        spec = TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
        if view._own_spec(parameter, name, spec).shape != spec.shape:
            return False  # of the full parameter
        is_flat = parameter.dim() == value.dim() == 1 and self.model_parameter(parameter).shape != parameter.shape
        return not is_flat or value.shape == parameter.shape  # see `ShardAware`: of other states none has one dim

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
    adopt_masters = DeprecatedAlias("use_master_weights")

    # Overridden by plugins.

    def use_master_weights(self, originals: Mapping[int, torch.Tensor]) -> bool:
        """Return True if the optimizer updates its own fp32 master weights, without `master_weights`.

        Args:
            originals: Full weights from before they were rounded, by the `id` of the user's parameter.
        """
        return False

    def _backward_context(self) -> AbstractContextManager[None]:
        """Return the context of autograd."""
        return _NO_CONTEXT

    def _finish_reduction(self) -> float:
        """Reduce gradients over ranks at the end of an accumulation; return the factor that makes them the mean.

        By default they are averaged in backward. Collective.
        """
        return 1.0

    def _update_parameters(self) -> None:
        """Step the user's optimizer and write the result into the model."""
        if self.master_weights is not None:
            self.master_weights.refresh()
        if self._accumulation.factors is not None:
            pairs = [(master, self.model_parameter(master)) for master in self._optimized_parameters()]
            copies = {master: parameter for master, parameter in pairs if parameter is not master}
            weights = {master: parameter.detach() for master, parameter in copies.items()}
            gradients = {master: one.grad for master, one in copies.items() if one.grad is not None}
            self._run_on_all_ranks(lambda: self._step_fused(weights, gradients))
        else:
            self._run_on_all_ranks(self.optim.step)
        if self.master_weights is not None:
            self.master_weights.end_step(is_model_updated=self._accumulation.factors is not None)

    def _run_on_all_ranks(self, update: Callable[[], Any]) -> None:
        """Run `update`; a failure on any rank is raised on all, and the next call retries.

        Collective if `_may_fail_locally`.
        """
        if not self._may_fail_locally:
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

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of all unscaled gradients over all ranks, as a 0-dim tensor."""
        if self._accumulation.factors is None:
            return nn.utils.get_total_norm(self._gradients(), norm_type)
        return self._accumulation.factors.unscaled_norm(gradient_norm(self._gradients(), norm_type))

    def _any_nonfinite(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether any rank of the world holds an inf or nan; see Note [Skip decision]. Collective."""
        return all_reduce_numbers([float(any_nonfinite(gradients))])[0] > 0

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is True on any rank. Collective if ranks may differ."""
        return list(flags)

    def _has_copies(self) -> bool:
        """Whether the model computes with copies of the optimizer's parameters, which have other gradients."""
        return self.master_weights is not None

    def _fetch_weights(self) -> None:
        """Copy changed or moved weights of the model into the optimizer's parameters. Collective."""
        if self.master_weights is not None:
            self.master_weights.refresh()

    def _restore_memory(self) -> None:
        """Undo replacements of the optimizer's memory by `p.data = ...`, keeping the values."""

    def _publish_weights(self) -> None:
        """Write the optimizer's parameters into the model, on all ranks. Collective."""
        if self.master_weights is not None:
            self.master_weights.copy_to_model()


def _other_shards_error(given: str, own: str) -> ConfigError:
    return ConfigError(
        f"load_state_dict() was given {given}, and this rank's optimizer has {own}: it takes only what its own"
        " state_dict() returned on the same rank. Write booster.load_optimizer(optimizer, path); a plain optimizer that"
        " was built from model.named_parameters() is saved for it by booster.save_optimizer(plain, path)"
    )


def _clear_gradient(parameter: nn.Parameter, set_to_none: bool) -> None:
    if set_to_none or parameter.grad is None:
        parameter.grad = None
    else:
        parameter.grad = parameter.grad.detach().zero_()
