"""The loss scale: a constant, or a factor that falls when gradients overflow and grows while they do not."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from booster.errors import CheckpointError, ConfigError

# The smallest scale whose reciprocal is finite in fp32.
_SMALLEST_SCALE = 2.0**-126

# Note [Hysteresis]
# The first `hysteresis - 1` overflows are forgiven: their steps are skipped, the scale stays. From then on every
# overflow lowers the scale. Forgiveness is renewed by a whole growth interval of clean steps and by nothing less (so a
# single clean step between overflows does not keep a scale alive that is too high). With hysteresis 1 this is torch's
# GradScaler, bit for bit: the scale is rounded to fp32 after each change, as there.


class DynamicLossScaler:
    """A loss scale that is lowered after overflows and raised after `growth_interval` clean steps in a row.

    See Note [Hysteresis]. All numbers live on the host.

    Args:
        initial_scale: The factor to begin with.
        growth_factor: Multiplies the scale after `growth_interval` clean steps; above 1.
        backoff_factor: Multiplies the scale after an overflow; between 0 and 1.
        growth_interval: Clean steps in a row before the scale grows.
        hysteresis: How many overflows it takes before the scale is lowered; 1: the first one does.
        min_scale: The scale never falls below; None: the smallest fp32 with a finite reciprocal.
        max_scale: The scale never grows above; None: no limit but fp32's own.
        report: Called with one line whenever a step is skipped or the scale grows.

    Raises:
        ConfigError: A number out of its range.
    """

    def __init__(
        self,
        initial_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        *,
        report: Callable[[str], None] | None = None,
    ) -> None:
        _check_scale("initial_scale", initial_scale)
        _check_factors(growth_factor, backoff_factor)
        _check_count("growth_interval", growth_interval)
        _check_count("hysteresis", hysteresis)
        _check_limits(initial_scale, min_scale, max_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.min_scale = max(_SMALLEST_SCALE, _SMALLEST_SCALE if min_scale is None else float(min_scale))
        self.max_scale = math.inf if max_scale is None else float(max_scale)
        self._report = report
        self._scale = self._limited(float(initial_scale))
        self._num_clean_steps = 0
        self._num_overflows = 0

    @property
    def scale(self) -> float:
        """The factor for losses of the current window."""
        return self._scale

    def update(self, found_nonfinite: bool) -> None:
        """Adapts the factor after a step was taken (False) or skipped (True)."""
        before = self._scale
        if found_nonfinite:
            self._count_overflow()
        else:
            self._count_clean_step()
        if self._report is None or not (found_nonfinite or self._scale != before):
            return
        event = "a gradient overflowed and the step was skipped" if found_nonfinite else "no gradient overflowed"
        if self._scale != before:
            self._report(f"loss scale {before:g} -> {self._scale:g}: {event}")
        else:
            self._report(f"the loss scale stays at {before:g}: {event}; {self._why_it_stays()}")

    def state_dict(self) -> dict[str, float | int]:
        """Returns what `load_state_dict` needs to go on exactly."""
        return {
            "scale": self._scale,
            "num_clean_steps": self._num_clean_steps,
            "num_overflows": self._num_overflows,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Takes over what `state_dict` returned, within this scaler's own limits.

        A `ConstantLossScaler`'s state is no experience with this model's gradients, and is left aside.

        Raises:
            CheckpointError: The state is no loss scaler's.
        """
        _check_state(state)
        if "num_clean_steps" not in state:
            return
        self._scale = self._limited(float(state["scale"]))
        self._num_clean_steps = int(state["num_clean_steps"])
        self._num_overflows = int(state["num_overflows"])

    def _count_overflow(self) -> None:
        self._num_clean_steps = 0
        self._num_overflows = min(self._num_overflows + 1, self.hysteresis)
        if self._num_overflows >= self.hysteresis:
            self._scale = self._limited(self._scale * self.backoff_factor)

    def _why_it_stays(self) -> str:
        """Returns in words why the overflow just counted left the scale as it is."""
        if self._scale <= self.min_scale:
            return "it is the smallest allowed (min_scale)"
        missing = self.hysteresis - self._num_overflows
        if missing > 0:
            lower = "overflow lowers" if missing == 1 else "overflows lower"
            return f"{missing} more {lower} it (hysteresis={self.hysteresis})"
        return f"backoff_factor={self.backoff_factor!r} is too near to 1 to lower it in fp32"

    def _count_clean_step(self) -> None:
        self._num_clean_steps += 1
        if self._num_clean_steps < self.growth_interval:
            return
        self._num_clean_steps = 0
        self._num_overflows = 0
        grown = self._limited(self._scale * self.growth_factor)
        if math.isfinite(grown):
            self._scale = grown

    def _limited(self, scale: float) -> float:
        return min(max(ctypes.c_float(scale).value, self.min_scale), self.max_scale)


class ConstantLossScaler:
    """A loss scale that stays. A step whose gradients overflowed is skipped all the same.

    Args:
        scale: The factor.

    Raises:
        ConfigError: The scale is no finite positive number.
    """

    def __init__(self, scale: float) -> None:
        _check_scale("loss_scale", scale)
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        """The factor for losses."""
        return self._scale

    def update(self, found_nonfinite: bool) -> None:
        """Does nothing: the scale is a setting."""

    def state_dict(self) -> dict[str, float | int]:
        """Returns the scale, for the reader of a checkpoint."""
        return {"scale": self._scale}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Checks the state and keeps the scale that this scaler was made with: it is a setting.

        Raises:
            CheckpointError: The state is no loss scaler's.
        """
        _check_state(state)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_scale(name: str, value: Any) -> None:
    if not _is_number(value) or not _SMALLEST_SCALE <= value < 2.0**128:
        raise ConfigError(
            f"{name}={value!r} is no finite positive fp32 number, and losses are multiplied with it: pass for example"
            " 2**16"
        )


def _check_factors(growth_factor: Any, backoff_factor: Any) -> None:
    if not _is_number(growth_factor) or growth_factor <= 1:
        raise ConfigError(
            f"growth_factor={growth_factor!r} does not raise the loss scale: pass a number above 1, for example 2.0"
        )
    if not _is_number(backoff_factor) or not 0 < backoff_factor < 1:
        raise ConfigError(
            f"backoff_factor={backoff_factor!r} does not lower the loss scale: pass a number between 0 and 1, for"
            " example 0.5"
        )


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} counts steps: pass an integer of at least 1")


def _check_limits(initial: float, low: Any, high: Any) -> None:
    for name, limit in (("min_scale", low), ("max_scale", high)):
        if limit is not None:
            _check_scale(name, limit)
    if (low is not None and initial < low) or (high is not None and initial > high):
        raise ConfigError(
            f"the initial loss scale {initial:g} is not between min_scale={low} and max_scale={high}: move the limits,"
            " or begin between them"
        )


def _check_state(state: Mapping[str, Any]) -> None:
    keys = ("scale", "num_clean_steps", "num_overflows") if "num_clean_steps" in state else ("scale",)
    if all(_is_number(state.get(key)) and state[key] >= 0 for key in keys) and state["scale"] > 0:
        return
    raise CheckpointError(
        f"{dict(state)!r} is no loss scaler's state, which has a positive scale and two counts: load what"
        " optimizer.state_dict()['loss_scaler'] held"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleArguments:
    """See `DynamicLossScaler`."""

    initial_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float | None = None

    @property
    def facts(self) -> list[str]:
        """Returns what must be the same on all ranks, which skip the same steps."""
        return [f"{name}={getattr(self, name)!r}" for name in self.__slots__]

    def check(self) -> None:
        """Raises for what can't be.

        Raises:
            ConfigError: A number out of its range.
        """
        self.new_scaler()

    def new_scaler(self, report: Callable[[str], None] | None = None) -> DynamicLossScaler:
        """Returns a scaler for one optimizer.

        Args:
            report: Called with one line whenever a step is skipped or the scale grows.
        """
        return DynamicLossScaler(**asdict(self), report=report)
