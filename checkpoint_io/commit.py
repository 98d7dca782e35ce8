"""Checkpoints appear whole or not at all: written beside their place, forced to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from booster.checkpoint_io.pending_commit import (
    DirectoryView,
    complete_commits,
    names_in,
    new_temporary_name,
    publish,
)
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError, ConfigError
from booster.logger import get_dist_logger

__all__ = ["DirectoryView", "Transaction", "listing", "remove_checkpoint", "resolve"]

# Note [Commit]
# What is to be saved is written into a temporary directory, each file forced to the disk by its writers. Then its
# directories are, and then one operation makes it count, the commit point. Until there a kill or a power cut leaves a
# temporary, which no reader takes, and all else as it was. There are three ways from there:
# (a) Nothing has the target's name. Commit point: one rename of the temporary, a sibling, which fails if something has
#     got the name meanwhile. Then the parent is synced: a power cut in between leaves all of the checkpoint or none.
# (b) One file. The temporary is a sibling directory with that file in it. Commit point: the rename of the file over the
#     old one. Then the parent is synced; until then a power cut may bring back the old file, whole.
# (c) The target is a directory that exists: it may hold other components, logs and folders, and be a mount point, so
#     the temporary lies inside of it (a rename can't leave a file system), and no rename exchanges all files at once.
#     Commit point: the rename of the temporary to a commit folder in the target, synced. From then on every reader of
#     ours sees the new files through it, see Note [Commit folder], and none of the old that they make stale. Only then
#     do the files move to their places, for other libraries. Wherever that stops, readers see the same whole
#     checkpoint, and the next save into the directory completes it before anything else.
#     Other libraries read the plain files: between commit point and end they find the old checkpoint, none, or the new,
#     but no index over shards of both.
# Savers of one directory take turns from the commit point to the end, by a lock on it; what one of them committed
# before it died is installed by the next, so no commit waits while a newer one is made. Temporaries are locked while
# their writer lives, so the next save tells a dead one's, which it clears, from a living one's. A file system without
# locks (NFS has none for directories) can't tell: there a save ends others that write to the same name.
# An error after the commit point is raised, and the new checkpoint stays, in its commit folder or in its place: the old
# one is partly gone.
# A checkpoint that is removed first loses its name, by a rename; what a kill leaves of it has a name that nobody reads.

_LOCK_TIMEOUT_SECONDS = 120.0
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.1
_MAX_NAMES = 10  # temporaries that other savers may clear away between their making and their lock
_REMOVED = re.compile(r"\..*\.removed-[0-9a-f]{32}", re.DOTALL)
_TEMPORARY = re.compile(r"\.(?P<target>.*)\.tmp-[0-9a-f]{32}", re.DOTALL)
_INNER = re.compile(r"\.booster-tmp-[0-9a-f]{32}")
_ADVICE = {
    errno.EXDEV: "part of it is on another file system, and renames stay within one: save to a path below that",
    errno.EBUSY: "it is a mount point or in use: save into a directory below it",
    errno.EEXIST: "another process made it while this save was running: save to another path, or again",
    errno.ENOTEMPTY: "another process filled it while this save was running: save to another path, or again",
}


class Transaction:
    """One file or directory on its way to its place. Rank 0 alone makes it; the others write into its directory.

    Args:
        storage: Where to write.
        target: The final file or directory, there already or not.
        is_directory: Whether the target is a directory of files.
        is_related: Whether saves to another name beside the target are of the same run, as those of its other steps
            are: what a dead one of them left is cleared as well. None: none is.
    """

    def __init__(
        self,
        storage: Storage,
        target: Path,
        *,
        is_directory: bool,
        is_related: Callable[[str], bool] | None = None,
    ) -> None:
        self._storage = storage
        self._is_directory = is_directory
        self._is_related = is_related
        if is_directory:
            self._target = Path(os.path.realpath(target))
        else:  # a link of that name is replaced, as a file is
            self._target = Path(os.path.realpath(target.parent)) / target.name
        self._temporary: Path | None = None
        self._lock: int | None = None
        self._is_inside = False

    def begin(self) -> Path:
        """Complete and clears what dead saves left, and returns a new empty directory to write into.

        Raises:
            ConfigError: The target is something else than what is to be written.
        """
        storage, target = self._storage, self._target
        container = target if self._is_directory else target.parent
        # Their files come before ours: the target may be among them, or lie in a folder of theirs.
        for directory in (container.parent, container):
            complete_commits(storage, directory)
        self._check_target()
        storage.make_parents(target)
        self.clear_leftovers()
        self._is_inside = self._is_directory and storage.kind(target) == "directory"
        self._make_temporary()
        assert self._temporary is not None
        return self._temporary

    def commit(self, *, is_stale: Callable[[str], bool]) -> None:
        """Make what was written count; every file of it is on the disk. See Note [Commit].

        Args:
            is_stale: Whether a file that an older save may have left in the directory, by its relative name, loses its
                meaning by this save; asked for the target itself and for the folders that this save has.

        Raises:
            CheckpointError: Something stands in the way.
            OSError: As the system gives it.
        """
        temporary = self._temporary
        assert temporary is not None, "commit() comes after begin()"
        with _renames(self._target):
            if self._is_inside:
                with _locked(self._storage, self._target):
                    publish(self._storage, temporary, self._target, is_stale=is_stale)
            elif self._is_directory:
                self._rename_directory(temporary)
            else:
                self._rename_file(temporary)
        self.abort()

    def abort(self) -> None:
        """Remove what was written, unless it was committed. A second call, or one after commit(), does nothing."""
        temporary, self._temporary = self._temporary, None
        try:
            if temporary is not None and self._storage.kind(temporary) == "directory":
                self._storage.remove_tree(temporary)
        except OSError as error:  # raised, it would hide why the save is given up
            get_dist_logger().warning(f"could not remove {temporary}: {error}; the next save to this path tries again")
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                self._storage.unlock(lock)

    def clear_leftovers(self) -> None:
        """Remove what dead saves left, as `begin` does: for who needs the space before that."""
        _clear(self._storage, self._target.parent, self._is_leftover)
        if self._is_directory:
            _clear(self._storage, self._target, lambda name: _INNER.fullmatch(name) is not None)

    def _rename_directory(self, temporary: Path) -> None:
        storage = self._storage
        _, folders = names_in(storage, temporary)
        for folder in [*folders, "."]:
            storage.sync_path(temporary / folder)
        storage.rename_new(temporary, self._target)  # the commit point
        storage.sync_path(self._target.parent)

    def _rename_file(self, temporary: Path) -> None:
        storage = self._storage
        if names_in(storage, temporary) != ([self._target.name], []):
            raise CheckpointError(f"{temporary} does not hold {self._target.name} alone: another process wrote into it")
        storage.replace(temporary / self._target.name, self._target)  # the commit point
        storage.sync_path(self._target.parent)

    def _check_target(self) -> None:
        kind = self._storage.kind(Path(os.path.realpath(self._target)))
        if self._is_directory and kind not in ("directory", None):
            raise ConfigError(
                f"{self._target} is a file, and shard=True writes a directory: give another path, or shard=False"
            )
        if not self._is_directory and kind not in ("file", None):
            raise ConfigError(
                f"{self._target} is a directory or no plain file, and one file is to be written: give a file name, or"
                " pass shard=True"
            )

    def _make_temporary(self) -> None:
        for _ in range(_MAX_NAMES):
            path = self._new_name()
            self._storage.make_directory(path)
            self._temporary = path
            self._lock = self._locked_by_us(path)
            if self._lock is not None:
                return
        raise CheckpointError(f"{self._target}: other processes remove what this one makes beside it. End them")

    def _new_name(self) -> Path:
        if self._is_inside:
            return self._target / new_temporary_name()
        return self._target.parent / f"{_prefix(self._target.name)}.tmp-{uuid4().hex}"

    def _locked_by_us(self, path: Path) -> int | None:
        """Return a lock on a new directory; None if another save took it for a dead one's before that."""
        try:
            lock = self._storage.lock(path)
        except FileNotFoundError:
            return None
        if lock is not None and self._storage.kind(path) != "directory":
            self._storage.unlock(lock)
            return None
        return lock

    def _is_leftover(self, name: str) -> bool:
        match = _TEMPORARY.fullmatch(name)
        if match is None:
            return _REMOVED.fullmatch(name) is not None
        is_related = self._is_related is not None and self._is_related(match["target"])
        return is_related or f".{match['target']}" == _prefix(self._target.name)


def resolve(storage: Storage, directory: Path, name: str) -> Path:
    """Return where a reader finds a file of a directory: in a commit folder that is not installed yet, or beside.

    Args:
        storage: Where.
        directory: The directory.
        name: The file's name, or `<folder>/<name>`. For a file that is nowhere, a path at which nothing is.
    """
    folder, _, base = name.rpartition("/")
    return DirectoryView(storage, directory / folder if folder else directory).path(base)


def listing(storage: Storage, directory: Path) -> list[str]:
    """Return the names in a directory as a reader sees them, sorted: with those in commit folders, without stale ones.

    Raises:
        OSError: The directory can't be listed.
    """
    return DirectoryView(storage, directory).names()


def remove_checkpoint(storage: Storage, directory: Path) -> None:
    """Remove a directory so that it is whole or gone for every reader; does nothing where there is none.

    Args:
        storage: Where.
        directory: The directory.

    Raises:
        CheckpointError: It is a link or a file, or another process is saving into it.
        OSError: As the system gives it.
    """
    kind = storage.kind(directory)
    if kind is None:
        return
    if kind != "directory":
        raise CheckpointError(f"{directory} is no directory, and only such are removed: check the path")
    aside = directory.parent / f"{_prefix(directory.name)}.removed-{uuid4().hex}"
    with _renames(directory), _locked(storage, directory):
        storage.rename_new(directory, aside)
        storage.sync_path(directory.parent)
        storage.remove_tree(aside)
    storage.sync_path(directory.parent)


def _prefix(name: str) -> str:
    # Cut: with what follows it has to be a name, and those end at 255 bytes.
    return f".{name[:50]}"


@contextmanager
def _locked(storage: Storage, directory: Path) -> Iterator[None]:
    """Hold a directory against other savers; they are at most as long there as some renames take."""
    deadline, pause = time.monotonic() + _LOCK_TIMEOUT_SECONDS, _FIRST_PAUSE
    while (lock := storage.lock(directory)) is None:
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{directory} has been locked by another saving process for {_LOCK_TIMEOUT_SECONDS:g} s: end it, or"
                " save to another path"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
    try:
        yield
    finally:
        storage.unlock(lock)


@contextmanager
def _renames(target: Path) -> Iterator[None]:
    """Report what to do about errors that renames alone give."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        raise CheckpointError(f"{target} cannot take the new checkpoint's place ({error}): {advice}") from error


def _clear(storage: Storage, directory: Path, is_leftover: Callable[[str], bool]) -> None:
    try:
        names = storage.names(directory) if storage.kind(directory) == "directory" else []
    except PermissionError:
        return  # a directory that one may write into but not list
    for name in filter(is_leftover, names):
        try:
            _clear_one(storage, directory / name)
        except (FileNotFoundError, PermissionError):
            continue  # another save was quicker, or it is another user's: neither is a reason not to save


def _clear_one(storage: Storage, path: Path) -> None:
    if storage.kind(path) != "directory":
        return  # no writer of ours makes links, files or pipes of that name
    lock = storage.lock(path)
    if lock is None:
        return
    try:
        storage.remove_tree(path)  # under the lock: its maker, if it lives, finds it gone once it has it
    finally:
        storage.unlock(lock)
