"""The numbers of a dynamic loss scale, as whoever makes scalers from them keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from booster.mixed_precision.loss_scaler import DynamicLossScaler

__all__ = ["LossScaleArguments"]


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
