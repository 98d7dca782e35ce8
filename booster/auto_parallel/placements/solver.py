"""`solve_placements`: the fastest tensor-parallel plan of a model on a machine, module by module."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import check_same_across_ranks, fake_collectives, fake_world, group_size, is_initialized
from booster.errors import ConfigError, first_line
from booster.estimate.estimate import TrainingRecipe, check_num_bytes, default_criterion
from booster.estimate.machine_profile import MachineProfile, find_profile
from booster.interface import Plugin
from booster.pytree import iter_tensors, map_tensors
from booster.registry import plugin_from_name
from booster.validation import check_flag, error_of, is_int

from .integer_program import Solution
from .layer_graph import LayerGraph, record_step
from .layout_conversion import AxisSpeed
from .placement_program import PlacementProgram, StepCosts, data_parallel_seconds
from .styles import PARTIAL_GRADIENT_STYLE, REPLICATED_STYLE, ChosenStyle, styled_modules

_SAME_PROFILE = "give all ranks the same model, batch and arguments, and the same profile=, such as that of one file"
_HEADER = ("module", "style", "time of a step with each style")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChoice:
    """Choice for a module, and what others would cost.

    Attributes:
        pattern: Names of the modules, with `*` for a layer's index.
        style: The style chosen.
        num_modules: Number of modules.
        seconds: Time of a step by style of these modules, all other modules chosen anew; without styles that have
            no solution.
        refused: Reasons for which the plugin refuses styles that would be faster, by style.
        note: What the choice follows from, if not from times; "" otherwise.
    """

    pattern: str
    style: str
    num_modules: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def reason(self) -> str:
        """Reason of the choice in words."""
        if self.note:
            return self.note
        others = sorted((one for one in self.seconds.items() if one[0] != self.style), key=lambda one: one[1])
        times = _times([(self.style, self.seconds[self.style]), *others])
        refused = [f"; the plugin refuses {style}: {why}" for style, why in self.refused.items()]
        return f"chosen for the time of a step: {times}{''.join(refused)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSolution:
    """Placements of a model's layers that take the least time.

    Attributes:
        plan: Styles by pattern of module names, for `HybridParallelPlugin(tp_size=..., plan=...)`; empty, and no plan
            of the plugin, if nothing is divided.
        tp_size: Number of tensor-parallel ranks.
        seconds: Predicted time of a step: forward, backward and the optimizer.
        seconds_data_parallel: Predicted time with replicated weights and the batch divided among the ranks.
        memory: Bytes of weights, gradients, optimizer states and kept activations on a rank.
        choices: Choice for each module.
    """

    plan: Mapping[str, str]
    tp_size: int
    seconds: float
    seconds_data_parallel: float
    memory: int
    choices: tuple[ModuleChoice, ...]

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
            refused = f"; refused: {', '.join(one.refused)}" if one.refused else ""
            rows.append((name, one.style, one.note or f"{times}{refused}"))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{name.ljust(widths[0])}  {style.ljust(widths[1])}  {text}" for name, style, text in rows]
        faster = "tensor" if self.is_tensor_parallel_faster else "data"
        tensor_parallel, data_parallel = map(_milliseconds, (self.seconds, self.seconds_data_parallel))
        lines.append(
            f"a step takes {tensor_parallel} on {self.tp_size} tensor-parallel ranks, {data_parallel} on as many"
            f" data-parallel ones: {faster} parallelism is faster"
        )
        lines.append(f"memory of weights, gradients, states and activations: {self.memory / 2**20:,.1f} MiB per rank")
        why = dict.fromkeys(
            f"{style} is refused: {text}" for one in self.choices for style, text in one.refused.items()
        )
        return "\n".join([*lines, *why])


def solve_placements(
    model: nn.Module,
    batch: Any,
    tp_size: int,
    *,
    profile: MachineProfile | None = None,
    memory_budget: float | None = None,
    criterion: Callable[[Any, Any], torch.Tensor] | None = None,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] = torch.optim.AdamW,
    verify: bool = True,
) -> PlacementSolution:
    """Find the fastest tensor-parallel plan for a model: the style of each linear layer and embedding.

    A training step is recorded on fake tensors; nothing is allocated or run. The sharding rules of DTensor give the
    strategies of each operator, the machine's profile their times, and an integer program the choice for all of them
    together. Equal layers are solved once. Only placements that `HybridParallelPlugin` runs are considered. The plugin
    verifies the plan: modules get no style that it refuses, and the program is solved again.

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
        verify: If False, the plan is not verified here, which computes with layers of the model's width, but only when
            the plugin boosts the model.

    Raises:
        ConfigError: No profile is known, scipy is not installed, the model can't be recorded, or no placements fit into
            the budget; on all ranks if on any.
        DesyncError: Arguments or profiles differ between ranks.

    Collective: after a launch, on all ranks with the same arguments.
    """
    made: list[_Search] = []

    def prepare() -> None:
        _check(model, tp_size, memory_budget)
        check_flag("verify", verify)
        found = _profile(profile, tp_size)
        costs = StepCosts(profile=found, axis=AxisSpeed.of(found, range(tp_size)))
        loss = criterion or default_criterion
        recipe = TrainingRecipe(model=model, batch=batch, optimizer=optimizer, criterion=loss)
        share = TrainingRecipe(model=model, batch=_share(batch, tp_size), optimizer=optimizer, criterion=loss)
        search = _Search(model, record_step(recipe), costs, memory_budget)
        search.seconds_data_parallel = data_parallel_seconds(record_step(share), costs)
        made.append(search)

    error = error_of(prepare)
    fingerprint = [line for search in made for line in search.fingerprint()]
    check_same_across_ranks("solve_placements()", fingerprint, error=error, instead=_SAME_PROFILE)
    (search,) = made
    while True:
        solution = search.solve()
        refused = search.refused(solution, tp_size) if verify else {}
        if not refused:
            break
        search.forbid(refused)
    plan, choices = search.result(solution)
    return PlacementSolution(
        plan=plan,
        tp_size=tp_size,
        seconds=solution.cost,
        seconds_data_parallel=search.seconds_data_parallel,
        memory=round(solution.memory),
        choices=choices,
    )


class _Search:
    seconds_data_parallel: float

    def __init__(self, model: nn.Module, graph: LayerGraph, costs: StepCosts, memory_budget: float | None) -> None:
        self._model, self._graph, self._budget = model, graph, memory_budget
        self._modules = {one.name: one for one in styled_modules(model, graph, costs.num_ranks)}
        self._program = PlacementProgram(model, graph, list(self._modules.values()), costs)
        if not self._program.program.reduce():
            raise ConfigError(
                f"{type(model).__name__} has an operator without any placement, not even a replicated one: give plan="
                " to the plugin instead"
            )
        self._forced: dict[int, list[int]] = {}
        self._forbidden: dict[str, dict[str, str]] = {}
        self._costs = costs
        self.solve()  # raises where nothing fits

    def fingerprint(self) -> list[str]:
        """Return what has to be equal on all ranks."""
        digest = hashlib.sha256(repr(self._costs.profile).encode()).hexdigest()[:12]
        solution = self.solve()
        styles = [f"{name}={self._program.style_of(name, solution).name}" for name in self._modules]
        return [f"profile={self._costs.profile.machine} {digest}", f"memory_budget={self._budget}", *styles]

    def solve(self) -> Solution:
        """Return the fastest placements.

        Raises:
            ConfigError: None fit into the budget.
        """
        found = self._program.program.solve(memory_budget=self._budget, allowed=self._forced)
        if found is None:
            least = self._program.program.least_memory(self._forced)
            raise ConfigError(
                f"memory_budget={self._budget:,} bytes is too small: weights, gradients, optimizer states and"
                f" activations take at least {least:,.0f} bytes on a rank with any placements. Give at least that,"
                " more ranks or a smaller batch"
            )
        return found

    def refused(self, solution: Solution, tp_size: int) -> dict[str, tuple[str, str]]:
        """Return the modules whose styles the plugin refuses, with the style and the reason.

        These are the groups of modules that it refuses alone, or else all that are divided.
        """
        styles = {name: self._program.style_of(name, solution).name for name in self._modules}
        partial = dict.fromkeys(map(_owner, self._program.partial_gradients(solution)), PARTIAL_GRADIENT_STYLE)
        whole = self._refusal({**styles, **partial}, tp_size)
        if whole is None:
            return {}
        reasons: dict[str, str] = {}
        for group in self._program.joined_modules(solution):
            owners = {_owner(name) for name in group}
            own = {name: styles[name] for name in self._modules if name in group}
            own |= {name: style for name, style in partial.items() if _owner(name) in owners}
            reason = self._refusal(own, tp_size)
            if reason is not None:
                reasons |= dict.fromkeys(group, reason)
        divided = [name for name, style in styles.items() if style != REPLICATED_STYLE]
        reasons = reasons or dict.fromkeys(divided, whole)
        return {name: (styles[name], reason) for name, reason in reasons.items() if styles[name] != REPLICATED_STYLE}

    def _refusal(self, styles: Mapping[str, str], tp_size: int) -> str | None:
        """Return why the plugin refuses a plan of the layers of the graph, or None if it accepts it."""
        plan = {one: style for name, style in styles.items() for one in self._names_like(name)}
        if all(style == REPLICATED_STYLE for style in plan.values()):
            return None
        with _plugin(tp_size, plan) as plugin:
            try:
                if plugin is not None:
                    plugin.check(self._model, None)
            except ConfigError as error:
                return textwrap.shorten(first_line(error), 300, placeholder=" ...")
        return None

    def forbid(self, refused: Mapping[str, tuple[str, str]]) -> None:
        for name, (style, reason) in refused.items():
            self._forbidden.setdefault(name, {})[style] = reason
            left = [one.name for one in self._modules[name].styles if one.name not in self._forbidden[name]]
            self._forced |= self._program.style_choices(name, left)

    def result(self, solution: Solution) -> tuple[dict[str, str], tuple[ModuleChoice, ...]]:
        choices: dict[str, ModuleChoice] = {}
        for name in self._modules:
            choices |= dict.fromkeys(self._names_like(name), self._choice(name, solution))
        for name in map(_owner, self._program.partial_gradients(solution)):
            note = "computes on sharded features, so its gradient is all-reduced"
            chosen = ModuleChoice(pattern=name, style=PARTIAL_GRADIENT_STYLE, num_modules=1, note=note)
            choices |= dict.fromkeys(self._names_like(name), chosen)
        grouped = tuple(_grouped(choices, [name for name, _ in self._model.named_modules()]))
        if all(one.style == REPLICATED_STYLE for one in grouped):
            return {}, grouped
        return {one.pattern: ChosenStyle(one.style, one.reason) for one in grouped}, grouped

    def _choice(self, name: str, solution: Solution) -> ModuleChoice:
        style = self._program.style_of(name, solution).name
        refused = self._forbidden.get(name, {})
        seconds = {style: solution.cost}
        for other in self._modules[name].styles:
            if other.name == style or other.name in refused:
                continue
            forced = self._forced | self._program.style_choices(name, [other.name])
            found = self._program.program.solve(memory_budget=self._budget, allowed=forced)
            if found is not None:
                seconds[other.name] = found.cost
        return ModuleChoice(pattern=name, style=style, num_modules=1, seconds=seconds, refused=refused)

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
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            groups.setdefault(pattern, []).append(name)
    for pattern, names in groups.items():
        regex = re.escape(pattern).replace(r"\*", r"[^.]*")
        matched = [one for one in modules if re.fullmatch(regex, one)]
        is_uniform = len({choices[name].style for name in names}) == 1
        if is_uniform and sorted(matched) == sorted(names):
            yield replace(choices[names[0]], pattern=pattern, num_modules=len(names))
            continue
        for name in names:
            yield replace(choices[name], pattern=name)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


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


def _check(model: nn.Module, tp_size: Any, memory_budget: Any) -> None:
    has_adapter = (name for name, one in model.named_modules() if one._modules.get("base_layer") is not None)
    adapted = next(has_adapter, None)
    if adapted is not None:
        raise ConfigError(
            f"{adapted!r} has an adapter, which is divided as the layer below it is: solve for the model without"
            " adapters, whose plan holds with them, too"
        )
    if not any(one.requires_grad for one in model.parameters()):
        raise ConfigError(f"{type(model).__name__} has no parameter that is trained: unfreeze some")
    if not is_int(tp_size) or tp_size < 2:
        raise ConfigError(f"tp_size={tp_size!r} is not a number of ranks that share layers: give an int of 2 or more")
    check_num_bytes("memory_budget", memory_budget)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _times(times: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{style} {_milliseconds(seconds)}" for style, seconds in times)
