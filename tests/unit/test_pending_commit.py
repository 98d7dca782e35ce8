"""What readers and savers make of what other savers left or are about to do."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from commit_cases import (
    NEW,
    STORAGE,
    TOKEN,
    is_ours,
    list_directory,
    plain,
    resolve,
    save,
    save_file,
    seen,
    write,
)
from oracles.faulting_storage import UnsyncedStorage

from booster.checkpoint_io import commit as commit_module
from booster.checkpoint_io.commit import Transaction, remove_checkpoint
from booster.errors import CheckpointError


def _pending(directory, files, stale="[]", token=TOKEN):
    commit = directory / f".booster-commit-{token}"
    commit.mkdir()
    write(STORAGE, commit, files)
    (commit / ".booster-stale.json").write_text(stale)
    return commit


def test_readers_see_a_commit_over_what_lies_beside(tmp_path):
    write(STORAGE, tmp_path, {"a": "old", "b": "old", "part/a": "old", "part/b": "old"})
    _pending(tmp_path, {"a": "1", "part/a": "1", "c": "1"}, '["b", "part/b"]', "1" * 32)
    _pending(tmp_path, {"a": "2", "b": "2"}, '["c", "part/b"]', "2" * 32)
    assert list_directory(STORAGE, tmp_path) == ["a", "b", "part"]
    assert list_directory(STORAGE, tmp_path / "part") == ["a"]
    assert seen(tmp_path) == {"a": "2", "b": "2", "part/a": "1"}
    for nothing in ("c", "d"):
        assert not resolve(STORAGE, tmp_path, nothing).exists()
    os.chdir(tmp_path.parent)
    assert seen(Path(tmp_path.name)) == {"a": "2", "b": "2", "part/a": "1"}
    save(STORAGE, tmp_path, {"z": "3"}, is_stale=lambda name: False)
    assert plain(tmp_path) == {"a": "2", "b": "2", "part/a": "1", "z": "3"}


@pytest.fixture(autouse=True)
def _same_directory():
    before = os.getcwd()
    yield
    os.chdir(before)


def test_any_save_below_completes_a_commit_first(tmp_path):
    """Else the older commit would come over the newer files later."""
    actions = {
        "beside": lambda root: save_file(STORAGE, root / "a", "newest"),
        "in its folder": lambda root: save_file(STORAGE, root / "part" / "a", "newest"),
        "its folder": lambda root: save(STORAGE, root / "part", {"a": "newest"}, is_stale=lambda name: False),
    }
    for name, action in actions.items():
        root = tmp_path / name
        (root / "part").mkdir(parents=True)
        _pending(root, {"a": "1", "part/a": "1", "part/b": "1"})
        action(root)
        expected = {"a": "1", "part/a": "1", "part/b": "1"}
        expected["a" if name == "beside" else "part/a"] = "newest"
        assert plain(root) == seen(root) == expected


def test_a_living_saver_completes_its_own_commit(tmp_path):
    commit = _pending(tmp_path, {"a": "1"})
    lock = STORAGE.lock(tmp_path)
    try:
        transaction = Transaction(STORAGE, tmp_path, is_directory=True)
        transaction.begin()
        assert (commit / "a").exists()
    finally:
        STORAGE.unlock(lock)
    write(STORAGE, transaction.begin(), {"b": "2"})
    transaction.commit(is_stale=is_ours)
    assert plain(tmp_path)["b"] == "2"


@pytest.mark.parametrize(
    "stale",
    ['["../x"]', '["/x"]', '[".."]', '["part/../../x"]', '["a/b/c"]', '[""]', "[7]", "{}", '[".hidden"]', "[", "null"],
)
def test_a_damaged_commit_removes_nothing_and_is_an_error(tmp_path, stale):
    (tmp_path / "x").write_text("kept")
    (tmp_path / "m").mkdir()
    before = plain(tmp_path) | {
        f"m/.booster-commit-{TOKEN}/a": "1",
        f"m/.booster-commit-{TOKEN}/.booster-stale.json": stale,
    }
    _pending(tmp_path / "m", {"a": "1"}, stale)
    for action in (
        lambda: list_directory(STORAGE, tmp_path / "m"),
        lambda: resolve(STORAGE, tmp_path / "m", "a"),
        lambda: Transaction(STORAGE, tmp_path / "m", is_directory=True).begin(),
    ):
        with pytest.raises(CheckpointError, match="booster-stale"):
            action()
    assert plain(tmp_path) == before


def test_links_and_files_named_as_commits_are_none(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "m").mkdir(parents=True)
    _pending(elsewhere, {"a": "theirs"})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_text("mine")
    (tmp_path / "m" / f".booster-commit-{'1' * 32}").symlink_to(elsewhere / f".booster-commit-{TOKEN}")
    (tmp_path / "m" / f".booster-commit-{'2' * 32}").write_text("")
    os.mkfifo(tmp_path / "m" / f".booster-commit-{'3' * 32}")
    (tmp_path / "m" / ".booster-commit-short").mkdir()
    assert resolve(STORAGE, tmp_path / "m", "a").read_text() == "mine"
    save(STORAGE, tmp_path / "m", {"b": "mine"}, is_stale=lambda name: False)
    assert (tmp_path / "m" / "a").read_text() == "mine"
    assert len(os.listdir(tmp_path / "m")) == 6


def test_in_a_directory_of_many_users_only_ones_own_commits_count(tmp_path):
    class SharedStorage(UnsyncedStorage):
        def is_foreign(self, path):
            return path.parent == tmp_path

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_text("mine")
    (tmp_path / "precious").write_text("mine")
    commit = _pending(tmp_path, {"m/a": "theirs", "b": "theirs"}, '["precious"]')
    assert resolve(SharedStorage(), tmp_path / "m", "a").read_text() == "mine"
    save_file(SharedStorage(), tmp_path / "m" / "c", "mine")
    save_file(SharedStorage(), tmp_path / "d", "mine")
    assert (tmp_path / "precious").exists()
    assert (commit / "b").exists()
    assert not (tmp_path / "b").exists()


def test_who_made_a_name_where_users_are_kept_apart(tmp_path):
    (tmp_path / "x").mkdir()
    assert not STORAGE.is_foreign(tmp_path / "x")
    tmp_path.chmod(0o1777)
    assert not STORAGE.is_foreign(tmp_path / "x")
    assert not STORAGE.is_foreign(tmp_path / "gone")
    if os.geteuid() == 0:
        os.chown(tmp_path / "x", 12345, 12345)
        assert STORAGE.is_foreign(tmp_path / "x")
        tmp_path.chmod(0o777)
        assert not STORAGE.is_foreign(tmp_path / "x")


def test_what_dead_savers_left_is_cleared_and_what_lives_is_not(tmp_path):
    (tmp_path / "m").mkdir()
    living = Transaction(STORAGE, tmp_path / "m", is_directory=True)
    beside = Transaction(STORAGE, tmp_path / "f", is_directory=False)
    kept = {living.begin(), beside.begin()}
    dead = [
        tmp_path / f".m.tmp-{TOKEN}",
        tmp_path / "m" / f".booster-tmp-{TOKEN}",
        tmp_path / f".f.tmp-{TOKEN}",
        tmp_path / f".other.removed-{TOKEN}",
    ]
    foreign = [tmp_path / f".other.tmp-{TOKEN}", tmp_path / ".m.tmp-short", tmp_path / f"m.tmp-{TOKEN}"]
    for path in dead + foreign:
        path.mkdir()
        (path / "x").write_text("")
    save(STORAGE, tmp_path / "m", {"a": "1"})
    save_file(STORAGE, tmp_path / "f", "1")
    assert [path for path in dead if path.exists()] == []
    assert all(path.exists() for path in [*kept, *foreign])
    living.abort()
    beside.abort()
    assert not any(path.exists() for path in kept)


def test_leftovers_that_are_no_directories_are_not_touched(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("")
    (tmp_path / f".m.tmp-{'1' * 32}").symlink_to("precious")
    (tmp_path / f".m.tmp-{'2' * 32}").write_text("")
    os.mkfifo(tmp_path / f".m.tmp-{'3' * 32}")
    (tmp_path / f".x.removed-{'4' * 32}").symlink_to("precious")
    save(STORAGE, tmp_path / "m", NEW)
    assert (tmp_path / "precious" / "x").exists()
    assert len(os.listdir(tmp_path)) == 6


def test_a_link_made_at_the_temporary_s_name_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(commit_module, "uuid4", lambda: type("Token", (), {"hex": TOKEN}))
    (tmp_path / f".m.tmp-{TOKEN}").symlink_to("elsewhere")
    transaction = Transaction(STORAGE, tmp_path / "m", is_directory=True)
    with pytest.raises(FileExistsError):
        transaction.begin()
    transaction.abort()
    assert os.listdir(tmp_path / "elsewhere") == []
    assert (tmp_path / f".m.tmp-{TOKEN}").is_symlink()


def test_a_temporary_that_another_save_took_for_a_dead_one_s_is_made_again(tmp_path):
    class RacingStorage(UnsyncedStorage):
        made = []

        def make_directory(self, path):
            super().make_directory(path)
            self.made.append(path)
            if len(self.made) == 1:  # another save clears it before it is locked
                path.rmdir()

        def lock(self, path):
            return None if self.made == [self.made[0], path] else super().lock(path)  # the second is being cleared

    storage = RacingStorage()
    transaction = Transaction(storage, tmp_path / "m", is_directory=True)
    path = transaction.begin()
    assert storage.made.index(path) == 2
    transaction.abort()


# Others at the same time.


def test_who_comes_second_to_a_new_name_is_told(tmp_path):
    first = Transaction(STORAGE, tmp_path / "m", is_directory=True)
    second = Transaction(STORAGE, tmp_path / "m", is_directory=True)
    write(STORAGE, first.begin(), {"a": "first"})
    write(STORAGE, second.begin(), {"a": "second"})
    first.commit(is_stale=is_ours)
    with pytest.raises(CheckpointError, match="another process created it during this save"):
        second.commit(is_stale=is_ours)
    second.abort()
    assert plain(tmp_path) == {"m/a": "first"}


@pytest.mark.parametrize("seed", range(5))
def test_savers_and_a_reader_of_one_directory(tmp_path, seed):
    """Every look finds one saver's files, or none of them where it came upon a change."""
    target = tmp_path / "m"
    save(STORAGE, target, {f"{index}": "start" for index in range(4)})
    done, looks = threading.Event(), []

    def saver(number):
        for turn in range(5):
            names = range(4 + (number + turn + seed) % 2)
            save(STORAGE, target, {f"{index}": f"{number}.{turn}" for index in names})

    def reader():
        while not done.is_set():
            try:
                looks.append(set(_opened(target)))
            except FileNotFoundError:
                continue

    threads = [threading.Thread(target=saver, args=(number,)) for number in range(3)]
    reading = threading.Thread(target=reader)
    reading.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reading.join()
    assert len(set(plain(target).values())) == 1
    assert not [name for name in os.listdir(target) if name.startswith(".")]
    assert looks


def _opened(target):
    """Reads all files the way a reader does that looks whether the directory has changed meanwhile."""
    while True:
        before = resolve(STORAGE, target, "0").read_text()
        contents = [resolve(STORAGE, target, name).read_text() for name in list_directory(STORAGE, target)]
        if before == resolve(STORAGE, target, "0").read_text() and len(set(contents)) == 1:
            return contents


def test_a_directory_that_stays_locked_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(commit_module, "_LOCK_TIMEOUT_SECONDS", 0.05)
    lock = STORAGE.lock(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=r"locked by another saving process for 0\.05 s"):
            save(STORAGE, tmp_path, NEW)
        (tmp_path / "m").mkdir()
    finally:
        STORAGE.unlock(lock)
    inner = STORAGE.lock(tmp_path / "m")
    try:
        with pytest.raises(CheckpointError, match="locked by another"):
            remove_checkpoint(STORAGE, tmp_path / "m")
    finally:
        STORAGE.unlock(inner)
    assert os.listdir(tmp_path) == ["m"]
