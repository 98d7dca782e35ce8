"""Check of whether an optimizer can update shards of parameters, if need be by a trial on small ones."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from booster.core.shard_aware import shard_state
from booster.device import current_device
from booster.errors import ConfigError
from booster.interface import Shard, ShardAware
from booster.optim import CPUAdam, FusedAdam, HybridAdam
from booster.rng_state import get_rng_state, set_rng_state, set_seed

from .optimizer_copy import (
    CheckFailed,
    ParamKey,
    TrialResult,
    check_is_conclusive,
    check_state_shapes,
    compare,
    compare_exactly,
    copy_optimizer,
)

_OUR_OWN = frozenset({CPUAdam, FusedAdam, HybridAdam})
# torch's optimizers with elementwise formulas; tests compare them on shards and on full parameters.
_ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
_REFUSED = {
    optim.Adafactor: "it needs means over the rows and columns of matrices, which booster.optim.Adafactor computes",
    optim.LBFGS: "it needs dot products over all parameters",
    optim.Muon: "it makes the update of a matrix orthogonal, which booster.optim.Muon does with the same arguments",
    optim.SparseAdam: "it takes sparse gradients, which are not summed over the ranks here",
}


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """Check that the optimizer can update shards of parameters; see `sharding_obstacle`.

    Args:
        optimizer: The user's optimizer, before its parameters are sharded.

    Raises:
        ConfigError: It can't; the message gives the observed difference.
    """
    obstacle = sharding_obstacle(optimizer)
    if obstacle is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} can't update shards of parameters: {obstacle}. Use an optimizer that updates"
            " every element by itself, such as torch.optim.AdamW, or the torch_ddp plugin; or give the class a method"
            " use_shards(), see booster.interface.ShardAware (an empty one declares that it is elementwise after all)"
        )


def sharding_obstacle(optimizer: optim.Optimizer) -> str | None:
    """Return the reason why an optimizer can't update shards of parameters, or None if it can.

    It can if it is one of torch's or our elementwise classes or `ShardAware`, or if copies of it gave equal results on
    shards and on full parameters in a trial on small tensors. The optimizer itself is not stepped or changed.

    Args:
        optimizer: The user's optimizer, before its parameters are sharded.

    Raises:
        ConfigError: It has `differentiable=True`, which no sharded training can do.
    """
    if isinstance(optimizer, ShardAware):
        return None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            "differentiable=True asks for gradients through the step, and the weights that it makes are copied between"
            " ranks: make the optimizer without it"
        )
    if type(optimizer) in _ELEMENTWISE or type(optimizer) in _OUR_OWN:
        return None
    obstacle = next((why for cls, why in _REFUSED.items() if isinstance(optimizer, cls)), None)
    return find_obstacle(optimizer) if obstacle is None else obstacle


def takes_empty_groups(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer is known to step with param groups that are empty on this rank."""
    return isinstance(optimizer, ShardAware) or type(optimizer) in _ELEMENTWISE | _OUR_OWN


@contextmanager
def isolated_trial(optimizer: Optimizer) -> Iterator[None]:
    """Isolate steps of optimizer copies: random number generators, warnings and class attributes are restored.

    Hooks registered for all optimizers of the process are not called.
    """
    devices = [group["params"][0].device for group in optimizer.param_groups if group["params"]]
    device = devices[0] if devices else torch.device("cpu")
    random_state = get_rng_state(device)
    with ExitStack() as stack:
        stack.callback(set_rng_state, random_state, device)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_without_global_hooks())
        stack.enter_context(_class_attributes_kept(type(optimizer)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Disable hooks registered with `register_optimizer_step_pre_hook` and `register_optimizer_step_post_hook`."""
    tables: list[dict[int, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


@contextmanager
def _class_attributes_kept(cls: type) -> Iterator[None]:
    """Restore numbers, strings and containers that are attributes of the user's classes, such as a call counter."""
    kinds = (bool, int, float, str, list, dict, set)
    before: list[tuple[type, str, Any, Any]] = [
        (owner, name, value, copy.copy(value))
        for owner in cls.__mro__
        if owner.__module__.split(".")[0] not in ("torch", "builtins")
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and not name.startswith("__")
    ]
    try:
        yield
    finally:
        for owner, name, value, content in before:
            if isinstance(value, list):
                value[:] = content
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


Span = tuple[int, int]
# Replaces the full parameters in a copy's param groups, and returns the new ones.
ReplaceParams = Callable[[Optimizer, Mapping[ParamKey, nn.Parameter]], Mapping[ParamKey, nn.Parameter]]

_GRADIENT_SCALES = (1.0, 1e-3, 0.1, 1.0, 10.0, 1.0, 1e3, 1.0)
_LEAST_LEARNING_RATE = 1e-2
_LEAST_NOISE = 128 * 160  # enough for different values in all small parameters


class TrialSteps:
    """Equal steps of optimizer copies with different parameters; see Note [Elementwise trial] for the values.

    Args:
        optimizer: The user's optimizer; not modified.
        shapes: Shapes of the full parameters by (param group, index).
        donors: Indices of the parameters that they have the names of; see `copy_optimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shapes: Mapping[ParamKey, tuple[int, ...]],
        donors: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._shapes = shapes
        self._donors = donors
        self._noise = torch.randn(
            max([_LEAST_NOISE, *(math.prod(shape) for shape in shapes.values())]),
            generator=torch.Generator("cpu").manual_seed(0),
            device="cpu",
            dtype=torch.float32,
        )

    def run(
        self,
        replace_params: ReplaceParams | None = None,
        *,
        what: str = "full parameters",
        spans: Mapping[ParamKey, Span] | None = None,
        seed: int = 0,
    ) -> TrialResult:
        """Step a copy and return its result.

        Args:
            replace_params: Called before the first step; optional, defaults to keeping the full parameters.
            what: Description of the parameters, for error messages.
            spans: Element ranges of the replaced parameters; optional, defaults to all elements.
            seed: Seed of the process's random number generators.

        Raises:
            CheckFailed: The optimizer can't be copied, or its step raised.
        """
        set_seed(seed)
        full_params = {param_key: self._make_parameter(param_key) for param_key in self._shapes}
        groups = range(len(self._optimizer.param_groups))
        copied = copy_optimizer(self._optimizer, [_of_group(full_params, index) for index in groups], self._donors)
        _raise_learning_rates(copied)
        held = full_params if replace_params is None else replace_params(copied, full_params)
        rows = {param_key: [parameter.detach().reshape(-1).clone()] for param_key, parameter in held.items()}
        _call_own(copied, "train", what)
        for step, scale in enumerate(_GRADIENT_SCALES):
            for param_key, parameter in held.items():
                gradient = self._gradient(param_key, step) * scale
                gradient = gradient if spans is None else gradient[slice(*spans[param_key])]
                parameter.grad = gradient.to(parameter).view(parameter.shape)
            for name in _step_methods(type(copied)):
                gradients = {param_key: parameter.grad for param_key, parameter in held.items()}
                _call(copied, name, what)
                for param_key, parameter in held.items():
                    rows[param_key].append(parameter.detach().reshape(-1).clone())
                    parameter.grad = gradients[param_key]
        if _call_own(copied, "eval", what):
            for param_key, parameter in held.items():
                rows[param_key].append(parameter.detach().reshape(-1).clone())
        result = TrialResult({param_key: torch.stack(some) for param_key, some in rows.items()})
        result.record_states(copied, held)
        return result

    def _make_parameter(self, param_key: ParamKey) -> nn.Parameter:
        original = self._optimizer.param_groups[param_key[0]]["params"][0]
        device = current_device() if original.device.type == "meta" else original.device
        dtype = torch.float64 if original.dtype == torch.float64 else torch.float32
        noise = self._noise_for(param_key, 0)
        weight = noise * torch.linspace(0.1, 3.0, noise.numel(), device="cpu", dtype=torch.float32)
        return nn.Parameter(weight.to(device, dtype).view(self._shapes[param_key]))

    def _gradient(self, param_key: ParamKey, step: int) -> torch.Tensor:
        noise = self._noise_for(param_key, step + 1)
        return noise * torch.linspace(3.0, 0.1, noise.numel(), device="cpu", dtype=torch.float32)

    def _noise_for(self, param_key: ParamKey, number: int) -> torch.Tensor:
        return self._noise.roll(997 * number + 101 * param_key[0] + 11 * param_key[1])[
            : math.prod(self._shapes[param_key])
        ]


def set_parameters(copied: Optimizer, held: Mapping[ParamKey, nn.Parameter]) -> None:
    """Replace the parameters in a copy's param groups, in place."""
    for index, group in enumerate(copied.param_groups):
        numbers = [number for (of_group, number) in held if of_group == index]
        if "param_names" in group:
            names = group["param_names"]
            group["param_names"] = [names[number] for number in numbers]
        group["params"][:] = _of_group(held, index)


def _of_group(parameters: Mapping[ParamKey, nn.Parameter], index: int) -> Sequence[nn.Parameter]:
    return [parameter for param_key, parameter in parameters.items() if param_key[0] == index]


def _call_own(copied: Optimizer, name: str, what: str) -> bool:
    """Call `train` or `eval` of an optimizer that swaps weights; return whether the method exists."""
    if not callable(getattr(type(copied), name, None)):
        return False
    _call(copied, name, what)
    return True


def _step_methods(cls: type[Optimizer]) -> tuple[str, ...]:
    """Return the methods that take a step: `step`, or `first_step` and `second_step` of implementations of SAM."""
    two_steps = ("first_step", "second_step")
    return two_steps if all(_needs_no_argument(getattr(cls, name, None)) for name in two_steps) else ("step",)


def _needs_no_argument(method: Any) -> bool:
    if not callable(method):
        return False
    _, *others = inspect.signature(method).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in others)


def _call(copied: Optimizer, name: str, what: str) -> None:
    try:
        getattr(type(copied), name)(copied)  # an instance attribute `step` is the wrapper of an LR scheduler
    except Exception as error:
        raise CheckFailed(f"on {what} its {name}() raised {type(error).__name__}: {error}") from error


def _raise_learning_rates(copied: Optimizer) -> None:
    for group in copied.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.clamp_(min=_LEAST_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEAST_LEARNING_RATE)


# Note [Elementwise trial]
# Three copies of the optimizer take the same steps: one with full parameters, two with the one-dimensional shards that
# two ranks would have. An elementwise optimizer gives the same results. To expose other optimizers:
# - Weights grow and gradients shrink along a parameter, so norms, means and maxima of the shards differ from those of
#   the full parameter. Gradients are large in some steps and small in others, so internal clipping is active in some.
# - Parameters have one, two and four dimensions, because many optimizers treat these differently. The matrix reaches
#   the usual thresholds of factored and quantized optimizers (128 rows, 4096 elements, full blocks of 256).
# - One parameter exists on the second rank only, so indices in param_groups differ.
# - States and numbers in param_groups are compared too: they reveal effects of later steps.
# - The learning rate is raised, because a warm-up may have set it to zero.
# - The two steps of SAM are taken in place of `step`: most implementations scale the first one by a norm.
_SHAPES = ((40,), (128, 160), (4, 3, 3, 3))
_FIRST_SHARD = (0, 7577, 41)  # number of elements on the first rank
# Models may have hundreds of groups that differ in learning rates only: one large matrix per kind of group is enough.
_SMALL_SHAPES = ((40,), (16, 20), (4, 3, 3, 3))
_SMALL_FIRST_SHARD = (0, 117, 41)
_MAX_LARGE_GROUPS = 8

_RANDOM = (
    "its update draws random numbers, so that shards of a parameter differ from the full parameter in any case, and"
    " a trial can't tell whether it is elementwise"
)


def find_obstacle(optimizer: Optimizer) -> str | None:
    """Return the reason why an optimizer can't update shards of parameters, or None if it is elementwise.

    The optimizer, its parameters, hooks, random number generators and class attributes stay unchanged.

    Args:
        optimizer: The user's optimizer, with unsharded parameters.
    """
    shapes: dict[ParamKey, tuple[int, ...]] = {}
    spans_of_ranks: tuple[dict[ParamKey, Span], dict[ParamKey, Span]] = ({}, {})
    for index, is_large in enumerate(large_groups(optimizer.param_groups)):
        sizes, cuts = (_SHAPES, _FIRST_SHARD) if is_large else (_SMALL_SHAPES, _SMALL_FIRST_SHARD)
        for number, (shape, cut) in enumerate(zip(sizes, cuts, strict=True)):
            if optimizer.param_groups[index]["params"]:
                shapes[index, number] = shape
                spans_of_ranks[0][index, number] = (0, cut)
                spans_of_ranks[1][index, number] = (cut, math.prod(shape))
    with isolated_trial(optimizer):
        steps = TrialSteps(optimizer, shapes)
        try:
            full = steps.run()
            check_is_conclusive(full)
            check_state_shapes(full, shapes)
            what = "one-dimensional shards of parameters"
            ranks = [steps.run(partial(_repoint, spans=spans), what=what, spans=spans) for spans in spans_of_ranks]
            compare(full, ranks, shapes)
        except CheckFailed as found:
            return _RANDOM if _is_random(steps) else str(found)
    return None


def _is_random(steps: TrialSteps) -> bool:
    """Return whether the result of full parameters depends on the random seed."""
    try:
        first, second = (steps.run(seed=seed).weights for seed in (1, 2))
    except CheckFailed:
        return False
    return any(
        not torch.allclose(first[param_key], second[param_key], rtol=0, atol=0, equal_nan=True) for param_key in first
    )


def _repoint(
    copied: Optimizer, full_params: Mapping[ParamKey, nn.Parameter], spans: Mapping[ParamKey, Span]
) -> Mapping[ParamKey, nn.Parameter]:
    """Replace full parameters by a rank's shards, as the plugin does, and return them."""
    held: dict[ParamKey, nn.Parameter] = {}
    for param_key, full in full_params.items():
        shard = _shard(full, spans[param_key], param_key[0])
        has_elements = shard.parameter.numel() > 0
        shard_state(copied, full, [shard] if has_elements else [])
        if has_elements:
            held[param_key] = shard.parameter
    set_parameters(copied, held)
    return held


def large_groups(groups: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for every group whether it is the first with its hyperparameters, ignoring float values."""
    kinds: set[frozenset[tuple[str, str]]] = set()
    is_large = []
    for group in groups:
        kind = frozenset((key, _kind_of(value)) for key, value in group.items() if key not in ("params", "param_names"))
        is_large.append(kind not in kinds and len(kinds) < _MAX_LARGE_GROUPS)
        kinds.add(kind)
    return is_large


def _kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "zero" if value == 0 else "not zero"
    return repr(value) if isinstance(value, (bool, int, str, type(None))) else type(value).__name__


def _shard(full: nn.Parameter, span: Span, group_index: int) -> Shard:
    return Shard(
        name="probe",
        global_shape=tuple(full.shape),
        span=span,
        parameter=nn.Parameter(full.detach().reshape(-1)[slice(*span)].clone()),
        model_param=full,
        group_index=group_index,
        has_master=False,
        is_primary=True,
    )


# One copy of the optimizer has a few parameters per group, with values as in Note [Elementwise trial] and with shapes
# proportional to the group's own, large enough to count as large. Other copies have subsets of these, as owner ranks
# would: every second parameter, all parameters of half of the groups, or none. An optimizer that updates parameters
# independently gives the same bits for each subset.
_LARGE_NUMEL = 128 * 160
_SMALL_NUMEL = 16 * 20
_MOST_PARAMETERS = 8  # larger groups are sampled by number of dimensions
_OF_EACH_DIM = 2


def find_coupling(optimizer: Optimizer) -> str | None:
    """Return the reason why updates of different parameters depend on each other, or None if they are independent.

    An optimizer that can't be tried counts as coupled. The optimizer, its parameters, hooks, random number generators
    and class attributes stay unchanged.

    Args:
        optimizer: The user's optimizer, with unsharded parameters.

    Raises:
        ConfigError: It does not step parameters that replace others in its param groups.
    """
    shapes: dict[ParamKey, tuple[int, ...]] = {}
    donors: list[Sequence[int]] = []
    for index, is_large in enumerate(large_groups(optimizer.param_groups)):
        parameters: Sequence[nn.Parameter] = optimizer.param_groups[index]["params"]
        donors.append(_donors([parameter.dim() for parameter in parameters]))
        seen: Counter[int] = Counter()
        for number, donor in enumerate(donors[-1]):
            shape = parameters[donor].shape
            seen[len(shape)] += 1
            most = _LARGE_NUMEL if is_large and seen[len(shape)] <= _OF_EACH_DIM else _SMALL_NUMEL
            shapes[index, number] = _shrunk(shape, most)
    with isolated_trial(optimizer):
        steps = TrialSteps(optimizer, shapes, donors)

        def compare_parts(parts: Iterable[Collection[ParamKey]]) -> None:
            for part in parts:
                what = f"{len(part)} of {len(shapes)} full parameters"
                compare_exactly(full, steps.run(partial(_keep_part, part=part), what=what), shapes)

        try:
            full = steps.run()
            check_is_conclusive(full)
        except CheckFailed as found:
            return str(found)
        try:
            compare_parts([shapes.keys()])
        except CheckFailed as found:
            raise ConfigError(
                f"{type(optimizer).__name__} does not follow its param_groups, in which sharded training puts other"
                f" parameters: when they were exchanged, {found}. Let its step() take every parameter from"
                " self.param_groups and keep none elsewhere, or use the torch_ddp plugin"
            ) from None
        try:
            compare_parts(_parts(shapes, len(donors)))
        except CheckFailed as found:
            return str(found)
    return None


def _parts(shapes: Mapping[ParamKey, tuple[int, ...]], num_groups: int) -> list[Collection[ParamKey]]:
    """Return the parameter subsets of the copies."""
    middle = num_groups // 2
    alternating = [{param_key for param_key in shapes if param_key[1] % 2 == rest} for rest in (0, 1)]
    by_groups = [
        {param_key for param_key in shapes if (param_key[0] < middle) == is_first} for is_first in (True, False)
    ]
    return [*alternating, *(by_groups if middle > 0 else ()), set()]


def _keep_part(
    copied: Optimizer, full_params: Mapping[ParamKey, nn.Parameter], part: Collection[ParamKey]
) -> Mapping[ParamKey, nn.Parameter]:
    """Replace full parameters by copies of some of them, with their states, and return these."""
    held: dict[ParamKey, nn.Parameter] = {}
    for param_key, full in full_params.items():
        state = copied.state.pop(full, None)
        if param_key in part:
            held[param_key] = nn.Parameter(full.detach().clone())
            if state is not None:
                copied.state[held[param_key]] = state
    set_parameters(copied, held)
    return held


def _donors(dims: Sequence[int]) -> Sequence[int]:
    """Return the indices of a group's sampled parameters, by number of dimensions; at least two, if need be equal."""
    if len(dims) == 1:
        return (0, 0)
    if len(dims) <= _MOST_PARAMETERS:
        return range(len(dims))
    chosen, seen = [], Counter[int]()
    for index, dim in enumerate(dims):
        seen[dim] += 1
        if seen[dim] <= _OF_EACH_DIM:
            chosen.append(index)
    return chosen


def _shrunk(shape: Sequence[int], most: int) -> tuple[int, ...]:
    sizes = [max(size, 1) for size in shape]
    while math.prod(sizes) > most:
        largest = sizes.index(max(sizes))
        sizes[largest] = (sizes[largest] + 1) // 2
    return tuple(sizes)
