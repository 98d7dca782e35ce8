"""What the optimizers of whole parameters share: groups, states in fp32, and how a step goes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from booster.core.shard_aware import Shards
from booster.errors import ConfigError

from .adam_update import MOMENTS, is_dense, laid_out_like
from .param_update import ParameterStep

# Note [Loaded states]
# torch converts every floating-point state to its parameter's dtype, so that fp32 moments of bf16 parameters would be
# rounded. What it does not know it leaves alone: tensors pass through in a wrapping, and come out in __setstate__.


@dataclass(frozen=True, slots=True, eq=False)
class Untouched:
    """A tensor that torch does not see."""

    tensor: Tensor


def hold_untouched(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose states are wrapped; a pre-hook of `load_state_dict`."""
    wrapped = {
        number: {key: Untouched(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": wrapped}


_LOW_PRECISION = (torch.float16, torch.bfloat16)


class OptimizerBase(Optimizer):
    """An optimizer that computes, and keeps its states, in fp32 for bf16 and fp16 parameters.

    It is `booster.interface.ShardAware`: what it needs of a whole parameter it sums over the ranks that hold parts.

    Args:
        params: Tensors, or param groups.
        defaults: Of the groups.

    Raises:
        ConfigError: A hyperparameter or a parameter that can't work.
    """

    _moments: ClassVar[tuple[str, ...]] = ()
    """The states with one value per element."""

    _shards: Shards | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check_group(defaults)
        super().__init__(params, defaults)

    # What an optimizer has to say.

    @abstractmethod
    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Return if a param group, defaults included, can be computed with.

        Raises:
            ConfigError: It can't.
        """

    @abstractmethod
    def _update(self, steps: list[ParameterStep]) -> None:
        """Update the weights of parameters. Collective if there are shards."""

    def _state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...] | None:
        """Return the shape of a state of one of `param_groups`; None: it is not among the tensors that it keeps."""
        return tuple(parameter.shape) if key in self._moments else None

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's.

        Raises:
            ConfigError: A hyperparameter or a parameter that can't work.
        """
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                self.param_groups.pop()
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}, and {type(self).__name__} has"
                    " no norms of complex numbers: give it torch.view_as_real of them, or use torch.optim.AdamW"
                )

    def use_shards(self, shards: Shards) -> None:
        """Take over which parts of which parameters the groups hold from now on; see `booster.interface.ShardAware`.

        Args:
            shards: This rank's parts.
        """
        self._shards = shards

    # Step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Computes the loss and calls backward; called once, before the step.

        Returns:
            What the closure returned.

        Collective over the ranks that hold shards, if there are any.

        Raises:
            ConfigError: A gradient that is sparse.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        steps = list(self._steps())
        self._update(steps)
        for step in steps:
            step.write_back()
        return result

    def _steps(self) -> Iterator[ParameterStep]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel() > 0:
                    yield self._step_of(parameter, parameter.grad, group)

    def _step_of(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> ParameterStep:
        if gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and {type(self).__name__}"
                " looks at all of its elements: use an embedding with sparse=False, or torch.optim.SparseAdam for it"
            )
        dtype = _state_dtype(parameter)
        shard = None if self._shards is None else self._shards.shard_of(parameter)
        # One with gaps in its memory is copied, too: see Note [Memory order].
        is_itself = parameter.dtype == dtype and is_dense(parameter)
        weights = parameter if is_itself else laid_out_like(parameter.contiguous(), parameter.contiguous(), dtype)
        return ParameterStep(
            parameter=parameter,
            weights=weights,
            gradient=laid_out_like(gradient, weights, dtype),
            state=self.state[parameter],
            group=group,
            shard=shard,
        )

    # States.

    def _state_tensor(self, step: ParameterStep, key: str) -> Tensor:
        """Return a parameter's state, zeros where there is none, in the format in which it is computed with."""
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
        elif is_moment:  # in the weights' order of memory, too
            value = laid_out_like(value, step.weights, dtype)
        else:
            value = value.to(device, dtype)
        step.state[key] = value
        return value

    def prepare_states(self) -> None:
        """Do nothing: memory is allocated on first use; see `booster.interface.StateAllocator`."""

    def allocate_state(self, parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return the memory for a state that is about to be filled; see `booster.interface.StateAllocator`."""
        if self._state_shape(parameter, key) is None:
            return None
        return torch.empty(shape, dtype=_state_dtype(parameter), device=parameter.device)

    @property
    def can_fail_alone(self) -> bool:
        """False: a step fails on all ranks, or on none."""
        return False

    def check_states(self) -> None:
        """Return: states in memory can always be read."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict` of this class; fp32 states stay fp32.

        Raises:
            ConfigError: It is another optimizer's, or of parameters of other shapes.
        """
        self._check_stored(state_dict)
        handle = self.register_load_state_dict_pre_hook(hold_untouched)  # after the user's own hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _check_stored(self, stored: Mapping[str, Any]) -> None:
        name = type(self).__name__
        for saved, group in zip(stored["param_groups"], self.param_groups, strict=False):
            missing = [key for key in self.defaults if key not in saved]
            if missing:
                raise ConfigError(
                    f"the state_dict has no {missing[0]!r} in a param group, so it is of an optimizer other than"
                    f" {name}, which would go on with other moments: load the state of a {name}"
                )
            self._check_group(saved)
            for number, parameter in zip(saved["params"], group["params"], strict=False):
                for key, value in stored["state"].get(number, {}).items():
                    self._check_state(parameter, key, value)

    def _check_state(self, parameter: Tensor, key: str, value: Any) -> None:
        shape = self._state_shape(parameter, key)
        if not isinstance(value, Tensor) or (value.dim() == 0 and shape is None):
            return  # a number, such as "step"
        if shape is None or tuple(value.shape) != shape:
            expected = "no such state" if shape is None else f"it in shape {shape}"
            raise ConfigError(
                f"the state_dict has {key!r} of shape {tuple(value.shape)} for a parameter of shape"
                f" {tuple(parameter.shape)}, of which {type(self).__name__} keeps {expected}: load it into an optimizer"
                " of the same class over the model that it was saved from, with its parameters in the same order"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        for parameter, values in self.state.items():
            for key, value in values.items():
                if isinstance(value, Untouched):
                    values[key] = self._loaded(parameter, key, value.tensor)

    def _loaded(self, parameter: Tensor, key: str, value: Tensor) -> Any:
        if self._state_shape(parameter, key) is None:
            return int(value) if key == "step" else value
        return value.to(parameter.device, _state_dtype(parameter))


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype


def moment_dtype(parameter: Tensor) -> torch.dtype:
    """Return the format of a parameter's moments."""
    dtype = parameter.dtype
    # torch's kernels for accelerators ask for one dtype of parameter and states.
    return torch.float32 if dtype in _LOW_PRECISION and parameter.is_cpu else dtype


def complete_step(state: dict[str, Any]) -> Tensor:
    """Make "step" an fp32 tensor on the CPU, zero where there is none, and return it."""
    step = state.get("step")
    if not (isinstance(step, Tensor) and step.is_cpu and step.dtype is torch.float32):
        step = state["step"] = torch.tensor(0.0 if step is None else float(step), dtype=torch.float32)
    return step


def complete_moments(state: dict[str, Any], parameter: Tensor) -> None:
    """Make the moments tensors beside the parameter, in its memory order; zeros where there are none."""
    dtype = moment_dtype(parameter)
    for key in MOMENTS:
        value = state.get(key)
        if value is None:
            state[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        elif not _is_in_form(value, parameter, dtype):
            model = parameter if is_dense(parameter) else parameter.contiguous()
            state[key] = laid_out_like(value, model, dtype)


def _is_in_form(value: Tensor, parameter: Tensor, dtype: torch.dtype) -> bool:
    if value.dtype is not dtype:
        return False
    if parameter.is_cpu and value.is_cpu and parameter.is_contiguous():
        return value.is_contiguous()
    return value.device == parameter.device and value.stride() == parameter.stride()


def require_learning_rate(group: Mapping[str, Any]) -> None:
    """Return if a group's lr can be multiplied with.

    Raises:
        ConfigError: It can't.
    """
    lr = group["lr"]
    if lr is None:
        raise ConfigError("lr=None is not a learning rate, and this optimizer does not compute one: give lr=2e-4 or so")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {tuple(lr.shape)}: give one with one element, or a number")
    require_amount(group, "lr")


def require_amount(
    group: Mapping[str, Any], name: str, *, is_positive: bool = False, below: float = math.inf, why: str = ""
) -> None:
    """Return if a hyperparameter is a finite number from 0 on.

    Args:
        group: A param group, defaults included.
        name: Of the hyperparameter.
        is_positive: 0 does not do either.
        below: What it must be less than.
        why: What would go wrong, to be put into the message.

    Raises:
        ConfigError: It is not.
    """
    value = group[name]
    if _is_number(value):
        number = float(value)
        if math.isfinite(number) and (number > 0 if is_positive else number >= 0) and number < below:
            return
    kind = "a positive finite number" if is_positive else "a finite number from 0 on"
    limit = "" if math.isinf(below) else f", less than {below:g}"
    raise ConfigError(f"{name}={value!r}{' ' + why if why else ' can not be computed with'}: give {kind}{limit}")


def require_fractions(group: Mapping[str, Any], name: str, count: int, *, example: tuple[float, ...]) -> None:
    """Return if a hyperparameter is so many numbers from 0 on, each less than 1.

    Raises:
        ConfigError: It is not.
    """
    values = group[name]
    is_row = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    if not is_row or not all(_is_number(value) and 0.0 <= float(value) < 1.0 for value in values):
        raise ConfigError(
            f"{name}={values!r} are no decay rates, which keep a part of what was: give {count} numbers from 0 on and"
            f" less than 1, such as {example}"
        )


def require_flag(group: Mapping[str, Any], name: str) -> None:
    """Return if a hyperparameter is True or False.

    Raises:
        ConfigError: It is not a bool: an argument may be in the place of another.
    """
    if not isinstance(group[name], bool):
        raise ConfigError(
            f"{name}={group[name]!r} is not a bool, so an argument may be in the place of another: give True or"
            " False, and arguments after lr by keyword"
        )


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)
