"""LAMB: Adam whose update of every layer is as long as the layer's weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from booster.errors import ConfigError

from .base import OptimizerBase, require_amount, require_flag, require_fractions, require_learning_rate
from .param_update import ParameterStep, StepBatch


def norms_of_pairs(batch: StepBatch, others: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return for every step the norm of the whole parameter's weights, and of another tensor of its shape.

    Args:
        batch: Of steps.
        others: A tensor for each of them: the update, or the gradient.

    Collective over the ranks of the batch's shards, if there are any. One all-reduce.
    """
    squares = [
        torch.stack([step.sum_of_squares(step.weights), step.sum_of_squares(other)])
        for step, other in zip(batch.steps, others, strict=True)
    ]
    return [(total[0].sqrt(), total[1].sqrt()) for total in batch.sums(squares, lambda shape: 2)]


def ratio_of_norms(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return one norm over another; 1 where either is zero, as of weights that begin at zero."""
    is_usual = (numerator > 0) & (denominator > 0)
    return torch.where(is_usual, numerator / denominator, torch.ones_like(numerator))


class Lamb(OptimizerBase):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, Algorithm 2), phi(z) = z.

    Moments are corrected for their start at zero, as in the paper; cybertronai's and ColossalAI's `Lamb` leave that
    out: `FusedLAMB(bias_correction=False, max_grad_norm=0)` computes theirs. A layer whose weights or whose update are
    all zero has a ratio of 1.

    Bytes per element: 8 for the moments. Over shards one all-reduce of two numbers per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator; positive.
        weight_decay: Part of the update, and of its norm.
        adam: Have a ratio of 1 everywhere, which is AdamW.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("exp_avg", "exp_avg_sq")

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

    def _check_group(self, group: Mapping[str, Any]) -> None:
        require_learning_rate(group)
        require_fractions(group, "betas", 2, example=(0.9, 0.999))
        require_amount(group, "eps", is_positive=True, why="divides 0 by 0 where an element never had a gradient")
        require_amount(group, "weight_decay")
        require_flag(group, "adam")

    def _update(self, steps: list[ParameterStep]) -> None:
        for batch in StepBatch.divide(steps, self._shards):
            updates = [self._adam_update(step) for step in batch.steps]
            norms = norms_of_pairs(batch, updates)
            for step, update, pair in zip(batch.steps, updates, norms, strict=True):
                if not step.group["adam"]:
                    update.mul_(ratio_of_norms(*pair))
                step.weights.sub_(update, alpha=float(step.group["lr"]))

    def _adam_update(self, step: ParameterStep) -> Tensor:
        (beta1, beta2), state = step.group["betas"], step.state
        first, second = self._state_tensor(step, "exp_avg"), self._state_tensor(step, "exp_avg_sq")
        number = state["step"] = state.get("step", 0) + 1
        first.lerp_(step.gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(step.gradient, step.gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**number)).sqrt_().add_(step.group["eps"])
        update = first.div(denominator).div_(1 - beta1**number)
        return update.add_(step.weights, alpha=step.group["weight_decay"])


# Note [Norm of a step]
# Gradients are clipped by the norm of all of them. A plugin may update some parameters after others, by several calls
# of step() that make one step, each of which shows some of the gradients: then the norm is taken at the first of these
# calls, of the gradients that were there when the step began. Hooks that ran since may have replaced those shown.


class FusedLAMB(OptimizerBase):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, Algorithm 2) with apex's options.

    Unlike the paper, and like apex's FusedLAMB, it clips all gradients together by `max_grad_norm` first, and takes the
    plain `lr` for parameters without weight decay unless `use_nvlamb`. Unlike apex, every parameter counts its own
    steps, so that one which is not used in every step is corrected rightly. The paper's own update is
    `max_grad_norm=0, use_nvlamb=True`.

    Bytes per element: 8 for the moments, and 4 while it steps. Over shards two all-reduces, of one number and of two
    numbers per parameter. Computed by torch's foreach kernels.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate.
        bias_correction: Whether the moments' start at zero is corrected for.
        betas: Decay rates of the moments.
        eps: Added to the denominator; positive.
        weight_decay: Weight decay.
        amsgrad: Not offered; here as apex has it in this place.
        adam_w_mode: True: decay is part of the update and of its norm; False: of the gradient.
        grad_averaging: Whether the first moment takes up `1 - beta1` of a gradient; False: all of it.
        set_grad_none: Whether `zero_grad()` drops gradients; False: it fills them with zeros.
        max_grad_norm: What the norm of all gradients is clipped to; 0: they are not.
        use_nvlamb: Have a ratio of norms also for parameters without weight decay.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("exp_avg", "exp_avg_sq")
    _set_grad_none = True
    _begun: dict[Tensor, Tensor] | None = None
    _norm_of_step: Tensor | None = None

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
        require_flag({"set_grad_none": set_grad_none}, "set_grad_none")
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
        self._set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_set_grad_none": self._set_grad_none}

    def _check_group(self, group: Mapping[str, Any]) -> None:
        require_learning_rate(group)
        require_fractions(group, "betas", 2, example=(0.9, 0.999))
        require_amount(group, "eps", is_positive=True, why="divides 0 by 0 where an element never had a gradient")
        require_amount(group, "weight_decay")
        require_amount(group, "max_grad_norm")
        for name in ("bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb"):
            require_flag(group, name)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Drop them; None: as `set_grad_none` says.
        """
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Return a context in which all calls of `step()` are one step; see `booster.core.shard_aware.NeedsWholeStep`.

        Not collective.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._begun = {one: one.grad for one in parameters if one.grad is not None}
        try:
            yield
        finally:
            self._begun = self._norm_of_step = None

    def _update(self, steps: list[ParameterStep]) -> None:
        if self._norm_of_step is None:
            norm = self._gradient_norm(steps)
            if self._begun is not None:
                self._norm_of_step = norm
        else:
            norm = self._norm_of_step
        for batch in StepBatch.join(steps, self._shards):
            updates = _per_group(batch.steps, lambda some: self._adam_updates(some, norm))
            norms = norms_of_pairs(batch, updates)
            for step, update, pair in zip(batch.steps, updates, norms, strict=True):
                if step.group["weight_decay"] or step.group["use_nvlamb"]:
                    update.mul_(ratio_of_norms(*pair))
                step.weights.sub_(update, alpha=float(step.group["lr"]))

    def _gradient_norm(self, steps: list[ParameterStep]) -> Tensor | None:
        """Return the norm of the gradients of a step; None: no group clips. See Note [Norm of a step]. Collective."""
        if not any(group["max_grad_norm"] for group in self.param_groups):
            return None
        shown = {step.parameter for step in steps}
        hidden = [
            self._step_of(parameter, self._begun[parameter], group)
            for group in (self.param_groups if self._begun is not None else ())
            for parameter in group["params"]
            if self._begun is not None and parameter in self._begun and parameter not in shown and parameter.numel() > 0
        ]
        squares: list[Tensor] = []
        for batch in StepBatch.join([*steps, *hidden], self._shards):
            own = [step.sum_of_squares(step.gradient).reshape(1) for step in batch.steps]
            squares += batch.all_sums(own, lambda shape: 1)
        if not squares:
            return None
        return torch.stack([one.reshape(()).to(squares[0]) for one in squares]).sum().sqrt()

    def _adam_updates(self, steps: Sequence[ParameterStep], norm: Tensor | None) -> list[Tensor]:
        """Return new tensors with the updates of parameters of one group, format and device."""
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


def _per_group(steps: Sequence[ParameterStep], update: Any) -> list[Tensor]:
    """Return what `update` makes of steps that have group, format and device in common, in the order of `steps`."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, step in enumerate(steps):
        alike.setdefault((id(step.group), step.weights.dtype, step.weights.device), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in alike.values():
        found |= dict(zip(numbers, update([steps[number] for number in numbers]), strict=True))
    return [found[number] for number in range(len(steps))]


class Lars(OptimizerBase):
    """LARS (You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, Algorithm 1).

    A layer's rate is `lr * eeta * |w| / (|g| + weight_decay * |w| + eps)`, and is part of what momentum remembers, as
    in the paper. A layer whose weights or gradients are all zero has the plain `lr`. ColossalAI's `Lars` does not let
    the ratio grow over 50; torchlars and apex's LARC decay the weights as here, but apex applies momentum before `lr`.

    Bytes per element: 4 with momentum. Over shards one all-reduce of two numbers per parameter.

    Args:
        params: Tensors, or param groups.
        lr: Learning rate of all layers together.
        momentum: What remains of the last update; less than 1.
        eeta: How much of a layer's weights an update may be; the paper's eta.
        weight_decay: Added to the gradient, times the weights.
        eps: Added to the denominator of the ratio.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments = ("momentum_buffer",)

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
        require_learning_rate(group)
        require_amount(group, "momentum", below=1.0)
        require_amount(group, "eeta", is_positive=True, why="would leave no step of any length")
        require_amount(group, "weight_decay")
        require_amount(group, "eps")

    def _update(self, steps: list[ParameterStep]) -> None:
        for batch in StepBatch.divide(steps, self._shards):
            norms = norms_of_pairs(batch, [step.gradient for step in batch.steps])
            for step, (weight_norm, gradient_norm) in zip(batch.steps, norms, strict=True):
                self._update_one(step, _ratio(step.group, weight_norm, gradient_norm))

    def _update_one(self, step: ParameterStep, ratio: Tensor) -> None:
        group = step.group
        update = step.gradient.add(step.weights, alpha=group["weight_decay"]).mul_(ratio * float(group["lr"]))
        if group["momentum"]:
            update = self._state_tensor(step, "momentum_buffer").mul_(group["momentum"]).add_(update)
        step.weights.sub_(update)


def _ratio(group: Mapping[str, Any], weight_norm: Tensor, gradient_norm: Tensor) -> Tensor:
    denominator = gradient_norm + group["weight_decay"] * weight_norm + group["eps"]
    is_usual = (weight_norm > 0) & (gradient_norm > 0)
    return torch.where(is_usual, group["eeta"] * weight_norm / denominator, torch.ones_like(weight_norm))
