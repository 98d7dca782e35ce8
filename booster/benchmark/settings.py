"""What a benchmark is asked for, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from booster.errors import ConfigError

__all__ = ["INNER_FACTOR", "MODES", "BenchmarkSettings", "modes_from_text"]

MODES = ("1d", "2d", "2.5d", "3d", "dp", "zero1", "zero2", "gemini")

INNER_FACTOR = 4  # how much wider the middle of an MLP layer is than its ends, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings:
    """One benchmark; the numbers are the same for all of its configurations.

    Attributes:
        num_ranks: Processes.
        batch: Examples of a step, all ranks together.
        sequence: Tokens of an example.
        hidden: Features of a token.
        layers: MLP layers, each `hidden` -> 4 * `hidden` -> `hidden`.
        warmup_steps: Steps before those that are timed.
        profile_steps: Timed steps, whose medians are reported.
        modes: Some of `MODES`, each once.
        timeout_seconds: After which a configuration is ended.
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
                f"--timeout={self.timeout_seconds:g} is no time to wait: give the seconds that one configuration may"
                " take, such as 300"
            )

    @property
    def rows(self) -> int:
        """Tokens of a step, all ranks together."""
        return self.batch * self.sequence


def modes_from_text(text: str) -> tuple[str, ...]:
    """Returns the modes of a list like "1d,2.5d,zero1", in the order of `MODES`; "all" stands for all of them.

    Raises:
        ConfigError: A name that is no mode, or no name at all.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if names == ["all"]:
        return MODES
    for name in names:
        if name not in MODES:
            raise ConfigError(f"-m {text}: {name!r} is no mode. Choose some of {','.join(MODES)}, or all")
    return tuple(mode for mode in MODES if mode in names)
