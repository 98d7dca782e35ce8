"""`AutoPlugin`: the plugin is chosen at the first `boost()`, for the model, its batches and this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from booster.activation_checkpointing import layers_without_policy
from booster.comm import all_gather_text, check_same_across_ranks, group_rank, group_size, max_of_numbers
from booster.core.model_wrapper import LabeledBatch
from booster.device import current_device, free_memory
from booster.errors import ConfigError, first_line
from booster.estimate.candidates import Candidate, bytes_from_text, find_candidates, format_size
from booster.estimate.estimate import TrainingRecipe, default_criterion
from booster.estimate.machine_profile import (
    MachineProfile,
    default_path,
    find_profile,
    profile_from_values,
    profile_values,
    save_profile,
)
from booster.estimate.machine_speed import measure_machine
from booster.interface import MixedPrecision, PluginChoice
from booster.pytree import map_tensors
from booster.rng_state import preserved_rng
from booster.trainer.batches import as_batch
from booster.validation import check_flag, error_of, is_count

from .plan import ParallelPlan
from .search import OBJECTIVES, Objective, refuse_pipelines, search

_USABLE_SHARE = 0.9  # of the free memory: the rest is for fragments, and for buffers of the communication backend
_CALL = "boost() with an AutoPlugin"


class AutoPlugin(PluginChoice, name="auto"):
    """Choose the plugin and its settings at the first `boost()`: `Booster(plugin=AutoPlugin())`, or plugin="auto".

    Every plugin that trains as one process does is estimated by its own code on fake tensors: its memory per rank, and
    the time of its step from the speed of this machine, which is measured at first use and kept. The best one that fits
    becomes `booster.plugin`, and layers recompute activations as far as it takes to fit, unless the model's layers are
    checkpointed already. All ranks choose the same.

    Args:
        objective: "time" for the least predicted time per batch, or "memory" for the least memory per rank.
        device_memory_budget: Memory per rank, in bytes or as text such as "40GiB"; optional, defaults to what is free
            on the device of the rank that has the least.
        candidates: Names of plugins, or pairs of a name and its arguments; or "all" for all plugins, also with stages
            of a pipeline, which train by `booster.execute_pipeline` only. Optional, defaults to all without stages.
        verbose: If True, rank 0 prints the ranking, with the reasons why others are out.
        batch: Batch of one rank, of which shapes and dtypes matter; optional, defaults to the first samples of the
            DataLoader that `boost()` is given.
        criterion: Function of (outputs, batch) that returns the loss; optional, defaults to the criterion of `boost()`,
            called with outputs and targets, else the model's own loss.
        profile: Speed of the machine; optional, defaults to what `booster profile-mesh` measured, or measures now.

    Attributes:
        plan: The chosen plan; None before.

    Raises:
        ConfigError: An argument is invalid.

    Examples:
        >>> import torch
        >>> from booster import AutoPlugin, Booster
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.rand(8, 3), torch.rand(8, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> booster = Booster(plugin=AutoPlugin(objective="memory", verbose=False))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, torch.nn.MSELoss(), loader)
        >>> booster.plan.num_ranks
        1
    """

    def __init__(
        self,
        objective: Objective = "time",
        device_memory_budget: int | str | None = None,
        candidates: str | Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        verbose: bool = True,
        *,
        batch: Any = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        profile: MachineProfile | None = None,
    ) -> None:
        if objective not in OBJECTIVES:
            raise ConfigError(
                f"AutoPlugin(objective={objective!r}): give one of {', '.join(map(repr, OBJECTIVES))}, which is what"
                " plans are ranked by"
            )
        check_flag("verbose", verbose)
        if profile is not None and not isinstance(profile, MachineProfile):
            raise ConfigError(
                f"AutoPlugin(profile={profile!r}) is a {type(profile).__name__}: pass a MachineProfile, such as"
                " booster.estimate.load_profile('profile.json') returns"
            )
        self._objective: Objective = objective
        self._budget = _bytes_of(device_memory_budget)
        self._candidates = candidates
        self._verbose = verbose
        self._batch, self._criterion, self._profile = batch, criterion, profile
        self.plan: ParallelPlan | None = None
        _checked_names(candidates)

    @classmethod
    def from_plan(cls, path: str | PathLike[str]) -> AutoPlugin:
        """Return an AutoPlugin whose choice is the plan in a file: `Booster(plugin=AutoPlugin.from_plan("plan.json"))`.

        Args:
            path: File that `booster plan --output FILE` or `booster.plan.save(FILE)` has written.

        Raises:
            ConfigError: The file can't be read, or is not a plan of this version.
        """
        made = cls(verbose=False)
        made.plan = ParallelPlan.load(path)
        return made

    def precision_for(self, mixed_precision: str | MixedPrecision | None) -> str | None:
        """Return the name of a Booster's mixed precision; see `PluginChoice.precision_for`."""
        if isinstance(mixed_precision, MixedPrecision):
            raise ConfigError(
                f"mixed_precision is a {type(mixed_precision).__name__}, and an AutoPlugin compares plugins that have"
                " precisions of their own: give its name, such as 'bf16', or choose the plugin"
            )
        plan = self.plan
        if plan is not None and mixed_precision is not None:
            own = plan.mixed_precision or plan.settings.get("precision")
            if mixed_precision != own:
                raise ConfigError(
                    f"mixed_precision={mixed_precision!r} was given with a plan that has {own!r}: leave it out, or make"
                    " another plan"
                )
        return mixed_precision

    def choose(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
        criterion: Callable[..., Any] | None,
        dataloader: Any,
        mixed_precision: str | None,
    ) -> ParallelPlan:
        """Return the best plan for the arguments of `boost()`; see `PluginChoice.choose`."""
        found: list[tuple[TrainingRecipe, list[Candidate]]] = []
        num_ranks = group_size()

        def prepare() -> None:
            recipe = self._recipe(model, optimizer, criterion, dataloader)
            found.append((recipe, _find(self._candidates, num_ranks, mixed_precision)))

        error = error_of(prepare)
        check_same_across_ranks(_CALL, self._fingerprint(model, mixed_precision), error=error)
        recipe, candidates = found[0]
        profile = self.machine()
        device_memory = self._device_memory(model)
        result = search(
            recipe,
            candidates,
            num_ranks,
            objective=self._objective,
            device_memory=device_memory,
            profile=profile,
            needs_accelerator_to_offload=self._candidates in (None, "all"),
            refusals=lambda one: "" if self._candidates == "all" else refuse_pipelines(one, num_ranks),
            plans_activations=error_of(lambda: layers_without_policy(model)) is None,
        )
        has_estimates = any(one.estimate is not None for one in result.results)
        if self._verbose and has_estimates and group_rank() == 0:
            notes = [
                f"times: predicted for {profile.machine} with {profile.num_ranks} rank(s) at work",
                f"memory per rank: {format_size(device_memory)}",
            ]
            print(result.format(notes), flush=True)
        self.plan = result.plan(recipe, num_ranks)
        check_same_across_ranks(f"the plan of {_CALL}", self.plan.fingerprint)
        return self.plan

    def _recipe(
        self, model: Any, optimizer: Any, criterion: Callable[..., Any] | None, dataloader: Any
    ) -> TrainingRecipe:
        if not isinstance(model, nn.Module) or not callable(getattr(optimizer, "step", optimizer)):
            raise ConfigError(
                f"an AutoPlugin chooses for a model in training, and boost() was given a {type(model).__name__} with"
                f" optimizer {type(optimizer).__name__}: boost the model that trains, with its optimizer, first, or"
                " name the plugin"
            )
        batch = self._batch
        if batch is None:
            if dataloader is None:
                raise ConfigError(
                    "an AutoPlugin estimates steps on a batch, and boost() was given no dataloader: pass it to boost(),"
                    " or give AutoPlugin(batch=...), such as the first batch of your loop"
                )
            batch = first_batch(dataloader)
        if not isinstance(batch, LabeledBatch) and (self._criterion is None or not isinstance(batch, tuple)):
            batch = as_batch(batch)
        return TrainingRecipe(
            model=model,
            batch=map_tensors(lambda tensor: tensor.to("meta"), batch),
            optimizer=optimizer,
            criterion=self._criterion or criterion_of(criterion, batch),
        )

    def _fingerprint(self, model: Any, mixed_precision: str | None) -> list[str]:
        tensors = model.named_parameters() if isinstance(model, nn.Module) else ()
        return [
            f"objective={self._objective!r}",
            f"device_memory_budget={self._budget!r}",
            f"candidates={self._candidates!r}",
            f"mixed_precision={mixed_precision!r}",
            *(f"{name}: {tuple(one.shape)} {one.dtype} requires_grad={one.requires_grad}" for name, one in tensors),
        ]

    def machine(self) -> MachineProfile:
        """Return the machine profile that times are predicted from: rank 0's, measured now if there is none.

        Collective: every rank must call it.
        """
        if self._profile is not None:
            found: MachineProfile | None = self._profile
        else:
            found = find_profile(group_size()) if group_rank() == 0 else None
            has_one = group_rank() == 0 and found is not None and found.num_ranks == group_size()
            if not max_of_numbers([int(has_one)])[0]:
                found = measure_machine()
                if group_rank() == 0:
                    save_profile(found, default_path(group_size()))
        text = [json.dumps(profile_values(found))] if group_rank() == 0 and found is not None else []
        return profile_from_values(json.loads(all_gather_text(f"the machine profile of {_CALL}", text)[0][0]))

    def _device_memory(self, model: nn.Module) -> int:
        if self._budget is not None:
            return self._budget
        device = current_device()
        held = sum(one.nbytes for one in model.parameters() if one.device.type == device.type)
        own = int(_USABLE_SHARE * (free_memory(device) + held))
        return -max_of_numbers([-own])[0]


def first_batch(dataloader: Any) -> Any:
    """Return a batch of a loader's first samples; the loader and the random number generators stay as they were.

    Raises:
        ConfigError: The loader is of another type, or its dataset can't be read by index.
    """
    advice = "give AutoPlugin(batch=...), such as the first batch of your loop"
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"an AutoPlugin can't take a batch of a {type(dataloader).__name__}, which is not a torch DataLoader:"
            f" {advice}"
        )
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"an AutoPlugin can't take a batch of a {type(dataset).__name__} without using up its samples: {advice}"
        )
    size = getattr(dataloader.batch_sampler, "batch_size", None) or dataloader.batch_size or 1
    with preserved_rng():
        try:
            samples = [dataset[index % len(dataset)] for index in range(size)]  # type: ignore[arg-type]
            return dataloader.collate_fn(samples)
        except Exception as error:  # any error of the user's dataset
            raise ConfigError(
                f"an AutoPlugin reads the dataset's first samples, and {type(dataset).__name__} failed with"
                f" {type(error).__name__}: {first_line(error)}: {advice}"
            ) from error


def criterion_of(criterion: Callable[..., Any] | None, batch: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Return a function of (outputs, batch) for the criterion that `boost()` is given, or for the model's own loss."""
    if criterion is None:
        return default_criterion
    if isinstance(batch, LabeledBatch):
        return lambda outputs, given: criterion(outputs, given.targets)
    return criterion


def _bytes_of(budget: int | str | None) -> int | None:
    if budget is None or is_count(budget):
        return budget  # type: ignore[return-value]  # is_count leaves an int
    if isinstance(budget, str):
        return bytes_from_text(budget, "AutoPlugin(device_memory_budget)")
    raise ConfigError(
        f"AutoPlugin(device_memory_budget={budget!r}) is not a size: give a number of bytes, or text such as '40GiB'"
    )


def _checked_names(candidates: Any) -> list[tuple[str, dict[str, Any] | None]]:
    """Return names of plugins, with arguments where given.

    Raises:
        ConfigError: It is not a list of these.
    """
    if candidates is None or candidates == "all":
        return [("all", None)]
    if isinstance(candidates, str):
        return [(candidates, None)]
    found: list[tuple[str, dict[str, Any] | None]] = []
    for one in candidates if isinstance(candidates, (list, tuple)) else [candidates]:
        if isinstance(one, str):
            found.append((one, None))
        elif (
            isinstance(one, (list, tuple)) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], Mapping)
        ):
            found.append((one[0], dict(one[1])))
        else:
            raise ConfigError(
                f"AutoPlugin(candidates={candidates!r}) has {one!r}, which is not a plugin: give names, or pairs of a"
                " name and its arguments, such as ['torch_ddp', ('low_level_zero', {'stage': 2})]"
            )
    if not found:
        raise ConfigError("AutoPlugin(candidates=[]) has none: give names of plugins, or leave it out for all")
    return found


def _find(candidates: Any, num_ranks: int, mixed_precision: str | None) -> list[Candidate]:
    """Return the candidates in the Booster's precision; by default in the dtypes of the parameters."""
    found: list[Candidate] = []
    for plugin, settings in _checked_names(candidates):
        precision = mixed_precision if settings else mixed_precision or "fp32"
        found += find_candidates(plugin, num_ranks, settings, precision)
    return [one for index, one in enumerate(found) if one not in found[:index]]
