"""Every state that a crash can leave of a save by four ranks: the old checkpoint or the new one is there, whole.

The saves are made and noted once; each state of each crash model is then laid out as files, and loaded; and a next save
must work on whatever debris lies there, and clear it.
"""

from __future__ import annotations

import copy
import random

import pytest
from crash_recording import NUM_RANKS, assert_sound, recorded
from harness import run_ranks
from oracles.crash_disk import read_tree, write_tree
from oracles.crash_states import cut_at, examine
from save_cases import NAMES, NEW, NEXT, OLD, SAVES, names_below, read, read_as_transformers, save, usual_names_below


def recorded_case(tmp_path, case, *, before=None, use_async=False):
    """Returns the disk before a save of some case over one of another, and what the save did."""
    older = [] if before is None else [((OLD, before), {})]
    return recorded(tmp_path, save, ((NEW, case), {"use_async": use_async}), older)


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
        left_over = sorted(set(usual_names_below(root)) - set(expected))
        return f"leaves {left_over}" if left_over else None

    return next_save


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


# What these do is done by others as well: the same files over an older save by "async overwrite" and "overwrite of
# another layout", one file over one file by "overwrite of a bin file".
SLOW_SCENARIOS = ("overwrite", "overwrite of bin shards", "overwrite of a file")


@pytest.mark.parametrize(
    "scenario", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW_SCENARIOS else one for one in SCENARIOS]
)
def test_every_crash_leaves_the_old_or_the_new(tmp_path, scenario):
    case, before, use_async = SCENARIOS[scenario]
    disk, operations = recorded_case(tmp_path, case, before=before, use_async=use_async)
    verdict = examine(
        disk,
        operations,
        tmp_path / "crash",
        lambda root: read(root, case),
        next_save_of(tmp_path, case),
        has_old=before is not None,
    )
    assert_sound(verdict, old="nothing" if before is None else "old")
    assert len(verdict.found("data")) == 1  # what counts is on the disk before it counts


# What was there before is in another layout, too: the single file that transformers prefers to an index goes, or comes,
# and so does the format that it prefers.
READ_BY_OTHERS = {
    "shards over shards": ("directory", "directory", False),
    "async shards over shards": ("directory", "directory", True),
    "shards over bin shards": ("directory", "bin directory", False),
    "bin shards over shards": ("bin directory", "directory", False),
    "bin shards over one shard": ("bin directory", "one shard", False),
    "bin shards over bin shards": ("bin directory", "bin directory", False),
    "one shard over one shard": ("one shard", "one shard", False),
    "one shard over shards": ("one shard", "directory", False),
    "shards over one shard": ("directory", "one shard", False),
}


@pytest.mark.parametrize("scenario", READ_BY_OTHERS)
def test_transformers_finds_the_old_or_the_new_after_every_crash(tmp_path, scenario):
    case, before, use_async = READ_BY_OTHERS[scenario]
    disk, operations = recorded_case(tmp_path, case, before=before, use_async=use_async)
    verdict = examine(disk, operations, tmp_path / "crash", lambda root: read_as_transformers(root / "m"), has_old=True)
    assert_sound(verdict, old="old")


def test_saves_over_each_other_take_turns_with_their_names(tmp_path):
    names = []
    for version in (OLD, NEW, NEXT):
        save(tmp_path, version)
        names.append({name for name in names_below(tmp_path) if "-of-" in name})
        assert read(tmp_path) == read_as_transformers(tmp_path / "m") == NAMES[version]
    assert names[0] == names[2]
    assert names[0].isdisjoint(names[1])
    assert len(names[1]) == len(names[0]) == 3


# Positive controls: the same saves, with an fsync left out or moved.


def _without(kind):
    return lambda operations: [operation for operation in operations if operation.kind != kind]


def _synced_before_written(operations):
    """Moves every fsync of a file to right after its creation, as torch.distributed.checkpoint and others have it."""
    inodes = {operation.inode: operation for operation in operations if operation.kind == "sync"}
    moved = []
    for operation in operations:
        if operation.kind != "sync":
            moved.append(operation)
        if operation.kind == "create" and operation.inode in inodes:
            moved.append(inodes[operation.inode])
    return moved


def _without_the_sync_of(rank):
    return lambda operations: [one for one in operations if one.kind != "sync" or one.rank != rank]


BROKEN = {
    "no fsync of files": (_without("sync"), "data"),
    "no fsync of directories": (_without("sync_path"), "entries"),
    "fsync before flush": (_synced_before_written, "data"),
    "no fsync on rank 0": (_without_the_sync_of(0), "data"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_save_without_one_of_its_guards_is_found_out(tmp_path, broken):
    change, model = BROKEN[broken]
    disk, operations = recorded_case(tmp_path, "directory", before="directory")
    operations, scratch = change(operations), tmp_path / "crash"
    commit = next(number for number, operation in enumerate(operations) if operation.kind == "rename")
    options = {"has_old": True, "since": commit}
    assert examine(disk, operations, scratch, read, models=[model], max_violations=1, **options).violations
    # The page cache outlives a process: a kill alone finds nothing.
    assert not examine(disk, operations, scratch, read, models=["kill"], **options).violations


def test_an_install_without_its_commit_point_is_found_out(tmp_path):
    """The renames of a save over an older one, without the folder that makes them one: DCP's and metaseq's way."""
    disk, operations = recorded_case(tmp_path, "directory", before="directory")

    def read_plain(root):
        for path in list((root / "m").glob(".booster-commit-*")):
            path.rename(root / "m" / f".unseen-{path.name}")
        return read(root)

    verdict = examine(disk, operations, tmp_path / "crash", read_plain, has_old=True, models=["kill"], max_violations=1)
    assert verdict.violations


# Every byte.


def _cut_states(disk, operations):
    """Gives what is there when the power fails before each fsync, with the file cut at every byte of what it misses."""
    disk = copy.deepcopy(disk)
    for operation in operations:
        if operation.kind == "sync":
            number = disk.by_inode[operation.inode]
            node = disk.nodes[number]
            for position in range(len(node.content) + 1):
                yield operation, position, disk.tree(contents={number: cut_at(node.content, node.durable, position)})
        disk.apply(operation)


def _check_cut_writes(tmp_path, case, pick):
    """Cuts each file of a save over an older one before it is on the disk: the old one loads."""
    disk, operations = recorded_case(tmp_path, case, before=case)
    num_states = 0
    for operation, position, tree in pick(list(_cut_states(disk, operations))):
        write_tree(tree, tmp_path / "crash")
        assert read(tmp_path / "crash", case) == "old", f"{operation} cut at byte {position}"
        num_states += 1
    return num_states


def _check_cut_files(tmp_path, case, pick):
    """Cuts each file of a committed checkpoint: an error that names it, or all of it still loads."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    run_ranks(save, NUM_RANKS, root, OLD, case)
    tree = read_tree(root)
    cuts = [(path, length) for path, content in tree.items() if content is not None for length in range(len(content))]
    for path, length in pick(cuts):
        file = root / path
        content = file.read_bytes()
        file.write_bytes(content[:length])
        found = read(root, case)
        file.write_bytes(content)
        assert found.startswith("error: "), f"{path} cut at byte {length}: {found}"
        assert file.name in found, f"{path} cut at byte {length} is not named: {found}"
    return len(cuts)


@pytest.mark.parametrize("case", ["directory", "file", "bin directory"])
def test_files_cut_at_some_bytes(tmp_path, case):
    """Every file of each kind, cut while it is written and after it was committed."""
    rng = random.Random(0)
    _check_cut_writes(tmp_path, case, lambda states: rng.sample(states, 30))
    _check_cut_files(tmp_path, case, lambda cuts: rng.sample(cuts, 120))


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVES)
def test_files_cut_at_every_byte(tmp_path, case):
    rng = random.Random(1)
    assert _check_cut_files(tmp_path, case, lambda cuts: cuts) > 3000
    (tmp_path / "writes").mkdir()
    assert _check_cut_writes(tmp_path / "writes", case, lambda states: rng.sample(states, 1000)) == 1000
