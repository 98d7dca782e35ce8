"""An I/O error at every operation of a save: the same error on both ranks, the old checkpoint whole, nothing left over.

Every fault meets a save by two ranks over an older checkpoint, and a save without a fault follows.
"""

from __future__ import annotations

import os
import resource
import stat

import pytest
from fault_cases import operations_of, saves_with_faults
from harness import run_ranks
from oracles.faulting_storage import ERRORS, HICCUPS, Fault
from save_cases import OLD, names_below, read, save

from booster.errors import BoosterError, CheckpointError

MAX_SECONDS = 5.0


def faults_at_every_operation(operations, errors=(*ERRORS, *HICCUPS)):
    """Returns a fault for every operation of every rank and every error that it can meet."""
    return [
        Fault(rank=rank, at=at, error=error)
        for rank, names in enumerate(operations)
        for at, name in enumerate(names)
        for error in errors
        if error not in HICCUPS or name == "write"
    ]


def wrong_with(fault, outcomes):
    """Returns what is wrong with what the ranks saw of a save with a fault, as texts."""
    writer = outcomes[fault.rank]
    if fault.error in HICCUPS:
        is_fine = all(outcome.error is None for outcome in outcomes) and outcomes[0].found == "after"
        return [] if is_fine else [f"not borne: {outcomes}"]
    if not writer.failed:
        return []  # fewer operations than in the save that was counted: threads share their work as it comes
    wrong = []
    if any(outcome.error is None for outcome in outcomes):
        return [f"no error on some rank: {[outcome.error for outcome in outcomes]}"]
    if len({outcome.error[0] for outcome in outcomes}) > 1:
        wrong.append(f"different errors: {[outcome.error for outcome in outcomes]}")
    for rank, outcome in enumerate(outcomes):
        name, text = outcome.error
        if fault.text not in text:
            wrong.append(f"rank {rank} does not say {fault.text!r}: {name}: {text}")
        if rank != fault.rank and f"rank {fault.rank}" not in text:
            wrong.append(f"rank {rank} does not name rank {fault.rank}: {text}")
        if outcome.seconds > MAX_SECONDS:
            wrong.append(f"rank {rank} took {outcome.seconds:.1f} s")
    if outcomes[0].found not in ("before", "after"):
        wrong.append(f"then loads: {outcomes[0].found}")
    if outcomes[0].debris and writer.failed[0][1] not in ("remove", "remove_tree", "replace"):
        wrong.append(f"leaves {outcomes[0].debris}")
    if outcomes[0].found_next != "after":
        wrong.append(f"after the next save: {outcomes[0].found_next}")
    return wrong


CASES = [("directory", False), ("directory", True), ("file", False), ("bin directory", False)]


@pytest.mark.parametrize(("case", "use_async"), CASES)
def test_an_error_at_every_operation(tmp_path, case, use_async):
    operations = run_ranks(operations_of, 2, tmp_path, case, use_async)
    faults = faults_at_every_operation(operations)
    by_rank = run_ranks(saves_with_faults, 2, tmp_path / "saves", case, faults, use_async, timeout=300)
    wrong = [
        f"{fault} at {operations[fault.rank][fault.at]}: {text}"
        for fault, outcomes in zip(faults, zip(*by_rank, strict=True), strict=True)
        for text in wrong_with(fault, outcomes)
    ]
    print(len(faults), "faults", operations)
    assert not wrong, f"{len(wrong)} of {len(faults)} faults:\n" + "\n".join(wrong[:20])
