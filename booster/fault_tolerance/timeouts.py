"""Timeouts of waits for other ranks: in training, set-up and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist

from booster.errors import ConfigError

# Note [Timeouts]
# A rank that is lost in training should be detected soon; a rank that compiles a kernel, reads a model or writes a
# large shard needs more time. So the launch takes three timeouts. Groups made by this package, and the world if the
# launch made it, have the training timeout, and inside of `timeout_scope` the set-up or checkpoint timeout: the
# timeouts of their backends are changed at entry and restored at exit, which costs a microsecond per group. The
# innermost `timeout_scope` of the process applies. Groups of the user, and an adopted world, keep their timeouts.
# A gloo message has the timeout that its connection was made with, unless its wait is given another one. A group is
# created with the set-up timeout. TORCH_DISTRIBUTED_DEBUG=DETAIL puts a barrier before each collective, whose timeout
# cannot be changed later: there, and with a backend other than gloo and nccl, a group keeps its timeout.

Kind = Literal["setup", "checkpoint"]

CHANGEABLE_BACKENDS = ("gloo", "nccl")
_MIN_SECONDS, _MAX_SECONDS = 0.001, 1e9  # torch counts milliseconds, and 0 disables its timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts of waits for other ranks, in seconds.

    Attributes:
        training: Timeout of collectives and messages of the training loop.
        setup: Timeout of the rendezvous, of new process groups, and of `boost()`.
        checkpoint: Timeout of collectives in a save or a load.

    Raises:
        ConfigError: A value is not a positive number.
    """

    training: float = 600
    setup: float = 1800
    checkpoint: float = 1800

    def __post_init__(self) -> None:
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name))


def check_seconds(name: str, seconds: Any) -> None:
    """Raise `ConfigError` unless `seconds` is a valid timeout."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number:
        raise ConfigError(f"{name}={seconds!r} is not a number of seconds: give one above 0, such as 600")
    if not seconds > 0:
        raise ConfigError(f"{name}={seconds!r} leaves no time to wait for others: give a number of seconds above 0")
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise ConfigError(
            f"{name}={seconds!r} is not a possible timeout: a lost rank would block the others without end, or messages"
            f" would be too late. Give seconds from {_MIN_SECONDS:g} to {_MAX_SECONDS:g}"
        )


DEFAULT_TIMEOUTS = Timeouts()
_timeouts = DEFAULT_TIMEOUTS


def timeouts() -> Timeouts:
    """Return the timeouts given to the launch, or the defaults."""
    return _timeouts


def set_timeouts(timeouts: Timeouts | None) -> None:
    """Set the timeouts of new groups and waits; None restores the defaults."""
    global _timeouts
    _timeouts = DEFAULT_TIMEOUTS if timeouts is None else timeouts


@dataclass(frozen=True, slots=True)
class _TimeoutGroup:
    """Group with a changeable timeout, and its backends."""

    backends: list[Any]
    is_gloo: bool


_groups: WeakKeyDictionary[dist.ProcessGroup, _TimeoutGroup] = WeakKeyDictionary()
_kinds: list[Kind] = []  # of the active `timeout_scope` blocks of this process, outermost first
_lock = threading.RLock()

# Called with a group and its new timeout in seconds, by other transports than the group's backends.
timeout_callbacks: list[Callable[[dist.ProcessGroup, float], None]] = []


def current_timeout() -> float:
    """Return the timeout of waits that start now."""
    return getattr(timeouts(), _kinds[-1]) if _kinds else timeouts().training


@contextmanager
def timeout_scope(kind: Kind) -> Iterator[None]:
    """Use the `setup` or `checkpoint` timeout for collectives started in this block. Also a decorator.

    Applies to all threads of this process. No communication. See Note [Timeouts].
    """
    with _lock:
        _kinds.append(kind)
        _apply(list(_groups))
    try:
        yield
    finally:
        with _lock:
            # Not simply the last one: another thread may have entered a block since.
            del _kinds[len(_kinds) - 1 - _kinds[::-1].index(kind)]
            _apply(list(_groups))


def p2p_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout for the wait of a message in this group, or None for the backend's.

    Waits for nccl's messages do not block: they are enqueued on the device's stream.
    """
    chosen = group or dist.group.WORLD
    known = None if chosen is None else _groups.get(chosen)
    return timedelta(seconds=current_timeout()) if known is not None and known.is_gloo else None


def register_group(group: dist.ProcessGroup) -> None:
    """Apply the timeouts of this module to a group from now on. No communication."""
    backends: list[Any] = []
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # inside of the wrapper of torch's debug mode
        if backend.name() in CHANGEABLE_BACKENDS and not any(backend is other for other in backends):
            backends.append(backend)
    is_gloo = bool(backends) and all(backend.name() == "gloo" for backend in backends)
    with _lock:
        _groups[group] = _TimeoutGroup(backends, is_gloo)
        _apply([group])


def _apply(groups: Sequence[dist.ProcessGroup]) -> None:
    seconds = current_timeout()
    for group in groups:
        for backend in _groups[group].backends:
            backend._set_default_timeout(timedelta(seconds=seconds))
        for callback in timeout_callbacks:
            callback(group, seconds)
