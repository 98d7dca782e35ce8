"""Files and directories appear whole or not at all, whatever fails and whenever the process ends."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from commit_cases import (
    NEW,
    OLD,
    OTHERS,
    STORAGE,
    TOKEN,
    complete,
    is_ours,
    killed_after,
    plain,
    save,
    save_file,
    seen,
    write,
)
from oracles.crash_disk import disk_of, read_tree
from oracles.crash_states import examine
from oracles.faulting_storage import Fault, FaultingStorage, UnsyncedStorage
from oracles.recording_storage import RecordingStorage, read_operations

from booster.checkpoint_io.commit import Transaction, remove_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError, ConfigError

# The three ways.


def test_a_new_directory_appears_by_one_rename(tmp_path):
    storage = RecordingStorage(tmp_path, tmp_path.parent / f"{tmp_path.name}-log")
    save(storage, tmp_path / "deep" / "m", NEW)
    assert plain(tmp_path / "deep") == {f"m/{name}": content for name, content in NEW.items()}
    renames = [operation for operation in read_operations(storage.log) if operation.kind == "rename"]
    assert [operation.target for operation in renames] == ["deep/m"]


def test_until_then_nothing_has_its_name(tmp_path):
    transaction = Transaction(STORAGE, tmp_path / "m", is_directory=True)
    write(STORAGE, transaction.begin(), NEW)
    assert not (tmp_path / "m").exists()
    transaction.abort()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("old", [OTHERS, OLD | OTHERS, {}], ids=["others", "old", "empty"])
def test_into_a_directory_that_exists(tmp_path, old):
    write(STORAGE, tmp_path, old)
    save(STORAGE, tmp_path, NEW)
    kept = {name: content for name, content in old.items() if name in OTHERS and name != "logs/x"}
    kept |= {"logs/x": "mine"} if "logs/x" in old else {}
    assert plain(tmp_path) == seen(tmp_path) == NEW | kept


def test_what_is_stale_is_asked_for_the_target_and_the_new_folders(tmp_path):
    write(STORAGE, tmp_path, {"a": "1", "b": "1", "part/b": "1", "other/b": "1", "sub/b": "1"})
    asked = []
    save(STORAGE, tmp_path, {"a": "2", "part/a": "2"}, is_stale=lambda name: asked.append(name) or name.endswith("b"))
    assert {"b", "part/b"} <= set(asked)
    assert not {"a", "part/a", "other/b", "sub/b"} & set(asked)
    assert plain(tmp_path) == {"a": "2", "part/a": "2", "other/b": "1", "sub/b": "1"}


@pytest.mark.parametrize("old", [None, "old"])
def test_one_file(tmp_path, old):
    target = tmp_path / "deep" / "m.bin"
    if old is not None:
        save_file(STORAGE, target, old)
    save_file(STORAGE, target, "new")
    assert plain(tmp_path) == {"deep/m.bin": "new"}
    assert os.listdir(tmp_path / "deep") == ["m.bin"]


def test_links_on_the_way_are_followed_and_a_link_to_a_file_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "m").mkdir()
    (tmp_path / "latest").symlink_to("real/m")
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "real" / "f").symlink_to(tmp_path / "kept")
    save(STORAGE, tmp_path / "link" / "new", NEW)
    save(STORAGE, tmp_path / "latest", NEW)
    save_file(STORAGE, tmp_path / "link" / "f", "new")
    assert plain(tmp_path / "real" / "new") == plain(tmp_path / "real" / "m") == NEW
    assert (tmp_path / "kept").read_text() == "kept"
    assert not (tmp_path / "real" / "f").is_symlink()


def test_modes_are_those_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        save(STORAGE, tmp_path / "m", NEW)
        save_file(STORAGE, tmp_path / "f", "new")
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("m", "m/part", "m/a", "f")}
    assert modes == {"m": 0o750, "m/part": 0o750, "m/a": 0o640, "f": 0o640}


@pytest.mark.parametrize("name", ["x" * 255, "\u00e4" * 127, "a b\n*[", "-rf"])
def test_any_name(tmp_path, name):
    for _ in range(2):
        save(STORAGE, tmp_path / "d" / name, NEW)
        save_file(STORAGE, tmp_path / "f" / name, "new")
    remove_checkpoint(STORAGE, tmp_path / "d" / name)
    assert plain(tmp_path) == {f"f/{name}": "new"}


def test_a_temporary_is_refused_to_hold_unwritten_bytes(tmp_path):
    (tmp_path / "m").mkdir()
    for target in (tmp_path / "m", tmp_path / "n"):
        transaction = Transaction(STORAGE, target, is_directory=True)
        (transaction.begin() / "link").symlink_to("/etc/passwd")
        with pytest.raises(CheckpointError, match="is a link or not a regular file"):
            transaction.commit(is_stale=is_ours)
        transaction.abort()
    transaction = Transaction(STORAGE, tmp_path / "f", is_directory=False)
    write(STORAGE, transaction.begin(), {"f": "1", "g": "1"})
    with pytest.raises(CheckpointError, match="has files besides f:"):
        transaction.commit(is_stale=is_ours)
    transaction.abort()
    assert plain(tmp_path) == {}


# Every crash.

SAVES = {
    "new directory": (None, lambda storage, root, files: save(storage, root / "m", files)),
    "directory": (OLD | OTHERS, lambda storage, root, files: save(storage, root / "m", files)),
    "unrelated directory": (OTHERS, lambda storage, root, files: save(storage, root / "m", files)),
}


def _read(old):
    def read(root):
        if not (Path(root) / "m").exists():
            return "nothing"
        kept = OTHERS if old else {}
        found = seen(Path(root) / "m")
        for outcome, files in (("new", NEW | kept), ("old", old), ("next", kept | {"a": "next", "part/z": "next"})):
            if found == files:
                return outcome
        return f"mixture: {found}"

    return read


@pytest.mark.parametrize("name", SAVES)
def test_every_crash_leaves_the_old_or_the_new_as_readers_see_it(tmp_path, name):
    old, action = SAVES[name]
    root, read = tmp_path / "root", _read(old)
    root.mkdir()
    if old is not None:
        (root / "m").mkdir()
        write(STORAGE, root / "m", old)
    disk = disk_of(root)
    action(RecordingStorage(root, tmp_path / "log"), root, NEW)

    def next_save(crashed):
        action(STORAGE, Path(crashed), {"a": "next", "part/z": "next"})
        left = [path for path in read_tree(crashed) if "booster" in path or ".tmp-" in path]
        return f"leaves {left}" if left else (None if read(crashed) == "next" else read(crashed))

    operations = read_operations(tmp_path / "log")
    verdict = examine(disk, operations, tmp_path / "crash", read, next_save, has_old=old is not None)
    assert not verdict.violations, verdict.violations[:5]
    assert verdict.found("kill") == {"nothing" if old is None else "old", "new"}
    assert verdict.num_trees > 15


def test_killed_during_every_operation_of_completing_a_commit(tmp_path):
    """A save is killed after its commit point, and the next one while it completes that: for all pairs of places."""
    num_pairs, first = 0, 0
    while True:
        root = tmp_path / str(first)
        root.mkdir()
        write(STORAGE, root, OLD | OTHERS)
        if not killed_after(first, lambda storage, root=root: save(storage, root, NEW)):
            break
        state = seen(root)
        assert state in (OLD | OTHERS, NEW | OTHERS)
        second = 0
        while killed_after(second, lambda storage, root=root: complete(storage, root)):
            assert seen(root) == state
            second += 1
        num_pairs += second
        assert seen(root) == state == plain(root)
        first += 1
    assert num_pairs > 30


@pytest.mark.parametrize("old", [None, "old"])
def test_killed_during_every_operation_of_saving_a_file(tmp_path, old):
    for number in range(100):
        target = tmp_path / str(number) / "f"
        target.parent.mkdir()
        if old is not None:
            target.write_text(old)
        is_killed = killed_after(number, lambda storage, target=target: save_file(storage, target, "new"))
        assert (target.read_text() if target.exists() else None) in (old, "new")
        save_file(STORAGE, target, "next")
        assert plain(target.parent) == {"f": "next"}
        assert os.listdir(target.parent) == ["f"]
        if not is_killed:
            return
    pytest.fail("it never ends")


# Errors.


@pytest.mark.parametrize(
    ("is_directory", "make", "match"),
    [
        (True, lambda path: path.write_text(""), "is a file, but a directory is to be written"),
        (True, os.mkfifo, "is a file, but a directory is to be written"),
        (False, lambda path: path.mkdir(), "is a directory or not a regular file"),
        (False, os.mkfifo, "is a directory or not a regular file"),
    ],
)
def test_a_target_of_another_kind_is_an_error(tmp_path, is_directory, make, match):
    make(tmp_path / "m")
    transaction = Transaction(STORAGE, tmp_path / "m", is_directory=is_directory)
    with pytest.raises(ConfigError, match=match):
        transaction.begin()
    transaction.abort()
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("old", [{"part": "a file"}, {"a/x": "a folder"}], ids=str)
def test_what_is_in_the_way_is_found_before_anything_changes(tmp_path, old):
    write(STORAGE, tmp_path, old)
    with pytest.raises(CheckpointError, match="is in the way"):
        save(STORAGE, tmp_path, NEW)
    assert plain(tmp_path) == old
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_link_in_a_folder_s_place_is_in_the_way(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "m" / "part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is in the way"):
        save(STORAGE, tmp_path / "m", NEW)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.EXDEV, "another file system"), (errno.EBUSY, "mount point"), (errno.ENOTEMPTY, "another process filled")],
)
@pytest.mark.parametrize("is_directory", [True, False])
def test_errors_of_renames_say_what_to_do(tmp_path, is_directory, code, advice):
    class RenamesFail(UnsyncedStorage):
        def rename_new(self, source, target):
            raise OSError(code, os.strerror(code))

        replace = rename_new

    action = save if is_directory else save_file
    with pytest.raises(CheckpointError, match=advice):
        action(RenamesFail(), tmp_path / "m", NEW if is_directory else "new")
    assert os.listdir(tmp_path) == []


def test_an_error_at_every_operation_leaves_the_old_or_the_new_and_nothing_else_but_a_commit(tmp_path):
    outcomes = []
    for number in range(100):
        target = tmp_path / str(number)
        target.mkdir()
        write(STORAGE, target, OLD | OTHERS)
        storage = FaultingStorage(Fault(at=number, error="EIO"))
        with suppress(OSError):
            save(storage, target, NEW)
            assert not storage.faults
            break
        outcomes.append("new" if seen(target) == NEW | OTHERS else "old")
        assert seen(target) in (OLD | OTHERS, NEW | OTHERS), storage.faults
        # What is left is a commit that could not be installed.
        assert outcomes[-1] == "new" or not [name for name in os.listdir(target) if name.startswith(".")]
        save(STORAGE, target, NEW)
        assert plain(target) == NEW | OTHERS
    assert outcomes == sorted(outcomes, reverse=True)  # old, and from one operation on new
    assert set(outcomes) == {"old", "new"}


def test_a_commit_that_the_disk_does_not_confirm_is_taken_back(tmp_path):
    class Unconfirmed(UnsyncedStorage):
        def sync_path(self, path):
            if any(name.startswith(".booster-commit-") for name in os.listdir(path)):
                raise OSError(errno.EIO, "not confirmed")

    write(STORAGE, tmp_path, OLD)
    with pytest.raises(OSError, match="not confirmed"):
        save(Unconfirmed(), tmp_path, NEW)
    assert plain(tmp_path) == OLD


def test_giving_up_twice_or_after_the_commit_does_nothing(tmp_path):
    transaction = Transaction(STORAGE, tmp_path / "m", is_directory=True)
    transaction.abort()
    write(STORAGE, transaction.begin(), NEW)
    transaction.commit(is_stale=is_ours)
    transaction.abort()
    transaction.abort()
    assert plain(tmp_path / "m") == NEW


def test_a_temporary_that_can_not_be_removed_hides_no_error(tmp_path, capsys):
    class Stuck(UnsyncedStorage):
        def remove_tree(self, path):
            raise OSError(errno.EIO, "stuck")

    transaction = Transaction(Stuck(), tmp_path / "m", is_directory=True)
    path = transaction.begin()
    transaction.abort()
    assert path.exists()
    assert "could not remove" in capsys.readouterr().err
    save(STORAGE, tmp_path / "m", NEW)
    assert not path.exists()


# Removing.


def test_a_removed_checkpoint_is_whole_or_gone_at_every_kill(tmp_path):
    for number in range(100):
        root = tmp_path / str(number)
        (root / "step-1").mkdir(parents=True)
        write(STORAGE, root / "step-1", OLD)
        is_killed = killed_after(number, lambda storage, root=root: remove_checkpoint(storage, root / "step-1"))
        assert not (root / "step-1").exists() or plain(root / "step-1") == OLD
        if not is_killed:
            assert os.listdir(root) == []
            return
        save(STORAGE, root / "step-2", NEW)  # clears it, though it had another name
        assert not [name for name in os.listdir(root) if name.startswith(".")]
    pytest.fail("it never ends")


def test_what_another_process_is_removing_is_left_to_it(tmp_path):
    path = tmp_path / f".step-1.removed-{TOKEN}"
    path.mkdir()
    lock = STORAGE.lock(path)
    try:
        save(STORAGE, tmp_path / "step-2", NEW)
        assert path.exists()
    finally:
        STORAGE.unlock(lock)


def test_only_directories_are_removed(tmp_path):
    remove_checkpoint(STORAGE, tmp_path / "nothing")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(CheckpointError, match="is not a directory"):
            remove_checkpoint(STORAGE, tmp_path / name)
    assert len(os.listdir(tmp_path)) == 3


def test_the_real_storage_does_it_too(tmp_path):
    """The others leave out fsync, for speed."""
    save(Storage(), tmp_path / "m", OLD)
    save(Storage(), tmp_path / "m", NEW)
    save_file(Storage(), tmp_path / "f", "new")
    assert plain(tmp_path) == {"f": "new"} | {f"m/{name}": content for name, content in NEW.items()}
    remove_checkpoint(Storage(), tmp_path / "m")
    assert os.listdir(tmp_path) == ["f"]
