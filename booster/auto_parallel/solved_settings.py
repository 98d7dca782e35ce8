"""Settings of candidates that are solved before they are estimated: `plan="solve"` of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from booster.errors import BoosterError, ConfigError
from booster.estimate.candidates import Candidate, CandidateResult
from booster.estimate.estimate import TrainingRecipe
from booster.estimate.machine_profile import MachineProfile

SOLVE = "solve"  # in place of a plan


def solve_settings(
    recipe: TrainingRecipe, candidates: Sequence[Candidate], profile: MachineProfile | None
) -> tuple[list[Candidate], list[CandidateResult]]:
    """Return the candidates with solved placements in place of `plan="solve"`, and why others have none.

    Args:
        recipe: Model, optimizer and batch.
        candidates: Plugins and settings.
        profile: Speed of the machine.

    Collective: after a launch every rank must call it, with equal arguments.
    """
    solved: list[Candidate] = []
    refused: list[CandidateResult] = []
    for candidate in candidates:
        if candidate.settings.get("plan") != SOLVE:
            solved.append(candidate)
            continue
        try:
            solved.append(_solve(recipe, candidate, profile))
        except BoosterError as error:
            refused.append(CandidateResult(candidate=candidate, reason=str(error)))
    return solved, refused


def _solve(recipe: TrainingRecipe, candidate: Candidate, profile: MachineProfile | None) -> Candidate:
    from .placements import solve_placements  # needs scipy, and imports DTensor's rules

    tp_size = candidate.settings.get("tp_size", 1)
    if profile is None:
        raise ConfigError(f"plan={SOLVE!r} needs the speed of the machine: measure it, or give --profile or --device")
    if not isinstance(tp_size, int) or tp_size < 2:
        raise ConfigError(f"plan={SOLVE!r} divides layers between tp_size={tp_size!r} ranks: give tp_size=2 or more")
    solution = solve_placements(
        recipe.model,
        recipe.batch,
        tp_size,
        profile=profile,
        criterion=recipe.criterion,
        optimizer=recipe.optimizer,
        verify=False,  # the plugin does, when the candidate is estimated
    )
    return replace(candidate, settings={**candidate.settings, "plan": dict(solution.plan)})
