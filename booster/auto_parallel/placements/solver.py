"""`solve_placements`: the fastest tensor-parallel plan of a model on a machine, module by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import fake_collectives, fake_world, group_size, is_initialized
from booster.errors import ConfigError, first_line
from booster.estimate.estimate import TrainingRecipe, default_criterion
from booster.estimate.machine_profile import MachineProfile, find_profile
from booster.interface import Plugin
from booster.pytree import iter_tensors, map_tensors
from booster.registry import plugin_from_name
from booster.validation import is_int, is_number

from .integer_program import ReducedProgram, Solution
from .layer_graph import LayerGraph, record_step
from .layout_conversion import AxisSpeed
from .placement_program import PlacementProgram, StepCosts, data_parallel_seconds
from .styles import PARTIAL_GRADIENT_STYLE, REPLICATED_STYLE, ChosenStyle, styled_modules

_HEADER = ("module", "style", "time of a step with each style")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChoice:
    """Choice for a module, and what others would cost.

    Attributes:
        pattern: Names of the modules, with `*` for a layer's index.
        style: The style chosen.
        num_modules: Number of modules.
        seconds: Time of a step by style of these modules, all other modules chosen anew; without styles for which
            there is no solution.
        note: What the choice follows from, if not from times; "" otherwise.
    """

    pattern: str
    style: str
    num_modules: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def reason(self) -> str:
        """Reason of the choice in words."""
        if self.note:
            return self.note
        others = sorted((one for one in self.seconds.items() if one[0] != self.style), key=lambda one: one[1])
        known = [(self.style, self.seconds[self.style])] if self.style in self.seconds else []
        return "chosen for the time of a step: " + _times([*known, *others])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """Placements of a model's layers that take the least time.

    Attributes:
        plan: Styles by pattern of module names, for `HybridParallelPlugin(tp_size=..., plan=...)`; empty if nothing is
            divided.
        tp_size: Number of tensor-parallel ranks.
        seconds: Predicted time of a step: forward, backward and the optimizer.
        seconds_data_parallel: Predicted time with replicated weights and the batch divided among the ranks.
        memory: Bytes of weights, gradients, optimizer states and kept activations on a rank.
        choices: Choice for each module.
        notes: What was not left to the solver, and why.
    """

    plan: Mapping[str, str]
    tp_size: int
    seconds: float
    seconds_data_parallel: float
    memory: int
    choices: tuple[ModuleChoice, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_tensor_parallel_faster(self) -> bool:
        """Whether the plan is predicted to be faster than data parallelism over the same ranks and batch."""
        return bool(self.plan) and self.seconds < self.seconds_data_parallel

    def explain(self) -> str:
        """Return a table of modules, their styles, and the time of a step with each style, all others chosen anew."""
        rows = [_HEADER]
        for one in self.choices:
            name = f"{one.pattern} ({one.num_modules})" if one.num_modules > 1 else one.pattern
            times = _times(sorted(one.seconds.items(), key=lambda item: item[1]))
            rows.append((name, one.style, one.note or times))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{name.ljust(widths[0])}  {style.ljust(widths[1])}  {text}" for name, style, text in rows]
        faster = "tensor" if self.is_tensor_parallel_faster else "data"
        tensor_parallel, data_parallel = map(_milliseconds, (self.seconds, self.seconds_data_parallel))
        lines.append(
            f"a step takes {tensor_parallel} on {self.tp_size} tensor-parallel ranks, {data_parallel} on as many"
            f" data-parallel ones: {faster} parallelism is faster"
        )
        lines.append(f"memory of weights, gradients, states and activations: {self.memory / 2**20:,.1f} MiB per rank")
        return "\n".join([*lines, *self.notes])


def solve_placements(
    model: nn.Module,
    batch: Any,
    tp_size: int,
    *,
    profile: MachineProfile | None = None,
    memory_budget: float | None = None,
    criterion: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] = torch.optim.AdamW,
) -> PlacementSolution:
    """Find the fastest tensor-parallel plan for a model: the style of each linear layer and embedding.

    A training step is recorded on fake tensors; nothing is allocated or run. The sharding rules of DTensor give the
    strategies of each operator, the machine's profile their times, and an integer program the choice for all of them
    together. Equal layers are solved once. Only placements that `HybridParallelPlugin` runs are considered, and the
    plugin verifies the plan.

    Args:
        model: Model in the dtype that it computes in, with real values or on the meta device. Not modified.
        batch: Batch of the tensor-parallel group: a mapping of keyword arguments, a tuple, or a tensor.
        tp_size: Number of tensor-parallel ranks.
        profile: Speed of the machine; optional, defaults to what `booster profile-mesh` measured here. Give all ranks
            the same.
        memory_budget: Bytes of a rank for weights, gradients, optimizer states and kept activations; optional, defaults
            to no limit.
        criterion: Function of (outputs, batch) that returns the loss; optional, defaults to the model's own loss.
        optimizer: Optimizer over parameters of the model, or a function that creates one from a list of parameters.

    Raises:
        ConfigError: There is no profile, scipy is not installed, the model can't be recorded, or no placements fit into
            the budget.

    Collective: after a launch, on all ranks with the same arguments, as a plugin is made to verify the plan.
    """
    _check(tp_size, memory_budget)
    found_profile = _profile(profile, tp_size)
    costs = StepCosts(profile=found_profile, axis=AxisSpeed.of(found_profile, range(tp_size)))
    recipe = TrainingRecipe(model=model, batch=batch, optimizer=optimizer, criterion=criterion or default_criterion)
    graph = record_step(recipe)
    share = TrainingRecipe(
        model=model, batch=_share(batch, tp_size), optimizer=optimizer, criterion=criterion or default_criterion
    )
    search = _Search(model, graph, costs, memory_budget)
    notes: list[str] = []
    while True:
        solution = search.solve()
        plan, choices = search.result(solution)
        refused = _refused(model, tp_size, plan)
        if not refused:
            break
        for owner, reason in refused.items():
            search.replicate(owner, reason)
            notes.append(f"{owner or 'the model'} stays replicated, as the plugin refuses its plan: {reason}")
    return PlacementSolution(
        plan=plan,
        tp_size=tp_size,
        seconds=solution.cost,
        seconds_data_parallel=data_parallel_seconds(record_step(share), costs),
        memory=round(solution.memory),
        choices=choices,
        notes=tuple(dict.fromkeys(notes)),
    )


class _Search:
    """Program of a model with its solutions.

    Args:
        model: The user's model.
        graph: Its graph.
        costs: Costs of the machine.
        memory_budget: Most memory, optional.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, costs: StepCosts, memory_budget: float | None) -> None:
        self._model, self._graph, self._budget = model, graph, memory_budget
        self._modules = {one.name: one for one in styled_modules(model, graph, costs.num_ranks)}
        self._program = PlacementProgram(model, graph, list(self._modules.values()), costs)
        reduced = self._program.program.reduce()
        if reduced is None:
            raise ConfigError(
                f"{type(model).__name__} has an operator without any placement, not even a replicated one: give plan="
                " to the plugin instead"
            )
        self._reduced: ReducedProgram = reduced
        self._forced: dict[int, list[int]] = {}
        self._refused: dict[str, str] = {}

    def solve(self) -> Solution:
        """Return the fastest placements.

        Raises:
            ConfigError: None fit into the budget.
        """
        found = self._reduced.solve(memory_budget=self._budget, allowed=self._forced)
        if found is None:
            least = self._reduced.least_memory()
            raise ConfigError(
                f"memory_budget={self._budget:,} bytes is too small: weights, gradients, optimizer states and"
                f" activations take at least {least:,.0f} bytes on a rank with any placements. Give at least that,"
                " more ranks or a smaller batch"
            )
        return found

    def replicate(self, owner: str, reason: str) -> None:
        """Let the direct children of a module, or of all modules like it, be replicated from now on."""
        for name in self._modules:
            if _generalize(_owner(name)) == owner:
                self._forced |= self._program.style_choice(name, REPLICATED_STYLE)
                self._refused[name] = reason

    def result(self, solution: Solution) -> tuple[dict[str, str], tuple[ModuleChoice, ...]]:
        """Return the plan of a solution, and the choice for each module."""
        choices: dict[str, ModuleChoice] = {}
        for name in self._modules:
            choices |= {one: self._choice(name, solution) for one in self._names_like(name)}
        for name in self._partial_modules(solution):
            note = "computes on sharded features, so its gradient is all-reduced"
            chosen = ModuleChoice(pattern=name, style=PARTIAL_GRADIENT_STYLE, num_modules=1, note=note)
            choices |= dict.fromkeys(self._names_like(name), chosen)
        grouped = tuple(_grouped(choices, [name for name, _ in self._model.named_modules()]))
        if all(one.style == REPLICATED_STYLE for one in grouped):
            return {}, grouped
        return {one.pattern: ChosenStyle(one.style, one.reason) for one in grouped}, grouped

    def _choice(self, name: str, solution: Solution) -> ModuleChoice:
        style = self._program.style_of(name, solution).name
        if name in self._refused:
            note = f"replicated, as the plugin refuses other styles: {self._refused[name]}"
            return ModuleChoice(pattern=name, style=style, num_modules=1, note=note)
        seconds = {}
        for other in self._modules[name].styles:
            forced = self._forced | self._program.style_choice(name, other.name)
            found = solution if other.name == style else self._reduced.solve(memory_budget=self._budget, allowed=forced)
            if found is not None:
                seconds[other.name] = found.cost
        return ModuleChoice(pattern=name, style=style, num_modules=1, seconds=seconds)

    def _partial_modules(self, solution: Solution) -> Iterator[str]:
        """Yield the modules with a replicated parameter whose gradient is all-reduced."""
        for _, node in self._graph.kept():
            if node.kind == "gradient" and self._program.is_partial_gradient(node.name, solution):
                yield _owner(node.name)

    def _names_like(self, name: str) -> list[str]:
        """Return the modules that one of a layer stands for."""
        for first, layers in self._graph.kinds.items():
            if name.startswith(f"{first}."):
                return [layer + name.removeprefix(first) for layer in layers]
        return [name]


def _grouped(choices: Mapping[str, ModuleChoice], modules: Sequence[str]) -> Iterator[ModuleChoice]:
    """Yield the choices by pattern, or by name where a pattern would match other modules."""
    groups: dict[str, list[str]] = {}
    for name in modules:
        if name in choices:
            groups.setdefault(_generalize(name), []).append(name)
    for pattern, names in groups.items():
        matched = [one for one in modules if _matches(pattern, one)]
        is_uniform = len({choices[name].style for name in names}) == 1
        if is_uniform and sorted(matched) == sorted(names):
            first = choices[names[0]]
            yield ModuleChoice(
                pattern=pattern, style=first.style, num_modules=len(names), seconds=first.seconds, note=first.note
            )
            continue
        for name in names:
            one = choices[name]
            yield ModuleChoice(pattern=name, style=one.style, num_modules=1, seconds=one.seconds, note=one.note)


def _generalize(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), name) is not None


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _refused(model: nn.Module, tp_size: int, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the modules whose children's styles the plugin refuses, with the reason; all of them, if only together."""
    if not plan:
        return {}
    with _plugin(tp_size, plan) as plugin:
        whole = None if plugin is None else _refusal(plugin, model)
    if whole is None:
        return {}
    owners: dict[str, dict[str, str]] = {}
    for pattern, style in plan.items():
        owners.setdefault(_generalize(_owner(pattern)), {})[pattern] = style
    owners = {owner: styles for owner, styles in owners.items() if set(styles.values()) != {REPLICATED_STYLE}}
    refused = {}
    for owner, styles in owners.items():
        with _plugin(tp_size, styles) as plugin:
            reason = None if plugin is None else _refusal(plugin, model)
        if reason is not None:
            refused[owner] = reason
    return refused or dict.fromkeys(owners, whole)


def _refusal(plugin: Plugin, model: nn.Module) -> str | None:
    """Return why a plugin refuses its plan for a model, or None if it accepts it."""
    try:
        plugin.check(model, None)
    except ConfigError as error:
        return first_line(error)
    return None


@contextmanager
def _plugin(tp_size: int, plan: Mapping[str, str]) -> Iterator[Plugin | None]:
    """Return a plugin with a plan in a fake world, or in the launched one; None if that has another number of ranks."""
    arguments = {"tp_size": tp_size, "plan": dict(plan), "precision": "fp32"}
    if not is_initialized():
        with fake_world(tp_size):
            yield plugin_from_name("hybrid_parallel", **arguments)
        return
    if group_size() % tp_size:
        yield None  # the plugin checks the plan when it boosts
        return
    with fake_collectives():
        plugin = plugin_from_name("hybrid_parallel", **arguments)
        try:
            yield plugin
        finally:
            plugin.close()


def _share(batch: Any, num_ranks: int) -> Any:
    """Return the share of the rank that gets the most of a batch."""
    size = next((tensor.shape[0] for tensor in iter_tensors(batch) if tensor.dim()), 1)
    most = -(-size // num_ranks)
    return map_tensors(lambda tensor: tensor[:most] if tensor.dim() and tensor.shape[0] == size else tensor, batch)


def _profile(profile: MachineProfile | None, tp_size: int) -> MachineProfile:
    found = find_profile(tp_size) if profile is None else profile
    if found is None:
        raise ConfigError(
            f"this machine has no profile with the times of collectives: run `booster profile-mesh --nproc {tp_size}`,"
            " or give profile=load_profile(path) of another machine"
        )
    return found


def _check(tp_size: Any, memory_budget: Any) -> None:
    if not is_int(tp_size) or tp_size < 2:
        raise ConfigError(f"tp_size={tp_size!r} is not a number of ranks that share layers: give an int of 2 or more")
    if memory_budget is not None and not (is_number(memory_budget) and memory_budget > 0):
        raise ConfigError(
            f"memory_budget={memory_budget!r} is not a positive number of bytes: give the memory of a device, such as"
            " 80 * 2**30, or omit it"
        )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _times(times: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{style} {_milliseconds(seconds)}" for style, seconds in times)
