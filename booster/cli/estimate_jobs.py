"""Estimates of a command's candidates, shared by processes."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from booster.estimate.candidates import Candidate, CandidateResult, bytes_from_text, estimate_candidate
from booster.estimate.estimate import TrainingRecipe
from booster.estimate.machine_profile import MachineProfile, load_profile
from booster.estimate.model_sources import ModelSource
from booster.estimate.processes import in_processes

from .arguments import find_optimizer, load_training_model
from .profile_mesh import MeasurementError, profile_for

_LARGE_NUMEL, _FEW = 2**32, 4  # a model and a number of candidates that are worth other processes from the start


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    """What estimates of several candidates have in common; `profile` is None if no times are predicted."""

    arguments: argparse.Namespace
    device_memory: int | None
    profile: MachineProfile | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> EstimateJob:
        """Return the job that the arguments describe, without a profile.

        Raises:
            ConfigError: --device-memory is not a size.
        """
        memory = arguments.device_memory
        return cls(
            arguments=arguments, device_memory=None if memory is None else bytes_from_text(memory, "--device-memory")
        )

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
    """Return the profile of --profile, or of this machine, or None if it can't be measured; and a note about it.

    Raises:
        ConfigError: The file can't be read.
    """
    try:
        profile = profile_for(arguments.nproc) if arguments.profile is None else load_profile(arguments.profile)
    except MeasurementError as error:
        return None, f"step times: unknown, as the machine could not be measured: {error}"
    return profile, f"step times: predicted from {profile.machine} with {profile.num_ranks} rank(s) at work"


def load_recipe(arguments: argparse.Namespace) -> tuple[TrainingRecipe, ModelSource]:
    """Return what the arguments train, and where the model comes from.

    Raises:
        ConfigError: The arguments are invalid.
    """
    optimizer = find_optimizer(arguments.optimizer, arguments.optimizer_settings)
    source = load_training_model(arguments)
    optimizer([one for one in source.model.parameters() if one.requires_grad])  # a mistake in it is one of all settings
    recipe = TrainingRecipe(model=source.model, batch=source.batch, optimizer=optimizer, criterion=source.criterion)
    return recipe, source


def _estimates(job: EstimateJob) -> Callable[[Candidate], CandidateResult]:
    """Return the function that estimates a candidate of a job, in another process."""
    recipe, _ = load_recipe(job.arguments)
    return job.estimator(recipe)
