"""The figures of benchmarks/adam/run.py: rows of the table, and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _harness.samples import Samples, Spread, paired_ratios
from _harness.table import align
from _harness.targets import Target
from adam.variants import BASELINES, CONTROL, DEEPSPEED, IN_PLACE, IN_PLACE_ALONE, OURS, REFERENCE_PASS, Variant

__all__ = ["Case", "Row", "format_rows", "rows_of", "targets_of"]

_HEAD = ["variant", "ns/param", "best", "quartiles", "GB/s", "of in place", "over baseline"]
_OF_IN_PLACE = 0.95
_OVER_FUSED = 1.0
_FASTER_THAN_SEQUENCE, _FASTER_THAN_DEEPSPEED, _REFERENCE_FASTER = 2.3, 1.5, 1.6
# Nanoseconds a parameter for one and two threads, where memory is read and written in place by one thread at 54 GB/s.
_MOST_NANOSECONDS = {1: 0.60, 2: 0.50}
_REFERENCE_BANDWIDTH = 54.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What was measured together."""

    precision: str
    numel: int
    num_threads: int

    @property
    def title(self) -> str:
        """Heads the table."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return f"{self.numel / 1e6:g}M parameters, {self.precision}, {threads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant's figures.

    Attributes:
        name: The variant.
        num_bytes: It has to move for each parameter.
        nanoseconds: A parameter takes.
        best_nanoseconds: Of the fastest step.
        gigabytes_per_second: At the median.
        of_in_place: Its bytes per second over those of reading and writing in place with as many threads, in the same
            round.
        over_baseline: Its time over the baseline's of the same round.
    """

    name: str
    num_bytes: int
    nanoseconds: Spread
    best_nanoseconds: float
    gigabytes_per_second: float
    of_in_place: Spread
    over_baseline: Spread


def rows_of(case: Case, variants: Mapping[str, Variant], samples: Mapping[str, Samples]) -> list[Row]:
    """Returns a row for every variant."""
    seconds = {name: samples[name].seconds for name in variants}
    rows = []
    for name, variant in variants.items():
        bytes_ratio = variant.num_bytes / variants[IN_PLACE].num_bytes
        nanoseconds = Spread.of([second * 1e9 / case.numel for second in seconds[name]])
        rows.append(
            Row(
                name=name,
                num_bytes=variant.num_bytes,
                nanoseconds=nanoseconds,
                best_nanoseconds=min(seconds[name]) * 1e9 / case.numel,
                gigabytes_per_second=variant.num_bytes / nanoseconds.median,
                of_in_place=Spread.of(
                    [ratio * bytes_ratio for ratio in paired_ratios(seconds[IN_PLACE], seconds[name])]
                ),
                over_baseline=Spread.of(paired_ratios(seconds[name], seconds[BASELINES[case.precision]])),
            )
        )
    return rows


def format_rows(case: Case, rows: Sequence[Row]) -> str:
    """Returns the figures for people to read."""
    cells = [
        [
            f"{row.name} ({row.num_bytes} B)",
            f"{row.nanoseconds.median:.3f}",
            f"{row.best_nanoseconds:.3f}",
            f"[{row.nanoseconds.first:.3f}, {row.nanoseconds.third:.3f}]",
            f"{row.gigabytes_per_second:.1f}",
            f"{row.of_in_place.median:.2f}",
            f"{row.over_baseline.median:.3f}",
        ]
        for row in rows
    ]
    return "\n".join([case.title, *align([_HEAD, *cells])])


def targets_of(case: Case, rows: Sequence[Row], samples: Mapping[str, Samples]) -> list[Target]:
    """Returns what is to be reached; a target over a peer only where it was measured."""
    by_name = {row.name: row for row in rows}
    if case.precision == "fp32":
        return [_bandwidth_target(case, by_name[OURS]), _fused_target(case, by_name)]
    targets = [_time_target(case, by_name)] if case.num_threads in _MOST_NANOSECONDS else []
    targets.append(_faster_target(case, OURS, BASELINES["mixed"], _FASTER_THAN_SEQUENCE, samples))
    if DEEPSPEED["mixed"] in by_name:
        targets.append(_faster_target(case, OURS, DEEPSPEED["mixed"], _FASTER_THAN_DEEPSPEED, samples))
    targets.append(_faster_target(case, REFERENCE_PASS, BASELINES["mixed"], _REFERENCE_FASTER, samples))
    return targets


def _bandwidth_target(case: Case, row: Row) -> Target:
    share = row.of_in_place
    return Target(
        what=f"ours of in-place bandwidth, {case.title}",
        value=share.median,
        low=_OF_IN_PLACE,
        interval=(share.low, share.high),
    )


def _fused_target(case: Case, rows: Mapping[str, Row]) -> Target:
    ratio = rows[OURS].over_baseline
    return Target(
        what=f"ours over torch fused, {case.title}",
        value=ratio.median,
        high=_OVER_FUSED,
        interval=(ratio.low, ratio.high),
        control=rows[CONTROL].over_baseline.median,
    )


def _time_target(case: Case, rows: Mapping[str, Row]) -> Target:
    bandwidth = rows[IN_PLACE_ALONE].gigabytes_per_second
    time = rows[OURS].nanoseconds
    return Target(
        what=f"ours, where one thread in place reaches {bandwidth:.1f} GB/s, {case.title}",
        value=time.median,
        high=_MOST_NANOSECONDS[case.num_threads] * _REFERENCE_BANDWIDTH / bandwidth,
        interval=(time.low, time.high),
        unit=" ns/param",
    )


def _faster_target(case: Case, name: str, peer: str, times: float, samples: Mapping[str, Samples]) -> Target:
    speedup = Spread.of(paired_ratios(samples[peer].seconds, samples[name].seconds))
    return Target(
        what=f"speed of {name} over {peer}, {case.title}",
        value=speedup.median,
        low=times,
        interval=(speedup.low, speedup.high),
    )
