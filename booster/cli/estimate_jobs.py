"""Estimates of a command's candidates, shared by processes."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from booster.estimate.candidates import Candidate, CandidateResult, estimate_candidate
from booster.estimate.estimate import TrainingRecipe
from booster.estimate.machine_profile import MachineProfile
from booster.estimate.model_sources import ModelSource
from booster.estimate.processes import in_processes

from .training_arguments import find_optimizer, load_training_model

_LARGE_NUMEL, _FEW = 2**32, 4  # a model and a number of candidates that are worth other processes from the start


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    """What estimates of several candidates have in common.

    Attributes:
        arguments: Arguments of the command.
        device_memory: Available memory per rank in bytes; None if not given.
        profile: Speed of the machine, optional.
        checkpoint: If True, simulate saves too.
        plans_activations: If True, candidates recompute as little as fits the device memory.
    """

    arguments: argparse.Namespace
    device_memory: int | None
    profile: MachineProfile | None
    checkpoint: bool = False
    plans_activations: bool = False

    def run(self, recipe: TrainingRecipe, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """Estimate candidates, on all cores if that takes long; report progress on stderr.

        Args:
            recipe: What the arguments train.
            candidates: Plugins and settings.
        """
        numbers = itertools.count(1)

        def show(candidate: Candidate) -> None:  # on stderr, so that stdout has the table alone
            print(f"[{next(numbers)}/{len(candidates)}] {candidate.name}", file=sys.stderr, flush=True)

        is_large = sum(parameter.numel() for parameter in recipe.model.parameters()) >= _LARGE_NUMEL
        waits = {"worthwhile_seconds": 0.0} if is_large and len(candidates) > _FEW else {}
        return in_processes(_estimates, self, candidates, show, function=self.estimator(recipe), **waits)

    def estimator(self, recipe: TrainingRecipe) -> Callable[[Candidate], CandidateResult]:
        """Return the function that estimates a candidate."""
        return partial(
            estimate_candidate,
            recipe,
            num_ranks=self.arguments.nproc,
            device_memory=self.device_memory,
            checkpoint=self.checkpoint,
            profile=self.profile,
            plans_activations=self.plans_activations,
        )


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
