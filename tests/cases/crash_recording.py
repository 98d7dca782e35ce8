"""A save by four ranks, noted operation by operation, and what the replay of the notes starts from."""

from __future__ import annotations

import copy

import torch.distributed as dist
from harness import run_ranks
from oracles.crash_disk import disk_of, read_tree
from oracles.recording_storage import RecordingStorage, read_operations

NUM_RANKS = 4


def recorded(tmp_path, save, new, before=()):
    """Returns the disk before a save on four ranks, and what the save did, in order.

    Args:
        tmp_path: A directory; the saves go below `root` in it.
        save: A function of a module that takes the root, and `storage` by keyword.
        new: Further arguments of the save that is noted, positional and by keyword.
        before: The same of saves before it.
    """
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    for args, kwargs in before:
        run_ranks(save, NUM_RANKS, root, *args, **kwargs)
    disk = disk_of(root)
    run_ranks(_save_recorded, NUM_RANKS, save, root, log, *new)
    operations = read_operations(log)
    assert {operation.rank for operation in operations} == set(range(NUM_RANKS))
    assert replayed(disk, operations) == read_tree(root), "the notes say something else than the file system"
    return disk, operations


def _save_recorded(save, root, log, args, kwargs):
    save(root, *args, **kwargs, storage=RecordingStorage(root, log, dist.get_rank()))


def replayed(disk, operations):
    """Returns what is there after the operations, by path."""
    disk = copy.deepcopy(disk)
    for operation in operations:
        disk.apply(operation)
    return disk.tree()


def assert_sound(verdict, *, old):
    """Checks that every crash left the old or the new, and that the crashes were such that it could be both."""
    print(verdict.num_states, "states,", verdict.num_trees, "of them different")
    assert not verdict.violations, f"{len(verdict.violations)} violations:\n" + "\n".join(verdict.violations[:20])
    assert verdict.found("kill") == verdict.found("entries") == {old, "new"}
    assert verdict.found("data") <= {old, "new"}
