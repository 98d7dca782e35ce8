"""Faults on purpose, for tests: a rank that raises, is late or dies at a certain communication.

    with inject_faults(Fault(rank=1, operation="reduce_scatter", call=2, action="exit")):
        train()

Every rank enters the block with the same faults; each acts on its own rank alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from booster.errors import ConfigError

__all__ = ["EXIT_CODE", "OPERATIONS", "Fault", "InjectedFault", "inject_faults", "strike"]

EXIT_CODE = 86  # of a process that a fault ended, for tests to tell from other ends
OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "receive", "reduce_scatter", "send")
_ACTIONS = ("raise", "delay", "exit")


class InjectedFault(RuntimeError):
    """What a fault with the action "raise" raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens, where and when; checked when it is made.

    Attributes:
        rank: World rank on which it happens.
        operation: Name of the communication, one of `OPERATIONS`.
        call: At the start of which call of that operation within the block, counted from 1.
        action: "raise" raises `InjectedFault`, "delay" sleeps and goes on, "exit" ends the process at once.
        seconds: How long a delay is.
    """

    rank: int
    operation: str
    call: int = 1
    action: Literal["raise", "delay", "exit"] = "raise"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ConfigError(f"operation={self.operation!r} never happens: choose one of {', '.join(OPERATIONS)}")
        if self.action not in _ACTIONS:
            raise ConfigError(f"action={self.action!r} is unknown: choose one of {', '.join(_ACTIONS)}")
        if self.rank < 0 or self.call < 1:
            raise ConfigError(f"rank={self.rank}, call={self.call} never comes: ranks count from 0 and calls from 1")
        if (self.action == "delay") != (self.seconds > 0):
            raise ConfigError(
                f"action={self.action!r} with seconds={self.seconds:g}: a delay needs seconds above 0, and only a delay"
            )


class _Injection:
    """The faults of one block, and how many calls of each operation it has seen on this rank."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def strike(self, operation: str, rank: int) -> None:
        with self._lock:
            self._calls[operation] += 1
            call = self._calls[operation]
        for fault in self._faults:
            if (fault.rank, fault.operation, fault.call) == (rank, operation, call):
                _act(fault)


_active: tuple[_Injection, ...] = ()


@contextmanager
def inject_faults(*faults: Fault) -> Iterator[None]:
    """Lets the faults happen in what this process communicates within the block; blocks may be nested."""
    global _active
    injection = _Injection(faults)
    _active = (*_active, injection)
    try:
        yield
    finally:
        _active = tuple(other for other in _active if other is not injection)


def strike(operation: str) -> None:
    """Lets the faults act that are due at the start of this operation."""
    for injection in _active:
        injection.strike(operation, dist.get_rank())


def _act(fault: Fault) -> None:
    if fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "exit":
        os._exit(EXIT_CODE)
    else:
        raise InjectedFault(f"{fault} struck, as the test asked")
