"""Constant and dynamic loss scalers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from booster.errors import CheckpointError, ConfigError
from booster.validation import is_count, is_non_nan_number

# The smallest scale whose reciprocal is finite in fp32.
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True)
class LossScaleConfig:
    """Numbers of a `DynamicLossScaler`.

    Attributes:
        initial_scale: Initial scale.
        growth_factor: Factor of the scale after `growth_interval` clean steps; above 1.
        backoff_factor: Factor of the scale after an overflow; between 0 and 1.
        growth_interval: Number of consecutive clean steps before the scale grows.
        hysteresis: Number of overflows before the scale is reduced.
        min_scale: Lower limit; optional, defaults to the smallest fp32 number with a finite reciprocal.
        max_scale: Upper limit; optional, defaults to the range of fp32.
    """

    initial_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float | None = None

    @property
    def fingerprint(self) -> list[str]:
        """Settings that must be the same on all ranks, so that they skip the same steps."""
        return [f"{name}={getattr(self, name)!r}" for name in self.__slots__]

    def check(self) -> None:
        """Raise `ConfigError` if a number is out of range."""
        _check_scale("initial_scale", self.initial_scale)
        _check_factors(self.growth_factor, self.backoff_factor)
        _check_count("growth_interval", self.growth_interval)
        _check_count("hysteresis", self.hysteresis)
        _check_limits(self.initial_scale, self.min_scale, self.max_scale)


class DynamicLossScaler:
    """Loss scale that is reduced after overflows and raised after `growth_interval` consecutive clean steps.

    Hysteresis: the first `hysteresis - 1` overflows only skip their steps, and every further overflow reduces the
    scale. Only a complete growth interval of clean steps resets the count, so a single clean step between overflows
    does not preserve a scale that is too high. With hysteresis 1 the scaler is bit-equal to torch's GradScaler: the
    scale is rounded to fp32 after each change. The state is on the host.

    Args:
        config: Numbers of the scale.
        report: Callable that receives one line when a step is skipped or the scale grows.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(self, config: LossScaleConfig, report: Callable[[str], None] | None = None) -> None:
        config.check()
        self._config = config
        self.min_scale = max(_SMALLEST_SCALE, float(config.min_scale or 0.0))
        self.max_scale = math.inf if config.max_scale is None else float(config.max_scale)
        self._report = report
        self._scale = self._clamp(float(config.initial_scale))
        self._num_clean_steps = 0
        self._num_overflows = 0

    @property
    def scale(self) -> float:
        """Scale of the losses in the current accumulation."""
        return self._scale

    def update(self, found_nonfinite: bool) -> None:
        """Update the scale after a step.

        Args:
            found_nonfinite: Whether the step was skipped because of nonfinite gradients.
        """
        before = self._scale
        if found_nonfinite:
            self._num_clean_steps = 0
            self._num_overflows = min(self._num_overflows + 1, self._config.hysteresis)
            if self._num_overflows >= self._config.hysteresis:
                self._scale = self._clamp(self._scale * self._config.backoff_factor)
        else:
            self._count_clean_step()
        if self._report is None or not (found_nonfinite or self._scale != before):
            return
        event = "a gradient overflowed and the step was skipped" if found_nonfinite else "no gradient overflowed"
        if self._scale != before:
            self._report(f"loss scale {before:g} -> {self._scale:g}: {event}")
        else:
            self._report(f"the loss scale stays at {before:g}: {event}; {self._why_unchanged()}")

    def state_dict(self) -> dict[str, float | int]:
        """Return the state for `load_state_dict`."""
        return {
            "scale": self._scale,
            "num_clean_steps": self._num_clean_steps,
            "num_overflows": self._num_overflows,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore a state, clamped to this scaler's limits.

        The state of a `ConstantLossScaler` is ignored, as its scale was not adapted to the gradients.

        Raises:
            CheckpointError: The state is not that of a loss scaler.
        """
        _check_state(state)
        if "num_clean_steps" not in state:
            return
        self._scale = self._clamp(float(state["scale"]))
        self._num_clean_steps = int(state["num_clean_steps"])
        self._num_overflows = int(state["num_overflows"])

    def _why_unchanged(self) -> str:
        if self._scale <= self.min_scale:
            return "it is the smallest allowed (min_scale)"
        missing = self._config.hysteresis - self._num_overflows
        if missing > 0:
            lower = "overflow lowers" if missing == 1 else "overflows lower"
            return f"{missing} more {lower} it (hysteresis={self._config.hysteresis})"
        return f"backoff_factor={self._config.backoff_factor!r} is too near to 1 to lower it in fp32"

    def _count_clean_step(self) -> None:
        self._num_clean_steps += 1
        if self._num_clean_steps < self._config.growth_interval:
            return
        self._num_clean_steps = 0
        self._num_overflows = 0
        grown = self._clamp(self._scale * self._config.growth_factor)
        if math.isfinite(grown):
            self._scale = grown

    def _clamp(self, scale: float) -> float:
        return min(max(ctypes.c_float(scale).value, self.min_scale), self.max_scale)


class ConstantLossScaler:
    """Constant loss scale. Steps with overflowed gradients are skipped, too.

    Args:
        scale: Factor of the losses.

    Raises:
        ConfigError: The scale is not a finite positive number.
    """

    def __init__(self, scale: float) -> None:
        _check_scale("loss_scale", scale)
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, found_nonfinite: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self._scale}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Validate the state. The scale of the constructor is kept.

        Raises:
            CheckpointError: The state is not that of a loss scaler.
        """
        _check_state(state)


def _is_finite(value: Any) -> bool:
    return is_non_nan_number(value) and math.isfinite(value)


def _check_scale(name: str, value: Any) -> None:
    if not _is_finite(value) or not _SMALLEST_SCALE <= value < 2.0**128:
        raise ConfigError(f"{name}={value!r} is not a finite positive fp32 number: pass a scale such as 2**16")


def _check_factors(growth_factor: Any, backoff_factor: Any) -> None:
    if not _is_finite(growth_factor) or growth_factor <= 1:
        raise ConfigError(
            f"growth_factor={growth_factor!r} does not raise the loss scale: pass a number above 1, such as 2.0"
        )
    if not _is_finite(backoff_factor) or not 0 < backoff_factor < 1:
        raise ConfigError(
            f"backoff_factor={backoff_factor!r} does not lower the loss scale: pass a number between 0 and 1, such as"
            " 0.5"
        )


def _check_count(name: str, value: Any) -> None:
    if not is_count(value):
        raise ConfigError(f"{name}={value!r} is not a number of steps: pass a positive int")


def _check_limits(initial: float, low: Any, high: Any) -> None:
    for name, limit in (("min_scale", low), ("max_scale", high)):
        if limit is not None:
            _check_scale(name, limit)
    if (low is not None and initial < low) or (high is not None and initial > high):
        raise ConfigError(
            f"the initial loss scale {initial:g} is not between min_scale={low} and max_scale={high}: choose"
            " other limits or another initial scale"
        )


def _check_state(state: Mapping[str, Any]) -> None:
    keys = ("scale", "num_clean_steps", "num_overflows") if "num_clean_steps" in state else ("scale",)
    if all(_is_finite(state.get(key)) and state[key] >= 0 for key in keys) and state["scale"] > 0:
        return
    raise CheckpointError(
        f"{dict(state)!r} is not a loss scaler's state, which has a positive scale and two counts: load"
        " optimizer.state_dict()['loss_scaler']"
    )
