"""Results of all configurations, with their losses compared to those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from booster.benchmark.configurations import SERIAL, Configuration
from booster.benchmark.measurement import Figures
from booster.benchmark.processes import ConfigurationError, Ranks
from booster.benchmark.settings import BenchmarkSettings

__all__ = ["Outcome", "measure_all"]

# Relative tolerance of fp32 losses, as the order of summation differs between configurations. A wrong gradient exceeds
# it by far: losses of the first steps are of the order of 1, and each step changes them by about 1e-3.
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one configuration.

    Attributes:
        configuration: The measured configuration.
        figures: Metrics, each the maximum over ranks; None if the measurement failed.
        loss_difference: Largest relative difference from the losses of one process; None if not compared.
        error: Error of the measurement or of the losses; None on success.
    """

    configuration: Configuration
    figures: Figures | None = None
    loss_difference: float | None = None
    error: str | None = None


def measure_all(
    configurations: list[Configuration], settings: BenchmarkSettings, tell: Callable[[str], None]
) -> list[Outcome]:
    """Measure a single process and then each configuration.

    Args:
        configurations: Result of `find_configurations`.
        settings: Settings of the benchmark.
        tell: Callback for progress, called with the name of each configuration before it is measured.
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
        alone = "its losses could not be compared, as the single process failed"
        return Outcome(configuration=configuration, figures=figures, error=alone)
    # Comparisons with nan are False: this key makes it the maximum, and `not <=` below an error.
    differences = [abs(loss - right) / abs(right) for loss, right in zip(figures.losses, expected, strict=True)]
    difference = max(differences, key=lambda one: (one != one, one))
    error: str | None = None
    if not difference <= _TOLERANCE:
        error = f"its losses are {figures.losses}, but one process has {expected}"
    return Outcome(configuration=configuration, figures=figures, loss_difference=difference, error=error)
