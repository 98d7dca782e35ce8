"""Saves whose storage fails at a certain operation, many in a row, on any ranks, and what may come of them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from oracles.faulting_storage import ERRORS, HICCUPS, Fault, FaultingStorage
from save_cases import names_below, read, save, usual_names_below

from booster.errors import BoosterError

MAX_SECONDS = 5.0
_MAX_VERSIONS = 1000  # more than that, and float32 holds no more of them


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What a rank saw of a save with a fault.

    Attributes:
        error: Class and text of the error; None: the save went through.
        seconds: How long it took.
        failed: Numbers and names of the operations that failed on this rank.
        debris: What lies there afterwards and does not belong to a checkpoint.
        found: Which of "before" and "after" loads afterwards, or what is wrong; on rank 0 alone.
        found_next: The same after another save without a fault: "after", and no debris. None where none was made.
    """

    error: tuple[str, str] | None
    seconds: float
    failed: list
    debris: list
    found: str | None
    found_next: str | None


def faults_at_every_operation(operations, errors=(*ERRORS, *HICCUPS)):
    """Returns a fault for every operation of every rank and every error that it can meet.

    Args:
        operations: The names of the operations of each rank.
        errors: Which; after the first of each operation also a disk that stays away.
    """
    faults = []
    for rank, names in enumerate(operations):
        for at, name in enumerate(names):
            fitting = [error for error in errors if error not in HICCUPS or name == "write"]
            faults += [Fault(rank=rank, at=at, error=error) for error in fitting]
            faults.append(Fault(rank=rank, at=at, error="EIO", is_lasting=True))
    return faults


def operations_of(root, case, use_async):
    """Returns the names of this rank's operations in a save over one of the same kind."""
    storage = FaultingStorage(Fault())
    save(root, 1, case)
    save(root, 2, case, storage=storage, use_async=use_async)
    return storage.operations


def saves_with_faults(root, case, faults, use_async, *, syncs=False, nexts=1):
    """Returns the outcome of a save with each fault, one save over the other.

    Args:
        root: A directory.
        case: Which kind of save.
        faults: What goes wrong in each.
        use_async: Whether they write in the background.
        syncs: Whether they wait for the disk.
        nexts: After how many of them a save without a fault is made.
    """
    with quick_groups() as (everyone, solo):
        versions = _Versions(root, case, everyone, solo)
        versions.save()
        clean = names_below(root)
        return [
            _save_with_fault(
                fault, versions, use_async, clean, syncs, is_followed=number % nexts == 0 or fault.is_lasting
            )
            for number, fault in enumerate(faults)
        ]


@contextmanager
def quick_groups():
    """Gives a group of all ranks and one of rank 0, without the checks that make a thousand saves slow."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        groups = dist.new_group(), dist.new_group([0])
    finally:
        dist.set_debug_level(before)
    yield groups


def _save_with_fault(fault, versions, use_async, clean, syncs, *, is_followed):
    if any(".b." in name for name in names_below(versions.root)):  # as a save over second names renames nothing first
        versions.meet()
        versions.save(1)
        versions.look()
    storage = FaultingStorage(fault, dist.get_rank(), syncs=syncs)
    begin, error = time.monotonic(), None
    try:
        versions.save(1, storage=storage, use_async=use_async)
    except BoosterError as caught:
        error = (type(caught).__name__, str(caught))
    seconds = time.monotonic() - begin
    versions.meet()
    debris = sorted(set(usual_names_below(versions.root)) - set(clean))
    found = versions.look()
    found_next = None
    if is_followed or debris:  # a save that begins with clearing would count its operations otherwise
        versions.save(1)
        names = set(usual_names_below(versions.root))
        found_next = versions.look() if names == set(clean) else f"names {sorted(names ^ set(clean))}"
    return SaveResult(
        error=error, seconds=seconds, failed=storage.faults, debris=debris, found=found, found_next=found_next
    )


class _Versions:
    """Which version is there; the numbers come round again."""

    def __init__(self, root, case, everyone, solo):
        self.root = root
        self._case, self._everyone, self._solo = case, everyone, solo
        self._number = 0

    def save(self, more=0, **options):
        save(self.root, self._version(more), self._case, group=self._everyone, **options)

    def look(self):
        """Returns what is there, "before" or "after" the save that was tried, or what is wrong; continues from it."""
        found = read(self.root, self._case, self._solo) if dist.get_rank() == 0 else ""
        texts = [found]
        dist.broadcast_object_list(texts, group=self._everyone)
        names = {str(self._version(0)): "before", str(self._version(1)): "after"}
        found = names.get(texts[0], texts[0])
        self._number += found == "after"
        return found

    def meet(self):
        dist.barrier(self._everyone)

    def _version(self, more):
        return 10 + (self._number + more) % _MAX_VERSIONS


def all_wrong_with(faults, operations, outcomes_by_rank):
    """Returns what is wrong with what the ranks saw of saves with faults, as texts that name the fault."""
    return [
        f"{fault} at {operations[fault.rank][fault.at]}: {text}"
        for fault, outcomes in zip(faults, zip(*outcomes_by_rank, strict=True), strict=True)
        for text in wrong_with(fault, operations, outcomes)
    ]


def wrong_with(fault, operations, outcomes):
    """Returns what is wrong with what the ranks saw of a save with a fault, as texts.

    Args:
        fault: What went wrong.
        operations: The names of the operations of each rank without it.
        outcomes: What each rank saw.
    """
    writer = outcomes[fault.rank]
    is_borne = all(outcome.error is None for outcome in outcomes)
    # Without a failure: threads share their work as it comes, and this time there were fewer operations.
    # The removal comes last, and what it leaves the next save clears.
    if fault.error in HICCUPS or not writer.failed or (writer.failed[0][1] == "remove_tree" and is_borne):
        is_fine = is_borne and outcomes[0].found == "after" and outcomes[0].found_next in ("after", None)
        return [] if is_fine else [f"not borne: {outcomes}"]
    return [*_wrong_errors(fault, outcomes), *_wrong_files(fault, operations[0], outcomes[0], writer.failed[0])]


def _wrong_errors(fault, outcomes):
    errors = [outcome.error for outcome in outcomes]
    if None in errors:
        yield f"no error on some rank: {errors}"
        return
    if len({name for name, _ in errors}) > 1:
        yield f"different errors: {errors}"
    for rank, (outcome, (name, text)) in enumerate(zip(outcomes, errors, strict=True)):
        if fault.text not in text:
            yield f"rank {rank} does not say {fault.text!r}: {name}: {text}"
        if "/saves" not in text:
            yield f"rank {rank} names no file: {text}"
        if rank != fault.rank and f"rank {fault.rank}" not in text:
            yield f"rank {rank} does not name rank {fault.rank}: {text}"
        if outcome.seconds > MAX_SECONDS:
            yield f"rank {rank} took {outcome.seconds:.1f} s"


def _wrong_files(fault, operations, first, failure):
    number, name = failure
    # A directory's commit point is the rename of its folder, and is taken back where that doesn't reach the disk.
    # Shards that get second names are renamed in the folder before.
    renames = [at for at, operation in enumerate(operations) if operation == "rename_new"]
    renamed = renames[-1] if renames else operations.index("replace")
    is_taken_back = operations[renamed] == "rename_new" and number == renamed + 1 and not fault.is_lasting
    is_after = fault.rank == 0 and number > renamed and not is_taken_back
    expected = "after" if is_after else "before"
    if first.found != expected:
        yield f"then loads {first.found}, and not what was {expected}"
    is_removable = not is_after and not fault.is_lasting and name != "remove_tree"
    if first.debris and is_removable:
        yield f"leaves {first.debris}"
    if first.found_next not in ("after", None):
        yield f"after the next save: {first.found_next}"
