"""Settings of a benchmark, validated before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from booster.errors import ConfigError

__all__ = ["INNER_FACTOR", "MODES", "BenchmarkSettings", "modes_from_text"]

MODES = ("1d", "2d", "2.5d", "3d", "dp", "zero1", "zero2", "gemini")

INNER_FACTOR = 4  # intermediate size / hidden size of an MLP layer, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings:
    """Settings shared by all configurations of a benchmark.

    Attributes:
        num_ranks: Number of processes.
        batch: Global batch size.
        sequence: Sequence length.
        hidden: Hidden size.
        layers: Number of MLP layers, each `hidden` -> 4 * `hidden` -> `hidden`.
        warmup_steps: Number of untimed steps before the timed ones.
        profile_steps: Number of timed steps; their medians are reported.
        modes: Distinct elements of `MODES`.
        timeout_seconds: Time limit of a configuration.
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

    @property
    def rows(self) -> int:
        """Tokens of a global batch."""
        return self.batch * self.sequence


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
