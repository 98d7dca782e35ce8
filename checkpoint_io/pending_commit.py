"""The folder by which a whole new checkpoint enters a directory that exists, and what readers make of it."""

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

__all__ = ["DirectoryView", "complete_commits", "names_in", "new_temporary_name", "publish"]

# Note [Commit folder]: `.booster-commit-<uuid>` in a directory holds the files of a checkpoint that is committed, and
# the names that it makes stale. What counts in that directory is an overlay: what lies beside, less the stale names,
# with the folder's own files over it. Installing moves the files out of the folder one by one and removes the stale
# ones; once all that is on the disk, the folder goes. No step changes the overlay, whichever of them a power cut takes
# back, so it may stop anywhere, and anyone may do the rest.
# A checkpoint may have folders of its own, one level deep; so what a directory holds can also lie in a commit folder of
# its parent. In a directory such as /tmp, where users share the names but not the files, only one's own folders count.

_COMMIT = re.compile(r"\.booster-commit-[0-9a-f]{32}")
_OURS = re.compile(r"\.booster-(?:commit|tmp)-[0-9a-f]{32}")
_STALE = ".booster-stale.json"
_MAX_ATTEMPTS = 20  # to see an overlay while others commit and install


def new_temporary_name() -> str:
    """Return a name for files that are being written into a directory that exists; no reader takes it for one."""
    return f".booster-tmp-{uuid4().hex}"


def publish(storage: Storage, temporary: Path, target: Path, *, is_stale: Callable[[str], bool]) -> None:
    """Commit a folder of new files into the directory that it lies in, and installs them; see Note [Commit].

    Args:
        storage: Where.
        temporary: A folder in `target` whose files are on the disk.
        target: The directory, which this process has locked.
        is_stale: Whether a file of an older save, by its name relative to the directory, loses its meaning.

    Raises:
        CheckpointError: Something stands in the way, and nothing was changed.
        OSError: As the system gives it. Where installing failed, the new checkpoint is there all the same.
    """
    _install_all(storage, target)
    files, folders = names_in(storage, temporary)
    _check_places(storage, target, files, folders)
    _make_folders(storage, target, folders)
    stale = _stale_names(storage, target, files, folders, is_stale)
    storage.write_file(temporary / _STALE, json.dumps(stale).encode("ascii"))
    for folder in [*folders, "."]:
        storage.sync_path(temporary / folder)
    # Names sort by time: where there are several, the last is the newest.
    commit = target / f".booster-commit-{time.time_ns():016x}{uuid4().hex[:16]}"
    storage.rename_new(temporary, commit)
    try:
        storage.sync_path(target)  # the commit point
    except OSError:
        _take_back(storage, commit, temporary)
        raise
    _install(storage, commit, target)


def complete_commits(storage: Storage, directory: Path) -> None:
    """Install what savers committed into a directory before they died; leaves it to them where one of them lives.

    Args:
        storage: Where.
        directory: The directory; it need not be there.
    """
    names = _names_or_none(storage, directory) if storage.kind(directory) == "directory" else []
    if not _commit_folders(storage, directory, names):
        return
    lock = storage.lock(directory)
    if lock is None:
        return
    try:
        _install_all(storage, directory)
    finally:
        storage.unlock(lock)


def names_in(storage: Storage, folder: Path) -> tuple[list[str], list[str]]:
    """Return the files and the folders in a folder that this library wrote, by their names relative to it.

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
                f"{folder / name} is a link or no plain file, and nothing that writes checkpoints makes such: another"
                " program did. Remove it"
            )
    return [name for name in files if name != _STALE], folders


class DirectoryView:
    """What a reader finds in a directory at one moment: what lies there, under what was committed since.

    Args:
        storage: Where.
        directory: The directory.

    Raises:
        OSError: It can't be listed.
        CheckpointError: A commit folder in it is damaged.
    """

    def __init__(self, storage: Storage, directory: Path) -> None:
        self._storage = storage
        self._directory = directory
        real = Path(os.path.realpath(directory))
        self._parent, self._name = real.parent, real.name
        self._places = self._look()

    def path(self, name: str) -> Path:
        """Return where a file of the directory is; for a name that is nowhere, where it would be."""
        return self._places.get(name, self._directory / name)

    def names(self) -> list[str]:
        """Return the names that are there, sorted."""
        return sorted(self._places)

    def _look(self) -> dict[str, Path]:
        names, commits = self._now()
        for _ in range(_MAX_ATTEMPTS if commits else 0):
            # The folders are listed before the directory, as files move from there to here.
            layers = [self._layer(*commit) for commit in commits]
            seen = commits
            names, commits = self._now()
            if commits == seen:
                return self._overlay(names, layers)
        if commits:
            raise CheckpointError(
                f"{self._directory} did not come to rest: other processes go on saving into it. Load when they have"
                " finished, or give every save a directory of its own"
            )
        return self._overlay(names, [])

    def _now(self) -> tuple[list[str], list[tuple[Path, str]]]:
        """Return the names that lie in the directory, and its commit folders with the part of them it stands for."""
        names = self._storage.names(self._directory)
        own = [(path, "") for path in _commit_folders(self._storage, self._directory, names)]
        above = _names_or_none(self._storage, self._parent)
        theirs = [(path, self._name) for path in _commit_folders(self._storage, self._parent, above)]
        return names, sorted(own + theirs, key=lambda found: found[0].name)

    def _layer(self, commit: Path, part: str) -> tuple[set[str], dict[str, Path]]:
        """Return the names that a commit makes stale in this directory, and where its own are."""
        try:
            stale = _read_stale(self._storage, commit)
            files, _ = names_in(self._storage, commit)
        except FileNotFoundError:  # installed in this moment: the folder is gone, which the next look will see
            return set(), {}
        ours = {name.rpartition("/")[2]: commit / name for name in files if name.rpartition("/")[0] == part}
        return {name.rpartition("/")[2] for name in stale if name.rpartition("/")[0] == part}, ours

    def _overlay(self, names: Sequence[str], layers: Sequence[tuple[set[str], Mapping[str, Path]]]) -> dict[str, Path]:
        places = {name: self._directory / name for name in names if not _OURS.fullmatch(name)}
        for stale, ours in layers:
            for name in stale:
                places.pop(name, None)
            places.update(ours)
        return places


def _names_or_none(storage: Storage, directory: Path) -> list[str]:
    try:
        return storage.names(directory)
    except PermissionError:
        return []  # a directory that one may enter but not list: nobody of ours can have committed into it


def _commit_folders(storage: Storage, directory: Path, names: Sequence[str]) -> list[Path]:
    """Return the commit folders among the names of a directory, the oldest first."""
    found = [directory / name for name in sorted(names) if _COMMIT.fullmatch(name)]
    return [path for path in found if storage.kind(path) == "directory" and not storage.is_foreign(path)]


def _check_places(storage: Storage, target: Path, files: Sequence[str], folders: Sequence[str]) -> None:
    for names, kinds in ((files, ("file", "link", None)), (folders, ("directory", None))):
        for name in names:
            if storage.kind(target / name) not in kinds:
                raise CheckpointError(
                    f"{target / name} is in the way: the checkpoint has a {'file' if names is files else 'folder'} of"
                    " that name, and it is something else. Remove it, or save to another path"
                )


def _make_folders(storage: Storage, target: Path, folders: Sequence[str]) -> None:
    # Before any file of them moves: an entry that is not yet on the disk takes what lies below with it.
    missing = [folder for folder in folders if storage.kind(target / folder) is None]
    for folder in missing:
        storage.make_directory(target / folder)
        storage.sync_path((target / folder).parent)


def _stale_names(
    storage: Storage, target: Path, files: Sequence[str], folders: Sequence[str], is_stale: Callable[[str], bool]
) -> list[str]:
    there = [name for name in storage.names(target) if not _OURS.fullmatch(name)]
    there += [f"{folder}/{name}" for folder in folders for name in storage.names(target / folder)]
    candidates = [name for name in there if name not in set(files) and is_stale(name)]
    return [name for name in candidates if storage.kind(target / name) in ("file", "link")]


def _take_back(storage: Storage, commit: Path, temporary: Path) -> None:
    """Undo a commit of which nobody knows whether it is on the disk; if that fails too, it stays, whole."""
    with suppress(OSError):
        storage.rename_new(commit, temporary)
        # Else a power cut could bring the commit back after its files are removed.
        storage.sync_path(commit.parent)


def _install_all(storage: Storage, directory: Path) -> None:
    for commit in _commit_folders(storage, directory, storage.names(directory)):
        _install(storage, commit, directory)


def _install(storage: Storage, commit: Path, target: Path) -> None:
    """Move a committed folder's files to their places; see Note [Commit folder]."""
    stale = _read_stale(storage, commit)
    files, folders = names_in(storage, commit)
    _check_places(storage, target, files, folders)
    _make_folders(storage, target, folders)
    _hide_indexes(storage, target, files)
    for name in sorted(files, key=_is_index):
        _move(storage, commit / name, target / name)
    for name in stale:
        if storage.kind(target / name) in ("file", "link"):
            storage.remove(target / name)
    for folder in dict.fromkeys([*folders, *(str(Path(name).parent) for name in stale), "."]):
        storage.sync_path(target / folder)
    storage.remove_tree(commit)


def _hide_indexes(storage: Storage, target: Path, files: Sequence[str]) -> None:
    """Remove the old index of shards that are replaced: other libraries would read old and new shards as one model."""
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
        # Gone: where a file system has no locks, another process may install the same commit.


def _read_stale(storage: Storage, commit: Path) -> list[str]:
    path = commit / _STALE
    if storage.kind(path) is None:
        return []  # the folder is being removed, all else is done
    try:
        names = parse_json(storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=commit), str(path))
    except CheckpointError:
        if storage.kind(path) is None:
            return []
        raise
    if not isinstance(names, list) or not all(_is_plain(name) for name in names):
        raise CheckpointError(
            f"{path} is damaged, or no save wrote it: it has to be a list of names within {commit.parent}. Remove"
            f" {commit}, and the checkpoint is what it was before that save"
        )
    return names


def _is_plain(name: object) -> bool:
    """Return whether it is a name that a save may have given, in the directory or one folder below."""
    if not isinstance(name, str):
        return False
    parts = name.split("/")
    return len(parts) <= 2 and all(part and not part.startswith(".") and part.isprintable() for part in parts)
