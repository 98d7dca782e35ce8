"""Atomic commit of checkpoints: write to a temporary directory, sync, rename."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from booster.errors import CheckpointError, ConfigError
from booster.logger import get_dist_logger

from .formats.json import MAX_JSON_BYTES, parse_json
from .layout import FileNames
from .storage import Storage

# Note [Commit directory]: `.booster-commit-<uuid>` in a directory holds the files of a committed checkpoint and the
# list of names that it makes stale. The content of the directory is an overlay: its own files, minus the stale names,
# plus the files of the commit directory. Installing moves the files one by one, indexes last, and removes the stale
# ones; after a sync, the commit directory is removed. No step changes the overlay, nor does the loss of any step in a
# power failure, so installing can stop anywhere and be finished by any process.
# A checkpoint may have subdirectories, one level deep. So the content of a directory can also be in a commit directory
# of its parent. In shared directories such as /tmp, only the user's own commit directories count.

_COMMIT = re.compile(r"\.booster-commit-[0-9a-f]{32}")
_COMMIT_OR_TEMPORARY = re.compile(r"\.booster-(?:commit|tmp)-[0-9a-f]{32}")
_STALE = ".booster-stale.json"
_MAX_RENAME_ATTEMPTS = 20  # to read a consistent overlay during concurrent commits


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
    _prepare_target(storage, target, files, folders)
    existing = [name for name in storage.names(target) if not _COMMIT_OR_TEMPORARY.fullmatch(name)]
    existing += [f"{folder}/{name}" for folder in folders for name in storage.names(target / folder)]
    candidates = [name for name in existing if name not in set(files) and is_stale(name)]
    stale = [name for name in candidates if storage.kind(target / name) in ("file", "link")]
    storage.write_file(temporary / _STALE, json.dumps(stale).encode("ascii"))
    for folder in [*folders, "."]:
        storage.sync_path(temporary / folder)
    # Names sort by time; the last one is the newest.
    commit = target / f".booster-commit-{time.time_ns():016x}{uuid4().hex[:16]}"
    storage.rename_new(temporary, commit)
    try:
        storage.sync_path(target)  # the commit point
    except OSError:
        with suppress(OSError):  # if undoing the commit fails too, it stays, complete
            storage.rename_new(commit, temporary)
            # Otherwise a power failure could restore the commit after its files are removed.
            storage.sync_path(target)
        raise
    _install(storage, commit, target)


def _recover_commits(storage: Storage, directory: Path) -> None:
    """Install commits of killed saves in a directory, if it exists, unless another save holds its lock."""
    if storage.kind(directory) != "directory" or not _commit_directories(storage, directory):
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


def paths_in(storage: Storage, directory: Path) -> dict[str, Path]:
    """Return the path of each file as readers see the directory: its files, overlaid by pending commits.

    The result is a consistent snapshot.

    Args:
        storage: Storage of the directory.
        directory: Directory.

    Raises:
        OSError: The directory cannot be listed.
        CheckpointError: A commit directory in it is damaged.
    """
    layers: list[tuple[set[str], dict[str, Path]]] = []
    names, commits = _read_names_and_commits(storage, directory)
    for _ in range(_MAX_RENAME_ATTEMPTS if commits else 0):
        # Commit directories are listed before the directory, because files move from the former to the latter.
        layers = [_read_commit(storage, *commit) for commit in commits]
        previous = commits
        names, commits = _read_names_and_commits(storage, directory)
        if commits == previous:
            break
    else:
        if commits:
            raise CheckpointError(
                f"{directory} changed too often while it was listed: other processes are saving into it. Load"
                " after they have finished, or give every save its own directory"
            )
        layers = []
    paths = {name: directory / name for name in names if not _COMMIT_OR_TEMPORARY.fullmatch(name)}
    for stale, commit_paths in layers:
        for name in stale:
            paths.pop(name, None)
        paths.update(commit_paths)
    return paths


def _read_names_and_commits(storage: Storage, directory: Path) -> tuple[list[str], list[tuple[Path, str]]]:
    """Return the names in the directory, and its commit directories, each with the subdirectory to overlay."""
    names = storage.names(directory)
    real = Path(os.path.realpath(directory))
    local = [(path, "") for path in _commit_directories(storage, directory, names)]
    from_parent = [(path, real.name) for path in _commit_directories(storage, real.parent)]
    return names, sorted(local + from_parent, key=lambda found: found[0].name)


def _read_commit(storage: Storage, commit: Path, subdirectory: str) -> tuple[set[str], dict[str, Path]]:
    """Return the names that a commit makes stale in a directory, and the paths of its files."""
    try:
        stale = _read_stale(storage, commit)
        files, _ = names_in(storage, commit)
    except FileNotFoundError:  # just installed and removed; the next listing shows that
        return set(), {}
    paths = {name.rpartition("/")[2]: commit / name for name in files if name.rpartition("/")[0] == subdirectory}
    return {name.rpartition("/")[2] for name in stale if name.rpartition("/")[0] == subdirectory}, paths


def _commit_directories(storage: Storage, directory: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Return the commit directories among the names in a directory, oldest first; the names are listed if not given."""
    if names is None:
        try:
            names = storage.names(directory)
        except PermissionError:
            return []  # not listable: no process of this user can have committed into it
    found = [directory / name for name in sorted(names) if _COMMIT.fullmatch(name)]
    return [path for path in found if storage.kind(path) == "directory" and not storage.is_foreign(path)]


def _prepare_target(storage: Storage, target: Path, files: Sequence[str], folders: Sequence[str]) -> None:
    """Check that nothing is in the way of the new files, and create missing directories."""
    for names, kinds in ((files, ("file", "link", None)), (folders, ("directory", None))):
        for name in names:
            if storage.kind(target / name) not in kinds:
                raise CheckpointError(
                    f"{target / name} is in the way: the checkpoint has a {'file' if names is files else 'folder'} of"
                    " that name, but it is something else. Remove it, or save to another path"
                )
    # Before any file is moved: files below an unsynced directory entry could be lost.
    missing = [folder for folder in folders if storage.kind(target / folder) is None]
    for folder in missing:
        storage.make_directory(target / folder)
        storage.sync_path((target / folder).parent)


def _install_all(storage: Storage, directory: Path) -> None:
    for commit in _commit_directories(storage, directory, storage.names(directory)):
        _install(storage, commit, directory)


def _install(storage: Storage, commit: Path, target: Path) -> None:
    """Move the files of a commit to their places; see Note [Commit directory]."""
    stale = _read_stale(storage, commit)
    files, folders = names_in(storage, commit)
    _prepare_target(storage, target, files, folders)
    indexes = [name for name in files if ".index." in name]
    shards = [name for name in files if FileNames.is_shard_like(name)]
    if any(storage.kind(target / name) is not None for name in shards):
        # With the old index, other libraries would read a mix of old and new shards.
        _remove_files(storage, target, [name for name in indexes if storage.kind(target / name) is not None])
    _move_files(storage, commit, target, [name for name in files if name not in indexes])
    if indexes:
        _sync_folders(storage, target, folders)
        _move_files(storage, commit, target, indexes)
    # Before any file that an index names is removed, the index is.
    stale_indexes = [name for name in stale if ".index." in name]
    if stale:
        _sync_folders(storage, target, folders)
    if stale_indexes:
        _remove_files(storage, target, stale_indexes)
        _sync_folders(storage, target, {str(Path(name).parent) for name in stale_indexes})
    _remove_files(storage, target, stale)
    _sync_folders(storage, target, [*folders, *(str(Path(name).parent) for name in stale)])
    storage.remove_tree(commit)


def _move_files(storage: Storage, commit: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        try:
            storage.replace(commit / name, target / name)
        except FileNotFoundError:
            if storage.kind(commit / name) is not None:
                raise
            # Moved by another process: without file locks, several may install the same commit.


def _remove_files(storage: Storage, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if storage.kind(target / name) in ("file", "link"):
            storage.remove(target / name)


def _sync_folders(storage: Storage, target: Path, folders: Iterable[str]) -> None:
    for folder in dict.fromkeys([*folders, "."]):
        storage.sync_path(target / folder)


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


# Note [Commit]
# A save writes into a temporary directory; each file is synced by its writers, then the directories are. Then a single
# operation, the commit point, makes the checkpoint visible. Before it, a kill or a power failure leaves a temporary
# directory, which readers ignore, and everything else unchanged. There are three cases:
# (a) The target does not exist. Commit point: the rename of the temporary, a sibling, which fails if the target was
# created meanwhile. Then the parent is synced; after a power failure before that, the checkpoint is complete or
# absent.
# (b) The target is one file. The temporary is a sibling directory with that file. Commit point: the rename over the old
# file. Then the parent is synced; a power failure before that may restore the old file, complete.
# (c) The target is an existing directory: it may hold other parts, logs and directories, and be a mount point. So the
# temporary is inside it (renames cannot cross file systems), and no single rename can replace all files. Commit point:
# the rename of the temporary to a commit directory in the target, synced. From then on every reader of this library
# sees the new files through it, see Note [Commit directory], and no stale old ones. Only then are the files moved to
# their places, for other libraries. If that is interrupted, readers still see the complete checkpoint, and the next
# save into the directory finishes it first. Other libraries read the plain files, a model by its index where there is
# no single file: between commit point and end they find the old model or the new one, see Note [Second names].
# Saves into one directory are serialized from the commit point to the end by a lock on it. A commit that a killed save
# did not install is installed by the next save, before its own. Temporaries are locked while their writer is alive, so
# the next save removes only those of killed saves. Without directory locks (NFS) this cannot be distinguished: a save
# then breaks concurrent saves to the same name.
# An error after the commit point is raised, and the new checkpoint stays, in its commit directory or in its place,
# because the old one is already partly removed.
# To remove a checkpoint, it is first renamed; a kill leaves a directory with a name that readers ignore.

_LOCK_TIMEOUT_SECONDS = 120.0
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.1
_MAX_ATTEMPTS = 10  # attempts, as other saves may remove a temporary before it is locked
_REMOVED = re.compile(r"\..*\.removed-[0-9a-f]{32}", re.DOTALL)
_MAX_NAME = 50  # of a target within another name: names are limited to 255 bytes including the suffix
_TEMPORARY = re.compile(r"\.(?P<target>.*)\.tmp-[0-9a-f]{32}", re.DOTALL)
_INNER = re.compile(r"\.booster-tmp-[0-9a-f]{32}")
_ADVICE = {
    errno.EXDEV: "part of it is on another file system, and renames stay within one: save to a path below that",
    errno.EBUSY: "it is a mount point or in use: save into a directory below it",
    errno.EEXIST: "another process created it during this save: save to another path, or retry",
    errno.ENOTEMPTY: "another process filled it during this save: save to another path, or retry",
}


class Transaction:
    """Atomic write of one file or directory. Created on rank 0 only; other ranks write into its directory.

    Args:
        storage: Storage of the target.
        target: Final file or directory; may exist.
        is_directory: Whether the target is a directory of files.
        is_related: Predicate: a save to this sibling name belongs to the same run, such as another step, so its
            leftovers are removed too. Optional, defaults to none.
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
        else:  # a symbolic link is replaced like a file
            self._target = Path(os.path.realpath(target.parent)) / target.name
        self._temporary: Path | None = None
        self._lock: int | None = None
        self.is_inside = False

    def begin(self) -> Path:
        """Finish commits and remove leftovers of killed saves; return a new empty directory to write into.

        Raises:
            ConfigError: The target is a file instead of a directory or vice versa.
        """
        storage, target = self._storage, self._target
        container = target if self._is_directory else target.parent
        # Pending commits first: they may contain the target or its directory.
        for directory in (container.parent, container):
            _recover_commits(storage, directory)
        kind = storage.kind(Path(os.path.realpath(target)))
        if self._is_directory and kind not in ("directory", None):
            raise ConfigError(
                f"{target} is a file, but a directory is to be written: give another path, or for one file a name that"
                " ends in .safetensors, without shard=True, which save_model() and save_optimizer() take"
            )
        if not self._is_directory and kind not in ("file", None):
            raise ConfigError(
                f"{target} is a directory or not a regular file, but one file is to be written: give a file name, or"
                " pass shard=True to save_model() or save_optimizer()"
            )
        storage.make_parents(target)
        self.clear_leftovers()
        self.is_inside = self._is_directory and storage.kind(target) == "directory"
        return self._create_temporary()

    def commit(self, *, is_stale: Callable[[str], bool]) -> None:
        """Make the written files, which must be synced, the checkpoint. See Note [Commit].

        Args:
            is_stale: Predicate: a file of an older save, by relative name, is obsolete after this save. Called for the
                target and the subdirectories of this save.

        Raises:
            CheckpointError: The commit is impossible.
            OSError: A file system operation failed.
        """
        storage, target, temporary = self._storage, self._target, self._temporary
        assert temporary is not None, "commit() comes after begin()"
        with _explain_rename_errors(target):
            if self.is_inside:
                with _hold_lock(storage, target), storage.free_space_later():
                    publish(storage, temporary, target, is_stale=is_stale)
            elif self._is_directory:
                _, folders = names_in(storage, temporary)
                for folder in [*folders, "."]:
                    storage.sync_path(temporary / folder)
                storage.rename_new(temporary, target)  # the commit point
                storage.sync_path(target.parent)
            else:
                if names_in(storage, temporary) != ([target.name], []):
                    raise CheckpointError(f"{temporary} has files besides {target.name}: another process wrote into it")
                with storage.free_space_later():
                    storage.replace(temporary / target.name, target)  # the commit point
                    storage.sync_path(target.parent)
        self.abort()

    def abort(self) -> None:
        """Remove what was written, unless it was committed. Idempotent; no effect after `commit`."""
        temporary, self._temporary = self._temporary, None
        try:
            if temporary is not None and self._storage.kind(temporary) == "directory":
                self._storage.remove_tree(temporary)
        except OSError as error:  # not raised, because that would hide the cause of the abort
            get_dist_logger().warning(f"could not remove {temporary}: {error}; the next save to this path tries again")
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                self._storage.unlock(lock)

    def clear_leftovers(self) -> None:
        """Remove leftovers of killed saves, as `begin` does, to free space early."""
        _remove_leftovers(self._storage, self._target.parent, self._is_leftover)
        if self._is_directory:
            _remove_leftovers(self._storage, self._target, lambda name: _INNER.fullmatch(name) is not None)

    def _create_temporary(self) -> Path:
        """Create and lock a temporary directory, in the target or beside it."""
        for _ in range(_MAX_ATTEMPTS):
            if self.is_inside:
                path = self._target / f".booster-tmp-{uuid4().hex}"
            else:
                path = self._target.parent / f".{self._target.name[:_MAX_NAME]}.tmp-{uuid4().hex}"
            self._storage.make_directory(path)
            self._temporary = path
            try:
                lock = self._storage.lock(path)
            except FileNotFoundError:
                continue  # another save removed it as a leftover
            if lock is None:
                continue
            if self._storage.kind(path) == "directory":
                self._lock = lock
                return path
            self._storage.unlock(lock)  # removed before it was locked
        raise CheckpointError(
            f"{self._target}: other processes remove the temporary directories of this save: end them"
        )

    def _is_leftover(self, name: str) -> bool:
        match = _TEMPORARY.fullmatch(name)
        if match is None:
            return _REMOVED.fullmatch(name) is not None
        is_related = self._is_related is not None and self._is_related(match["target"])
        return is_related or match["target"] == self._target.name[:_MAX_NAME]


@contextmanager
def replaced_file(storage: Storage, target: Path) -> Iterator[Path]:
    """Context that yields the path at which to write and sync one file, and makes it the target if it does not raise.

    Raises:
        ConfigError: The target is a directory.
        CheckpointError: The commit is impossible.
        OSError: A file system operation failed.
    """
    transaction = Transaction(storage, target, is_directory=False)
    try:
        yield transaction.begin() / target.name
        transaction.commit(is_stale=lambda name: False)
    finally:
        transaction.abort()


def remove_checkpoint(storage: Storage, directory: Path) -> None:
    """Remove a directory atomically for readers; do nothing if it does not exist.

    Args:
        storage: Storage of the directory.
        directory: Directory.

    Raises:
        CheckpointError: The path is a link or a file, or another process is saving into it.
        OSError: A file system operation failed.
    """
    kind = storage.kind(directory)
    if kind is None:
        return
    if kind != "directory":
        raise CheckpointError(f"{directory} is not a directory, and only directories are removed: check the path")
    removed = directory.parent / f".{directory.name[:_MAX_NAME]}.removed-{uuid4().hex}"
    with _explain_rename_errors(directory), _hold_lock(storage, directory), storage.free_space_later():
        storage.rename_new(directory, removed)
        storage.sync_path(directory.parent)
        storage.remove_tree(removed)
    storage.sync_path(directory.parent)


@contextmanager
def _hold_lock(storage: Storage, directory: Path) -> Iterator[None]:
    """Hold the lock of a directory. Other saves hold it only for a few renames."""
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
def _explain_rename_errors(target: Path) -> Iterator[None]:
    """Add advice to errors that are specific to renames."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        raise CheckpointError(f"{target} cannot be replaced by the new checkpoint ({error}): {advice}") from error


def _remove_leftovers(storage: Storage, directory: Path, is_leftover: Callable[[str], bool]) -> None:
    try:
        names = storage.names(directory) if storage.kind(directory) == "directory" else []
    except PermissionError:
        return  # writable, but not listable
    for name in filter(is_leftover, names):
        try:
            _remove_leftover(storage, directory / name)
        except (FileNotFoundError, PermissionError):
            continue  # removed by another save, or owned by another user


def _remove_leftover(storage: Storage, path: Path) -> None:
    if storage.kind(path) != "directory":
        return  # links, files and pipes of that name are not from this library
    lock = storage.lock(path)
    if lock is None:
        return
    try:
        storage.remove_tree(path)  # under the lock: a writer that locks it later finds it removed
    finally:
        storage.unlock(lock)
