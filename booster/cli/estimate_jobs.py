"""Estimates of a command's candidates, shared by processes."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from booster.estimate.candidates import (
    Candidate,
    CandidateResult,
    bytes_from_text,
    estimate_candidate,
    find_candidates,
)
from booster.estimate.estimate import TrainingRecipe
from booster.estimate.machine_profile import MachineProfile, load_profile
from booster.estimate.model_sources import ModelSource
from booster.estimate.processes import in_processes

from .arguments import find_optimizer, load_training_model, parse_settings
from .profile_mesh import MeasurementError, profile_for

_LARGE_NUMEL, _FEW = 2**32, 4  # a model and a number of candidates that are worth other processes from the start


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    """What estimates of several candidates have in common; `profile` is None if no times are predicted."""

    arguments: argparse.Namespace
    device_memory: int | None
    profile: MachineProfile | None = None

    def run(self, recipe: TrainingRecipe, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """Estimate candidates of the recipe, on all cores if that takes long; report progress on stderr."""
        numbers = itertools.count(1)

        def show(candidate: Candidate) -> None:  # on stderr, so that stdout has the table alone
            print(f"[{next(numbers)}/{len(candidates)}] {candidate.name}", file=sys.stderr, flush=True)

        is_large = sum(parameter.numel() for parameter in recipe.model.parameters()) >= _LARGE_NUMEL
        at_once = is_large and len(candidates) > _FEW
        return in_processes(_estimates, self, candidates, show, function=self.estimator(recipe), at_once=at_once)

    def estimator(self, recipe: TrainingRecipe) -> Callable[[Candidate], CandidateResult]:
        """Return the function that estimates a candidate."""
        return partial(
            estimate_candidate,
            recipe,
            num_ranks=self.arguments.nproc,
            device_memory=self.device_memory,
            checkpoint=getattr(self.arguments, "checkpoint", False),  # an option of `booster estimate`
            profile=self.profile,
            plans_activations=self.arguments.checkpoint_activations == "auto",
        )


def find_machine(arguments: argparse.Namespace) -> tuple[MachineProfile | None, str]:
    """Return the profile of --profile, or of this machine, or None if it can't be measured; and a note about it."""
    try:
        profile = profile_for(arguments.nproc) if arguments.profile is None else load_profile(arguments.profile)
    except MeasurementError as error:
        return None, f"step times: unknown, as the machine could not be measured: {error}"
    return profile, f"step times: predicted from {profile.machine} with {profile.num_ranks} rank(s) at work"


def prepare(
    arguments: argparse.Namespace,
) -> tuple[list[Candidate], TrainingRecipe, ModelSource, int | None]:
    """Return the candidates, what they train, where the model comes from, and the device's memory, if given."""
    memory = arguments.device_memory
    device_memory = None if memory is None else bytes_from_text(memory, "--device-memory")
    settings = parse_settings(arguments.settings, "--settings")
    candidates = find_candidates(arguments.plugin, arguments.nproc, settings, arguments.mixed_precision)
    return candidates, *_load_recipe(arguments), device_memory


def _load_recipe(arguments: argparse.Namespace) -> tuple[TrainingRecipe, ModelSource]:
    optimizer = find_optimizer(arguments.optimizer, arguments.optimizer_settings)
    source = load_training_model(arguments)
    optimizer([one for one in source.model.parameters() if one.requires_grad])  # a mistake in it is one of all settings
    recipe = TrainingRecipe(model=source.model, batch=source.batch, optimizer=optimizer, criterion=source.criterion)
    return recipe, source


def _estimates(job: EstimateJob) -> Callable[[Candidate], CandidateResult]:
    """Return the function that estimates a candidate of a job, in another process."""
    recipe, _ = _load_recipe(job.arguments)
    return job.estimator(recipe)
