"""The figures of benchmarks/disk/run.py: from samples to rows, a table and targets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _harness.engine import Step
from _harness.samples import Samples, Spread, paired_ratios
from _harness.table import align
from _harness.targets import Target
from disk.variants import IN_MEMORY, ON_DISK, is_raw

__all__ = ["ByteCounts", "Row", "counting", "format_rows", "rows_of", "targets_of"]

_LEAST_SHARE = 0.90
_MOST_TIMES = 1.10


@dataclass(slots=True)
class ByteCounts:
    """What one variant had the disk read and write in its last round, as the system counts it."""

    read: int = 0
    written: int = 0


def counting(step: Step, counts: ByteCounts) -> Step:
    """Returns the step with its traffic counted: the page cache's is none."""

    def counted(index: int) -> float:
        before = _traffic()
        loss = float(step(index))
        after = _traffic()
        counts.read, counts.written = after[0] - before[0], after[1] - before[1]
        return loss

    return counted


def _traffic() -> tuple[int, int]:
    descriptor = os.open("/proc/self/io", os.O_RDONLY)
    try:
        lines = os.read(descriptor, 4096).decode().splitlines()
    finally:
        os.close(descriptor)
    values = dict(line.split(": ") for line in lines)
    return int(values["read_bytes"]), int(values["write_bytes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant.

    Attributes:
        seconds: Of a round.
        best_seconds: Of the fastest.
        read_bytes: What the disk read in the last round.
        written_bytes: What was written to it.
        bytes_per_second: Both over the median.
        share: Of the raw bandwidth, which is that of the fastest raw variant in the same round.
    """

    name: str
    seconds: Spread
    best_seconds: float
    read_bytes: int
    written_bytes: int
    bytes_per_second: float
    share: Spread


def rows_of(samples: Mapping[str, Samples], counts: Mapping[str, ByteCounts]) -> list[Row]:
    """Returns a row for each variant."""
    disk = _disk_seconds(samples)
    return [_row(name, one.seconds, counts[name], disk) for name, one in samples.items()]


def _row(name: str, seconds: Sequence[float], counts: ByteCounts, disk: Sequence[float]) -> Row:
    spread = Spread.of(seconds)
    return Row(
        name=name,
        seconds=spread,
        best_seconds=min(seconds),
        read_bytes=counts.read,
        written_bytes=counts.written,
        bytes_per_second=(counts.read + counts.written) / spread.median,
        share=Spread.of(paired_ratios(disk, seconds)),
    )


def format_rows(rows: Sequence[Row]) -> str:
    """Returns a table."""
    head = ["variant", "median ms", "best ms", "read MB", "written MB", "GB/s", "of raw", "quartiles"]
    return "\n".join(align([head, *map(_cells, rows)]))


def _cells(row: Row) -> list[str]:
    has_traffic = row.name != IN_MEMORY
    return [
        row.name,
        f"{row.seconds.median * 1e3:.1f}",
        f"{row.best_seconds * 1e3:.1f}",
        f"{row.read_bytes / 1e6:.1f}",
        f"{row.written_bytes / 1e6:.1f}",
        f"{row.bytes_per_second / 1e9:.2f}" if has_traffic else "-",
        f"{row.share.median:.3f}" if has_traffic else "-",
        f"[{row.share.first:.3f}, {row.share.third:.3f}]" if has_traffic else "-",
    ]


def targets_of(samples: Mapping[str, Samples]) -> list[Target]:
    """Returns what steps with states on the disk should reach."""
    step, disk = samples[ON_DISK].seconds, _disk_seconds(samples)
    limit = [max(pair) for pair in zip(disk, samples[IN_MEMORY].seconds, strict=True)]
    share, times = Spread.of(paired_ratios(disk, step)), Spread.of(paired_ratios(step, limit))
    return [
        Target(
            what="step: share of the raw read and write bandwidth",
            value=share.median,
            low=_LEAST_SHARE,
            interval=(share.low, share.high),
        ),
        Target(
            what="step: time over the larger of disk time and compute time",
            value=times.median,
            high=_MOST_TIMES,
            interval=(times.low, times.high),
        ),
    ]


def _disk_seconds(samples: Mapping[str, Samples]) -> list[float]:
    """Returns what the disk needs for a step's bytes, round by round: by the fastest of the raw variants."""
    raw = [one.seconds for name, one in samples.items() if is_raw(name)]
    return [min(seconds) for seconds in zip(*raw, strict=True)]
