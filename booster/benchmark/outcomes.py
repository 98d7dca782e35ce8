"""Results of all configurations, with their losses compared to those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from booster.benchmark.configurations import SERIAL, Configuration
from booster.benchmark.measurement import Metrics
from booster.benchmark.processes import ConfigurationError, WorkerPool
from booster.benchmark.settings import BenchmarkSettings

__all__ = ["BenchmarkResult", "measure_all"]

# Relative tolerance of fp32 losses, as the order of summation differs between configurations. A wrong gradient exceeds
# it by far: losses of the first steps are of the order of 1, and each step changes them by about 1e-3.
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """Result of one configuration.

    Attributes:
        configuration: The measured configuration.
        figures: Metrics, each the maximum over ranks; None if the measurement failed.
        loss_difference: Largest relative difference from the losses of one process; None if not compared.
        error: Error of the measurement or of the losses; None on success.
    """

    configuration: Configuration
    metrics: Metrics | None = None
    loss_difference: float | None = None
    error: str | None = None


def measure_all(
    configurations: list[Configuration], settings: BenchmarkSettings, on_start: Callable[[str], None]
) -> list[BenchmarkResult]:
    """Measure a single process and then each configuration.

    Args:
        configurations: Result of `find_configurations`.
        settings: Settings of the benchmark.
        on_start: Callback for progress, called with the name of each configuration before it is measured.
    """
    results: list[BenchmarkResult] = []
    expected: list[float] | None = None
    with WorkerPool(settings) as pool:
        for configuration in [Configuration(SERIAL), *configurations]:
            on_start(configuration.name)
            try:
                metrics = pool.measure(configuration)
            except ConfigurationError as error:
                results.append(BenchmarkResult(configuration=configuration, error=str(error)))
                continue
            if configuration.mode == SERIAL:
                expected = metrics.losses
            results.append(_compare_losses(configuration, metrics, expected))
    return results


def _compare_losses(configuration: Configuration, metrics: Metrics, expected: list[float] | None) -> BenchmarkResult:
    if expected is None:
        alone = "its losses could not be compared, as the single process failed"
        return BenchmarkResult(configuration=configuration, metrics=metrics, error=alone)
    # Comparisons with nan are False: this key makes it the maximum, and `not <=` below an error.
    differences = [
        abs(loss - reference) / abs(reference) for loss, reference in zip(metrics.losses, expected, strict=True)
    ]
    difference = max(differences, key=lambda one: (one != one, one))
    error: str | None = None
    if not difference <= _TOLERANCE:
        error = f"its losses are {metrics.losses}, but one process has {expected}"
    return BenchmarkResult(configuration=configuration, metrics=metrics, loss_difference=difference, error=error)
