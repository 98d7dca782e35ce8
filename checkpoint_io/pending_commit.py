"""Commit directory: atomic replacement of a checkpoint in an existing directory, and its view by readers."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES, parse_json
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

__all__ = ["DirectoryView", "names_in", "new_temporary_name", "publish", "recover_commits"]

# Note [Commit directory]: `.booster-commit-<uuid>` in a directory holds the files of a committed checkpoint and the list
# of names that it makes stale. The content of the directory is an overlay: its own files, minus the stale names, plus
# the files of the commit directory. Installing moves the files one by one and removes the stale ones; after a sync, the
# commit directory is removed. No step changes the overlay, nor does the loss of any step in a power failure, so
# installing can stop anywhere and be finished by any process.
# A checkpoint may have subdirectories, one level deep. So the content of a directory can also be in a commit directory
# of its parent. In shared directories such as /tmp, only the user's own commit directories count.

_COMMIT = re.compile(r"\.booster-commit-[0-9a-f]{32}")
_COMMIT_OR_TEMPORARY = re.compile(r"\.booster-(?:commit|tmp)-[0-9a-f]{32}")
_STALE = ".booster-stale.json"
_MAX_ATTEMPTS = 20  # to read a consistent overlay during concurrent commits


def new_temporary_name() -> str:
    """Return a name for a temporary directory inside an existing one; readers ignore such names."""
    return f".booster-tmp-{uuid4().hex}"


def publish(storage: Storage, temporary: Path, target: Path, *, is_stale: Callable[[str], bool]) -> None:
    """Commit a directory of new files into its parent, and install them; see Note [Commit].

    Args:
        storage: Storage of the target.
        temporary: Directory in `target` whose files are synced.
        target: Target directory, locked by this process.
        is_stale: Predicate: a file of an older save, by relative name, is obsolete.

    Raises:
        CheckpointError: The commit is impossible; nothing was changed.
        OSError: A file system operation failed. If installing failed, the new checkpoint is committed nevertheless.
    """
    _install_all(storage, target)
    files, folders = names_in(storage, temporary)
    _check_targets(storage, target, files, folders)
    _create_directories(storage, target, folders)
    stale = _stale_names(storage, target, files, folders, is_stale)
    storage.write_file(temporary / _STALE, json.dumps(stale).encode("ascii"))
    for folder in [*folders, "."]:
        storage.sync_path(temporary / folder)
    # Names sort by time; the last one is the newest.
    commit = target / f".booster-commit-{time.time_ns():016x}{uuid4().hex[:16]}"
    storage.rename_new(temporary, commit)
    try:
        storage.sync_path(target)  # the commit point
    except OSError:
        _rollback(storage, commit, temporary)
        raise
    _install(storage, commit, target)


def recover_commits(storage: Storage, directory: Path) -> None:
    """Install commits of killed saves in a directory, unless another save holds its lock.

    Args:
        storage: Storage of the directory.
        directory: Directory; need not exist.
    """
    names = _names_if_readable(storage, directory) if storage.kind(directory) == "directory" else []
    if not _commit_directories(storage, directory, names):
        return
    lock = storage.lock(directory)
    if lock is None:
        return
    try:
        _install_all(storage, directory)
    finally:
        storage.unlock(lock)


def names_in(storage: Storage, folder: Path) -> tuple[list[str], list[str]]:
    """Return relative names of files and directories below a directory of this library.

    Raises:
        CheckpointError: It holds something else, such as a link.
    """
    files: list[str] = []
    folders: list[str] = []
    for name in storage.names(folder):
        kind = storage.kind(folder / name)
        if kind == "directory":
            folders.append(name)
            inner_files, inner_folders = names_in(storage, folder / name)
            files += [f"{name}/{inner}" for inner in inner_files]
            folders += [f"{name}/{inner}" for inner in inner_folders]
        elif kind == "file":
            files.append(name)
        elif kind is not None:
            raise CheckpointError(
                f"{folder / name} is a link or not a regular file, which no checkpoint contains: another program"
                " created it. Remove it"
            )
    return [name for name in files if name != _STALE], folders


class DirectoryView:
    """Consistent snapshot of a directory as readers see it: its files, overlaid by pending commits.

    Args:
        storage: Storage of the directory.
        directory: Directory.

    Raises:
        OSError: The directory cannot be listed.
        CheckpointError: A commit directory in it is damaged.
    """

    def __init__(self, storage: Storage, directory: Path) -> None:
        self._storage = storage
        self._directory = directory
        real = Path(os.path.realpath(directory))
        self._parent, self._name = real.parent, real.name
        self._paths = self._read_snapshot()

    def path(self, name: str) -> Path:
        """Return the path of a file; for a missing file, its path in the directory."""
        return self._paths.get(name, self._directory / name)

    def names(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self._paths)

    def _read_snapshot(self) -> dict[str, Path]:
        names, commits = self._read_names_and_commits()
        for _ in range(_MAX_ATTEMPTS if commits else 0):
            # Commit directories are listed before the directory, because files move from the former to the latter.
            layers = [self._read_commit(*commit) for commit in commits]
            previous = commits
            names, commits = self._read_names_and_commits()
            if commits == previous:
                return self._overlay(names, layers)
        if commits:
            raise CheckpointError(
                f"{self._directory} changed too often while it was listed: other processes are saving into it. Load"
                " after they have finished, or give every save its own directory"
            )
        return self._overlay(names, [])

    def _read_names_and_commits(self) -> tuple[list[str], list[tuple[Path, str]]]:
        """Return the names in the directory, and its commit directories, each with the subdirectory to overlay."""
        names = self._storage.names(self._directory)
        local = [(path, "") for path in _commit_directories(self._storage, self._directory, names)]
        parent_names = _names_if_readable(self._storage, self._parent)
        from_parent = [(path, self._name) for path in _commit_directories(self._storage, self._parent, parent_names)]
        return names, sorted(local + from_parent, key=lambda found: found[0].name)

    def _read_commit(self, commit: Path, subdirectory: str) -> tuple[set[str], dict[str, Path]]:
        """Return the names that a commit makes stale in this directory, and the paths of its files."""
        try:
            stale = _read_stale(self._storage, commit)
            files, _ = names_in(self._storage, commit)
        except FileNotFoundError:  # just installed and removed; the next listing shows that
            return set(), {}
        paths = {name.rpartition("/")[2]: commit / name for name in files if name.rpartition("/")[0] == subdirectory}
        return {name.rpartition("/")[2] for name in stale if name.rpartition("/")[0] == subdirectory}, paths

    def _overlay(self, names: Sequence[str], layers: Sequence[tuple[set[str], Mapping[str, Path]]]) -> dict[str, Path]:
        paths = {name: self._directory / name for name in names if not _COMMIT_OR_TEMPORARY.fullmatch(name)}
        for stale, commit_paths in layers:
            for name in stale:
                paths.pop(name, None)
            paths.update(commit_paths)
        return paths


def _names_if_readable(storage: Storage, directory: Path) -> list[str]:
    try:
        return storage.names(directory)
    except PermissionError:
        return []  # not listable: no process of this user can have committed into it


def _commit_directories(storage: Storage, directory: Path, names: Sequence[str]) -> list[Path]:
    """Return the commit directories among the names, oldest first."""
    found = [directory / name for name in sorted(names) if _COMMIT.fullmatch(name)]
    return [path for path in found if storage.kind(path) == "directory" and not storage.is_foreign(path)]


def _check_targets(storage: Storage, target: Path, files: Sequence[str], folders: Sequence[str]) -> None:
    for names, kinds in ((files, ("file", "link", None)), (folders, ("directory", None))):
        for name in names:
            if storage.kind(target / name) not in kinds:
                raise CheckpointError(
                    f"{target / name} is in the way: the checkpoint has a {'file' if names is files else 'folder'} of"
                    " that name, but it is something else. Remove it, or save to another path"
                )


def _create_directories(storage: Storage, target: Path, folders: Sequence[str]) -> None:
    # Before any file is moved: files below an unsynced directory entry could be lost.
    missing = [folder for folder in folders if storage.kind(target / folder) is None]
    for folder in missing:
        storage.make_directory(target / folder)
        storage.sync_path((target / folder).parent)


def _stale_names(
    storage: Storage, target: Path, files: Sequence[str], folders: Sequence[str], is_stale: Callable[[str], bool]
) -> list[str]:
    existing = [name for name in storage.names(target) if not _COMMIT_OR_TEMPORARY.fullmatch(name)]
    existing += [f"{folder}/{name}" for folder in folders for name in storage.names(target / folder)]
    candidates = [name for name in existing if name not in set(files) and is_stale(name)]
    return [name for name in candidates if storage.kind(target / name) in ("file", "link")]


def _rollback(storage: Storage, commit: Path, temporary: Path) -> None:
    """Try to undo a commit that may not be on disk; if that fails too, it stays, complete."""
    with suppress(OSError):
        storage.rename_new(commit, temporary)
        # Otherwise a power failure could restore the commit after its files are removed.
        storage.sync_path(commit.parent)


def _install_all(storage: Storage, directory: Path) -> None:
    for commit in _commit_directories(storage, directory, storage.names(directory)):
        _install(storage, commit, directory)


def _install(storage: Storage, commit: Path, target: Path) -> None:
    """Move the files of a commit to their places; see Note [Commit directory]."""
    stale = _read_stale(storage, commit)
    files, folders = names_in(storage, commit)
    _check_targets(storage, target, files, folders)
    _create_directories(storage, target, folders)
    _remove_old_indexes(storage, target, files)
    for name in sorted(files, key=_is_index):
        _move(storage, commit / name, target / name)
    for name in stale:
        if storage.kind(target / name) in ("file", "link"):
            storage.remove(target / name)
    for folder in dict.fromkeys([*folders, *(str(Path(name).parent) for name in stale), "."]):
        storage.sync_path(target / folder)
    storage.remove_tree(commit)


def _remove_old_indexes(storage: Storage, target: Path, files: Sequence[str]) -> None:
    """Remove the old index of replaced shards: other libraries would read a mix of old and new shards."""
    if len(files) > 1:
        for name in filter(_is_index, files):
            if storage.kind(target / name) is not None:
                storage.remove(target / name)


def _is_index(name: str) -> bool:
    return ".index." in name


def _move(storage: Storage, source: Path, target: Path) -> None:
    try:
        storage.replace(source, target)
    except FileNotFoundError:
        if storage.kind(source) is not None:
            raise
        # Moved by another process: without file locks, several may install the same commit.


def _read_stale(storage: Storage, commit: Path) -> list[str]:
    path = commit / _STALE
    if storage.kind(path) is None:
        return []  # the directory is being removed; everything else is done
    try:
        names = parse_json(storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=commit), str(path))
    except CheckpointError:
        if storage.kind(path) is None:
            return []
        raise
    if not isinstance(names, list) or not all(_is_safe_name(name) for name in names):
        raise CheckpointError(
            f"{path} is damaged or not from this library: it must be a list of names within {commit.parent}. Remove"
            f" {commit} to restore the checkpoint from before that save"
        )
    return names


def _is_safe_name(name: object) -> bool:
    """Return whether the name is valid in a save: in the directory, or one level below."""
    if not isinstance(name, str):
        return False
    parts = name.split("/")
    return len(parts) <= 2 and all(
        component and not component.startswith(".") and component.isprintable() for component in parts
    )
