"""Compares engines in pairs: the measuring tool of all benchmarks.

Separate launches of one and the same script differ by 25% on a shared machine. So all engines live in the same
processes and step in turn, and what counts is the ratio of an engine's step to the baseline's step of the same round.
The baseline runs a second time as the control: how far its ratio is from 1 is the noise of the run.

    engines = [Engine(name="torch", build=build_torch), Engine(name="booster", build=build_booster)]
    result = compare("a title", engines, Schedule(steps=50), World(size=2), memory_steps=4)
    print(result.table())

A build function belongs to a module, not into another function: the processes that run it are started afresh.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from _harness.engine import MEASURED, NOT_INSTALLED, Engine, Step, build_engine, with_control
from _harness.environment import describe_run
from _harness.memory import Memory, measure_memory, worst
from _harness.ranks import RankError, World, on_ranks
from _harness.samples import Samples, Spread, largest_difference, paired_differences, paired_ratios
from _harness.table import format_table
from _harness.timing import Schedule, time_alternately

__all__ = [
    "RESULTS",
    "Comparison",
    "Engine",
    "EngineReport",
    "RankError",
    "Schedule",
    "Step",
    "World",
    "compare",
    "memory_of",
    "on_ranks",
    "report_engines",
    "save",
    "time_engines",
    "write_json",
]

RESULTS = Path(__file__).resolve().parents[1] / "results"
_REPOSITORY = RESULTS.parent.parent
_ABSOLUTE_PATH = re.compile(r"""(?<![\w.~)/<-])/(?:[\w.+@-]+(?:/[\w.+@-]+)*/?)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The times and losses of one engine.

    Attributes:
        seconds: Spread of a step.
        best_seconds: The fastest step.
        ratio: Spread of the step over the baseline's step of the same round.
        ratios: The same over the step of every other engine, by its name.
        extra_seconds: Spread of the step minus the baseline's step of the same round.
        num_steps: Timed steps.
        last_loss: Mean over the ranks.
        largest_loss_difference: To the baseline, over all steps and ranks.
    """

    seconds: Spread
    best_seconds: float
    ratio: Spread
    ratios: Mapping[str, Spread]
    extra_seconds: Spread
    num_steps: int
    last_loss: float
    largest_loss_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What came of one engine: `outcome` is "measured", "not installed" or the traceback of its build."""

    name: str
    outcome: str
    figures: Figures | None = None
    memory: Memory | None = None

    @property
    def has_failed(self) -> bool:
        """True where the engine could not be built, unless it is a peer that is not installed."""
        return self.outcome not in (MEASURED, NOT_INSTALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All engines of one run, the baseline first and its control second.

    Attributes:
        title: Heads the table.
        world: The processes.
        schedule: How many steps.
        engines: Their reports.
        step_tokens: What all ranks together train on in one step; None: not counted in tokens.
    """

    title: str
    world: World
    schedule: Schedule
    engines: list[EngineReport]
    step_tokens: int | None = None

    @property
    def has_failed(self) -> bool:
        """True if an engine could not be built: the benchmark must end with exit code 1."""
        return any(engine.has_failed for engine in self.engines)

    @property
    def control(self) -> EngineReport:
        """The second copy of the baseline."""
        return self.engines[1]

    def engine(self, name: str) -> EngineReport:
        """Returns the report of one engine."""
        return next(engine for engine in self.engines if engine.name == name)

    def ratio(self, name: str, over: str) -> Spread | None:
        """Returns one engine's steps over another one's of the same rounds; None where one was not measured."""
        figures = next((engine.figures for engine in self.engines if engine.name == name), None)
        return None if figures is None else figures.ratios.get(over)

    def table(self) -> str:
        """Returns the figures for people to read."""
        return format_table(self)

    def document(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        return asdict(self)


def compare(
    title: str,
    engines: Sequence[Engine],
    schedule: Schedule,
    world: World | None = None,
    *,
    memory_steps: int = 0,
    step_tokens: int | None = None,
) -> Comparison:
    """Measures the engines against the first one of them.

    Args:
        title: Heads the table.
        engines: The baseline first; its control is added.
        schedule: How many steps.
        world: The processes; None: one.
        memory_steps: Steps after which resident memory is read, in further processes; 0: memory is not measured.
        step_tokens: Tokens of one step over all ranks, for the column of tokens per second; None: no such column.

    Raises:
        RankError: A step raised, a rank died or was too late, or the baseline could not be built.
    """
    world = world or World()
    all_engines = with_control(engines)
    memory = {engine.name: memory_of(engine, world, memory_steps) for engine in engines} if memory_steps else {}
    ranks = on_ranks(time_engines, world, all_engines, schedule)
    reports = report_engines(all_engines, ranks, memory)
    return Comparison(title=title, world=world, schedule=schedule, engines=reports, step_tokens=step_tokens)


def memory_of(engine: Engine, world: World, steps: int) -> Memory | None:
    """Returns the true resident memory of one engine, in processes of its own; None where it could not be built."""
    return worst(on_ranks(measure_memory, world, engine, steps, gives_memory_back=True))


def time_engines(engines: Sequence[Engine], schedule: Schedule) -> tuple[dict[str, str], dict[str, Samples]]:
    """Builds the engines and steps them in turn; returns this rank's outcomes and samples.

    Collective: every rank must call it with the same arguments.
    """
    steps: dict[str, Step] = {}
    outcomes: dict[str, str] = {}
    for engine in engines:
        step, outcomes[engine.name] = build_engine(engine)
        if step is not None:
            steps[engine.name] = step
    if engines[0].name not in steps:
        raise RuntimeError(f"the baseline {engines[0].name!r} was not built: {outcomes[engines[0].name]}")
    return outcomes, time_alternately(steps, schedule)


def report_engines(
    engines: Sequence[Engine],
    ranks: Sequence[tuple[Mapping[str, str], Mapping[str, Samples]]],
    memory: Mapping[str, Memory | None],
) -> list[EngineReport]:
    """Turns what `time_engines` returned on all ranks into one report per engine."""
    outcomes = ranks[0][0]
    samples = [of_rank for _, of_rank in ranks]
    reports = []
    for engine in engines:
        name, outcome = engine.name, outcomes[engine.name]
        figures = _figures(name, engines[0].name, samples) if outcome == MEASURED else None
        reports.append(EngineReport(name=name, outcome=outcome, figures=figures, memory=memory.get(name)))
    return reports


def save(
    name: str,
    comparisons: Sequence[Comparison],
    arguments: Mapping[str, Any],
    sections: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the figures with versions and machine into a JSON file under results/; returns its path.

    Args:
        name: Of the benchmark.
        comparisons: What was measured.
        arguments: The command line's, by name.
        sections: More of the document, by its keys.
    """
    document = {
        "benchmark": name,
        **describe_run(arguments),
        "comparisons": [comparison.document() for comparison in comparisons],
        **(sections or {}),
    }
    return write_json(f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}", document)


def write_json(stem: str, document: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a document to `<folder>/<stem>.json` and returns the path.

    NaN and inf become text. Absolute paths, also those of tracebacks, become relative to the repository.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(portable(document), indent=2, allow_nan=False) + "\n")
    return path


def portable(value: Any) -> Any:
    """Returns a value for JSON that means the same on another machine; see `write_json`."""
    if isinstance(value, Mapping):
        return {key: portable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(inner) for inner in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    if isinstance(value, (str, Path)):
        return _ABSOLUTE_PATH.sub(lambda found: os.path.relpath(found.group(), _REPOSITORY), str(value))
    return value


def _figures(name: str, baseline: str, ranks: Sequence[Mapping[str, Samples]]) -> Figures:
    seconds = _slowest(name, ranks)
    others = {other: _slowest(other, ranks) for other in ranks[0] if other != name}
    theirs = others.get(baseline, seconds)
    return Figures(
        seconds=Spread.of(seconds),
        best_seconds=min(seconds),
        ratio=Spread.of(paired_ratios(seconds, theirs)),
        ratios={other: Spread.of(paired_ratios(seconds, its)) for other, its in others.items()},
        extra_seconds=Spread.of(paired_differences(seconds, theirs)),
        num_steps=len(seconds),
        last_loss=sum(samples[name].losses[-1] for samples in ranks) / len(ranks),
        largest_loss_difference=max(
            largest_difference(samples[name].losses, samples[baseline].losses) for samples in ranks
        ),
    )


def _slowest(name: str, ranks: Sequence[Mapping[str, Samples]]) -> list[float]:
    """Returns the duration of every step on its slowest rank: that is when the next step can begin."""
    return [max(step) for step in zip(*(samples[name].seconds for samples in ranks), strict=True)]
