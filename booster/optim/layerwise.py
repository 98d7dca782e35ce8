"""LAMB and LARS: optimizers with layer-wise trust ratios."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from booster.compatibility import takes_foreign
from booster.deprecation import DeprecatedAlias
from booster.errors import ConfigError

from .base import OptimizerBase, check_decay_rates, check_flags, check_learning_rate, check_non_negative
from .param_update import ParamUpdate, UpdateBatch


def _weight_and_update_norms(batch: UpdateBatch, others: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return, for every update, the norms of the full parameter's weights and of a second tensor, as its gradient.

    Collective over the ranks of the batch's shards, if there are any. One all-reduce.
    """
    squares = [
        torch.stack([step.sum_of_squares(step.weights), step.sum_of_squares(other)])
        for step, other in zip(batch.updates, others, strict=True)
    ]
    return [(total[0].sqrt(), total[1].sqrt()) for total in batch.reduced_sums(squares, lambda shape: 2)]


def _trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the trust ratio `numerator / denominator`, or 1 if either is zero (such as zero-initialized weights)."""
    is_nonzero = (numerator > 0) & (denominator > 0)
    return torch.where(is_nonzero, numerator / denominator, torch.ones_like(numerator))


class _LambBase(OptimizerBase):
    """LAMB but for the arithmetic of its update: moments, checks, and steps scaled by the trust ratios."""

    _moments = ("exp_avg", "exp_avg_sq")
    _flags: ClassVar[tuple[str, ...]]
    """Hyperparameters that are bools."""

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_learning_rate(group)
        check_decay_rates(group, "betas", 2, example=(0.9, 0.999))
        check_non_negative(group, "eps", is_positive=True, why="divides 0 by 0 where an element never had a gradient")
        check_non_negative(group, "weight_decay")
        check_flags(group, *self._flags)

    @abstractmethod
    def _has_trust_ratio(self, group: Mapping[str, Any]) -> bool:
        """Return whether a group's updates are scaled by trust ratios."""

    def _apply(self, batch: UpdateBatch, updates: Sequence[Tensor]) -> None:
        """Subtract the updates, which are overwritten. Collective over the ranks of the batch's shards."""
        norms = _weight_and_update_norms(batch, updates)
        for step, update, pair in zip(batch.updates, updates, norms, strict=True):
            if self._has_trust_ratio(step.group):
                update.mul_(_trust_ratio(*pair))
            step.weights.sub_(update, alpha=float(step.group["lr"]))


class Lamb(_LambBase):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, Algorithm 2), phi(z) = z.

    Moments have bias correction, as in the paper; cybertronai's and ColossalAI's `Lamb` have none, and
    `FusedLAMB(bias_correction=False, max_grad_norm=0)` computes theirs. A layer with all-zero weights or an all-zero
    update has a trust ratio of 1.

    Bytes per element: 8 for the moments. Over shards one all-reduce of two numbers per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Term added to the denominator; positive.
        weight_decay: Weight decay, included in the update and its norm.
        adam: If True, all trust ratios are 1, which is AdamW.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _flags = ("adam",)

    @takes_foreign("bias_correction")
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam})

    def _has_trust_ratio(self, group: Mapping[str, Any]) -> bool:
        return not group["adam"]

    def _update(self, steps: list[ParamUpdate]) -> None:
        for batch in UpdateBatch.split(steps, self._shards):
            self._apply(batch, [self._adam_update(step) for step in batch.updates])

    def _adam_update(self, step: ParamUpdate) -> Tensor:
        (beta1, beta2), state = step.group["betas"], step.state
        first, second = self._state_tensor(step, "exp_avg"), self._state_tensor(step, "exp_avg_sq")
        number = state["step"] = state.get("step", 0) + 1
        first.lerp_(step.gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(step.gradient, step.gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**number)).sqrt_().add_(step.group["eps"])
        update = first.div(denominator).div_(1 - beta1**number)
        return update.add_(step.weights, alpha=step.group["weight_decay"])


class FusedLAMB(_LambBase):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, Algorithm 2) with apex's options.

    Unlike the paper, and like apex's FusedLAMB, it first clips the global gradient norm to `max_grad_norm`, and uses a
    trust ratio of 1 for parameters without weight decay unless `use_nvlamb`. Unlike apex, every parameter has its own
    step count, so that bias correction is right for parameters without a gradient in every step. The paper's update is
    `max_grad_norm=0, use_nvlamb=True`.

    Bytes per element: 8 for the moments, and 4 during a step. Over shards two all-reduces, of one number and of two
    numbers per parameter. Computed by torch's foreach kernels.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        bias_correction: If True, the moments are corrected for their initialization to zero.
        betas: Decay rates of the moments.
        eps: Term added to the denominator; positive.
        weight_decay: Weight decay.
        amsgrad: Not supported; accepted for apex's argument order.
        adam_w_mode: If True, weight decay is part of the update and its norm; if False, of the gradient.
        grad_averaging: If True, the first moment adds `1 - beta1` times the gradient; if False, the gradient.
        set_grad_none: If True, `zero_grad()` sets gradients to None; if False, it fills them with zeros.
        max_grad_norm: Upper limit of the global gradient norm; 0 disables clipping.
        use_nvlamb: If True, parameters without weight decay have a trust ratio as well.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _flags = ("bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb")
    set_grad_none = True
    _initial_grads: dict[Tensor, Tensor] | None = None
    _step_grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise ConfigError("amsgrad=True has no meaning in LAMB, and apex refuses it as well: leave it out")
        check_flags({"set_grad_none": set_grad_none}, "set_grad_none")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_non_negative(group, "max_grad_norm")

    def _has_trust_ratio(self, group: Mapping[str, Any]) -> bool:
        return bool(group["weight_decay"] or group["use_nvlamb"])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients.

        Args:
            set_to_none: If True, gradients are set to None; optional, defaults to `set_grad_none`.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @contextmanager
    def full_step(self) -> Iterator[None]:
        """Return a context in which all calls of `step()` are one step; see `booster.core.shard_aware.NeedsFullStep`.

        Not collective.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._initial_grads = {one: one.grad for one in parameters if one.grad is not None}
        try:
            yield
        finally:
            self._initial_grads = self._step_grad_norm = None

    whole_step = DeprecatedAlias("full_step")

    def _update(self, steps: list[ParamUpdate]) -> None:
        if self._step_grad_norm is None:
            norm = self._gradient_norm(steps)
            if self._initial_grads is not None:
                self._step_grad_norm = norm
        else:
            norm = self._step_grad_norm
        for batch in UpdateBatch.join(steps, self._shards):
            self._apply(batch, _per_group(batch.updates, lambda some: self._adam_updates(some, norm)))

    def _gradient_norm(self, steps: list[ParamUpdate]) -> Tensor | None:
        """Return the global gradient norm, or None if no group clips. Collective."""
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return None
        # Within `full_step` several calls of step() make one step, and each call has some of the gradients. The norm
        # is computed in the first call, from the gradients present when the step began: hooks may have replaced others
        # since.
        updated = {step.parameter for step in steps}
        remaining = [
            self._param_update(parameter, self._initial_grads[parameter], group)
            for group in (self.param_groups if self._initial_grads is not None else ())
            for parameter in group["params"]
            if self._initial_grads is not None
            and parameter in self._initial_grads
            and parameter not in updated
            and parameter.numel() > 0
        ]
        squares: list[Tensor] = []
        for batch in UpdateBatch.join([*steps, *remaining], self._shards):
            local_squares = [step.sum_of_squares(step.gradient).reshape(1) for step in batch.updates]
            squares += batch.reduced_sums_of_all(local_squares, lambda shape: 1)
        if not squares:
            return None
        return torch.stack([one.reshape(()).to(squares[0]) for one in squares]).sum().sqrt()

    def _adam_updates(self, steps: Sequence[ParamUpdate], norm: Tensor | None) -> list[Tensor]:
        """Return new tensors with the updates of parameters of one param group, dtype and device."""
        group = steps[0].group
        beta1, beta2 = group["betas"]
        weights, gradients = [step.weights for step in steps], [step.gradient for step in steps]
        first = [self._state_tensor(step, "exp_avg") for step in steps]
        second = [self._state_tensor(step, "exp_avg_sq") for step in steps]
        if norm is not None and group["max_grad_norm"]:
            divisor = (norm / group["max_grad_norm"]).clamp(min=1.0).to(gradients[0])
            gradients = list(torch._foreach_div(gradients, divisor))
        if group["weight_decay"] and not group["adam_w_mode"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        numbers = [step.state.get("step", 0) + 1 for step in steps]
        for step, number in zip(steps, numbers, strict=True):
            step.state["step"] = number
        corrects = group["bias_correction"]
        denominators = torch._foreach_div(second, [1 - beta2**number if corrects else 1.0 for number in numbers])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(first, denominators)
        torch._foreach_div_(updates, [1 - beta1**number if corrects else 1.0 for number in numbers])
        if group["weight_decay"] and group["adam_w_mode"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return list(updates)


def _per_group(steps: Sequence[ParamUpdate], update: Any) -> list[Tensor]:
    """Call `update` once per combination of param group, dtype and device; return results in the order of `steps`."""
    indices_by_key: dict[tuple[Any, ...], list[int]] = {}
    for number, step in enumerate(steps):
        indices_by_key.setdefault((id(step.group), step.weights.dtype, step.weights.device), []).append(number)
    results: dict[int, Tensor] = {}
    for numbers in indices_by_key.values():
        results |= dict(zip(numbers, update([steps[number] for number in numbers]), strict=True))
    return [results[number] for number in range(len(steps))]


class Lars(OptimizerBase):
    """LARS (You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, Algorithm 1).

    A layer's rate is `lr * eeta * |w| / (|g| + weight_decay * |w| + eps)`, and is included in the momentum buffer, as
    in the paper. A layer with all-zero weights or gradients has the rate `lr`. ColossalAI's `Lars` limits the ratio to
    50; torchlars and apex's LARC decay the weights as here, but apex applies momentum before `lr`.

    Bytes per element: 4 with momentum. Over shards one all-reduce of two numbers per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Global learning rate.
        momentum: Momentum factor, less than 1.
        eeta: Trust coefficient, the paper's eta.
        weight_decay: Weight decay, an L2 term in the gradient.
        eps: Term added to the denominator of the ratio.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _moments = ("momentum_buffer",)

    @takes_foreign(epsilon="eps")
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        eps: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "eeta": eeta, "weight_decay": weight_decay, "eps": eps}
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_learning_rate(group)
        check_non_negative(group, "momentum", below=1.0)
        check_non_negative(group, "eeta", is_positive=True, why="would make every step zero")
        check_non_negative(group, "weight_decay")
        check_non_negative(group, "eps")

    def _update(self, steps: list[ParamUpdate]) -> None:
        for batch in UpdateBatch.split(steps, self._shards):
            norms = _weight_and_update_norms(batch, [step.gradient for step in batch.updates])
            for step, (weight_norm, gradient_norm) in zip(batch.updates, norms, strict=True):
                group = step.group
                denominator = gradient_norm + group["weight_decay"] * weight_norm + group["eps"]
                is_nonzero = (weight_norm > 0) & (gradient_norm > 0)
                ratio = torch.where(is_nonzero, group["eeta"] * weight_norm / denominator, torch.ones_like(weight_norm))
                update = step.gradient.add(step.weights, alpha=group["weight_decay"]).mul_(ratio * float(group["lr"]))
                if group["momentum"]:
                    update = self._state_tensor(step, "momentum_buffer").mul_(group["momentum"]).add_(update)
                step.weights.sub_(update)
