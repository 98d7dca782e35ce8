"""One model under many plugins and settings: what each takes, and which that fits communicates the least."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from booster.comm import imagined_world
from booster.errors import BoosterError, ConfigError
from booster.estimate.estimation import MemoryEstimate, answer
from booster.estimate.question import Question
from booster.interface import MixedPrecision, Plugin
from booster.mixed_precision import mixed_precision_from_name
from booster.registry import plugin_class, plugin_from_name, plugin_names
from booster.single_device import SingleDevicePlugin

__all__ = ["ONE_DEVICE", "Candidate", "Outcome", "cheapest", "compare", "find_candidates", "smallest", "written"]

ONE_DEVICE = "none"  # what Booster(plugin=None) is called on the command line
_PRECISIONS = (None, "bf16")  # worth a look where the Booster has the say


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train.

    Attributes:
        plugin: Its name; `ONE_DEVICE`: none.
        settings: Its arguments.
        mixed_precision: The Booster's; None: none, or the plugin has one of its own.
    """

    plugin: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mixed_precision: str | None = None

    @property
    def name(self) -> str:
        """The plugin and what was set."""
        shown = dict(self.settings)
        if self.mixed_precision is not None:
            shown["mixed_precision"] = self.mixed_precision
        return " ".join([self.plugin, *(f"{key}={written(value)}" for key, value in shown.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        candidate: The way to train.
        estimate: What it takes; None: it can't be used, for the `reason`.
        dp_size: Into how many parts the data is split.
        reason: Why there is no estimate.
        is_fault: The reason is no mistake of the user's.
        seconds: That it took to find out.
    """

    candidate: Candidate
    estimate: MemoryEstimate | None = None
    dp_size: int = 1
    reason: str = ""
    is_fault: bool = False
    seconds: float = 0.0

    @property
    def sent_for_batch(self) -> float:
        """Bytes that all ranks together send for every batch of those that they train with in a step."""
        return 0.0 if self.estimate is None else self.estimate.sent * self.estimate.num_ranks / self.dp_size


def written(value: Any) -> str:
    """Return an argument in few words: of a policy what differs from its defaults."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value) and not isinstance(value, type):
        given = [getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != one.default]
        return f"{type(value).__name__}({','.join(map(written, given))})"
    return str(value)


def find_candidates(
    plugins: str, num_ranks: int, settings: Mapping[str, Any] | None = None, mixed_precision: str | None = None
) -> list[Candidate]:
    """Return the ways to train that are to be looked at.

    Args:
        plugins: Names with commas between them, or "all".
        num_ranks: Of the world.
        settings: Arguments of the one plugin, in place of those that it finds worth a look.
        mixed_precision: The Booster's, for plugins that leave it the say; None: those worth a look.

    Raises:
        ConfigError: No such plugin, or no way to use it on so many ranks.
    """
    names = _names(plugins, num_ranks)
    if settings and (len(names) > 1 or names == [ONE_DEVICE]):
        raise ConfigError(
            f"--settings {' '.join(settings)} are arguments of one plugin, and --plugin {plugins} is"
            f" {'no plugin' if names == [ONE_DEVICE] else f'{len(names)} of them'}: give one plugin's name"
        )
    if mixed_precision not in (None, "fp32"):
        mixed_precision_from_name(str(mixed_precision))
    found: list[Candidate] = []
    for name in names:
        if name == ONE_DEVICE:
            every: list[dict[str, Any]] = [{}]
        else:
            every = [dict(settings)] if settings else plugin_class(name).settings_for(num_ranks)
        for one in every:
            bare = Candidate(plugin=name, settings=one)
            given: tuple[str | None, ...] = _PRECISIONS if mixed_precision is None else (mixed_precision,)
            if _controls_precision(bare, num_ranks) and (mixed_precision is None or plugins == "all"):
                given = (None,)
            found += [replace(bare, mixed_precision=precision) for precision in given]
    return found


def compare(
    question: Question,
    candidates: Sequence[Candidate],
    num_ranks: int,
    *,
    device_memory: int | None = None,
    tell: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """Return what becomes of each candidate.

    Args:
        question: The model, its optimizer and batch.
        candidates: The ways to train.
        num_ranks: Of the world, which is imagined.
        device_memory: Bytes that a rank has.
        tell: Is called with the name of each before it is looked at.
    """
    precisions: dict[str, MixedPrecision] = {}
    outcomes: list[Outcome] = []
    for candidate in candidates:
        tell(candidate.name)
        started = time.monotonic()
        outcome = _outcome(question, candidate, num_ranks, device_memory, precisions)
        outcomes.append(replace(outcome, seconds=time.monotonic() - started))
    return outcomes


def cheapest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return which of those that fit sends the least for every batch, then takes the least memory."""
    fitting = [one for one in outcomes if one.estimate is not None and one.estimate.fits]
    return min(fitting, key=lambda one: (one.sent_for_batch, _total(one)), default=None)


def smallest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return which takes the least memory."""
    return min((one for one in outcomes if one.estimate is not None), key=_total, default=None)


def _names(plugins: str, num_ranks: int) -> list[str]:
    if plugins == "all":
        return [*([ONE_DEVICE] if num_ranks == 1 else []), *plugin_names()]
    names = list(dict.fromkeys(one.strip() for one in plugins.split(",")))
    if "all" in names or not all(names):
        raise ConfigError(f"--plugin {plugins!r} is no list of plugins: give names with a comma between them, or all")
    for name in names:
        if name != ONE_DEVICE:
            plugin_class(name)
        elif num_ranks > 1:
            raise ConfigError(
                f"--plugin {ONE_DEVICE} is one device without a plugin, and --nproc is {num_ranks}: give --nproc 1, or"
                f" one of {', '.join(plugin_names())}"
            )
    return names


def _controls_precision(candidate: Candidate, num_ranks: int) -> bool:
    """Return whether the plugin leaves the Booster no say; where it can't be made, why will be told later."""
    try:
        with imagined_world(num_ranks):
            return _made(candidate).control_precision()
    except BoosterError:
        return True


def _total(outcome: Outcome) -> int:
    return 0 if outcome.estimate is None else outcome.estimate.total


def _outcome(
    question: Question,
    candidate: Candidate,
    num_ranks: int,
    device_memory: int | None,
    precisions: dict[str, MixedPrecision],
) -> Outcome:
    try:
        with imagined_world(num_ranks):
            plugin = _made(candidate)
            precision = None
            if candidate.mixed_precision not in (None, "fp32"):
                # One object for all: what was measured with it is known the next time.
                name = str(candidate.mixed_precision)
                precision = precisions.setdefault(name, mixed_precision_from_name(name))
            estimate = answer(question, plugin, mixed_precision=precision, device_memory=device_memory)
            dp_size = plugin.dp_size
    except BoosterError as error:
        return Outcome(candidate=candidate, reason=str(error))
    except Exception as error:  # one plugin's fault must not hide what the others need: it is told, and the exit code 1
        return Outcome(candidate=candidate, reason=f"{type(error).__name__}: {error}", is_fault=True)
    return Outcome(candidate=candidate, estimate=replace(estimate, settings=candidate.settings), dp_size=dp_size)


def _made(candidate: Candidate) -> Plugin:
    if candidate.plugin == ONE_DEVICE:
        return SingleDevicePlugin("cpu")
    return plugin_from_name(candidate.plugin, **candidate.settings)
