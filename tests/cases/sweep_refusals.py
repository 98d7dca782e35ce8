"""What the library refuses of the models of `zoo.transformers_sweep`: strategy, reason and models, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Models that a strategy refuses for one reason.

    Attributes:
        strategy: Of `cases.sweep_cases.STRATEGIES`.
        reason: As docs/tested_models.md says it.
        message: Part of the library's error.
        names: Classes of transformers, separated by spaces.
    """

    strategy: str
    reason: str
    message: str
    names: str


REFUSALS: tuple[Refusal, ...] = ()


def refusal_of(name: str, strategy: str) -> Refusal | None:
    """Return why a strategy refuses a model; None where it runs."""
    found = [one for one in REFUSALS if one.strategy == strategy and name in one.names.split()]
    assert len(found) <= 1, f"{name} under {strategy} is refused twice: {found}"
    return found[0] if found else None
