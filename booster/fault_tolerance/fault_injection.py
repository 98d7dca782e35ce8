"""Fault injection for tests: a rank raises, is late, stops or dies at a given collective or phase.

    with inject_faults(Fault.kill(rank=1, at="commit"), Fault.delay(rank=0, at="reduce_scatter", call=2, seconds=1.0)):
        train()

Every rank enters the block with the same faults; each fault acts on its rank alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from booster.errors import ConfigError

from .progress import PHASES, call_on_entry

EXIT_CODE = 86  # of a process that a fault ended, distinct from other exits
OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "receive", "reduce_scatter", "send")
ACTIONS = ("kill", "stop", "throw", "leave", "exit", "delay")
_RUNS_ON_RANK = ("throw", "leave", "exit")  # a rank is killed, stopped and delayed, but these happen on it


class InjectedFault(RuntimeError):
    """Error raised by a fault with the action "throw"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Action of a rank at a collective or phase. Plain data: `Fault(**asdict(fault))` is equal to it.

    Attributes:
        rank: Global rank.
        at: Operation of `OPERATIONS`, or phase of `booster.fault_tolerance.progress.PHASES`.
        call: Number of the operation's start or the phase's entry within the block, from 1, over all threads. A phase
            nested in itself is not entered again.
        action: "kill" ends the process by SIGKILL; "stop" stops it by SIGSTOP, as a host that hangs; "throw" raises
            `InjectedFault`; "leave" ends the program without an error (`sys.exit(0)`, in the main thread only); "exit"
            ends the process at once with `EXIT_CODE`; "delay" sleeps and continues.
        seconds: Seconds of a delay.
    """

    rank: int
    at: str
    call: int = 1
    action: Literal["kill", "stop", "throw", "leave", "exit", "delay"] = "throw"
    seconds: float = 0.0

    @classmethod
    def kill(cls, *, rank: int, at: str, call: int = 1) -> Fault:
        """Return a fault that ends the process by SIGKILL, as the system does when memory runs out."""
        return cls(rank=rank, at=at, call=call, action="kill")

    @classmethod
    def stop(cls, *, rank: int, at: str, call: int = 1) -> Fault:
        """Return a fault that stops the process by SIGSTOP, until SIGCONT or SIGKILL."""
        return cls(rank=rank, at=at, call=call, action="stop")

    @classmethod
    def throw(cls, *, rank: int, at: str, call: int = 1) -> Fault:
        """Return a fault that raises `InjectedFault`."""
        return cls(rank=rank, at=at, call=call, action="throw")

    @classmethod
    def leave(cls, *, rank: int, at: str, call: int = 1) -> Fault:
        """Return a fault that ends the program early and without an error, by `sys.exit(0)`."""
        return cls(rank=rank, at=at, call=call, action="leave")

    @classmethod
    def exit(cls, *, rank: int, at: str, call: int = 1) -> Fault:
        """Return a fault that ends the process at once with `EXIT_CODE`, without cleanup."""
        return cls(rank=rank, at=at, call=call, action="exit")

    @classmethod
    def delay(cls, *, rank: int, at: str, call: int = 1, seconds: float) -> Fault:
        """Return a fault that sleeps for `seconds`."""
        return cls(rank=rank, at=at, call=call, action="delay", seconds=seconds)

    def __post_init__(self) -> None:
        if self.at not in (*OPERATIONS, *PHASES):
            raise ConfigError(
                f"at={self.at!r} is unknown: choose an operation ({', '.join(OPERATIONS)}) or a phase"
                f" ({', '.join(PHASES)})"
            )
        if self.action not in ACTIONS:
            raise ConfigError(f"action={self.action!r} is unknown: choose one of {', '.join(ACTIONS)}")
        if self.rank < 0 or self.call < 1:
            raise ConfigError(f"rank={self.rank}, call={self.call} never occurs: ranks count from 0 and calls from 1")
        if (self.action == "delay") != (self.seconds > 0):
            raise ConfigError(
                f"action={self.action!r} with seconds={self.seconds:g}: a delay needs seconds above 0, and only a delay"
            )

    def __str__(self) -> str:
        call = "" if self.call == 1 else f" number {self.call}"
        late = f" by {self.seconds:g} s" if self.seconds else ""
        return f"{self.action}{' on' * (self.action in _RUNS_ON_RANK)} rank {self.rank} at {self.at}{call}{late}"

    def __repr__(self) -> str:
        call = "" if self.call == 1 else f", call={self.call}"
        late = f", seconds={self.seconds:g}" if self.seconds else ""
        return f"Fault.{self.action}(rank={self.rank}, at={self.at!r}{call}{late})"


@dataclass(frozen=True, slots=True, eq=False)
class _Injection:
    """Faults of one block, and the number of calls of each operation and phase on this rank."""

    faults: Sequence[Fault]
    calls: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_active: tuple[_Injection, ...] = ()


@contextmanager
def inject_faults(*faults: Fault) -> Iterator[None]:
    """Inject the faults into all threads of this process in the block; blocks may be nested."""
    global _active
    injection = _Injection(faults)
    _active = (*_active, injection)
    call_on_entry(maybe_inject_fault)
    try:
        yield
    finally:
        _active = tuple(other for other in _active if other is not injection)
        call_on_entry(maybe_inject_fault if _active else None)


def maybe_inject_fault(at: str) -> None:
    """Run the faults that are due at the start of this operation or phase."""
    for injection in _active:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        with injection.lock:
            injection.calls[at] += 1
            call = injection.calls[at]
        for fault in injection.faults:
            if (fault.rank, fault.at, fault.call) == (rank, at, call):
                _act(fault)


def _act(fault: Fault) -> None:
    if fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
    elif fault.action == "exit":
        os._exit(EXIT_CODE)
    elif fault.action == "leave":
        sys.exit(0)
    else:
        raise InjectedFault(f"{fault}: injected")
