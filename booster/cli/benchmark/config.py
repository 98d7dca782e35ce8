"""Settings of a benchmark, validated before anything is started."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.config import TENSOR_MODES

MODES = (*TENSOR_MODES, "dp", "zero1", "zero2", "gemini")

INNER_FACTOR = 4  # intermediate size / hidden size of an MLP layer, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings:
    """Settings shared by all configurations of a benchmark, of whose timed steps medians are reported.

    Batch and sequence are those of the global batch. An MLP layer is `hidden` -> 4 * `hidden` -> `hidden`. The timeout
    is that of a configuration.
    """

    num_ranks: int = 4
    batch: int = 8
    sequence: int = 64
    hidden: int = 256
    layers: int = 2
    warmup_steps: int = 2
    profile_steps: int = 5
    modes: tuple[str, ...] = MODES
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        for option, number, least in (
            ("-g/--nproc", self.num_ranks, 1),
            ("-b/--batch-size", self.batch, 1),
            ("-s/--sequence-length", self.sequence, 1),
            ("-d/--hidden", self.hidden, 1),
            ("-l/--layers", self.layers, 1),
            ("-w/--warmup-steps", self.warmup_steps, 0),
            ("-p/--profile-steps", self.profile_steps, 1),
        ):
            if number < least:
                raise ConfigError(f"{option}={number} leaves nothing to measure: give a number from {least}")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ConfigError(
                f"--timeout={self.timeout_seconds:g} is not a positive number: give the time limit of a configuration"
                " in seconds, such as 300"
            )


def modes_from_text(text: str) -> tuple[str, ...]:
    """Parse a list such as "1d,2.5d,zero1" or "all" into modes in the order of `MODES`.

    Raises:
        ConfigError: A name is not a mode, or no name is given.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if names == ["all"]:
        return MODES
    for name in names:
        if name not in MODES:
            raise ConfigError(f"-m {text}: {name!r} is not a mode: choose from {','.join(MODES)}, or give all")
    return tuple(mode for mode in MODES if mode in names)


SERIAL = "serial"

_DATA_PARALLEL = ("dp", "zero1", "zero2", "gemini")
_MAX_SUGGESTIONS = 4  # numbers of ranks suggested in a message


@dataclass(frozen=True, slots=True)
class Configuration:
    """Parallel configuration of the network.

    Attributes:
        mode: One of `MODES`, or `SERIAL` for a single process.
        sizes: Number of ranks along each mesh axis of the mode.
    """

    mode: str
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Label in tables, such as "1d tp=2 dp=2"."""
        axes = [f"{axis}={size}" for axis, size in self.sizes.items()]
        return " ".join(axes if self.mode in self.sizes else [self.mode, *axes])


@dataclass(frozen=True, slots=True)
class Skipped:
    """Configuration that is not measured, and the reason."""

    name: str
    reason: str


def find_configurations(settings: BenchmarkSettings) -> tuple[list[Configuration], list[Skipped]]:
    """Return the configurations of the settings' modes that can be measured, and the skipped ones.

    Raises:
        ConfigError: No configuration can be measured; the message lists all reasons.
    """
    found: list[Configuration] = []
    skipped: list[Skipped] = []
    for mode in settings.modes:
        candidates = [Configuration(mode, sizes) for sizes in _possible_sizes(mode, settings.num_ranks)]
        if not candidates:
            skipped.append(Skipped(mode, _mode_skip_reason(mode, settings.num_ranks)))
        for candidate in candidates:
            reason = _skip_reason(candidate, settings)
            if reason is None:
                found.append(candidate)
            else:
                skipped.append(Skipped(candidate.name, reason))
    if not found:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in skipped)
        raise ConfigError(f"-g {settings.num_ranks} -m {','.join(settings.modes)} leaves nothing to measure. {reasons}")
    return found, skipped


def _possible_sizes(mode: str, num_ranks: int) -> list[dict[str, int]]:
    """Return the mesh axes of each mesh that a mode can have with this number of ranks."""
    if mode in _DATA_PARALLEL:
        return [{"dp": num_ranks}]
    if mode == "1d":
        return [{"tp": tp, "dp": num_ranks // tp} for tp in range(num_ranks, 1, -1) if num_ranks % tp == 0]
    power = 3 if mode == "3d" else 2
    sides = list(itertools.takewhile(lambda side: side**power <= num_ranks, itertools.count(2)))
    if mode == "2.5d":
        return [{"depth": num_ranks // side**2, "q": side} for side in reversed(sides) if num_ranks % side**2 == 0]
    return [{"q": side} for side in sides if side**power == num_ranks]


_RULES = {
    "1d": "tp * dp ranks with tp from 2",
    "2d": "q * q ranks with q from 2",
    "2.5d": "depth * q * q ranks with q from 2",
    "3d": "q * q * q ranks with q from 2",
}


def _mode_skip_reason(mode: str, num_ranks: int) -> str:
    # The nearest possible number below, if any, and the next ones above.
    below = (number for number in range(num_ranks - 1, 0, -1) if _possible_sizes(mode, number))
    above = (number for number in itertools.count(num_ranks + 1) if _possible_sizes(mode, number))
    possible = itertools.islice(itertools.chain(itertools.islice(below, 1), above), _MAX_SUGGESTIONS)
    return f"not possible with -g {num_ranks}: it needs {_RULES[mode]}, so -g {', '.join(map(str, possible))}, ..."


def _skip_reason(candidate: Configuration, settings: BenchmarkSettings) -> str | None:
    if candidate.mode == "2.5d" and candidate.sizes["depth"] == 1 and "2d" in settings.modes:
        return f"the same as 2d q={candidate.sizes['q']}"
    what, size, num_shards = _divided_size(candidate, settings)
    if size % num_shards == 0:
        return None
    below = size // num_shards * num_shards
    nearest = f"{below} or {below + num_shards}" if below else f"{num_shards}"
    return f"{what} is {size}, which is not divisible by {num_shards} ranks: use {nearest}"


def _divided_size(candidate: Configuration, settings: BenchmarkSettings) -> tuple[str, int, int]:
    """Return the name and value of the size that has to be divisible, and into how many parts."""
    sizes = candidate.sizes
    if "dp" in sizes:  # 1D tensor parallelism may shard layers unevenly
        return "the batch (-b)", settings.batch, sizes["dp"]
    return "the hidden size (-d)", settings.hidden, sizes["q"] ** (2 if candidate.mode == "3d" else 1)
