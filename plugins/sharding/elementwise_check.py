"""Finds out by trying whether an optimizer updates every element of a parameter by itself."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from booster.device import current_device
from booster.errors import ConfigError
from booster.interface import Shard
from booster.rng_state import get_rng_state, set_rng_state, set_seed

from .optimizer_copy import (
    CopyError,
    ObstacleFound,
    Outcome,
    Place,
    check_state_shapes,
    check_tells_something,
    compare,
    compare_exactly,
    copy_optimizer,
)
from .shard_states import shard_state


@contextmanager
def nothing_changed(optimizer: Optimizer) -> Iterator[None]:
    """Within it, copies of an optimizer may step: random numbers, warnings and the class's counts stay as they were.

    Hooks that were registered on all optimizers of the process are not called.
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
    """Set aside what `register_optimizer_step_pre_hook` and its like have put on all optimizers of the process."""
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
    """Put back numbers, texts and containers that are attributes of the user's classes, such as a count of calls."""
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
# Puts other parameters into a copy's param groups in the place of whole ones, and returns them.
Exchange = Callable[[Optimizer, Mapping[Place, nn.Parameter]], Mapping[Place, nn.Parameter]]

_GRADIENT_SCALES = (1.0, 1e-3, 0.1, 1.0, 10.0, 1.0, 1e3, 1.0)
_LEAST_LEARNING_RATE = 1e-2
_LEAST_NOISE = 128 * 160  # so that small parameters have numbers of their own


class SmallSteps:
    """Runs of one optimizer that differ in what its copies hold alone; see Note [Probe] about the numbers.

    Args:
        optimizer: The user's optimizer. Only read.
        shapes: Shapes of the full parameters that are tried, by position.
    """

    def __init__(self, optimizer: Optimizer, shapes: Mapping[Place, tuple[int, ...]]) -> None:
        self._optimizer = optimizer
        self._shapes = shapes
        self._noise = torch.randn(
            max([_LEAST_NOISE, *(math.prod(shape) for shape in shapes.values())]),
            generator=torch.Generator("cpu").manual_seed(0),
            device="cpu",
            dtype=torch.float32,
        )

    def run(
        self,
        exchange: Exchange | None = None,
        *,
        what: str = "whole parameters",
        spans: Mapping[Place, Span] | None = None,
        seed: int = 0,
    ) -> Outcome:
        """Return what a copy did.

        Args:
            exchange: Called before the first step; None: it holds the whole parameters.
            what: Description of the contents, for error messages.
            spans: Which elements of the whole those are, where they are not all.
            seed: Seed of the process's random numbers.

        Raises:
            CopyError: The optimizer can't be copied.
            ObstacleFound: Its step raised.
        """
        set_seed(seed)
        wholes = {place: self._make_parameter(place) for place in self._shapes}
        groups = range(len(self._optimizer.param_groups))
        copied = copy_optimizer(self._optimizer, [_of_group(wholes, index) for index in groups])
        _raise_learning_rates(copied)
        held = wholes if exchange is None else exchange(copied, wholes)
        rows = {place: [parameter.detach().reshape(-1).clone()] for place, parameter in held.items()}
        _call_own(copied, "train", what)
        for step, scale in enumerate(_GRADIENT_SCALES):
            for place, parameter in held.items():
                gradient = self._gradient(place, step) * scale
                gradient = gradient if spans is None else gradient[slice(*spans[place])]
                parameter.grad = gradient.to(parameter).view(parameter.shape)
            _call(copied, "step", what)
            for place, parameter in held.items():
                rows[place].append(parameter.detach().reshape(-1).clone())
        if _call_own(copied, "eval", what):
            for place, parameter in held.items():
                rows[place].append(parameter.detach().reshape(-1).clone())
        outcome = Outcome({place: torch.stack(some) for place, some in rows.items()})
        outcome.note_states(copied, held)
        return outcome

    def _make_parameter(self, place: Place) -> nn.Parameter:
        original = self._optimizer.param_groups[place[0]]["params"][0]
        device = current_device() if original.device.type == "meta" else original.device
        dtype = torch.float64 if original.dtype == torch.float64 else torch.float32
        noise = self._noise_for(place, 0)
        weight = noise * torch.linspace(0.1, 3.0, noise.numel(), device="cpu", dtype=torch.float32)
        return nn.Parameter(weight.to(device, dtype).view(self._shapes[place]))

    def _gradient(self, place: Place, step: int) -> torch.Tensor:
        noise = self._noise_for(place, step + 1)
        return noise * torch.linspace(3.0, 0.1, noise.numel(), device="cpu", dtype=torch.float32)

    def _noise_for(self, place: Place, number: int) -> torch.Tensor:
        return self._noise.roll(997 * number + 101 * place[0] + 11 * place[1])[: math.prod(self._shapes[place])]


def hold_only(copied: Optimizer, held: Mapping[Place, nn.Parameter]) -> None:
    """Put parameters into a copy's param groups in the place of all others, in the same lists."""
    for index, group in enumerate(copied.param_groups):
        numbers = [number for (of_group, number) in held if of_group == index]
        if "param_names" in group:
            names = group["param_names"]
            group["param_names"] = [names[number] for number in numbers]
        group["params"][:] = _of_group(held, index)


def _of_group(parameters: Mapping[Place, nn.Parameter], index: int) -> Sequence[nn.Parameter]:
    return [parameter for place, parameter in parameters.items() if place[0] == index]


def _call_own(copied: Optimizer, name: str, what: str) -> bool:
    """Call the `train` or `eval` of an optimizer that swaps its weights; returns whether there is one."""
    if not callable(getattr(type(copied), name, None)):
        return False
    _call(copied, name, what)
    return True


def _call(copied: Optimizer, name: str, what: str) -> None:
    try:
        getattr(type(copied), name)(copied)  # an instance's own `step` is a scheduler's, which counts
    except Exception as error:
        raise ObstacleFound(f"on {what} its {name}() raised {type(error).__name__}: {error}") from error


def _raise_learning_rates(copied: Optimizer) -> None:
    for group in copied.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.clamp_(min=_LEAST_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEAST_LEARNING_RATE)


# Note [Probe]
# Three copies of the optimizer take the same steps: one has a few parameters whole, the other two are what two ranks
# would have, parts of them as one-dimensional parameters. An elementwise optimizer does the same in all three.
# To make others show:
# - Weights grow and gradients shrink along a parameter, so that norms, means and maxima of the parts differ much from
#   the whole's. Some steps have large gradients and some small ones, so that clipping inside acts and does not.
# - There are parameters of one, two and four dimensions, since many optimizers ask for that. The matrix is as large as
#   those ask for that factor or quantise large matrices only (128 rows, 4096 elements, whole blocks of 256).
# - One parameter is on the second rank alone, so that positions in param_groups differ.
# - The states and the numbers in param_groups are compared too: what acts after many steps only is in there before.
# - A learning rate that a warm-up has set to zero would hide everything, so it is raised.
_SHAPES = ((40,), (128, 160), (4, 3, 3, 3))
_FIRST_PART = (0, 7577, 41)  # elements that the first rank has of each
# Of hundreds of groups, one for each layer, most differ in a rate only: the large matrix is for the first of a kind.
_SMALL_SHAPES = ((40,), (16, 20), (4, 3, 3, 3))
_SMALL_FIRST_PART = (0, 117, 41)
_MAX_LARGE_GROUPS = 8

_RANDOM = (
    "its update draws random numbers, so that parts of a parameter come out different from the whole in any case, and"
    " trying says nothing"
)


def find_obstacle(optimizer: Optimizer) -> str | None:
    """Return what keeps an optimizer from running on parts of parameters; None: it updates every element by itself.

    Neither the optimizer and its parameters, nor hooks, random numbers or class attributes are changed.

    Args:
        optimizer: The user's optimizer, with whole parameters.
    """
    with nothing_changed(optimizer):
        trial = _Trial(optimizer)
        try:
            trial.compare()
        except CopyError as error:
            return f"{error}, so it could not be tried out"
        except ObstacleFound as found:
            return _RANDOM if trial.is_random() else str(found)
    return None


class _Trial:
    """Three copies of an optimizer, see Note [Probe]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._shapes: dict[Place, tuple[int, ...]] = {}
        self._spans: tuple[dict[Place, tuple[int, int]], dict[Place, tuple[int, int]]] = ({}, {})
        for index, is_large in enumerate(large_groups(optimizer.param_groups)):
            shapes, cuts = (_SHAPES, _FIRST_PART) if is_large else (_SMALL_SHAPES, _SMALL_FIRST_PART)
            if optimizer.param_groups[index]["params"]:
                for number, (shape, cut) in enumerate(zip(shapes, cuts, strict=True)):
                    self._shapes[index, number] = shape
                    self._spans[0][index, number] = (0, cut)
                    self._spans[1][index, number] = (cut, math.prod(shape))
        self._steps = SmallSteps(optimizer, self._shapes)

    def compare(self) -> None:
        """Raise ObstacleFound if parts of parameters come out different from whole ones."""
        whole = self._steps.run()
        check_tells_something(whole)
        check_state_shapes(whole, self._shapes)
        compare(whole, [self._run_on_parts(rank) for rank in (0, 1)], self._shapes)

    def is_random(self) -> bool:
        """Return whether the same steps end elsewhere with other random numbers."""
        try:
            first, second = (self._steps.run(seed=seed).weights for seed in (1, 2))
        except ObstacleFound:
            return False
        return any(not torch.allclose(first[place], second[place], rtol=0, atol=0, equal_nan=True) for place in first)

    def _run_on_parts(self, rank: int) -> Outcome:
        """Step what one of two ranks would have."""
        repoint = partial(_repoint, spans=self._spans[rank])
        return self._steps.run(repoint, what="one-dimensional parts of parameters", spans=self._spans[rank])


def _repoint(
    copied: Optimizer, wholes: Mapping[Place, nn.Parameter], spans: Mapping[Place, tuple[int, int]]
) -> Mapping[Place, nn.Parameter]:
    """Put a rank's parts into the param groups, as the plugin does, and return them."""
    held: dict[Place, nn.Parameter] = {}
    for place, whole in wholes.items():
        shard = _shard(whole, spans[place], place[0])
        has_elements = shard.parameter.numel() > 0
        shard_state(copied, whole, [shard] if has_elements else [])
        if has_elements:
            held[place] = shard.parameter
    hold_only(copied, held)
    return held


def large_groups(groups: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for every group whether it is among the first with hyperparameters of its kind, rates apart."""
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


def _shard(whole: nn.Parameter, span: tuple[int, int], group_index: int) -> Shard:
    return Shard(
        name="probe",
        global_shape=tuple(whole.shape),
        span=span,
        parameter=nn.Parameter(whole.detach().reshape(-1)[slice(*span)].clone()),
        model_param=whole,
        group_index=group_index,
        has_master=False,
        is_primary=True,
    )


# One copy of the optimizer has a few parameters of every group, as Note [Probe] has them, in shapes like those of the
# group's own: as many dimensions, in like proportions, and as large as may be needed to be treated as large. Other
# copies have some of these, as owners would: of every group each second one, of half of the groups all, or nothing. An
# optimizer that updates each parameter by itself does the same to them, bit for bit, as nothing else is computed.
_LARGE_NUMEL = 128 * 160
_SMALL_NUMEL = 16 * 20
_MOST_PARAMETERS = 8  # of a group that are all tried; of more, some of each number of dimensions
_OF_EACH_DIM = 2


def find_tie(optimizer: Optimizer) -> str | None:
    """Return what ties an optimizer's parameters to each other; None: it updates every one of them by itself.

    What can't be tried out counts as tied, as all parameters together are always right. Neither the optimizer and its
    parameters, nor hooks, random numbers or class attributes are changed.

    Args:
        optimizer: The user's optimizer, with whole parameters.

    Raises:
        ConfigError: It doesn't step the parameters that are in its param groups, if they are others than it began with.
    """
    with nothing_changed(optimizer):
        trial = _IsolatedTrial(optimizer)
        try:
            whole = trial.run_as_they_are()
        except CopyError as error:
            return f"{error}, so it could not be tried out"
        except ObstacleFound as found:
            return str(found)
        try:
            trial.compare(whole, [trial.places])
        except ObstacleFound as found:
            raise ConfigError(
                f"{type(optimizer).__name__} does not follow its param_groups, in which sharded training puts other"
                f" parameters: when they were exchanged, {found}. Let its step() take every parameter from"
                " self.param_groups and keep none elsewhere, or use the torch_ddp plugin"
            ) from None
        try:
            trial.compare(whole, trial.parts())
        except ObstacleFound as found:
            return str(found)
    return None


class _IsolatedTrial:
    """Copies of an optimizer with a few parameters each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._shapes: dict[Place, tuple[int, ...]] = {}
        self._donors: list[Sequence[int]] = []
        for index, is_large in enumerate(large_groups(optimizer.param_groups)):
            parameters: Sequence[nn.Parameter] = optimizer.param_groups[index]["params"]
            self._donors.append(_donors([parameter.dim() for parameter in parameters]))
            seen: Counter[int] = Counter()
            for number, donor in enumerate(self._donors[-1]):
                shape = parameters[donor].shape
                seen[len(shape)] += 1
                most = _LARGE_NUMEL if is_large and seen[len(shape)] <= _OF_EACH_DIM else _SMALL_NUMEL
                self._shapes[index, number] = _shrunk(shape, most)
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self._steps = SmallSteps(optimizer, self._shapes)

    @property
    def places(self) -> Collection[Place]:
        """All that are tried."""
        return self._shapes.keys()

    def parts(self) -> list[Collection[Place]]:
        """Return which parameters the copies have that don't have all."""
        middle = len(self._donors) // 2
        alternating = [[place for place in self._shapes if place[1] % 2 == rest] for rest in (0, 1)]
        by_groups = [[place for place in self._shapes if (place[0] < middle) == is_first] for is_first in (True, False)]
        return [*alternating, *(by_groups if middle > 0 else ()), ()]

    def run_as_they_are(self) -> Outcome:
        """Return what happens to all parameters, none of which was exchanged after the optimizer was made."""

        def keep(copied: Optimizer, wholes: Mapping[Place, nn.Parameter]) -> Mapping[Place, nn.Parameter]:
            self._rename(copied)
            return wholes

        whole = self._steps.run(keep)
        check_tells_something(whole)
        return whole

    def compare(self, whole: Outcome, parts: Iterable[Collection[Place]]) -> None:
        """Raise ObstacleFound if parameters come out different when others of them, or none, are not there."""
        for part in parts:
            compare_exactly(whole, self._run(set(part)), self._shapes)

    def _run(self, part: Collection[Place]) -> Outcome:
        def exchange(copied: Optimizer, wholes: Mapping[Place, nn.Parameter]) -> Mapping[Place, nn.Parameter]:
            self._rename(copied)
            held: dict[Place, nn.Parameter] = {}
            for place, whole in wholes.items():
                state = copied.state.pop(whole, None)
                if place in part:
                    held[place] = nn.Parameter(whole.detach().clone())
                    if state is not None:
                        copied.state[held[place]] = state
            hold_only(copied, held)
            return held

        return self._steps.run(exchange, what=f"{len(part)} of {len(self._shapes)} whole parameters")

    def _rename(self, copied: Optimizer) -> None:
        """Give every parameter the name of the one whose shape it has."""
        for group, donors, names in zip(copied.param_groups, self._donors, self._names, strict=True):
            if names is not None:
                group["param_names"] = [names[donor] for donor in donors]


def _donors(dims: Sequence[int]) -> Sequence[int]:
    """Return which of a group's parameters are tried, by their numbers of dimensions: two at least, so one twice."""
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
