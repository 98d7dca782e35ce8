"""The enumeration of crashes finds the mistakes that real writers make, and no others: its positive controls."""

from __future__ import annotations

import pytest
from oracles import naive_writers
from oracles.crash_disk import disk_of, read_tree, write_tree
from oracles.crash_states import crash_states, examine
from oracles.recording_storage import RecordingStorage, read_operations, write_operations

from booster.checkpoint_io.storage import Storage


def _recorded(tmp_path, writer, *, has_old):
    """Returns the disk before a save of one of the writers, and what the save did."""
    root = tmp_path / "root"
    root.mkdir()
    if has_old:
        writer(Storage(), root, "old")
    disk = disk_of(root)
    writer(RecordingStorage(root, tmp_path / "log"), root, "new")
    return disk, read_operations(tmp_path / "log")


def _examined(tmp_path, writer, *, has_old):
    disk, operations = _recorded(tmp_path, writer, has_old=has_old)

    def next_save(root):
        writer(Storage(), root, "next")
        return None if naive_writers.read(root) == "next" else naive_writers.read(root)

    return examine(disk, operations, tmp_path / "crash", naive_writers.read, next_save, has_old=has_old)


@pytest.mark.parametrize("has_old", [True, False], ids=["overwrite", "first"])
def test_a_sound_writer_passes(tmp_path, has_old):
    verdict = _examined(tmp_path, naive_writers.sound, has_old=has_old)
    assert not verdict.violations
    before = "old" if has_old else "nothing"
    assert verdict.found("kill") == verdict.found("entries") == {before, "new"}
    assert verdict.found("data") == {before}  # once the index is in its place, no byte is left to lose
    assert verdict.num_states > verdict.num_trees > 30


# Writer, what each crash model must find over an old checkpoint besides "old" and "new".
MISTAKES = {
    naive_writers.in_place: {
        "kill": {"mixture"},
        "data": {"mixture", "damaged bytes"},
    },
    naive_writers.sync_before_flush: {
        "kill": set(),
        "data": {"error: damaged index", "error: new-0 is missing or cut", "damaged bytes"},
    },
    naive_writers.unlink_before_rename: {"kill": {"nothing"}, "data": set()},
    naive_writers.no_directory_sync: {"kill": set(), "data": set(), "entries": {"error: new-0 is missing or cut"}},
    naive_writers.torch_distributed_checkpoint: {
        "kill": {"mixture", "nothing"},
        "data": {"mixture", "nothing", "error: damaged index"},
    },
}


@pytest.mark.parametrize("writer", MISTAKES, ids=lambda writer: writer.__name__)
def test_each_mistake_is_found_where_it_shows(tmp_path, writer):
    verdict = _examined(tmp_path, writer, has_old=True)
    assert verdict.violations
    for model, wrong in MISTAKES[writer].items():
        found = verdict.found(model) - {"old", "new"}
        assert wrong <= found
        assert bool(wrong) is bool(found), f"{model} finds {found}"


def test_dcp_loses_what_it_overwrites(tmp_path):
    """Killed after its unlink nothing loads; before, new parts load through the old index."""
    verdict = _examined(tmp_path, naive_writers.torch_distributed_checkpoint, has_old=True)
    assert any("kill after" in text and text.endswith(": nothing") for text in verdict.violations)
    assert any("kill after" in text and text.endswith(": mixture") for text in verdict.violations)


@pytest.mark.parametrize("writer", [naive_writers.sync_before_flush, naive_writers.no_directory_sync])
def test_a_save_that_is_done_is_there_after_a_power_cut(tmp_path, writer):
    """359 of nvidia-resiliency-ext, and DLRover's tracker file: an fsync of what is not flushed yet."""
    disk, operations = _recorded(tmp_path, writer, has_old=False)
    verdict = examine(disk, operations, tmp_path / "crash", naive_writers.read, has_old=False)
    assert any(
        "the save was done" in text or f"after {len(operations)} operations" in text for text in verdict.violations
    )


def test_a_replay_ends_as_the_file_system_did(tmp_path):
    for writer in (*MISTAKES, naive_writers.sound):
        place = tmp_path / writer.__name__
        place.mkdir()
        disk, operations = _recorded(place, writer, has_old=True)
        write_operations(place / "copy", operations)
        assert read_operations(place / "copy") == operations
        for operation in operations:
            disk.apply(operation)
        assert disk.tree() == read_tree(place / "root")


def test_the_removal_of_a_tree_may_stop_anywhere(tmp_path):
    root = tmp_path / "root"
    (root / "tree" / "sub").mkdir(parents=True)
    for name in ("a", "sub/b"):
        (root / "tree" / name).write_bytes(b"x")
    disk = disk_of(root)
    RecordingStorage(root, tmp_path / "log").remove_tree(root / "tree")
    operations = read_operations(tmp_path / "log")
    trees = [set(state.tree) for state in crash_states(disk, operations)]
    assert {"tree", "tree/a", "tree/sub"} in trees
    assert {"tree", "tree/sub", "tree/sub/b"} in trees
    assert set() in trees
    write_tree(disk.tree(), tmp_path / "copy")
    assert read_tree(tmp_path / "copy") == {"tree": None, "tree/a": b"x", "tree/sub": None, "tree/sub/b": b"x"}
