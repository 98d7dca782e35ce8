"""Comparison of plugins and settings for a model: memory of each, and least communication among those that fit."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from booster.comm import fake_world
from booster.core.activation_schedule import ActivationSchedule
from booster.errors import BoosterError, ConfigError
from booster.interface import Plugin
from booster.mixed_precision import mixed_precision_from_name
from booster.registry import check_plugin_arguments, plugin_class, plugin_names, plugin_with_precision
from booster.single_device import SingleDevicePlugin
from booster.validation import size_from_text

from .activation_plan import plan_activations
from .estimate import MemoryEstimate, Simulator, TrainingRecipe
from .machine_profile import MachineProfile

T = TypeVar("T")
ONE_DEVICE = "none"  # name of Booster(plugin=None) on the command line
_PRECISIONS = (None, "bf16")  # candidates, if the Booster controls the precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Plugin, or `ONE_DEVICE`, with its arguments, and the Booster's mixed precision, if that controls it."""

    plugin: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mixed_precision: str | None = None

    @property
    def name(self) -> str:
        """Name of the plugin and its settings."""
        shown = dict(self.settings)
        if self.mixed_precision is not None:
            shown["mixed_precision"] = self.mixed_precision
        return " ".join([self.plugin, *(f"{key}={format_setting(value)}" for key, value in shown.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult:
    """Result of a candidate.

    Attributes:
        candidate: Plugin and settings.
        estimate: Memory estimate; None if the candidate can't be used, see `reason`.
        dp_size: Data parallel size.
        schedule: Activation schedule of the estimate; None if nothing is recomputed, or no schedule was searched for.
        reason: Error message if there is no estimate.
        is_internal_error: If True, the error is not a `BoosterError`: a bug rather than unusable settings.
        seconds: Time of the estimate.
    """

    candidate: Candidate
    estimate: MemoryEstimate | None = None
    dp_size: int = 1
    schedule: ActivationSchedule | None = None
    reason: str = ""
    is_internal_error: bool = False
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name of the candidate, and what it recomputes."""
        return self.candidate.name if self.schedule is None else f"{self.candidate.name}, {self.schedule}"

    @property
    def sent_per_batch(self) -> float:
        """Bytes sent by all ranks in a step, per batch of the step."""
        return 0.0 if self.estimate is None else self.estimate.sent * self.estimate.num_ranks / self.dp_size

    @property
    def seconds_per_batch(self) -> float | None:
        """Predicted time of a step, per batch of the step; None without a machine profile."""
        time = None if self.estimate is None else self.estimate.step_time
        return None if time is None else time.total / self.dp_size


def format_setting(value: Any) -> str:
    """Format an argument briefly: of a dataclass only non-default fields."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value) and not isinstance(value, type):
        given = [getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != one.default]
        return f"{type(value).__name__}({','.join(map(format_setting, given))})"
    return f"({len(value)} entries)" if isinstance(value, Mapping) else str(value)


def find_candidates(
    plugins: str, num_ranks: int, settings: Mapping[str, Any] | None = None, mixed_precision: str | None = None
) -> list[Candidate]:
    """Return the plugins and settings to estimate.

    Names are separated by commas, or "all". Without settings, which are those of a single plugin, each plugin has its
    own candidates; without a mixed precision there is one in none and one in bf16, where the Booster controls it.

    Raises:
        ConfigError: A plugin is unknown, lacks one of these settings, or has none for this number of ranks.
    """
    names = _names(plugins, num_ranks)
    if settings and (len(names) > 1 or names == [ONE_DEVICE]):
        raise ConfigError(
            f"--settings {' '.join(settings)} are arguments of one plugin, but --plugin {plugins} is"
            f" {'no plugin' if names == [ONE_DEVICE] else f'{len(names)} of them'}: give the name of one plugin"
        )
    if settings:
        check_plugin_arguments(names[0], settings)
    if mixed_precision not in (None, "fp32"):
        mixed_precision_from_name(str(mixed_precision))
    found: list[Candidate] = []
    for name in names:
        all_settings = [dict(settings)] if settings else []
        if not settings and name != ONE_DEVICE:
            all_settings = plugin_class(name).settings_for(num_ranks)
        if not all_settings and (name == ONE_DEVICE or plugins != "all"):  # one of another update only if it is named
            all_settings = [{}]
        for one in all_settings:
            found += _with_precision(Candidate(plugin=name, settings=one), num_ranks, mixed_precision, settings)
    return [one for number, one in enumerate(found) if one not in found[:number]]


def fastest(results: Sequence[CandidateResult]) -> CandidateResult | None:
    """Return the fastest candidate per batch that fits, or for which no device memory was given; None without times."""
    usable = [one for one in results if one.estimate is not None and one.estimate.fits is not False]
    timed = {index: one.seconds_per_batch for index, one in enumerate(usable) if one.seconds_per_batch is not None}
    best = min(timed, key=lambda index: (timed[index], _total(usable[index])), default=None)
    return None if best is None else usable[best]


def least_communication(results: Sequence[CandidateResult]) -> CandidateResult | None:
    """Return the fitting candidate that sends the fewest bytes per batch, then uses the least memory."""
    fitting = [one for one in results if one.estimate is not None and one.estimate.fits]
    return min(fitting, key=lambda one: (one.sent_per_batch, _total(one)), default=None)


def least_memory(results: Sequence[CandidateResult]) -> CandidateResult | None:
    """Return the candidate that uses the least memory."""
    return min((one for one in results if one.estimate is not None), key=_total, default=None)


def _with_precision(
    candidate: Candidate, num_ranks: int, mixed_precision: str | None, given: Mapping[str, Any] | None
) -> list[Candidate]:
    """Return the candidate in the asked precision, or without one in each precision that it has."""
    if not ask_plugin(candidate, num_ranks, lambda plugin: plugin.control_precision(), default=True):
        precisions = _PRECISIONS if mixed_precision is None else (mixed_precision,)
        return [replace(candidate, mixed_precision=precision) for precision in precisions]
    if mixed_precision is None or given:
        return [replace(candidate, mixed_precision=mixed_precision)]
    if "precision" in inspect.signature(plugin_class(candidate.plugin)).parameters:
        return [replace(candidate, settings={**candidate.settings, "precision": mixed_precision})]
    others = {key: value for key, value in candidate.settings.items() if key != "mixed_precision"}
    return [replace(candidate, settings=others, mixed_precision=mixed_precision)]


def _names(plugins: str, num_ranks: int) -> list[str]:
    if plugins == "all":
        return [*([ONE_DEVICE] if num_ranks == 1 else []), *plugin_names()]
    names = list(dict.fromkeys(one.strip() for one in plugins.split(",")))
    if "all" in names or not all(names):
        raise ConfigError(f"--plugin {plugins!r} is not a list of plugins: give comma-separated names, or all")
    for name in names:
        if name != ONE_DEVICE:
            plugin_class(name)
        elif num_ranks > 1:
            raise ConfigError(
                f"--plugin {ONE_DEVICE} is one device without a plugin, but --nproc is {num_ranks}: give --nproc 1, or"
                f" one of {', '.join(plugin_names())}"
            )
    return names


def ask_plugin(candidate: Candidate, num_ranks: int, question: Callable[[Plugin], T], default: T) -> T:
    """Return what a plugin with a candidate's settings answers, or the default if it can't be made (reported later)."""
    try:
        with fake_world(num_ranks):
            return question(make_plugin(candidate))
    except BoosterError:
        return default


def _total(result: CandidateResult) -> int:
    return 0 if result.estimate is None else result.estimate.total


def estimate_candidate(
    recipe: TrainingRecipe,
    candidate: Candidate,
    num_ranks: int,
    *,
    device_memory: int | None = None,
    checkpoint: bool = False,
    profile: MachineProfile | None = None,
    plans_activations: bool = False,
) -> CandidateResult:
    """Estimate one candidate; an error becomes the result's reason.

    With `plans_activations` it recomputes as little as fits the device memory, which must be given.
    """
    started = time.monotonic()
    given: dict[str, Any] = {
        "plugin": None if candidate.plugin == ONE_DEVICE else candidate.plugin,
        "num_ranks": num_ranks,
        "settings": candidate.settings,
        "mixed_precision": candidate.mixed_precision,
        "profile": profile,
    }
    result = CandidateResult(candidate=candidate)
    try:
        with fake_world(num_ranks):
            dp_size = make_plugin(candidate).dp_size
        if plans_activations:
            assert device_memory is not None
            schedule, estimate = plan_activations(recipe, device_memory=device_memory, **given)
        else:
            simulator = Simulator.of(recipe, **given)
            schedule, estimate = None, simulator.estimate(device_memory, checkpoint=checkpoint)
        result = replace(result, estimate=estimate, dp_size=dp_size, schedule=schedule)
    except BoosterError as error:
        result = replace(result, reason=str(error))
    except Exception as error:  # a bug in one plugin must not hide other estimates: it is reported, with exit code 1
        result = replace(result, reason=f"{type(error).__name__}: {error}", is_internal_error=True)
    return replace(result, seconds=time.monotonic() - started)


def make_plugin(candidate: Candidate) -> Plugin:
    """Return a new plugin with a candidate's settings, in the world of now."""
    if candidate.plugin == ONE_DEVICE:
        return SingleDevicePlugin("cpu")
    return plugin_with_precision(candidate.plugin, candidate.mixed_precision, **candidate.settings)


_BEST_MARK = "  <--"
_HEADINGS = ("parameters", "gradients", "states", "activations", "buffers", "peak", "offloaded", "sent")
_SAVE_HEADINGS = ("save", "async save")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MIN_UNITLESS_BYTES = 2**20  # a smaller number without unit is taken for a forgotten unit


def bytes_from_text(text: str, option: str) -> int:
    """Parse a size such as 80GiB (2^30 bytes each), 80GB (10^9 bytes each) or 85899345920, the value of an option.

    Raises:
        ConfigError: The text is not a size.
    """
    unitless = re.fullmatch(r"\s*(\d+)\s*", text)
    size = size_from_text(text, ignores_case=True) if unitless is None else int(unitless[1])
    if size is None or size < (1 if unitless is None else _MIN_UNITLESS_BYTES):
        number = re.match(r"\s*(\d+(?:\.\d+)?)", text)
        hint = f"{number[1]}GiB or {number[1]}GB" if number and float(number[1]) else "80GiB or 80GB"
        raise ConfigError(f"{option} {text} is not a size: write a number and its unit, such as {hint}")
    return round(size)


def format_size(num_bytes: float) -> str:
    """Format a size with a binary unit."""
    unit, size = _unit_for(num_bytes)
    return f"{num_bytes / size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a time in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def format_batches(count: int) -> str:
    """Format the number of batches of a step: bytes and times of a step are comparable only with it."""
    return "1 batch" if count == 1 else f"{count} batches"


def format_table(results: Sequence[CandidateResult], best: CandidateResult | None = None) -> str:
    """Return a table with a row for each estimate, in one unit; empty if there is none.

    Args:
        results: Results, in the order of the rows.
        best: The one to mark; optional, defaults to the fastest, without times the cheapest, or that of least memory.
    """
    found = [one for one in results if one.estimate is not None]
    if not found:
        return ""
    unit, size = _unit_for(max(_figures(one)[5] for one in found))
    first = found[0].estimate
    assert first is not None
    has_limit, has_saves = first.device_memory is not None, first.memory.checkpoint is not None
    times, limits = ["step time"] * (first.step_time is not None), ["fits"] * has_limit
    headings = [*_HEADINGS, *(_SAVE_HEADINGS if has_saves else ()), "groups", *times, *limits]
    rows = [[*headings, f"(sizes in {unit})"]]
    best = best or fastest(results) or (least_communication(results) if has_limit else least_memory(results))
    for one in found:
        figures = [f"{figure / size:.2f}" for figure in _figures(one)]
        name = one.name + (_BEST_MARK if one is best else "")
        assert one.estimate is not None
        groups, fits = str(one.estimate.memory.communicators), "yes" if one.estimate.fits else "no"
        time = [] if one.estimate.step_time is None else [format_seconds(one.estimate.step_time.total)]
        rows.append([*figures, groups, *time, *([fits] if has_limit else []), name])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *figures, name in rows:
        aligned = [figure.rjust(width) for figure, width in zip(figures, widths, strict=False)]
        lines.append("  ".join([*aligned, name]))
    return "\n".join(lines)


def format_notes(results: Sequence[CandidateResult], notes: Sequence[str] = ()) -> str:
    """Return the notes and the unusable candidates, grouped by reason; empty if there are none."""
    lines = list(notes)
    names_by_reason: dict[str, list[str]] = {}
    for one in results:
        if one.estimate is None:
            kind = "failed" if one.is_internal_error else "not possible"
            names_by_reason.setdefault(f"{kind}: {one.reason}", []).append(f"    {one.candidate.name}")
    for reason, names in names_by_reason.items():
        lines += [reason, *names]
    return "\n".join(lines)


def format_recommendation(results: Sequence[CandidateResult], device_memory: int | None) -> str:
    """Return the recommended candidate, or how to reduce memory if none fits."""
    least = least_memory(results)
    if least is None or least.estimate is None:
        return "no setting can train this model"
    quickest = fastest(results)
    if quickest is not None and quickest.estimate is not None:
        return _format_fastest(quickest, quickest.estimate, least, device_memory)
    if device_memory is None:
        return (
            f"least memory: {least.name}, {format_size(least.estimate.total)}\n"
            "give --device-memory, such as 80GiB, to find what fits"
        )
    best = least_communication(results)
    if best is None or best.estimate is None:
        excess, activations = least.estimate.total - device_memory, least.estimate.peak.activations
        if activations > least.estimate.total - activations:
            advice = "most of it is activations: give a smaller --batch or --seq"
        else:
            advice = "most of it is the model: give more ranks (--nproc), or --dtype bf16 to keep the weights in bf16"
        return (
            f"no setting fits in {format_size(device_memory)}: {least.name} needs the least,"
            f" {format_size(least.estimate.total)}, which is {format_size(excess)} too much: {advice}"
        )
    return (
        f"cheapest that fits, by bytes sent: {best.name}, {format_size(best.estimate.total)} of"
        f" {format_size(device_memory)}, {format_size(best.estimate.sent)} sent by a rank in a step, which trains with"
        f" {format_batches(best.dp_size)}"
    )


def _format_fastest(
    result: CandidateResult, estimate: MemoryEstimate, least: CandidateResult, device_memory: int | None
) -> str:
    time = estimate.step_time
    assert time is not None
    parts = f"{format_seconds(time.total)} a step of {format_batches(result.dp_size)}, of which the optimizer takes"
    parts += f" {format_seconds(time.step)}"
    if time.exposed_communication:
        parts += f" and waits for communication {format_seconds(time.exposed_communication)}"
    if time.bubble:
        parts += f" and waits for other stages {format_seconds(time.bubble)}"
    if time.offloading:
        parts += f" and takes {format_seconds(time.offloading)} for what is offloaded"
    if device_memory is None:
        return (
            f"least memory: {least.name}, {format_size(_total(least))}\n"
            f"fastest: {result.name}, {parts}; {format_size(estimate.total)}; give --device-memory, such as"
            " 80GiB, to find what fits"
        )
    return f"fastest that fits: {result.name}, {parts}; {format_size(estimate.total)} of {format_size(device_memory)}"


def to_json(results: Sequence[CandidateResult]) -> list[dict[str, Any]]:
    """Return all results as JSON-serializable data, in bytes."""
    return [
        {
            "plugin": one.candidate.plugin,
            "settings": {
                key: value if isinstance(value, (int, float, str, type(None))) else format_setting(value)
                for key, value in one.candidate.settings.items()
            },
            "mixed_precision": one.candidate.mixed_precision,
            "peak": None if one.estimate is None else {**asdict(one.estimate.peak), "total": one.estimate.total},
            "memory": None if one.estimate is None else asdict(one.estimate.memory),
            "step_time": one.estimate.step_time.total if one.estimate is not None and one.estimate.step_time else None,
            "dp_size": one.dp_size if one.estimate is not None else None,
            "fits": None if one.estimate is None else one.estimate.fits,
            "activation_schedule": None if one.schedule is None else one.schedule.to_json(),
            "reason": one.reason or None,
            "seconds": round(one.seconds, 3),
        }
        for one in results
    ]


def _figures(result: CandidateResult) -> list[int]:
    if result.estimate is None:
        return []
    estimate = result.estimate
    saves = estimate.memory.checkpoint
    of_saves = [] if saves is None else [saves.host, saves.async_host]
    return [*astuple(estimate.peak), estimate.total, estimate.memory.offloaded, estimate.sent, *of_saves]


def _unit_for(most: float) -> tuple[str, float]:
    return next(((unit, float(size)) for unit, size in _UNITS if most >= size), _UNITS[-1])
