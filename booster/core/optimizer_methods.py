"""Calls of methods that only the user's optimizer has, such as `train` and `eval` of a schedule-free one."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import raise_on_all_ranks
from booster.deprecation import DeprecatedAlias
from booster.errors import ConfigError
from booster.kernels.checksum import crc32

from .accumulation import AccumulationState
from .model_wrapper import ModelWrapper
from .precision import LossScaler, MasterWeights


class OptimizerPassThrough(Optimizer):
    """Optimizer whose groups, states and hooks are those of another one.

    Args:
        optim: The user's optimizer.
    """

    def __init__(self, optim: Optimizer) -> None:
        # Optimizer.__init__ is not called: it would make a second set of groups and states.
        self.optim = optim

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

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet: __init__ did not run
            raise AttributeError(name)
        value = getattr(self.optim, name)
        if not (inspect.isroutine(value) or isinstance(value, functools.partial)):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call_user_method(functools.partial(value, *args, **kwargs))

        functools.update_wrapper(call, value)
        return call

    def _call_user_method(self, method: Callable[[], Any]) -> Any:
        """Call a method that only the user's optimizer has."""
        return method()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def unwrap(self) -> Optimizer:
        """Return the user's optimizer."""
        return self.optim


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: OptimizerPassThrough, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optim, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Call the user's optimizer's `{name}`."
    return method


# The inherited versions would write into hook tables that the user's optimizer never reads.
for _name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(OptimizerPassThrough, _name, _delegate(_name))


class OptimizerParameters(OptimizerPassThrough):
    """Optimizer whose `param_groups` may hold fp32 copies of the model's parameters."""

    model: ModelWrapper
    master_weights: MasterWeights | None
    _accumulation: AccumulationState

    def _optimized_parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optim.param_groups for parameter in group["params"]]

    def _model_parameters(self) -> list[nn.Parameter]:
        return [self.model_parameter(parameter) for parameter in self._optimized_parameters()]

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

    def _named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's gradients with the user's names of their parameters."""
        is_scaled = self._accumulation.factors is not None
        names = {id(one): self.model.logical_name(name) for name, one in self.model.named_parameters()}
        for parameter in self._optimized_parameters():
            model_parameter = self.model_parameter(parameter)
            gradient = model_parameter.grad if is_scaled else parameter.grad
            if gradient is not None:
                yield names.get(id(model_parameter), "a parameter outside of the model"), gradient

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._model_parameters())


# Note [Weight-writing methods]
# An optimizer may have methods that write weights outside of step(): `train` and `eval` of a schedule-free one swap
# them, `first_step` of SAM moves them. If the optimizer updates shards or master weights, the model must follow. Which
# methods write is unknown, and a rank sees its own shards only. So all ranks call every method that the wrapper lacks,
# compare a checksum of their shards before and after, and update the model if any rank's has changed. The method gets
# the gradients of step(); if it clears them all, the accumulation has ended.


class OptimizerMethods(OptimizerParameters):
    """Optimizer whose further methods get unscaled gradients, and whose model follows the weights that they write."""

    data_parallel_group: dist.ProcessGroup | None
    loss_scaler: LossScaler | None
    _defers_step: bool
    _is_last_microbatch = False
    _is_stepping = False
    _num_own_step_hooks = 0

    @abstractmethod
    def _unscale_gradients(self) -> None:
        """Unscale gradients, or record the factors that the step multiplies them with. Collective."""

    @abstractmethod
    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's gradients."""

    def _apply_factors(self) -> None:
        """Unscale gradients where that was left to the step; see Note [Fused unscaling]."""
        factors, self._accumulation.factors = self._accumulation.factors, None
        if factors is None:
            return
        if self.master_weights is not None:
            self.master_weights.copy_gradients()
        factors.apply_to(self._gradients())

    def _multiply(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        if gradients:
            torch._foreach_mul_(list(gradients), factor)

    def _unscale_factor(self, loss_scale: float) -> float:
        """Return the factor that unscales the current gradients. Collective if num_items was given."""
        accumulation = self._accumulation
        return (
            1.0
            if accumulation.grad_factor != 1.0
            else accumulation.unscale_factor(loss_scale, self.data_parallel_group)
        )

    def _unscale_in_place(self) -> None:
        """Unscale `p.grad` after the last microbatch's backward(). Collective if num_items was given.

        A further backward() of the same microbatch reverts it, see `_begin_accumulation`.
        """
        if self._is_last_microbatch and self._uses_param_grads():
            self._accumulation.grad_factor = self._unscale_factor(1.0)
            if self._accumulation.grad_factor != 1.0:
                self._multiply(self._gradients(), self._accumulation.grad_factor)

    def _uses_param_grads(self) -> bool:
        """Whether the optimizer uses the gradients that backward() leaves in `p.grad`."""
        return self.loss_scaler is None and self.master_weights is None

    # Called by torch's clipping functions; see Note [Plain torch].

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

    def _call_user_method(self, method: Callable[[], Any]) -> Any:
        """Call the method with unscaled gradients, and update the model if it wrote weights.

        Collective if ranks hold shards: every rank must call it.

        Raises:
            ConfigError: It updates weights from loss-scaled gradients, where an overflow cannot be skipped.
        """
        has_gradients = self._accumulation.is_open and not self._defers_step
        if has_gradients:
            self._unscale_gradients()
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

    def _weights_digest(self) -> int:
        """Return a checksum of this rank's optimizer parameters; writes to `.data` change no version counter."""
        digest = 0
        for parameter in self._optimized_parameters():
            if parameter.requires_grad:
                content = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
                digest = crc32(content.numpy().data, digest)
        return digest

    # Overridden by plugins.

    def _has_copies(self) -> bool:
        """Whether the model computes with copies of the optimizer's parameters."""
        return self.master_weights is not None

    def _fetch_weights(self) -> None:
        """Copy changed or moved weights of the model into the optimizer's parameters. Collective."""

    def _restore_memory(self) -> None:
        """Undo replacements of the optimizer's memory by `p.data = ...`, keeping the values."""

    def _publish_weights(self) -> None:
        """Write the optimizer's parameters into the model, on all ranks. Collective."""
        if self.master_weights is not None:
            self.master_weights.copy_to_model()

    def _any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is True on any rank. Collective if ranks may differ."""
        return list(flags)
