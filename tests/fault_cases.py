"""Saves whose storage fails at a certain operation, many in a row, on any ranks; run on the ranks by the tests of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist
from oracles.faulting_storage import Fault, FaultingStorage
from save_cases import names_below, read, save

from booster.errors import BoosterError

_MAX_VERSIONS = 1000  # more than that, and float32 holds no more of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rank saw of a save with a fault.

    Attributes:
        error: Class and text of the error; None: the save went through.
        seconds: How long it took.
        failed: Numbers and names of the operations that failed on this rank.
        debris: What lies there afterwards and does not belong to a checkpoint.
        found: Which of "before" and "after" loads afterwards, or what is wrong; on rank 0 alone.
        found_next: The same after another save without a fault: "after", and no debris.
    """

    error: tuple[str, str] | None
    seconds: float
    failed: list
    debris: list
    found: str | None
    found_next: str | None


def operations_of(root, case, use_async):
    """Returns the names of this rank's operations in a save over one of the same kind."""
    storage = FaultingStorage(Fault())
    save(root, 1, case)
    save(root, 2, case, storage=storage, use_async=use_async)
    return storage.operations


def saves_with_faults(root, case, faults, use_async, *, syncs=False):
    """Returns the outcome of a save with each fault, one save over the other."""
    solo = dist.new_group([0])
    versions = _Versions(root, case, solo)
    save(root, versions.before, case)
    clean = names_below(root)
    return [_save_with_fault(root, case, fault, use_async, versions, clean, syncs) for fault in faults]


def _save_with_fault(root, case, fault, use_async, versions, clean, syncs):
    storage = FaultingStorage(fault, dist.get_rank(), syncs=syncs)
    begin, error = time.monotonic(), None
    try:
        save(root, versions.after, case, storage=storage, use_async=use_async)
    except BoosterError as caught:
        error = (type(caught).__name__, str(caught))
    seconds = time.monotonic() - begin
    dist.barrier()
    debris = sorted(set(names_below(root)) - set(clean))
    found = versions.found()
    dist.barrier()
    versions.advance()
    save(root, versions.after, case)
    found_next = versions.found() if set(names_below(root)) == set(clean) else f"names {names_below(root)}"
    versions.advance()
    return Outcome(
        error=error, seconds=seconds, failed=storage.faults, debris=debris, found=found, found_next=found_next
    )


class _Versions:
    """Which version is there before a save and which after it; the numbers come round again."""

    def __init__(self, root, case, solo):
        self._root, self._case, self._solo = root, case, solo
        self._number = 10

    @property
    def before(self):
        return 10 + self._number % _MAX_VERSIONS

    @property
    def after(self):
        return 10 + (self._number + 1) % _MAX_VERSIONS

    def advance(self):
        self._number += 1

    def found(self):
        """Returns what loads, in words; only rank 0 looks."""
        if dist.get_rank() != 0:
            return None
        found = read(self._root, self._case, self._solo)
        return {str(self.before): "before", str(self.after): "after"}.get(found, found)
