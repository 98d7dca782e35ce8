"""Opens a checkpoint file or directory and checks its structure before a tensor is read."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from booster.checkpoint_io.files.index_file import check_file_name, check_held, listed, parse_index
from booster.checkpoint_io.files.manifest import MANIFEST_KEY, FileRecord, Manifest, check_tiling
from booster.checkpoint_io.files.tensor_files import GROUPS_KEY, TensorFile, open_tensor_file
from booster.checkpoint_io.layout import OPTIMIZER, SINGLE_FILE_SUFFIXES, FileNames, Kind
from booster.checkpoint_io.loading.directory_reader import DirectoryReader, cannot_open, is_transient, open_directory
from booster.checkpoint_io.loading.stored_checkpoint import Checkpoint, read_recorded
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

__all__ = ["Checkpoint", "open_checkpoint"]

# Another process may commit a new checkpoint into a directory while this process opens it. No file of a commit is moved
# to its place before its manifest is visible (see Note [Commit]). So if the manifest is the same before the first file
# is opened and after the last, all files belong to one save. Otherwise, or if a listed file is missing, opening is
# retried.

_MIN_ATTEMPTS = 3
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5


def open_checkpoint(
    storage: Storage,
    path: str | os.PathLike[str],
    kind: Kind,
    *,
    patience_seconds: float = 0.0,
    requires_manifest: bool = True,
) -> Checkpoint:
    """Open a tensor file, an index, or a directory.

    In a directory, the manifest determines the files of the checkpoint; without one the index does; otherwise the
    single file with the kind's default name is used. Sizes, headers, index and names are compared with the recorded
    ones here; the checksums of the data are compared by `verify_ranges`.

    Args:
        storage: Storage of the files.
        path: File or directory.
        kind: Kind of checkpoint to open in a directory.
        patience_seconds: Timeout to wait for a missing file: network file systems show new files late on other hosts.
        requires_manifest: If False, also open files whose manifest is missing.

    Raises:
        CheckpointError: No checkpoint, several candidates, names or links that leave the directory, or damaged files.
    """
    opening = _Opening(storage, kind, requires_manifest)
    deadline = time.monotonic() + patience_seconds
    num_attempts = 0
    while True:
        try:
            return opening.open(Path(path))
        except CheckpointError as error:
            num_attempts += 1
            is_late = time.monotonic() >= deadline
            if not is_transient(error) or (is_late and num_attempts >= _MIN_ATTEMPTS):
                raise
        if not is_late:
            time.sleep(min(_FIRST_PAUSE_SECONDS * 2**num_attempts, _LONGEST_PAUSE_SECONDS))


class _Opening:
    """State of one `open_checkpoint` call."""

    def __init__(self, storage: Storage, kind: Kind, requires_manifest: bool) -> None:
        self._storage = storage
        self._kind = kind
        self._requires_manifest = requires_manifest

    def open(self, path: Path) -> Checkpoint:
        directory = self._directory(path)
        if directory is not None:
            return self._open_directory(directory, _find_owner(directory, self._kind))
        if path.suffix == ".json":
            return self._open_directory(open_directory(self._storage, path.parent), self._owner_of_record(path))
        for name in self._names_beside(path):
            owner = self._kind.names_of(name)
            if owner is not None and name == owner.manifest and owner.owns(path.name):
                return self._open_recorded(open_directory(self._storage, path.parent), owner, only=path.name)
        return self._open_single(path, lambda: open_tensor_file(self._storage, path))

    def _directory(self, path: Path) -> DirectoryReader | None:
        """Return a reader if the path is a directory, or None for other existing paths."""
        try:
            return DirectoryReader(self._storage, path)
        except NotADirectoryError:
            return None
        except FileNotFoundError as error:
            if path.name in self._names_beside(path):  # a dangling link: opening it raises
                return None
            raise CheckpointError(
                f"{path} does not exist: give a file or a directory that holds a {self._kind.name}"
            ) from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise cannot_open(path, error) from error

    def _names_beside(self, path: Path) -> Sequence[str]:
        try:
            return DirectoryReader(self._storage, path.parent).names
        except OSError:
            return ()  # the caller raises for the missing path

    def _owner_of_record(self, path: Path) -> FileNames:
        owner = self._kind.names_of(path.name)
        if owner is None or path.name not in (owner.index, owner.manifest):
            expected = self._kind.names(is_safetensors=True).index
            raise CheckpointError(
                f"{path} is not a {self._kind.name} index: give a directory, a file of tensors, or {expected}"
            )
        return owner

    def _open_directory(self, directory: DirectoryReader, owner: FileNames) -> Checkpoint:
        if owner.manifest in directory.names:
            return self._open_recorded(directory, owner, only=None)
        is_sharded = owner.index in directory.names
        found = self._open_foreign(directory, owner) if is_sharded else self._open_plain(directory, owner)
        if owner.manifest in self._names_beside(directory.path / owner.manifest):
            found.close()
            raise _changed(directory.path)
        return found

    # With a manifest.

    def _open_recorded(self, directory: DirectoryReader, owner: FileNames, only: str | None) -> Checkpoint:
        """Open all files of a manifest, or only one, and check that the manifest did not change meanwhile."""
        raw = directory.read(owner.manifest)
        directory = open_directory(self._storage, directory.path)  # list again, after the manifest was read
        failure: CheckpointError | None = None
        with ExitStack() as stack:
            try:
                found = stack.enter_context(self._open_by_manifest(directory, owner, raw, only))
            except CheckpointError as error:
                failure = error
            if open_directory(self._storage, directory.path).read(owner.manifest) != raw:
                raise _changed(directory.path)
            if failure is not None:
                raise failure
            stack.pop_all()
        return found

    def _open_by_manifest(
        self, directory: DirectoryReader, owner: FileNames, raw: bytes, only: str | None
    ) -> Checkpoint:
        path = directory.path / owner.manifest
        manifest = Manifest.parse(raw, str(path))
        if manifest.kind != self._kind.name:
            raise CheckpointError(f"{path} is the manifest of a {manifest.kind[:200]!r}, not of a {self._kind.name}")
        for name in manifest.files:
            check_file_name(name, str(path), owner)
        if only is not None and only not in manifest.files:
            raise CheckpointError(f"{path} does not name {only}, which is a leftover of another save: remove it")
        with ExitStack() as stack:
            files = []
            for name, record in manifest.files.items():
                if only in (None, name):
                    files.append(directory.open(name, record))
                    stack.callback(files[-1].close)
                    _check_ranges(files[-1], record)
            if only is None:
                _check_index(directory, owner, manifest, files)
            groups = read_recorded(directory, owner.groups, manifest) if self._kind == OPTIMIZER else None
            checkpoint = Checkpoint(self._storage, path, files, groups, manifest, raw)
            stack.pop_all()
        return checkpoint

    # Without a manifest: single files, and checkpoints of other programs.

    def _open_foreign(self, directory: DirectoryReader, owner: FileNames) -> Checkpoint:
        groups = directory.read(owner.groups) if self._kind == OPTIMIZER else None
        path = directory.path / owner.index
        with ExitStack() as stack:
            files = []
            for file_name, held in parse_index(directory.read(owner.index), str(path), owner).items():
                files.append(directory.open(file_name))
                stack.callback(files[-1].close)
                self._check_mark(files[-1])
                check_held(held, files[-1].specs, files[-1].path, owner.index)
            checkpoint = Checkpoint(self._storage, path, files, groups)
            stack.pop_all()
        return checkpoint

    def _open_plain(self, directory: DirectoryReader, owner: FileNames) -> Checkpoint:
        return self._open_single(directory.path / owner.single, lambda: directory.open(owner.single))

    def _open_single(self, path: Path, open_file: Callable[[], TensorFile]) -> Checkpoint:
        with ExitStack() as stack:
            file = open_file()
            stack.callback(file.close)
            self._check_mark(file)
            text = file.metadata.get(GROUPS_KEY)
            groups = None if text is None else text.encode("utf-8", "surrogatepass")
            checkpoint = Checkpoint(self._storage, path, [file], groups)
            stack.pop_all()
        return checkpoint

    def _check_mark(self, file: TensorFile) -> None:
        mark = file.metadata.get(MANIFEST_KEY)
        if mark is not None and self._requires_manifest:
            raise CheckpointError(
                f"{file.path} was saved with the manifest {mark[:200]!r}, which records its checksums, but is missing:"
                ' copy it beside the file, or pass verify="structure" to load without checksums'
            ) from _not_there(mark[:200])


def _find_owner(directory: DirectoryReader, kind: Kind) -> FileNames:
    names = directory.names
    found = {owner: None for name in names if (owner := kind.names_of(name)) is not None}
    candidates = [owner for owner in found if owner.prefix is None] or list(found)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        given = sorted(owner.index if owner.index in names else owner.single for owner in candidates)
        raise CheckpointError(
            f"{directory.path} holds several {kind.name} checkpoints: {listed(given)}. Give the one to load"
        )
    plain = kind.names(is_safetensors=True)
    others = [name for name in names if name.endswith((*SINGLE_FILE_SUFFIXES, ".json"))]
    steps = [name for name in names if re.fullmatch(r"step-\d{8,}", name)]
    advice = (
        f"It has directories of steps: give one, such as {directory.path / steps[-1]}" if steps else "Check the path"
    )
    raise CheckpointError(
        f"{directory.path} holds no {kind.name} checkpoint: found neither {plain.index} nor {plain.single} nor .bin"
        f" files, only {listed(others)}. {advice}"
    ) from _not_there(str(directory.path))


def _check_ranges(file: TensorFile, record: FileRecord) -> None:
    try:
        check_tiling(file.specs, record.ranges)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path} and its manifest do not match: {error}") from error


def _check_index(directory: DirectoryReader, owner: FileNames, manifest: Manifest, files: Sequence[TensorFile]) -> None:
    if owner.index not in manifest.documents and owner.index not in directory.names:
        return
    path = directory.path / owner.index
    named = parse_index(read_recorded(directory, owner.index, manifest), str(path), owner)
    for file in files:
        held = named.pop(file.path.name, [])
        check_held(held, file.specs, file.path, owner.index)
        if len(held) != len(file.specs):
            raise CheckpointError(f"{path} lacks tensors of {file.path}: the files are from different saves")
    if named:
        raise CheckpointError(f"{path} names files that {owner.manifest} does not: {listed(named)}")


def _changed(directory: Path) -> CheckpointError:
    error = CheckpointError(
        f"{directory} changed repeatedly while it was opened: another process saves into it. Load after it has finished"
    )
    error.__cause__ = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory))
    return error


def _not_there(name: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
