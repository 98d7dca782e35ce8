"""Estimates of a command's candidates, shared by processes: Python runs one at a time in each."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from booster.device import num_cores
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

from .arguments import find_optimizer, load_training_model, parse_settings
from .profile_mesh import MeasurementError, profile_for

T = TypeVar("T")
R = TypeVar("R")
_LARGE_NUMEL, _FEW = 2**32, 4  # a model and a number of candidates that are worth other processes from the start
_WORTHWHILE_SECONDS = 15.0  # of work that is left: another process takes some of them to start
_function: Callable[[Any], Any] | None = None  # of a process of the pool


def estimate_all(
    arguments: argparse.Namespace,
    device_memory: int | None,
    profile: MachineProfile | None,
    recipe: TrainingRecipe,
    candidates: Sequence[Candidate],
) -> list[CandidateResult]:
    """Estimate candidates, on all cores if that takes long; report progress on stderr.

    No times are predicted without a profile.
    """
    options: dict[str, Any] = {
        "num_ranks": arguments.nproc,
        "device_memory": device_memory,
        "checkpoint": getattr(arguments, "checkpoint", False),  # an option of `booster estimate`
        "profile": profile,
        "plans_activations": arguments.checkpoint_activations == "auto",
    }
    numbers = itertools.count(1)

    def show(candidate: Candidate) -> None:  # on stderr, so that stdout has the table alone
        print(f"[{next(numbers)}/{len(candidates)}] {candidate.name}", file=sys.stderr, flush=True)

    is_large = sum(parameter.numel() for parameter in recipe.model.parameters()) >= _LARGE_NUMEL
    return in_processes(
        partial(estimate_candidate, recipe, **options),
        partial(_estimator, arguments, options),
        candidates,
        show,
        at_once=is_large and len(candidates) > _FEW,
    )


def _estimator(arguments: argparse.Namespace, options: dict[str, Any]) -> Callable[[Candidate], CandidateResult]:
    recipe, _ = _load_recipe(arguments)
    return partial(estimate_candidate, recipe, **options)


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


def in_processes(
    function: Callable[[T], R],
    make_function: Callable[[], Callable[[T], R]],
    items: Sequence[T],
    on_start: Callable[[T], None],
    *,
    at_once: bool = False,
) -> list[R]:
    """Return the results of a function for all items, in their order.

    This process runs them one by one. When the work that is left would take long, or at once if asked for, new
    processes on the other cores take items, too. They start anew: a copy of this process would lack its threads.

    Args:
        function: The function, in this process.
        make_function: Function that returns it in another process, to which it is sent, as items and results are.
        items: Items.
        on_start: Called in this process, on any thread, with each item when its turn comes.
        at_once: If True, new processes are started before the first item shows how long it takes.
    """
    results: dict[int, R] = {}
    left = deque(range(len(items)))
    started = time.monotonic()

    def run_next(call: Callable[[T], R]) -> bool:
        try:
            index = left.popleft()
        except IndexError:
            return False
        on_start(items[index])
        results[index] = call(items[index])
        return True

    def is_worthwhile() -> bool:
        seconds = (time.monotonic() - started) / len(results) * len(left) if results else 0.0
        return len(left) > 1 and num_cores() > 1 and (at_once or seconds > _WORTHWHILE_SECONDS)

    while left and not is_worthwhile():
        run_next(function)
    if left:
        count = min(num_cores() - 1, len(left) - 1)
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _prepare, (make_function,))
        with pool, ThreadPoolExecutor(count) as threads:  # each waits for a process, an item at a time

            def run_in_pool() -> None:
                while run_next(lambda item: pool.submit(_call, item).result()):
                    pass

            others = [threads.submit(run_in_pool) for _ in range(count)]
            try:
                while run_next(function):
                    pass
                for one in others:
                    one.result()
            finally:
                left.clear()
    return [results[index] for index in range(len(items))]


def _prepare(make_function: Callable[[], Callable[[Any], Any]]) -> None:
    global _function
    torch.set_num_threads(1)
    _function = make_function()


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)
