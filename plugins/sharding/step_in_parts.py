"""One step of an optimizer in several calls, each of which sees the gradients of some parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# Note [Arriving gradients]
# Gradients of offloaded optimizers are copied to the host, with an event for each bucket or chunk. A fused step without
# clipping waits for them part by part: what has arrived is updated while the rest travels, or is still computed.
# Everything else that reads gradients waits for all of them, which is one wait.
_MAX_PARTS = 8  # each call of the optimizer looks at all of its parameters


@dataclass(frozen=True, slots=True)
class Arrival:
    """Gradients on their way to the host.

    Attributes:
        parameters: Parameters whose `grad` must not be read before the wait.
        wait: Function that makes the host wait for them.
    """

    parameters: Sequence[nn.Parameter]
    wait: Callable[[], object]


def wait_for_all(arrivals: Sequence[Arrival]) -> None:
    """Wait for gradients on the host, for the last ones first: the others have arrived by then."""
    for arrival in reversed(arrivals):
        arrival.wait()


def step_as_they_arrive(optimizer: Optimizer, arrivals: Sequence[Arrival], step: Callable[[], None]) -> None:
    """Step once for some gradients after another; see Note [Arriving gradients].

    Args:
        optimizer: Optimizer with the param groups.
        arrivals: Arrivals in order. All other gradients are used in the first call.
        step: Function that calls the optimizer.
    """
    arriving = {id(one) for arrival in arrivals for one in arrival.parameters}
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    others = [one for one in parameters if id(one) not in arriving]
    arrivals = [Arrival(others, lambda: None), *arrivals] if others else arrivals
    size = -(-len(arrivals) // _MAX_PARTS)
    parts = [arrivals[start : start + size] for start in range(0, len(arrivals), size)]

    def step_part(number: int) -> None:
        wait_for_all(parts[number])
        step()

    step_in_parts(optimizer, [[one for arrival in part for one in arrival.parameters] for part in parts], step_part)


def step_in_parts(optimizer: Optimizer, parts: Sequence[Sequence[nn.Parameter]], step: Callable[[int], None]) -> None:
    """Make one step in several calls. Step hooks, and what the optimizer counts in its param groups, see a single step.

    Args:
        optimizer: Optimizer with the param groups.
        parts: Parameters of each call, no parameter in two of them. Others keep their gradients in all calls.
        step: Function of the number of a part that calls the optimizer. If it raises, parameters of this and later
            parts keep their gradients, and those before have none, so that another call continues.
    """
    kept = [[(parameter, parameter.grad) for parameter in part] for part in parts]
    counters = _Counters(optimizer) if len(parts) > 1 else None
    for part in parts:
        for parameter in part:
            parameter.grad = None
    for number, members in enumerate(kept):
        _set_gradients(members)
        if counters is not None and number > 0:
            counters.restore()
        try:
            with _hooks_once(optimizer, is_first=number == 0, is_last=number == len(parts) - 1):
                step(number)
        except BaseException:
            if counters is not None:
                counters.restore()
            for later in kept[number + 1 :]:
                _set_gradients(later)
            raise
        for parameter, _ in members:
            parameter.grad = None
    for members in kept:
        _set_gradients(members)


def _set_gradients(members: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, gradient in members:
        parameter.grad = gradient


class _Counters:
    """What a step changes beside the states of parameters, such as a number of steps in a param group.

    Each call for some of the parameters starts from the values before the first one, as its part of the same step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._owners = [vars(optimizer), *optimizer.param_groups]
        self._keys = [frozenset(owner) for owner in self._owners]
        self._values = [
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in owner.items()
                if isinstance(value, (int, float, tuple, torch.Tensor))
            }
            for owner in self._owners
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, keys, values in zip(self._owners, self._keys, self._values, strict=True):
            for key in [one for one in owner if one not in keys and _is_counter(owner[one])]:
                del owner[key]  # created by the first call
            for key, value in values.items():
                current = owner.get(key)
                if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                    current.copy_(value)  # a scheduler may hold it
                else:
                    owner[key] = value


def _is_counter(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


@contextmanager
def _hooks_once(optimizer: Optimizer, *, is_first: bool, is_last: bool) -> Iterator[None]:
    """Call the user's step hooks only once for a step in several parts."""
    names = [] if is_first else ["_optimizer_step_pre_hooks"]
    names += [] if is_last else ["_optimizer_step_post_hooks"]
    before: dict[str, Any] = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(optimizer, name, hooks)
