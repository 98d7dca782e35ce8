"""Files appear whole or not at all: written beside their place, forced to the disk, then renamed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from booster.checkpoint_io.storage import Storage
from booster.errors import ConfigError

__all__ = ["PendingDirectory", "new_file"]

# Note [Commit]
# A new directory appears by one rename. Into a directory that exists (the model's, when the optimizer follows) files
# move one by one, the index last, and what an older save left goes after that. Between two moves a loader finds
# - an older save without its new companions, or the new one beside leftovers of the old, if they share no file name;
# - no index, if they share one (a save over a save of as many shards): the old index goes first, because old index with
#   some new shards would load as a mixture. Such a kill loses the old save; give every save its own directory.
# A temporary carries a lock while its writer lives, so the next save tells a dead one's from a running one's.


@contextmanager
def new_file(storage: Storage, path: Path) -> Iterator[BinaryIO]:
    """Gives a file to write, which takes its place when the block ends, or never if the block raises.

    Args:
        storage: Where to write.
        path: The final name; an older file there is replaced.

    Raises:
        ConfigError: A directory is there.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, and one file is to be written: give a file name, or pass shard=True")
    storage.make_parents(path)
    _remove_leftovers(storage, path.parent, path.name)
    temporary = path.parent / _temporary_name(path.name)
    file = storage.create(temporary)
    lock = None
    try:
        with file:
            lock = storage.lock(temporary)
            yield file
            storage.sync(file)
        storage.replace(temporary, path)
        storage.sync_path(path.parent)
    except BaseException:
        _remove(storage, temporary)
        raise
    finally:
        if lock is not None:
            storage.unlock(lock)


class PendingDirectory:
    """A directory of new files on their way to their place; a context manager that clears up behind itself.

    Args:
        storage: Where to write.
        target: The final directory, there already or not.

    Raises:
        ConfigError: A file is there.
    """

    def __init__(self, storage: Storage, target: Path) -> None:
        if target.exists() and not target.is_dir():
            raise ConfigError(
                f"{target} is a file, and shard=True writes a directory: give another path, or shard=False"
            )
        self._storage = storage
        self._target = Path(os.path.realpath(target))
        # Inside of a directory that exists, which may be a mount point: a rename cannot leave its file system.
        self._is_inside = self._target.is_dir()
        parent = self._target if self._is_inside else self._target.parent
        self.path = parent / _temporary_name(self._target.name)
        self._lock: int | None = None

    def __enter__(self) -> PendingDirectory:
        storage, target = self._storage, self._target
        storage.make_parents(target)
        for parent in {target.parent, self.path.parent}:
            _remove_leftovers(storage, parent, target.name)
        storage.make_directory(self.path)
        self._lock = storage.lock(self.path)
        return self

    def __exit__(self, *reason: object) -> None:
        if self.path.is_dir():
            self._storage.remove_tree(self.path)
        if self._lock is not None:
            self._storage.unlock(self._lock)

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """Gives a file of the directory to write; it is on the disk when the block ends."""
        with self._storage.create(self.path / name) as file:
            yield file
            self._storage.sync(file)

    def commit(self, *, members: Sequence[str], index: str | None, is_stale: Callable[[str], bool]) -> None:
        """Moves everything to its place; see Note [Commit].

        Args:
            members: Files that make sense only together.
            index: The file that says which belong together, if there is one.
            is_stale: Whether an older save of the same kind may have written a file of this name.
        """
        storage, target = self._storage, self._target
        names = storage.names(self.path)
        for name in set(names) - set(members) - {index}:
            storage.sync_path(self.path / name)  # written by others
        storage.sync_path(self.path)
        if not self._is_inside:
            storage.replace(self.path, target)
            storage.sync_path(target.parent)
            return
        before = storage.names(target)
        self._move_in(names, members, index, before)
        storage.sync_path(target)
        stale = [name for name in before if name not in names and is_stale(name)]
        for name in sorted(stale, key=lambda name: not name.endswith(".json")):  # an index before what it names
            storage.remove(target / name)
        storage.sync_path(target)

    def _move_in(self, names: Sequence[str], members: Sequence[str], index: str | None, before: Sequence[str]) -> None:
        storage, target = self._storage, self._target
        if index in before and any(name in before for name in members):
            storage.remove(target / str(index))
            storage.sync_path(target)
        for name in names:
            if name != index:
                storage.replace(self.path / name, target / name)
        if index is not None:
            storage.sync_path(target)
            storage.replace(self.path / index, target / index)


def _temporary_name(name: str) -> str:
    return f".{name}.tmp-{uuid4().hex}"


def _remove_leftovers(storage: Storage, directory: Path, name: str) -> None:
    pattern = re.compile(rf"\.{re.escape(name)}\.tmp-[0-9a-f]{{32}}")
    for found in storage.names(directory):
        if pattern.fullmatch(found) and _is_abandoned(storage, directory / found):
            _remove(storage, directory / found)


def _is_abandoned(storage: Storage, path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return False  # no writer of ours makes links or pipes
        lock = storage.lock(path)
    except (FileNotFoundError, PermissionError):
        return False  # its writer was quicker, or it is another user's: neither is a reason not to save
    if lock is None:
        return False
    storage.unlock(lock)
    return True


def _remove(storage: Storage, path: Path) -> None:
    if path.is_dir():
        storage.remove_tree(path)
    elif path.exists():
        storage.remove(path)
