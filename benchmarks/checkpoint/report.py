"""The figures of benchmarks/checkpoint/run.py: from the ranks' samples to rows, tables and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from _harness.samples import Spread, paired_ratios
from _harness.table import align
from _harness.targets import Target
from checkpoint.disk import COLD_SHARE
from checkpoint.measure import Measured, Peaks
from checkpoint.variants import ASYNC_BASELINE, BASELINE, CONTROL, DCP, OURS, OURS_ASYNC, SAFETENSORS, Variant

__all__ = ["Figures", "Row", "format_rows", "rows_of", "targets_of"]

_MIB = 2**20
_MOST_EXTRA_MIB = 64 + 16  # and one staging buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The times of one variant's saves or loads.

    Attributes:
        seconds: Of every one, on its slowest rank.
        best_seconds: Of the fastest.
        bytes_per_second: The state's bytes over the median.
        share: Of the baseline's bytes per second, both of the same round: 1 is what the disk, or memory, can do.
        peak_bytes: Memory that it took on the rank where it took most; None: not measured.
    """

    seconds: Spread
    best_seconds: float
    bytes_per_second: float
    share: Spread
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant; `save` is None for a peer that is not installed.

    Attributes:
        durable: Of an asynchronous save: seconds until it was on the disk.
        cached: The largest share of the files that was in memory when a load began: 0 for a cold one.
    """

    name: str
    is_async: bool
    num_bytes: int = 0
    save: Figures | None = None
    load: Figures | None = None
    warm_load: Figures | None = None
    durable: Spread | None = None
    cached: float = 0.0


def rows_of(
    variants: Sequence[Variant], ranks: Sequence[Mapping[str, Measured]], peaks: Sequence[Mapping[str, Peaks]]
) -> list[Row]:
    """Returns a row per variant.

    Args:
        variants: What was to be measured, both baselines among them.
        ranks: What `measure_times` returned on each of them.
        peaks: What `measure_peaks` returned on each of them; empty: it was not called.
    """
    return [_row(variant.name, variant.is_async, ranks, peaks) for variant in variants]


def _row(
    name: str, is_async: bool, ranks: Sequence[Mapping[str, Measured]], peaks: Sequence[Mapping[str, Peaks]]
) -> Row:
    if name not in ranks[0]:
        return Row(name=name, is_async=is_async)
    baseline = ASYNC_BASELINE if is_async else BASELINE
    saves, settles = _slowest(name, ranks, _saves), _slowest(name, ranks, _settles)
    has_load, has_warm_load = bool(ranks[0][name].loads), bool(ranks[0][name].warm_loads)
    return Row(
        name=name,
        is_async=is_async,
        num_bytes=ranks[0][name].num_bytes,
        save=_figures(name, baseline, ranks, _saves, _largest(rank[name].save for rank in peaks)),
        load=_figures(name, baseline, ranks, _loads, _largest(rank[name].load for rank in peaks)) if has_load else None,
        warm_load=_figures(name, ASYNC_BASELINE, ranks, _warm_loads, None) if has_warm_load else None,
        durable=Spread.of([sum(pair) for pair in zip(saves, settles, strict=True)]) if settles else None,
        cached=max(rank[name].cached for rank in ranks),
    )


def _figures(
    name: str,
    baseline: str,
    ranks: Sequence[Mapping[str, Measured]],
    samples: Callable[[Measured], list[float]],
    peak_bytes: int | None,
) -> Figures:
    ours, num_bytes = _slowest(name, ranks, samples), ranks[0][name].num_bytes
    theirs, per_byte = _slowest(baseline, ranks, samples), num_bytes / ranks[0][baseline].num_bytes
    seconds = Spread.of(ours)
    return Figures(
        seconds=seconds,
        best_seconds=min(ours),
        bytes_per_second=num_bytes / seconds.median,
        share=Spread.of([per_byte * ratio for ratio in paired_ratios(theirs, ours)]),
        peak_bytes=peak_bytes,
    )


def _saves(measured: Measured) -> list[float]:
    return measured.saves


def _settles(measured: Measured) -> list[float]:
    return measured.settles


def _loads(measured: Measured) -> list[float]:
    return measured.loads


def _warm_loads(measured: Measured) -> list[float]:
    return measured.warm_loads


def _slowest(
    name: str, ranks: Sequence[Mapping[str, Measured]], samples: Callable[[Measured], list[float]]
) -> list[float]:
    return [max(times) for times in zip(*(samples(rank[name]) for rank in ranks), strict=True)]


def _largest(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


# Tables.


def format_rows(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the tables: durable saves, cold and warm loads, and how long training waits for an asynchronous save."""
    head = ["seconds", "best s", "GB/s", "of raw", "quartiles", "extra MiB"]
    saves = [(row, row.save) for row in rows if not row.is_async]
    loads = [(row, row.load) for row in rows if row.load is not None]
    warm_loads = [(row, row.warm_load) for row in rows if row.warm_load is not None]
    waits = [(row, row.save) for row in rows if row.is_async]
    yield _table(["durable save", *head], [[row.name, *_cells(figures)] for row, figures in saves])
    yield _table(["cold load", *head], [[row.name, *_cells(figures)] for row, figures in loads])
    head[3] = "of copy"
    yield _table(["warm load", *head], [[row.name, *_cells(figures)] for row, figures in warm_loads])
    head = ["asynchronous save", "blocks s", *head[1:], "durable s"]
    yield _table(head, [[row.name, *_cells(figures), _seconds(row.durable)] for row, figures in waits])
    cached = [
        f"{row.name}: {row.cached:.0%} of the files were in memory before a load"
        for row in rows
        if row.cached > COLD_SHARE
    ]
    if cached:
        yield "\n".join(["NOT COLD:", *cached])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(align([head, *rows]))


def _cells(figures: Figures | None) -> list[str]:
    if figures is None:
        return ["not installed", *["-"] * 5]
    return [
        f"{figures.seconds.median:.3f}",
        f"{figures.best_seconds:.3f}",
        f"{figures.bytes_per_second / 1e9:.2f}",
        f"{figures.share.median:.3f}",
        f"[{figures.share.first:.3f}, {figures.share.third:.3f}]",
        "-" if figures.peak_bytes is None else f"{figures.peak_bytes / _MIB:.0f}",
    ]


def _seconds(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.3f}"


# Targets.


def targets_of(ranks: Sequence[Mapping[str, Measured]], rows: Sequence[Row]) -> list[Target]:
    """Returns what our rows must reach, each against another row of the same rounds, if that was measured.

    Args:
        ranks: What `measure_times` returned on each of them.
        rows: What `rows_of` made of it.
    """
    targets = [
        _ratio_target(ranks, *target) for target in _RATIO_GOALS if target[1] in ranks[0] and target[2] in ranks[0]
    ]
    row = next(row for row in rows if row.name == OURS)
    for what, figures in (("saving", row.save), ("loading", row.load)):
        if figures is not None and figures.peak_bytes is not None:
            extra = figures.peak_bytes / _MIB
            targets.append(
                Target(what=f"extra memory per rank while {what}", value=extra, high=_MOST_EXTRA_MIB, unit=" MiB")
            )
    return targets


def _ratio_target(
    ranks: Sequence[Mapping[str, Measured]],
    what: str,
    slower: str,
    faster: str,
    samples: Callable[[Measured], list[float]],
    bounds: dict[str, float],
) -> Target:
    control = None
    if slower == BASELINE:
        control = Spread.of(paired_ratios(_slowest(BASELINE, ranks, samples), _slowest(CONTROL, ranks, samples))).median
    ratio = Spread.of(paired_ratios(_slowest(slower, ranks, samples), _slowest(faster, ranks, samples)))
    return Target(what=what, value=ratio.median, interval=(ratio.low, ratio.high), control=control, **bounds)


# What is said, whose seconds over whose, of what, and the bounds.
_RATIO_GOALS: tuple[tuple[str, str, str, Callable[[Measured], list[float]], dict[str, float]], ...] = (
    ("durable save: share of raw O_DIRECT", BASELINE, OURS, _saves, {"low": 0.90}),
    ("durable save: times as fast as save_file and fsync", SAFETENSORS, OURS, _saves, {"low": 2.0}),
    ("durable save: times as fast as torch.distributed.checkpoint", DCP, OURS, _saves, {"low": 1.3}),
    ("cold load: share of raw O_DIRECT", BASELINE, OURS, _loads, {"low": 0.85}),
    ("cold load: times as fast as safetensors.load_file", SAFETENSORS, OURS, _loads, {"low": 1.8}),
    ("cold load: times as fast as torch.distributed.checkpoint", DCP, OURS, _loads, {"low": 2.0}),
    ("warm load: share of a copy in memory", ASYNC_BASELINE, OURS, _warm_loads, {"low": 0.7}),
    (
        "asynchronous save: blocks, over a copy into persistent buffers",
        OURS_ASYNC,
        ASYNC_BASELINE,
        _saves,
        {"high": 1.15},
    ),
)
