"""What the ranks of benchmarks/checkpoint/run.py do: every variant saves and loads once a round, in turn."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from _harness.memory import MemoryMeter
from _harness.samples import order_of_round
from checkpoint.disk import drop_cached, read_cached
from checkpoint.peers import Actions
from checkpoint.state import TrainingState, size_of
from checkpoint.variants import Variant

__all__ = ["Measured", "Peaks", "measure_peaks", "measure_times"]


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one variant did on this rank.

    Attributes:
        num_bytes: What it saves.
        saves: Seconds of every save, the warm-up's left out.
        settles: Seconds from the end of a save until it was durable, where that is later.
        loads: Seconds of every load.
        warm_loads: Seconds of every load of files in the page cache.
        cached: The largest share of the files that was still in memory when a load began.
    """

    num_bytes: int
    saves: list[float] = field(default_factory=list)
    settles: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    warm_loads: list[float] = field(default_factory=list)
    cached: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most memory that was resident above what was there before, in bytes; None: not measured, or not known."""

    save: int | None
    load: int | None


def measure_times(variants: Sequence[Variant], directory: str, num_bytes: int, repeats: int) -> dict[str, Measured]:
    """Saves and loads in all variants that are installed, one warm-up round and `repeats` timed ones.

    Collective.

    Args:
        variants: What to measure, both baselines among them.
        directory: Where the files go, each variant's into a folder that is removed after it.
        num_bytes: About how large the state is.
        repeats: Timed rounds.

    Raises:
        RuntimeError: A variant failed, or its load did not bring back what was saved; the message names it.
    """
    state = TrainingState(size_of(num_bytes))
    actions = _build_all(variants, state)
    measured = {name: Measured(num_bytes=action.num_bytes) for name, action in actions.items()}
    saved = state.fingerprint()
    for index in range(1 + repeats):
        for name in order_of_round(list(actions), index):
            with _Named(name), _Folder(directory) as folder:
                if index == 0:
                    _check(state, actions[name], folder, saved)
                else:
                    _time(actions[name], folder, measured[name])
    return measured


def measure_peaks(variants: Sequence[Variant], directory: str, num_bytes: int) -> dict[str, Peaks]:
    """Saves and loads once in all variants, and returns how much memory that took.

    Call it in fresh processes with `gives_memory_back`, and without having saved in them before: what a variant keeps
    from save to save counts too. Collective.
    """
    state = TrainingState(size_of(num_bytes))
    peaks = {}
    for name, action in _build_all(variants, state).items():
        with _Named(name), _Folder(directory) as folder:
            saving = _peak(lambda: _save_and_settle(action, folder))  # noqa: B023 - called at once
            loading = None if action.load is None else _peak(lambda: action.load(folder))  # noqa: B023
            peaks[name] = Peaks(save=saving, load=loading)
    return peaks


def _build_all(variants: Sequence[Variant], state: TrainingState) -> dict[str, Actions]:
    return {variant.name: variant.build(state) for variant in variants if variant.is_installed}


def _peak(action: Callable[[], None]) -> int | None:
    dist.barrier()
    meter = MemoryMeter()
    action()
    peak = meter.peak()
    dist.barrier()
    return peak


def _save_and_settle(actions: Actions, folder: Path) -> None:
    actions.save(folder)
    if actions.settle is not None:
        actions.settle()


def _check(state: TrainingState, actions: Actions, folder: Path, saved: int) -> None:
    """The warm-up: what a load brings back must be what was saved, bit for bit."""
    _save_and_settle(actions, folder)
    load = actions.load or actions.warm_load
    if load is None:
        return
    dist.barrier()
    if actions.fills_state:
        state.clear()
    load(folder)
    if state.fingerprint() != saved:
        raise RuntimeError("the load did not bring back what was saved")


def _time(actions: Actions, folder: Path, measured: Measured) -> None:
    if dist.get_rank() == 0:
        os.sync()  # what others left to be written must not be written during this save
    measured.saves.append(_seconds(lambda: actions.save(folder)))
    settle, load, warm_load = actions.settle, actions.load, actions.warm_load
    if settle is not None:
        measured.settles.append(_seconds(settle))
    if load is not None:
        if dist.get_rank() == 0:
            measured.cached = max(measured.cached, drop_cached(folder))
        measured.loads.append(_seconds(lambda: load(folder)))
    if warm_load is not None:
        if dist.get_rank() == 0:
            read_cached(folder)
        measured.warm_loads.append(_seconds(lambda: warm_load(folder)))


def _seconds(action: Callable[[], None]) -> float:
    """Returns the time until all ranks are done."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


class _Folder:
    """A new folder for all ranks; the first one makes it, and removes it once all have left."""

    def __init__(self, parent: str) -> None:
        self._path = Path(parent) / "files"

    def __enter__(self) -> Path:
        if dist.get_rank() == 0:
            self._path.mkdir()
        dist.barrier()
        return self._path

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            return  # a barrier would wait for ranks that may be stuck; the parent removes all folders
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._path)
        dist.barrier()


class _Named:
    """Puts a variant's name before the message of an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise RuntimeError(f"{self._name!r} failed: {error}") from error
