"""Every state that a crash can leave of a save by four ranks: the old checkpoint or the new one is there, whole.

The saves are made and noted once; each state of each crash model is then laid out as files, and loaded; and a next save
must work on whatever debris lies there, and clear it.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from oracles.crash_disk import disk_of, read_tree, write_tree
from oracles.crash_states import crash_states, examine
from oracles.faulting_storage import UnsyncedStorage
from oracles.recording_storage import RecordingStorage, read_operations
from save_cases import NEW, NEXT, OLD, SAVES, names_below, read, read_path, save, save_recorded

from booster.checkpoint_io import GeneralCheckpointIO
from booster.errors import CheckpointError
from booster.interface import ModelWrapper

NUM_RANKS = 4


def recorded(tmp_path, case, *, before=None, use_async=False):
    """Returns the disk before a save on four ranks, and what the save did."""
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    if before is not None:
        run_ranks(save, NUM_RANKS, root, OLD, before)
    disk = disk_of(root)
    run_ranks(save_recorded, NUM_RANKS, root, log, NEW, case, use_async=use_async)
    operations = read_operations(log)
    assert {operation.rank for operation in operations} == set(range(NUM_RANKS))
    replayed = disk_of_operations(disk, operations)
    assert replayed == read_tree(root)
    return disk, operations


def disk_of_operations(disk, operations):
    import copy

    replayed = copy.deepcopy(disk)
    for operation in operations:
        replayed.apply(operation)
    return replayed.tree()


def next_save_of(tmp_path, case):
    """Returns the save that must work on any debris, and leave nothing of it."""
    clean = tmp_path / "clean"
    clean.mkdir()
    save(clean, NEXT, case)
    expected = names_below(clean)

    def next_save(root):
        save(root, NEXT, case)
        found = read(root, case)
        if found != "next":
            return f"finds {found}"
        left_over = sorted(set(names_below(root)) - set(expected))
        return f"leaves {left_over}" if left_over else None

    return next_save


def assert_sound(verdict, *, old):
    assert not verdict.violations, f"{len(verdict.violations)} violations:\n" + "\n".join(verdict.violations[:20])
    assert verdict.found("kill") == {old, "new"}
    assert verdict.found("entries") == {old, "new"}
    assert verdict.found("data") <= {old, "new"}
    print(verdict.num_states, "states,", verdict.num_trees, "trees")


# The case, what was there before, and whether the save is in the background.
SCENARIOS = {
    "first": ("directory", None, False),
    "overwrite": ("directory", "directory", False),
    "async overwrite": ("directory", "directory", True),
    "overwrite of another layout": ("directory", "one shard", False),
    "overwrite of bin shards": ("bin directory", "bin directory", False),
    "first file": ("file", None, False),
    "overwrite of a file": ("file", "file", False),
    "overwrite of a bin file": ("bin file", "bin file", False),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_crash_leaves_the_old_or_the_new(tmp_path, scenario):
    case, before, use_async = SCENARIOS[scenario]
    disk, operations = recorded(tmp_path, case, before=before, use_async=use_async)
    verdict = examine(
        disk,
        operations,
        tmp_path / "crash",
        lambda root: read(root, case),
        next_save_of(tmp_path, case),
        has_old=before is not None,
    )
    assert_sound(verdict, old="nothing" if before is None else "old")
