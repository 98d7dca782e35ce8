"""The largest GPT that can be trained under a limit of memory, for benchmarks/gemini/run.py --largest."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from _harness.pair import RankError, World, on_ranks
from _harness.table import align
from gemini.engines import BASELINE
from gemini.limit import lacked_memory, memory_groups
from gemini.search import Found, search_largest
from gemini.systems import OURS, SYSTEMS, System, Trained, num_parameters, shape_of, train_confined

__all__ = ["Conditions", "Record", "Try", "format_records", "measure_largest", "weights_of"]

_FITS = "fits"
_TOO_LARGE = "does not fit"
_TOO_SLOW = "not done in time"
_LATE = "gave no result within"  # what RankError says of ranks that were killed for it

_STEPS = 2
_TOLERANCE = 0.08
_PEER_GROWTH = 2.0
_OUR_GROWTH = 1.5  # a try of ours takes minutes: a failed one should not be a far one
_PEER_SHARE = 0.2  # of the time, each; the rest is ours
_TIMES_BASELINE = 8  # where ours begins: at the target
_PROCESS_BYTES = 400 * 2**20  # about what Python, torch and the activations take: for the first guess only
_DISK_BYTES = 32  # a weight, over all ranks: 16 bytes, and files that are written anew beside them
_DISK_SHARE = 0.9  # of what is free
_MANY_LAYERS = 4096
_SHOWN_TEXT = 2000
_HEAD = ["system", "layers", "weights", "outcome", "peak MiB", "build s", "step s", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which all systems run.

    Attributes:
        world: The processes; its timeout is that of one try.
        limit_bytes: Memory of each process.
        width: Of the GPT, whose layers are searched for.
        directory: Where the tiers on the disk lie.
        cgroup: A memory cgroup to limit them in; None: by RLIMIT_DATA.
        seconds: For the whole search.
    """

    world: World
    limit_bytes: int
    width: int
    directory: Path
    cgroup: Path | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One model in fresh processes, with the worst of the ranks.

    Attributes:
        layers: Of the model.
        weights: Of the model.
        outcome: Fits, does not fit, or not done in time.
        seconds: That it took, start of the processes and all.
        trained: What came of it; None where it does not fit.
        detail: What the processes said where it does not fit, its end.
    """

    layers: int
    weights: int
    outcome: str
    seconds: float
    trained: Trained | None = None
    detail: str = ""

    @property
    def fits(self) -> bool:
        """True if it was trained."""
        return self.outcome == _FITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one system reached.

    Attributes:
        name: Of the system.
        tries: In the order in which they were made.
        found: The layers; None where an error ended it.
        error: That error; None: none.
    """

    name: str
    tries: list[Try] = field(default_factory=list)
    found: Found | None = None
    error: str | None = None

    @property
    def largest(self) -> Try | None:
        """The largest model that was trained; None: none was."""
        return max((one for one in self.tries if one.fits), key=lambda one: one.weights, default=None)


def measure_largest(conditions: Conditions, systems: Sequence[System] = SYSTEMS) -> Iterator[Record]:
    """Yields a record for every system, in their order.

    The baseline comes first, as ours begins with a model that is larger than the baseline's by the target.
    """
    start = time.monotonic()
    baseline: int | None = None
    for index, system in enumerate(systems):
        left = conditions.seconds - (time.monotonic() - start)
        is_last = index == len(systems) - 1
        share = left if is_last else min(left, _PEER_SHARE * conditions.seconds)
        record = _search(system, conditions, time.monotonic() + share, baseline)
        if system.name == BASELINE:
            baseline = weights_of(record)
        yield record


def weights_of(record: Record) -> int | None:
    """Returns the weights of the largest model that was trained; None: none was."""
    return None if record.largest is None else record.largest.weights


def format_records(records: Sequence[Record], conditions: Conditions) -> str:
    """Returns the table of all tries, errors below it."""
    how = (
        "RLIMIT_DATA, and private and shared memory that is held"
        if conditions.cgroup is None
        else f"memory cgroup {conditions.cgroup}"
    )
    title = (
        f"largest GPT of width {conditions.width} in {conditions.limit_bytes / 2**20:.0f} MiB a process, by {how}: "
        f"{conditions.world.size} ranks, {_STEPS} steps each"
    )
    rows = [_HEAD, *(_row(record, one) for record in records for one in record.tries)]
    notes = [_summary(record, conditions.width) for record in records]
    return "\n".join([title, *align(rows), *notes])


def _summary(record: Record, width: int) -> str:
    if record.error is not None:
        return f"{record.name} FAILED: {record.error}"
    if record.largest is None or record.found is None:
        return f"{record.name}: nothing was trained"
    text = f"{record.name}: {record.largest.weights / 1e6:.1f}M weights fit"
    if record.found.too_large is not None:
        above = num_parameters(shape_of(width, record.found.too_large))
        why = next(one.outcome for one in record.tries if one.layers == record.found.too_large)
        text += f"; {above / 1e6:.1f}M: {why}"
    return text + ("" if record.found.is_narrowed else "; the time was over before it was narrowed further")


def _row(record: Record, one: Try) -> list[str]:
    cells = [record.name, str(one.layers), f"{one.weights / 1e6:.1f}M", one.outcome]
    if one.trained is None:
        return [*cells, *["-"] * (len(_HEAD) - len(cells))]
    trained = one.trained
    figures = (f"{trained.build_seconds:.1f}", f"{trained.step_seconds:.1f}", f"{trained.loss:.4f}")
    return [*cells, f"{trained.peak_bytes / 2**20:.0f}", *figures]


def _search(system: System, conditions: Conditions, deadline: float, baseline: int | None) -> Record:
    record = Record(name=system.name)

    def fits(layers: int) -> bool:
        one = _try(system, conditions, layers, deadline - time.monotonic())
        record.tries.append(one)
        return one.fits

    def may_go_on() -> bool:
        """A try that can't end in time would say nothing."""
        return time.monotonic() + max((one.seconds for one in record.tries), default=0.0) < deadline

    try:
        # Without a limit: what is broken shows itself, and kernels are compiled.
        _train(system, conditions, 1, None, conditions.world.timeout_seconds)
        found = search_largest(
            fits,
            first=_first_guess(system, conditions, baseline),
            most=_most_layers(system, conditions),
            growth=_OUR_GROWTH if system.name == OURS else _PEER_GROWTH,
            tolerance=_TOLERANCE,
            may_go_on=may_go_on,
        )
    except RankError as error:
        return replace(record, error=str(error))
    return replace(record, found=found)


def _first_guess(system: System, conditions: Conditions, baseline: int | None) -> int:
    if system.weight_bytes is not None:
        free = max(0, conditions.limit_bytes - _PROCESS_BYTES)
        return _layers_of(int(free / system.weight_bytes(conditions.world.size)), conditions.width)
    return _layers_of(_TIMES_BASELINE * baseline, conditions.width) + 1 if baseline else 1


def _most_layers(system: System, conditions: Conditions) -> int:
    if system.weight_bytes is not None:
        return _MANY_LAYERS
    free = shutil.disk_usage(conditions.directory).free
    return _layers_of(int(free * _DISK_SHARE / _DISK_BYTES), conditions.width)


def _layers_of(weights: int, width: int) -> int:
    """Returns the most layers of a model with no more weights; 1 at least."""
    one, two = (num_parameters(shape_of(width, layers)) for layers in (1, 2))
    return max(1, 1 + (weights - one) // (two - one))


def _try(system: System, conditions: Conditions, layers: int, seconds_left: float) -> Try:
    start = time.monotonic()
    seconds = max(1.0, min(seconds_left, conditions.world.timeout_seconds))
    outcome, worst, detail = _FITS, None, ""
    try:
        trained = _train(system, conditions, layers, conditions.limit_bytes, seconds)
        worst = max(trained, key=lambda one: one.peak_bytes)
    except RankError as error:
        detail = str(error)
        is_late = _LATE in detail
        if not is_late and not lacked_memory(detail):
            raise
        outcome = _TOO_SLOW if is_late else _TOO_LARGE
    return Try(
        layers=layers,
        weights=num_parameters(shape_of(conditions.width, layers)),
        outcome=outcome,
        seconds=time.monotonic() - start,
        trained=worst,
        detail=detail[-_SHOWN_TEXT:],
    )


def _train(
    system: System, conditions: Conditions, layers: int, limit_bytes: int | None, seconds: float
) -> list[Trained]:
    world = replace(conditions.world, timeout_seconds=seconds)
    shape = shape_of(conditions.width, layers)
    cgroup = None if limit_bytes is None else conditions.cgroup
    with _directory(conditions.directory) as directory, memory_groups(cgroup, world.size, limit_bytes or 0) as groups:
        arguments = (system.build, shape, directory, limit_bytes, list(groups), _STEPS)
        trained: list[Trained] = on_ranks(train_confined, world, *arguments, gives_memory_back=True)
    return trained


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    """A directory of its own for every try; a killed rank can't remove what it has there."""
    with tempfile.TemporaryDirectory(prefix="gemini-", dir=parent) as name:
        yield Path(name)
