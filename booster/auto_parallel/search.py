"""Search for a plan: every plugin with its settings estimated, and ranked by an objective."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from booster.comm import all_gather_text, group_rank, group_size
from booster.errors import BoosterError, ConfigError
from booster.estimate.candidates import (
    Candidate,
    CandidateResult,
    ask_plugin,
    estimate_candidate,
    fastest,
    format_batches,
    format_notes,
    format_recommendation,
    format_seconds,
    format_size,
    format_table,
    least_communication,
    least_memory,
)
from booster.estimate.estimate import TrainingRecipe
from booster.estimate.machine_profile import MachineProfile
from booster.pytree import iter_tensors

from .plan import ParallelPlan, decode, encode

Objective: TypeAlias = Literal["time", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory")

# Note [Search for a plan]
# Every candidate's own code is run on fake tensors (Note [Simulated training]), as `booster estimate` does. What can't
# be used gets a reason in place of an estimate. Batches are those of a data-parallel rank, so plans are compared by
# their time per batch: eight data-parallel ranks train with eight batches in a step.
# Ranks of a launched world share the work: each estimates every n-th candidate, and all exchange the results after each
# round, so that no rank waits longer than for one estimate. From equal results all choose the same plan.


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Ranked candidates.

    Attributes:
        results: Results of all candidates, the best first, then those that don't fit, then those that can't be used.
        objective: What they are ranked by.
        best: The best one that fits; None if there is none.
        device_memory: Available memory per rank in bytes; None if unknown.
        machine: Machine that times were predicted for; empty without times.
    """

    results: tuple[CandidateResult, ...]
    objective: Objective
    best: CandidateResult | None
    device_memory: int | None
    machine: str = ""

    def plan(self, recipe: TrainingRecipe, num_ranks: int) -> ParallelPlan:
        """Return the best candidate as a plan.

        Raises:
            ConfigError: None can be used, or none fits.
        """
        best = self.best
        if best is None or best.estimate is None:
            raise ConfigError(
                f"no plugin has a plan for {type(recipe.model).__name__} on {num_ranks} rank(s): {self._obstacle()}"
            )
        time = best.estimate.step_time
        return ParallelPlan(
            plugin=best.candidate.plugin,
            settings=best.candidate.settings,
            mixed_precision=best.candidate.mixed_precision,
            num_ranks=num_ranks,
            model=type(recipe.model).__name__,
            num_parameters=sum(parameter.numel() for parameter in recipe.model.parameters()),
            activation_schedule=None if best.schedule is None else best.schedule.items,
            batches=best.dp_size,
            memory=best.estimate.total,
            seconds=None if time is None else time.total,
            machine=self.machine,
        )

    def _obstacle(self) -> str:
        """Return why there is no plan: what is too large, or the reason of most candidates that can't be used."""
        if any(one.estimate is not None for one in self.results):
            return format_recommendation(self.results, self.device_memory)
        (reason, count), *others = Counter(one.reason for one in self.results).most_common()
        return f"{count} of {len(self.results)} candidates can't be used, as {reason}" + (
            f" (and {len(others)} other reason(s))" if others else ""
        )

    def format(self, notes: Sequence[str] = ()) -> str:
        """Return the ranking as text: a table, notes, why the rest is out, and the choice."""
        text = [format_table(self.results, self.best), format_notes(self.results, notes)]
        best = self.best
        if best is None or best.estimate is None:
            text.append(format_recommendation(self.results, self.device_memory))
        else:
            memory = format_size(best.estimate.total)
            limit = "" if self.device_memory is None else f" of {format_size(self.device_memory)}"
            time = best.estimate.step_time
            seconds = "" if time is None else f", {format_seconds(time.total)} a step of {format_batches(best.dp_size)}"
            word = {"time": "fastest" if time is not None else "fewest bytes sent", "memory": "least memory"}
            text.append(f"chosen, {word[self.objective]}: {best.name}: {memory}{limit} per rank{seconds}")
        return "\n\n".join(one for one in text if one)


def search(
    recipe: TrainingRecipe,
    candidates: Sequence[Candidate],
    num_ranks: int,
    *,
    objective: Objective,
    device_memory: int | None,
    profile: MachineProfile | None,
    plans_activations: bool = False,
    needs_accelerator_to_offload: bool = True,
    refusals: Callable[[Candidate], str] = lambda candidate: "",
    estimate_all: Callable[[Sequence[Candidate]], list[CandidateResult]] | None = None,
) -> SearchResult:
    """Estimate all candidates and rank them; see Note [Search for a plan].

    Args:
        recipe: Model, optimizer and batch.
        candidates: Plugins and settings.
        num_ranks: World size.
        objective: "time" or "memory"; without a profile, fewest bytes sent stand for the least time.
        device_memory: Available memory per rank in bytes.
        profile: Speed of the machine, optional.
        plans_activations: If True, candidates recompute as few activations as it takes to fit the device memory.
        needs_accelerator_to_offload: If True, candidates that offload to the host are out where the profile is that of
            a CPU, whose memory is the host's.
        refusals: Function that returns why a candidate is not to be used, or an empty text.
        estimate_all: Function that estimates candidates; optional, defaults to this process or the launched ranks.

    Collective: after a launch of `num_ranks` ranks every rank must call it, with equal arguments.
    """
    usable: list[Candidate] = []
    refused: list[CandidateResult] = []
    for candidate in candidates:
        reason = refusals(candidate)
        try:
            usable += [] if reason else [_solved(recipe, candidate, profile)]
        except BoosterError as error:
            reason = str(error)
        refused += [CandidateResult(candidate=candidate, reason=reason)] if reason else []
    estimate = partial(
        estimate_candidate,
        recipe,
        num_ranks=num_ranks,
        device_memory=device_memory,
        profile=profile,
        plans_activations=plans_activations and device_memory is not None,
    )
    if estimate_all is not None:
        found = estimate_all(usable)
    else:
        found = _share(estimate, usable) if group_size() > 1 else [estimate(one) for one in usable]
    if needs_accelerator_to_offload and profile is not None and not profile.is_asynchronous:
        found = [_refuse_offload(one) for one in found]
    results = [*found, *refused]
    fitting = [one for one in results if one.estimate is not None and one.estimate.fits is not False]
    by_memory = objective == "memory"
    return SearchResult(
        results=tuple(sorted(results, key=lambda one: _rank(one, objective))),
        objective=objective,
        best=least_memory(fitting) if by_memory else fastest(fitting) or least_communication(fitting),
        device_memory=device_memory,
        machine="" if profile is None else profile.machine,
    )


def _solved(recipe: TrainingRecipe, candidate: Candidate, profile: MachineProfile | None) -> Candidate:
    """Return a candidate with solved placements in place of `plan="solve"`. Collective."""
    if candidate.settings.get("plan") != "solve":
        return candidate
    from .placements import solve_placements  # needs scipy, and imports DTensor's rules

    tp_size = candidate.settings.get("tp_size", 1)
    if profile is None:
        raise ConfigError("plan='solve' needs the speed of the machine: measure it, or give --profile or --device")
    if not isinstance(tp_size, int) or tp_size < 2:
        raise ConfigError(f"plan='solve' divides layers between tp_size={tp_size!r} ranks: give tp_size=2 or more")
    solution = solve_placements(
        recipe.model,
        recipe.batch,
        tp_size,
        profile=profile,
        criterion=recipe.criterion,
        optimizer=recipe.optimizer,
        verify=False,  # the plugin does, when the candidate is estimated
    )
    if not solution.plan:
        raise ConfigError(
            f"plan='solve' divides no layer over tp_size={tp_size}, as replicated ones are faster: leave it out"
        )
    return replace(candidate, settings={**candidate.settings, "plan": dict(solution.plan)})


def refuse_pipelines(candidate: Candidate, num_ranks: int) -> str:
    """Return why a candidate with pipeline stages is out, where the loop may call the model itself."""
    if ask_plugin(candidate, num_ranks, lambda plugin: plugin.pp_size, default=1) == 1:
        return ""
    return (
        "a loop that calls the model can't run stages of a pipeline: write booster.execute_pipeline() in its place, and"
        " give candidates='all'"
    )


def refuse_small_batches(candidate: Candidate, num_ranks: int, recipe: TrainingRecipe) -> str:
    """Return why a candidate is out whose stages have no microbatch each in a batch."""
    stages = ask_plugin(candidate, num_ranks, lambda plugin: plugin.pp_size, default=1)
    samples = next((len(one) for one in iter_tensors(recipe.batch) if one.dim() > 0), 1)
    if stages <= max(1, samples):
        return ""
    return (
        f"a batch of {samples} sample(s) has too few microbatches for these stages: give a batch of as many samples as"
        " there are stages, or more"
    )


def _refuse_offload(result: CandidateResult) -> CandidateResult:
    if result.estimate is None or not result.estimate.memory.offloaded:
        return result
    return CandidateResult(
        candidate=result.candidate,
        reason="it offloads to the host's memory, which is the device's own on a CPU: give an accelerator",
    )


def _rank(result: CandidateResult, objective: Objective) -> tuple[float, ...]:
    estimate = result.estimate
    if estimate is None:
        return (2.0 + result.is_internal_error,)
    seconds = math.inf if result.seconds_per_batch is None else result.seconds_per_batch
    keys = (estimate.total, seconds) if objective == "memory" else (seconds, result.sent_per_batch, estimate.total)
    return (float(estimate.fits is False), *keys)


def _share(estimate: Callable[[Candidate], CandidateResult], candidates: Sequence[Candidate]) -> list[CandidateResult]:
    """Estimate every n-th candidate on each of n ranks, and return the results of all."""
    found: list[CandidateResult] = []
    for begin in range(0, len(candidates), group_size()):
        batch = candidates[begin : begin + group_size()]
        own: list[str] = []
        if group_rank() < len(batch):
            own = [json.dumps(encode(_with_candidate(estimate(batch[group_rank()]), Candidate(plugin=""))))]
        texts = all_gather_text(f"search for a plan, round {begin // group_size()}", own)
        results = [decode(json.loads(one[0])) for one in texts if one]
        found += [_with_candidate(one, candidate) for one, candidate in zip(results, batch, strict=True)]
    return found


def _with_candidate(result: CandidateResult, candidate: Candidate) -> CandidateResult:
    """Return a result with another candidate in place of its own: settings of users may be of any type."""
    estimate = result.estimate
    if estimate is not None:
        estimate = replace(estimate, settings=dict(candidate.settings))
    return replace(result, candidate=candidate, estimate=estimate)
