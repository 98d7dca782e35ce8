"""Measures all configurations one after the other, and compares their losses with those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from booster.benchmark.configurations import SERIAL, Configuration
from booster.benchmark.measurement import Figures
from booster.benchmark.processes import ConfigurationError, Ranks
from booster.benchmark.settings import BenchmarkSettings

__all__ = ["Outcome", "measure_all"]

# Of the losses in fp32, whose sums are in another order in every configuration. A wrong gradient is far above it: the
# losses of the first steps are of the order of 1, and each step changes them by about a thousandth.
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one configuration.

    Attributes:
        configuration: Which.
        figures: The largest over the ranks; None where it could not be measured.
        loss_difference: The largest from the losses of one process, relative to those; None where there are none.
        error: Why it could not be measured, or how its losses are wrong; None if all is well.
    """

    configuration: Configuration
    figures: Figures | None = None
    loss_difference: float | None = None
    error: str | None = None


def measure_all(
    configurations: list[Configuration], settings: BenchmarkSettings, tell: Callable[[str], None]
) -> list[Outcome]:
    """Returns the outcome of one process and of each configuration, in this order.

    Args:
        configurations: From `find_configurations`.
        settings: Of all of them.
        tell: Called with the name of each before it is measured.
    """
    outcomes: list[Outcome] = []
    expected: list[float] | None = None
    with Ranks(settings) as ranks:
        for configuration in [Configuration(SERIAL), *configurations]:
            tell(configuration.name)
            try:
                figures = ranks.measure(configuration)
            except ConfigurationError as error:
                outcomes.append(Outcome(configuration=configuration, error=str(error)))
                continue
            if configuration.mode == SERIAL:
                expected = figures.losses
            outcomes.append(_compared(configuration, figures, expected))
    return outcomes


def _compared(configuration: Configuration, figures: Figures, expected: list[float] | None) -> Outcome:
    if expected is None:
        alone = "its losses could not be compared, as one process alone failed"
        return Outcome(configuration=configuration, figures=figures, error=alone)
    # nan is no difference that any comparison would show
    differences = [abs(loss - right) / abs(right) for loss, right in zip(figures.losses, expected, strict=True)]
    difference = max(differences, key=lambda one: (one != one, one))
    error: str | None = None
    if not difference <= _TOLERANCE:
        error = f"its losses are {figures.losses}, but one process has {expected}"
    return Outcome(configuration=configuration, figures=figures, loss_difference=difference, error=error)
