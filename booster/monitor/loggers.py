"""Loggers of step records: JSON lines, TensorBoard and a progress bar; reading and drawing logged runs."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from booster.comm import all_gather_equal, group_rank
from booster.errors import ConfigError, DesyncError
from booster.logger import get_dist_logger

from .step_stats import NON_TRAINING_PHASES, PHASES, StepStats

_MANY_STEPS = 200  # above, markers would hide the line
_INCHES = (7.0, 3.0)  # width and height of a panel
_FIELDS = (
    *("last_step", "num_steps", "num_skipped", "loss_sum", "loss_weight", "num_tokens", "memory", "sent_bytes"),
    "seconds",
)
# Names that `Monitor.log` rejects.
RESERVED_NAMES = frozenset(
    (
        *("step", "time", "ranks", "loss", "lr", "seconds", "seconds_in", "tokens_per_second", "samples_per_second"),
        *("memory", "communication_bytes", "steps", "skipped", "experts"),
    )
)


def stats_to_vector(stats: StepStats, *, step: int, memory: int, sent_bytes: int) -> list[float]:
    """Flatten this rank's statistics into the vector that the ranks all-gather.

    Args:
        stats: Statistics of this rank since the last record.
        step: Number of the last finished step.
        memory: Peak memory in bytes.
        sent_bytes: Bytes sent since the last record.
    """
    seconds = stats.seconds_by_phase()
    counts = (step, stats.num_steps, stats.num_skipped, float(stats.loss_sum), stats.loss_weight)
    totals = (stats.num_tokens, memory, sent_bytes, sum(seconds.values()))
    return [float(number) for number in (*counts, *totals, *(seconds[name] for name in PHASES))]


def aggregate_record(local: Sequence[float], *, lr: Sequence[float], unit: str, across_ranks: bool) -> dict[str, Any]:
    """Aggregate the statistics of all ranks into one record, equal on all ranks except for `lr` and `unit`.

    Args:
        local: Result of `stats_to_vector` on this rank.
        lr: Learning rate of each parameter group.
        unit: Throughput unit, "tokens" or "samples".
        across_ranks: If False, the record describes this rank only and no communication takes place.

    Raises:
        DesyncError: The ranks are at different steps.

    Collective: yes if `across_ranks`, after the same step on every rank.
    """
    vector = torch.tensor(local, dtype=torch.float64)
    if across_ranks:
        vector = all_gather_equal(vector)
    rows = [dict(zip((*_FIELDS, *PHASES), row, strict=True)) for row in vector.view(-1, len(local)).tolist()]
    _check_same_step(rows)
    num_steps = rows[0]["num_steps"]
    weight = _sum(rows, "loss_weight")
    in_training = [row["seconds"] - sum(row[name] for name in NON_TRAINING_PHASES) for row in rows]
    throughput = _sum(rows, "num_tokens") / max(sum(in_training) / len(rows), 1e-9)
    return {
        "step": int(rows[0]["last_step"]),
        "time": round(time.time(), 3),
        "ranks": len(rows),
        "loss": _sum(rows, "loss_sum") / weight if weight else None,
        "lr": list(lr),
        f"{unit}_per_second": throughput,
        "seconds": _mean(rows, "seconds") / num_steps,
        "seconds_in": {name: _mean(rows, name) / num_steps for name in PHASES},
        "memory": [int(row["memory"]) for row in rows],
        "communication_bytes": round(_mean(rows, "sent_bytes") / num_steps),
        "steps": int(num_steps),
        "skipped": int(rows[0]["num_skipped"]),
    }


def _json_safe(value: Any) -> Any:
    """Return a record with rounded numbers; those that are not finite become "nan", "inf" and "-inf"."""
    if isinstance(value, Mapping):
        return {key: _json_safe(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_json_safe(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.13g}") if math.isfinite(value) else str(value)
    return value


def _check_same_step(rows: Sequence[Mapping[str, float]]) -> None:
    steps = [(int(row["last_step"]), int(row["num_steps"])) for row in rows]
    for rank, (step, num_steps) in enumerate(steps):
        if (step, num_steps) != steps[0]:
            raise DesyncError(
                f"rank {group_rank()} logs at different steps than other ranks: rank 0 finished step {steps[0][0]},"
                f" rank {rank} step {step}. Call optimizer.step() equally often on all ranks and create the Monitor at"
                " the same point, or pass Monitor(across_ranks=False)"
            )


def _sum(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows)


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return _sum(rows, name) / len(rows)


_TAIL_BYTES = 2**20  # more than any record


class RecordLogger(Protocol):
    """Destination of records, on one rank only."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record of a step, or user values that extend one."""

    def close(self) -> None:
        """Close the log; no record follows."""


class JsonLinesLogger:
    """JSON lines file. Each record is appended in one write, so a concurrent reader never sees a partial line.

    Args:
        path: Path of the file. Missing directories are created.
        first_step: First step of a resumed run, or None for a new run, whose file must not hold another run.

    Raises:
        ConfigError: The file holds another run or is not writable.
    """

    def __init__(self, path: Path, first_step: int | None) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            last = last_step_in(path)
            if last is not None and first_step is None:
                raise ConfigError(
                    f"log={str(path)!r} already holds steps up to {last} of a run, and lines would be mixed:"
                    f" pass another path, remove the file, or resume that run with first_step={last + 1}"
                )
            size = path.stat().st_size if path.is_file() else 0
            self._file = io.FileIO(path, "a+" if size else "a")
            if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")  # the previous run was killed in the middle of a line
        except OSError as error:
            raise ConfigError(
                f"log={str(path)!r} is not writable ({error}): pass the path of a file in a writable directory"
            ) from error
        self._has_failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_json_safe(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes")
        except OSError as error:  # a full disk must not abort the training
            if not self._has_failed:
                get_dist_logger().warning(f"cannot write to {self._path}, training continues: {error}")
            self._has_failed = True

    def close(self) -> None:
        self._file.close()


def last_step_in(path: Path) -> int | None:
    """Return the step of the last complete record of a JSON lines file, or None if there is none."""
    if not path.is_file():  # also a device, whose reads may never end
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    records = (parse_record(line) for line in reversed(lines))
    return next((int(record["step"]) for record in records if record is not None), None)


class TensorBoardLogger:
    """TensorBoard event files.

    Args:
        directory: Directory of the event files.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard={str(directory)!r} needs TensorBoard, which is not installed ({error}): run"
                " `pip install torch-booster[tensorboard]`, or leave tensorboard out"
            ) from error
        try:
            self._writer = SummaryWriter(str(directory))
        except OSError as error:
            raise ConfigError(
                f"tensorboard={str(directory)!r} is not writable ({error}): pass a writable directory"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        for tag, number in scalars_of(record):
            self._writer.add_scalar(tag, number, record["step"], walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


def scalars_of(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the numbers of a record by their names; those of nested values have paths such as "seconds_in/step"."""
    shown = {name: value for name, value in record.items() if name not in ("step", "time", "steps", "ranks")}
    return [scalar for name, value in shown.items() for scalar in _scalars(name, value)]


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    if name == "experts":
        value = {f"{layer}/{key}": one for layer, load in value.items() for key, one in _load_scalars(load).items()}
    if isinstance(value, Mapping):
        return [(f"{name}/{key}", one) for key, one in value.items() if one is not None]
    if isinstance(value, list):
        return [(name if len(value) == 1 else f"{name}/{index}", one) for index, one in enumerate(value)]
    return [] if value is None else [(name, value)]


def _load_scalars(load: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a layer's load: the largest one as a multiple of the mean, dropped tokens, the entropy."""
    return {"max_load": largest_load(load["tokens"]), "dropped": load["dropped"], "entropy": load["entropy"]}


def largest_load(tokens: Sequence[float]) -> float:
    """Return the largest load of an expert as a multiple of the mean, 1 if all have equally many tokens."""
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


class ProgressBar:
    """tqdm progress bar on stderr.

    Args:
        total_steps: Number of steps, or None if unknown.
        first_step: Number of the first step.
    """

    def __init__(self, total_steps: int | None, first_step: int) -> None:
        self._bar = tqdm(
            total=total_steps, initial=first_step - 1, unit="step", file=sys.stderr, dynamic_ncols=True, leave=True
        )
        self._user_text = ""
        self._text = ""

    def write(self, record: Mapping[str, Any]) -> None:
        if "seconds" in record:
            self._text = _progress_text(record)
            self._bar.update(record["step"] - self._bar.n)
        else:
            self._user_text = "".join(
                f" {name} {value:.4g}" for name, value in record.items() if name not in ("step", "time")
            )
        self._bar.set_postfix_str(self._text + self._user_text, refresh="seconds" not in record)

    def close(self) -> None:
        self._bar.close()


def _progress_text(record: Mapping[str, Any]) -> str:
    loss = "no loss" if record["loss"] is None else f"loss {record['loss']:.4f}"
    unit = "tokens" if "tokens_per_second" in record else "samples"
    seconds, parts = record["seconds"], record["seconds_in"]
    shown = ("forward", "backward", "step", "data", "communication")
    split = ", ".join(f"{name} {parts[name] / max(seconds, 1e-9):.0%}" for name in shown)
    rate = f" lr {record['lr'][0]:.3g}" if record["lr"] else ""
    speed = f"{record[f'{unit}_per_second']:.4g} {unit}/s {seconds * 1e3:.4g} ms/step"
    return f"{loss}{rate} {speed} ({split})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Records of one log file.

    Attributes:
        name: Legend entry.
        records: Records by step, in order. If a run that resumed from a checkpoint logged a step twice, the later
            record is kept, with the user values added to it.
        num_invalid_lines: Number of lines that are not records, such as the last line of a killed run.
    """

    name: str
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_invalid_lines: int = 0

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a value of this name, and the values. A list counts as its maximum."""
        steps, numbers = [], []
        for step, record in self.records.items():
            value = record.get(name)
            value = max(value, default=None) if isinstance(value, list) else value
            if isinstance(value, (int, float, str)):
                steps.append(step)
                numbers.append(float(value))
        return steps, numbers


def read_run(path: str | os.PathLike[str], name: str | None = None) -> LoggedRun:
    """Read the run of a JSON lines file.

    Args:
        path: Path that was passed as `Monitor(log=)`.
        name: Name of the run; optional, defaults to the file name without its suffix.

    Raises:
        ConfigError: The file does not exist or holds no record of a step.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} is not readable ({error}): pass a file written by Monitor(log=...)"
        ) from error
    found = [(line, parse_record(line)) for line in lines if line.strip()]
    records: dict[int, dict[str, Any]] = {}
    for record in (record for _, record in found if record is not None):
        step, is_of_step = record["step"], "seconds" in record
        # Earlier records of this step or of later steps belong to steps that were repeated after a resume.
        while records and next(reversed(records)) >= step + (not is_of_step):
            records.popitem()
        records.setdefault(step, {}).update(record)
    if not records:
        what = "is empty" if not found else f"has no record of a step in its {len(found)} lines"
        raise ConfigError(f"{str(path)!r} {what}: pass a file written by Monitor(log=...)")
    num_invalid_lines = sum(record is None for _, record in found)
    return LoggedRun(name=name or path.stem, records=dict(sorted(records.items())), num_invalid_lines=num_invalid_lines)


def parse_record(line: str) -> dict[str, Any] | None:
    """Parse a line; return None if it is not a record."""
    try:
        record = json.loads(line)
    except ValueError:  # a truncated line, or another kind of file
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int and _has_numbers(record)
    return record if is_record else None


def _has_numbers(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_has_numbers, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")


PANELS = ("loss", "throughput", "memory", "experts")


def draw_runs(runs: Sequence[LoggedRun], path: Path, panels: Sequence[str] = PANELS) -> None:
    """Write a figure with panels for loss, throughput, memory and the load of experts, and one line per run.

    The load is the largest one of an expert as a multiple of its layer's mean, of the layer where it is largest; of a
    single run that of each expert, as a heat map. The share of dropped tokens is a dashed line.

    Args:
        runs: Runs, at least one.
        path: Path of the image; its suffix selects the format.
        panels: Names from `PANELS`, at least one; "experts" is left out beside others if no run has experts.

    Raises:
        ConfigError: "experts" alone is drawn of runs without experts, matplotlib is not installed or does not support
            the suffix, or the path is not writable.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"plots need matplotlib, which is not installed ({error}): run `pip install torch-booster[plot]`"
        ) from error
    if not any(record.get("experts") for run in runs for record in run.records.values()):
        if list(panels) == ["experts"]:
            raise ConfigError("no log has loads of experts: the models have no experts that Monitor has found")
        panels = [name for name in panels if name != "experts"]
    figure = Figure(figsize=(_INCHES[0], len(panels) * _INCHES[1]), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise ConfigError(
            f"{str(path)!r} has no supported image suffix: choose one of {', '.join(sorted(kinds))}, such as"
            f" {path.with_suffix('.png').name}"
        )
    drawn = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for name, panel in zip(panels, drawn, strict=True):
        _draw_panel(panel, name, runs)
        panel.grid(visible=True, alpha=0.3)
    if drawn[0].get_legend_handles_labels()[0]:  # a heat map has none
        drawn[0].legend()
    drawn[-1].set_xlabel("step")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} is not writable ({error}): pass the path of a writable file") from error


def _draw_experts(panel: Any, runs: Sequence[LoggedRun]) -> None:
    loads = [{step: record["experts"] for step, record in run.records.items() if record.get("experts")} for run in runs]
    lines = []
    if len(runs) > 1:
        for run, of_run in zip(runs, loads, strict=True):
            highest = [max(largest_load(load["tokens"]) for load in layers.values()) for layers in of_run.values()]
            lines += panel.plot(list(of_run), highest, label=run.name)
        panel.set_ylabel("largest load of an expert / mean")
        panel.set_ylim(bottom=0)
    else:
        _draw_heat_map(panel, runs[0], loads[0])
    dropped = [{step: _dropped_share(layers.values()) for step, layers in of_run.items()} for of_run in loads]
    if any(any(shares.values()) for shares in dropped):
        axis = panel.twinx()
        for number, shares in enumerate(dropped):
            color = lines[number].get_color() if lines else "black"
            axis.plot(list(shares), list(shares.values()), linestyle="--", color=color)
        axis.set_ylabel("share of tokens dropped (dashed)")
        axis.set_ylim(0, 1)


def _draw_heat_map(panel: Any, run: LoggedRun, loads: Mapping[int, Mapping[str, Any]]) -> None:
    """Draw the load of each expert over steps; that of a layer without tokens stays blank."""
    sizes = {name: len(load["tokens"]) for layers in loads.values() for name, load in layers.items()}
    rows = torch.full((sum(sizes.values()), len(loads)), math.nan)
    for column, layers in enumerate(loads.values()):
        position = 0
        for name, size in sizes.items():
            if name in layers:
                tokens = torch.tensor(layers[name]["tokens"])
                rows[position : position + size, column] = tokens * size / tokens.sum().clamp(min=1)
            position += size
    steps = list(loads)
    edges = [steps[0] - run.records[steps[0]].get("steps", 1), *steps]
    image = panel.pcolorfast(edges, range(len(rows) + 1), rows.numpy(), cmap="RdBu_r", vmin=0, vmax=2)
    panel.figure.colorbar(image, ax=panel, label="load / mean")
    for position in itertools.accumulate(sizes.values()):
        panel.axhline(position, color="black", linewidth=0.5)
    panel.set_ylabel("experts by layer")


def _dropped_share(loads: Iterable[Mapping[str, Any]]) -> float:
    numbers = [(sum(load["tokens"]), load["dropped"]) for load in loads]
    dropped = sum(one for _, one in numbers)
    return float(dropped / max(sum(map(sum, numbers)), 1))


def _draw_panel(panel: Any, name: str, runs: Sequence[LoggedRun]) -> None:
    if name == "experts":
        _draw_experts(panel, runs)
        return
    for run in runs:
        series = _throughput_name(run) if name == "throughput" else name
        _draw(panel, run, series, scale=2**-20 if name == "memory" else 1.0)
    if name == "loss":
        panel.set_ylabel("loss")
        return
    if name == "throughput":
        units = sorted({_throughput_name(run).removesuffix("_per_second") for run in runs})
        panel.set_ylabel(f"{' or '.join(units)} per second")
        panel.set_ylim(bottom=0)
    else:
        panel.set_ylabel("peak memory (MiB, largest rank)")
        panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.05)


def _throughput_name(run: LoggedRun) -> str:
    has_tokens = any("tokens_per_second" in record for record in run.records.values())
    return "tokens_per_second" if has_tokens else "samples_per_second"


def _draw(panel: Any, run: LoggedRun, name: str, scale: float = 1.0) -> None:
    steps, numbers = run.series(name)
    marker = "" if len(steps) > _MANY_STEPS else "."
    panel.plot(steps, [number * scale for number in numbers], label=run.name, marker=marker)
