"""Which groups communicate through shared memory: those of CPU tensors whose ranks all run on one host.

`BOOSTER_SHARED_MEMORY=off` or `use_shared_memory(False)` leave everything to the group's own backend.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from booster.comm.imagined import ImaginedMemory, are_others_imagined
from booster.comm.started import Started, perform_started
from booster.errors import ConfigError
from booster.kernels.shared_memory import MAX_RANKS, SharedMemory, Ticket, is_available
from booster.logger import get_dist_logger

__all__ = [
    "GroupMemory",
    "abort_shared_memory",
    "memory_of",
    "release_shared_memory",
    "set_shared_memory_timeout",
    "transport",
    "use_shared_memory",
]

# Note [Choosing a transport]
# A group decides at its first collective of CPU tensors in this package, once. Each rank tells what it knows of itself
# by one small all-gather of the backend: whether it wants shared memory and has the kernel, on which host and in whose
# processes' sight it runs, and rank 0 also where it has made the memory. If all agree, the others attach to it, and a
# second all-gather tells whether everybody could. A rank that could not, or does not want to, means the group's own
# backend for all. Every rank takes part whatever it wants, so settings that differ are safe.

VARIABLE = "BOOSTER_SHARED_MEMORY"
_SETTINGS = {"": True, "on": True, "auto": True, "1": True, "off": False, "0": False}
_DEFAULT_TIMEOUT = timedelta(minutes=30)

# is it wanted, host, namespace of process ids (device, inode), user; process id, file, key, size of a slot
_CARD = struct.Struct("<?36sQQQqqQQ")
_NO_FILE = -1

# torch 2.13 renamed it and warns at each call of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class GroupMemory:
    """The shared memory of a group, and the order in which this rank uses it.

    Attributes:
        memory: This rank's end.
        lock: Held while an operation is performed.
        started: What was started and not performed yet; see Note [Started operations].
    """

    memory: SharedMemory
    lock: threading.RLock = field(default_factory=threading.RLock)
    started: deque[Started] = field(default_factory=deque)


_is_wanted: bool | None = None  # None: what the environment says
_is_wanted_in: WeakKeyDictionary[dist.ProcessGroup, bool | None] = WeakKeyDictionary()  # overrides it
_decisions: WeakKeyDictionary[dist.ProcessGroup, GroupMemory | None] = WeakKeyDictionary()


def use_shared_memory(enabled: bool | None, only_in: dist.ProcessGroup | None = None) -> None:
    """Switches shared memory on or off from the next collective on, for groups that have decided already, too.

    Args:
        enabled: None: as the environment variable `BOOSTER_SHARED_MEMORY` says, which is on unless it is `off`.
        only_in: For this group alone, whatever is said for all; None: for all groups.

    To be called on every rank at the same place; where the ranks' values differ, it is off for all. No communication.
    """
    global _is_wanted
    if only_in is None:
        _is_wanted = enabled
        _decisions.clear()
    else:
        _is_wanted_in[only_in] = enabled
        _decisions.pop(only_in, None)


def transport(group: dist.ProcessGroup | None = None) -> str:
    """Returns what collectives of CPU tensors go through: "shared memory", or the name of the group's backend.

    Collective: every rank of the group must call it, as the group may have to decide now.
    """
    chosen = group or _get_default_group()
    if dist.get_world_size(chosen) > 1 and memory_of(chosen, torch.empty(0)) is not None:
        return "shared memory"
    return str(dist.get_backend(chosen))


def memory_of(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> GroupMemory | None:
    """Returns the shared memory for a collective of this tensor; None where the group's backend is to be used.

    Args:
        group: Of several ranks; None: the world.
        tensor: On the same kind of device on all ranks.

    Collective at the group's first call with a CPU tensor; see Note [Choosing a transport].

    Raises:
        ConfigError: `BOOSTER_SHARED_MEMORY` has no known value.
        RuntimeError: The backend's, where a rank is lost or too late.
    """
    if are_others_imagined():
        return GroupMemory(ImaginedMemory())  # type: ignore[arg-type]  # all that is used of it
    if tensor.device.type != "cpu":
        return None
    chosen = group or _get_default_group()
    if chosen not in _decisions:  # asked for, so that what fails in the decision has no KeyError behind it
        perform_started()  # the group's own backend knows nothing of what others may wait for
        _decisions[chosen] = _decide(chosen)
    return _decisions[chosen]


def abort_shared_memory(group: dist.ProcessGroup) -> None:
    """Lets all collectives of the group through shared memory fail, on all ranks. No communication."""
    decision = _decisions.get(group)
    if decision is not None:
        decision.memory.abort()


def release_shared_memory(group: dist.ProcessGroup) -> None:
    """Unmaps this rank's end of the group's shared memory; none of its collectives is under way. No communication."""
    _decisions.pop(group, None)


def set_shared_memory_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Changes how long a rank waits in what begins from now on, if the group has shared memory. No communication."""
    decision = _decisions.get(group)
    if decision is not None:
        decision.memory.set_timeout(seconds)


def _decide(group: dist.ProcessGroup) -> GroupMemory | None:
    size = dist.get_world_size(group)
    if "gloo" not in str(dist.get_backend(group)) or size > MAX_RANKS:
        return None
    memory, card = _introduce(group, size)
    cards = _gathered(card, group)
    if not _is_agreed(cards):
        return None
    if memory is None:
        memory = _attach(cards[0], group, size)
    if not all(any(answer) for answer in _gathered(bytes([memory is not None]), group)) or memory is None:
        return None
    memory.begin()
    return GroupMemory(memory)


def _introduce(group: dist.ProcessGroup, size: int) -> tuple[SharedMemory | None, bytes]:
    """Returns the memory, on rank 0 where it could be made, and what this rank tells the others."""
    if not _wants_shared_memory(group):
        return None, bytes(_CARD.size)
    memory, ticket = None, Ticket(os.getpid(), _NO_FILE, 0, 0)
    if dist.get_rank(group) == 0:
        try:
            memory, ticket = SharedMemory.create(size, _timeout_seconds(group))
        except RuntimeError as error:
            _warn(str(error))
    place = ticket.process_id, ticket.file_number, ticket.key, ticket.slot_bytes
    return memory, _CARD.pack(True, *_host(), *place)


def _wants_shared_memory(group: dist.ProcessGroup) -> bool:
    setting = os.environ.get(VARIABLE, "").lower()
    if setting not in _SETTINGS:
        raise ConfigError(f"{VARIABLE}={setting!r} is unknown: set it to on or off, or unset it")
    explicit = _is_wanted_in.get(group, _is_wanted)
    is_wanted = _SETTINGS[setting] if explicit is None else explicit
    return is_wanted and sys.platform == "linux" and is_available()


def _host() -> tuple[bytes, int, int, int]:
    """Returns what is the same for processes that can open each other's memory."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    namespace = os.stat("/proc/self/ns/pid")
    return boot_id, namespace.st_dev, namespace.st_ino, os.geteuid()


def _is_agreed(cards: Sequence[bytes]) -> bool:
    told = [_CARD.unpack(card) for card in cards]
    is_wanted_by_all = all(one[0] for one in told)
    is_one_host = len({one[1:5] for one in told}) == 1
    return is_wanted_by_all and is_one_host and told[0][6] != _NO_FILE


def _attach(card_of_first: bytes, group: dist.ProcessGroup, size: int) -> SharedMemory | None:
    ticket = Ticket(*_CARD.unpack(card_of_first)[5:])
    try:
        return SharedMemory.attach(ticket, size, dist.get_rank(group), _timeout_seconds(group))
    except RuntimeError as error:
        _warn(str(error))
        return None


def _gathered(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    source = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    joined = source.new_empty(dist.get_world_size(group) * len(mine))
    _all_gather_single(joined, source, group=group)
    return [bytes(row.numpy()) for row in joined.view(-1, len(mine))]


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """Returns how long the group's backend waits for a rank, which torch keeps in the backend's options alone."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", _DEFAULT_TIMEOUT)
    return timeout.total_seconds()


_reasons: set[str] = set()


def _warn(reason: str) -> None:
    if reason not in _reasons:
        _reasons.add(reason)
        get_dist_logger().warning(
            f"ranks on this host communicate through gloo, several times slower than through shared memory: {reason}."
            f" {VARIABLE}=off asks for that"
        )
