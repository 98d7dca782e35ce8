"""Base class of optimizers with per-parameter statistics: param groups, fp32 states, and the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from booster.comm import sum_dtype
from booster.core.shard_aware import Shards
from booster.deprecation import DeprecatedAlias, DeprecatedOverrides
from booster.errors import ConfigError
from booster.validation import check_flag, is_non_nan_number

from .adam_update import MOMENTS, is_dense, match_strides
from .param_update import ParamUpdate


@dataclass(frozen=True, slots=True, eq=False)
class _NoCast:
    """Wrapper that hides a state tensor from `Optimizer.load_state_dict`.

    torch casts every floating-point state to its parameter's dtype, which would round fp32 moments of bf16 parameters.
    It leaves other objects alone, so states are wrapped by a pre-hook and unwrapped in `__setstate__`.
    """

    tensor: Tensor


def _wrap_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of `load_state_dict`: returns a state_dict with its state tensors wrapped in `_NoCast`."""
    wrapped = {
        index: {key: _NoCast(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": wrapped}


class CheckedOptimizer(DeprecatedOverrides, Optimizer):
    """Optimizer that checks its param groups, and whose states keep their dtype when they are loaded."""

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ConfigError if a param group, defaults included, is invalid."""

    def _check_parameter(self, parameter: Tensor) -> None:
        """Raise ConfigError if a parameter is not supported."""
        if parameter.is_complex():
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}, and {type(self).__name__}"
                " does not support complex parameters: pass torch.view_as_real of them, or use torch.optim.AdamW"
            )

    @abstractmethod
    def _check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ConfigError if a state does not belong to this optimizer."""

    @abstractmethod
    def _loaded(self, parameter: Tensor, key: str, value: Tensor) -> Any:
        """Return the state that is kept for a loaded one."""

    @abstractmethod
    def _step(self) -> None:
        """Update every parameter that has a gradient. Collective if there are shards."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Function that computes the loss and calls backward; called once, before the step.

        Returns:
            Result of the closure.

        Collective over the ranks that hold shards, if there are any.

        Raises:
            ConfigError: A gradient is sparse. Of an Adam: a gradient or a param group is invalid, the disk has too
                little space for the states, or the last step failed and the gradients are not those of that step.
            OSError: The disk with an Adam's states failed; the message reports which parameters were updated.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._step()
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as `torch.optim.Optimizer.add_param_group` does.

        Raises:
            ConfigError: A hyperparameter or a parameter is invalid.
        """
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                self._check_parameter(parameter)
        except ConfigError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, an Adam's also of torch.optim.Adam or AdamW; fp32 states stay fp32.

        Raises:
            ConfigError: The state belongs to another kind of optimizer, an unsupported variant, or parameters of other
                shapes, or the disk has too little free space for the states.
        """
        self._check_state_dict(state_dict)
        handle = self.register_load_state_dict_pre_hook(_wrap_states)  # after the user's hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for parameter, values in self.state.items():
            for key, value in values.items():
                if isinstance(value, _NoCast):
                    values[key] = self._loaded(parameter, key, value.tensor)


class OptimizerBase(CheckedOptimizer):
    """Optimizer with fp32 arithmetic and fp32 states for bf16 and fp16 parameters.

    It is `booster.interface.ShardAware`: statistics of a full parameter are summed over the ranks that hold its shards.

    Args:
        params: Tensors, or param groups.
        defaults: Default values of the param groups.

    Raises:
        ConfigError: A hyperparameter or a parameter is invalid.
    """

    _moments: ClassVar[tuple[str, ...]] = ()
    """Keys of the states with one value per element."""

    _keys_of_others: ClassVar[tuple[str, ...]] = ("differentiable",)
    """Keys of param groups that a state to load may lack, because other versions or classes have none."""

    _shards: Shards | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check_group(defaults)
        super().__init__(params, defaults)

    @abstractmethod
    def _update(self, steps: list[ParamUpdate]) -> None:
        """Update the weights. Collective if there are shards."""

    def _state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...] | None:
        """Return the shape of a state tensor, or None if `key` is not a state tensor of the parameter."""
        return tuple(parameter.shape) if key in self._moments else None

    def use_shards(self, shards: Shards) -> None:
        """Set the shards that the param groups hold from now on; see `booster.interface.ShardAware`.

        Args:
            shards: Shards of this rank.
        """
        self._shards = shards

    def _step(self) -> None:
        steps = [
            self._param_update(parameter, parameter.grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.numel() > 0
        ]
        self._update(steps)
        for step in steps:
            if step.weights is not step.parameter:
                step.parameter.copy_(step.weights)

    def _param_update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> ParamUpdate:
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and {type(self).__name__}"
                " needs dense gradients: use an embedding with sparse=False, or torch.optim.SparseAdam for it"
            )
        dtype = _state_dtype(parameter)
        shard = None if self._shards is None else self._shards.shard_of(parameter)
        # A parameter with gaps in its memory is copied as well; see Note [Memory layout of kernel arguments].
        is_in_place = parameter.dtype == dtype and is_dense(parameter)
        weights = parameter if is_in_place else match_strides(parameter.contiguous(), parameter.contiguous(), dtype)
        return ParamUpdate(
            parameter=parameter,
            weights=weights,
            gradient=match_strides(gradient, weights, dtype),
            state=self.state[parameter],
            group=group,
            shard=shard,
        )

    def _state_tensor(self, step: ParamUpdate, key: str) -> Tensor:
        """Return a parameter's state in the dtype of the arithmetic; a missing state is created as zeros."""
        value: Tensor | None = step.state.get(key)
        dtype, device = step.weights.dtype, step.weights.device
        is_moment = key in self._moments
        if value is None:
            if is_moment:
                value = torch.zeros_like(step.weights, requires_grad=False)
            else:
                shape = self._state_shape(step.parameter, key)
                assert shape is not None
                value = torch.zeros(shape, dtype=dtype, device=device)
        elif is_moment:  # with the strides of the weights
            value = match_strides(value, step.weights, dtype)
        else:
            value = value.to(device, dtype)
        step.state[key] = value
        return value

    def prepare_states(self) -> None:
        """Do nothing, as states in memory need no preparation; see `booster.interface.StateAllocator`."""

    def allocate_state(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Allocate a state that is about to be filled; see `booster.interface.StateAllocator`."""
        if self._state_shape(parameter, key) is None:
            return None
        return torch.empty(shape, dtype=_state_dtype(parameter), device=parameter.device)

    @property
    def may_fail_locally(self) -> bool:
        """False, as a step fails on all ranks or on none."""
        return False

    can_fail_alone = DeprecatedAlias("may_fail_locally")

    def check_states(self) -> None:
        """Do nothing, as states in memory can always be read."""

    def _check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        name = type(self).__name__
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            missing = [key for key in self.defaults if key not in saved and key not in self._keys_of_others]
            if missing:
                raise ConfigError(
                    f"the state_dict has no {missing[0]!r} in a param group, so it belongs to an optimizer other than"
                    f" {name}, and its moments have another meaning: load the state of a {name}"
                )
            self._check_group({**self.defaults, **saved})
            for index, parameter in zip(saved["params"], group["params"], strict=False):
                for key, value in state_dict["state"].get(index, {}).items():
                    self._check_state(parameter, key, value)

    def _check_state(self, parameter: Tensor, key: str, value: Any) -> None:
        shape = self._state_shape(parameter, key)
        if not isinstance(value, Tensor) or (value.dim() == 0 and shape is None):
            return  # a number, such as "step"
        if shape is None or tuple(value.shape) != shape:
            expected = "no such state" if shape is None else f"it with shape {shape}"
            raise ConfigError(
                f"the state_dict has {key!r} of shape {tuple(value.shape)} for a parameter of shape"
                f" {tuple(parameter.shape)}, for which {type(self).__name__} keeps {expected}: load it into an"
                " optimizer of the same class, for the same model, with the parameters in the same order"
            )

    def _loaded(self, parameter: Tensor, key: str, value: Tensor) -> Any:
        if self._state_shape(parameter, key) is not None:
            return value.to(parameter.device, _state_dtype(parameter))
        return int(value) if key == "step" else value


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return sum_dtype(parameter.dtype)


def moment_dtype(parameter: Tensor) -> torch.dtype:
    dtype = parameter.dtype
    # torch's fused kernels on accelerators require the same dtype for parameter and states.
    return sum_dtype(dtype) if parameter.is_cpu else dtype


def init_step_counter(state: dict[str, Any]) -> Tensor:
    """Convert "step" to an fp32 CPU tensor, zero if it is missing, and return it."""
    step = state.get("step")
    if not (isinstance(step, Tensor) and step.is_cpu and step.dtype is torch.float32):
        step = state["step"] = torch.tensor(0.0 if step is None else float(step), dtype=torch.float32)
    return step


def init_moments(state: dict[str, Any], parameter: Tensor) -> None:
    """Convert the moments to the parameter's device, strides and moment dtype; missing ones are created as zeros."""
    dtype = moment_dtype(parameter)
    for key in MOMENTS:
        value = state.get(key)
        if value is None:
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            continue
        if parameter.is_cpu and value.is_cpu and parameter.is_contiguous():
            is_same_layout = value.is_contiguous()
        else:
            is_same_layout = value.device == parameter.device and value.stride() == parameter.stride()
        if value.dtype is not dtype or not is_same_layout:
            like = parameter if is_dense(parameter) else parameter.contiguous()
            state[key] = match_strides(value, like, dtype)


def check_learning_rate(group: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the `lr` of a param group is a single finite non-negative number."""
    lr = group["lr"]
    if lr is None:
        raise ConfigError("lr=None, and this optimizer computes no learning rate itself: pass lr=2e-4 or similar")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {tuple(lr.shape)}: pass one with one element, or a number")
    check_non_negative(group, "lr")


def check_non_negative(
    group: Mapping[str, Any], name: str, *, is_positive: bool = False, below: float = math.inf, why: str = ""
) -> None:
    """Check that a hyperparameter is a finite non-negative number.

    Args:
        group: Param group, defaults included.
        name: Name of the hyperparameter.
        is_positive: If True, 0 is refused as well.
        below: Exclusive upper limit.
        why: Consequence of a wrong value, for the message.

    Raises:
        ConfigError: The value is out of range or is not a number.
    """
    value = group[name]
    if _is_number(value):
        number = float(value)
        if math.isfinite(number) and (number > 0 if is_positive else number >= 0) and number < below:
            return
    kind = "a positive finite number" if is_positive else "a finite non-negative number"
    limit = "" if math.isinf(below) else f", less than {below:g}"
    raise ConfigError(f"{name}={value!r}{' ' + why if why else ' is out of range'}: give {kind}{limit}")


def check_decay_rates(group: Mapping[str, Any], name: str, count: int, *, example: tuple[float, ...]) -> None:
    """Raise `ConfigError` unless a hyperparameter is a sequence of `count` numbers in [0, 1)."""
    values = group[name]
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    if not is_sequence or not all(_is_number(value) and 0.0 <= float(value) < 1.0 for value in values):
        raise ConfigError(
            f"{name}={values!r} is not a sequence of decay rates: give {count} numbers in [0, 1), such as {example}"
        )


def check_flags(group: Mapping[str, Any], *names: str) -> None:
    """Raise `ConfigError` unless hyperparameters are bools: positional arguments may be in the wrong order."""
    for name in names:
        check_flag(
            name,
            group[name],
            reason=", so positional arguments may be in the wrong order",
            advice="pass True or False, and arguments after lr by keyword",
        )


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else is_non_nan_number(value)
