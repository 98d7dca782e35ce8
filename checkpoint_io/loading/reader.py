"""Opens a checkpoint file or directory and checks its structure before a tensor is read."""

from __future__ import annotations

import errno
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from booster.checkpoint_io.commit import paths_in
from booster.checkpoint_io.formats.json import MAX_JSON_BYTES, parse_json
from booster.checkpoint_io.formats.manifest import (
    MANIFEST_KEY,
    FileRecord,
    Manifest,
    check_ranges_cover,
    is_safe_name,
)
from booster.checkpoint_io.formats.tensor_files import GROUPS_KEY, TensorFile, open_tensor_file
from booster.checkpoint_io.layout import MODEL, OPTIMIZER, SINGLE_FILE_SUFFIXES, FileKind, FileNames
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError, format_list
from booster.interface import TensorSpec
from booster.logger import get_dist_logger

T = TypeVar("T")

MAX_TENSORS = 1_000_000
_MAX_LISTED = 10

_NUM_ATTEMPTS = 3  # a file may be moved between listing and opening, and again by the next commit
_TRANSIENT = (errno.ENOENT, errno.ESTALE)


class DirectoryReader:
    """Opens the files of a directory, including those of a commit that is not installed yet.

    Args:
        storage: Storage of the directory.
        path: Directory.

    Attributes:
        names: Its files and subdirectories, sorted: those of pending commits too, without stale ones.
        paths: Where they are, by name.

    Raises:
        OSError: The path is not a directory, or cannot be listed.
    """

    def __init__(self, storage: Storage, path: Path) -> None:
        self.path = path
        self._storage = storage
        self.paths = paths_in(storage, path)
        self.names = sorted(self.paths)

    def open(self, name: str, expected: FileRecord | None = None) -> TensorFile:
        """Open a tensor file; see `open_tensor_file`."""
        return self._retry(
            name, lambda path, inside: open_tensor_file(self._storage, path, inside=inside, expected=expected)
        )

    def read(self, name: str) -> bytes:
        """Return the content of a small file of at most 64 MiB."""
        return self._retry(
            name, lambda path, inside: self._storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=inside)
        )

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

        def measure(path: Path, inside: Path) -> int:
            with self._storage.open_regular(path, inside=inside) as file:
                return self._storage.size(file)

        return self._retry(name, measure)

    def _retry(self, name: str, action: Callable[[Path, Path], T]) -> T:
        """Run the action with the file's path and the directory that its links must not leave."""
        num_attempts = 0
        while True:
            path = self.paths.get(name, self.path / name)
            # A directory committed together with its parent is a subdirectory of the parent's commit directory.
            inside = self.path if path.is_relative_to(self.path) else path.parent.parent
            try:
                return action(path, inside)
            except CheckpointError as error:
                num_attempts += 1
                if num_attempts == _NUM_ATTEMPTS or not _is_transient(error):
                    raise
            try:
                self.paths = paths_in(self._storage, self.path)
            except OSError as error:
                raise _cannot_open(self.path, error) from error


def open_directory(storage: Storage, path: Path) -> DirectoryReader:
    """Return a reader of a directory.

    Raises:
        CheckpointError: The path is not a directory, or cannot be listed.
    """
    try:
        return DirectoryReader(storage, path)
    except OSError as error:
        raise _cannot_open(path, error) from error


def read_document(storage: Storage, path: Path) -> bytes:
    """Return the content of a small file as readers see it, in a pending commit or in its place.

    Raises:
        CheckpointError: The file is missing, not a regular file, outside of its directory, or larger than 64 MiB.
    """
    return open_directory(storage, path.parent).read(path.name)


def _cannot_open(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot open {str(path)!r}: {error}. Check the path and its permissions")


def _is_transient(error: CheckpointError) -> bool:
    """Return whether the cause is a missing or stale file, which may appear on retry."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _TRANSIENT


class StoredCheckpoint(AbstractContextManager["StoredCheckpoint"]):
    """Open checkpoint; a context manager that closes its files.

    Args:
        storage: Storage of the files.
        path: Manifest, index or single file.
        files: Open tensor files.
        groups: Optimizer's plain values as JSON. Optional, for optimizer checkpoints.
        manifest: Sizes and checksums of all files. Optional.
        raw_manifest: Content of the manifest file.

    Attributes:
        specs: Shape and dtype of every tensor, from the files that hold them.

    Raises:
        CheckpointError: A tensor is in two files.
    """

    def __init__(
        self,
        storage: Storage,
        path: Path,
        files: Sequence[TensorFile],
        groups: bytes | None = None,
        manifest: Manifest | None = None,
        raw_manifest: bytes = b"",
    ) -> None:
        self._raw_manifest = raw_manifest
        self.storage = storage
        self.path = path
        self.files = tuple(files)
        self.groups = groups
        self.manifest = manifest
        self.specs: dict[str, TensorSpec] = {}
        self._file_of: dict[str, TensorFile] = {}
        for file in self.files:
            duplicate = next((name for name in file.specs if name in self._file_of), None)
            if duplicate is not None:
                raise CheckpointError(
                    f"{path}: {duplicate!r} is in two files, {self._file_of[duplicate].path.name} and {file.path.name},"
                    " and one of them is stale: remove it"
                )
            self.specs.update(file.specs)
            self._file_of.update(dict.fromkeys(file.specs, file))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the save, from manifest and heads; differs between saves as far as these record it."""
        heads = [
            (file.path.name, file.num_bytes, getattr(self.record_of(file), "head_crc32", 0)) for file in self.files
        ]
        return f"{zlib.crc32(self._raw_manifest):08x} {sorted(heads)}"

    def locate(self, name: str) -> tuple[OpenFile, int] | None:
        """Return file and offset of a tensor's bytes, or None if only `read` can access it, as for `.bin`."""
        return self._file_of[name].locate(name)

    def file_of(self, name: str) -> TensorFile:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def record_of(self, file: TensorFile) -> FileRecord | None:
        """Return the recorded checksums of a file, or None if there are none."""
        if self.manifest is not None:
            return self.manifest.files.get(file.path.name)
        return file.embedded_record

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU. The caller must not modify it."""
        return self._file_of[name].read(name)

    def check_documents(self) -> None:
        """Verify the documents that the manifest records.

        Raises:
            CheckpointError: A document is missing or differs from its checksum.
        """
        if self.manifest is None or not self.manifest.documents:
            return
        directory = open_directory(self.storage, self.path.parent)
        try:
            for name in self.manifest.documents:
                _read_recorded(directory, name, self.manifest)
        except CheckpointError:
            # Another save may have replaced this one since; its tensor files are still open and consistent.
            listed = open_directory(self.storage, self.path.parent)
            if self.path.name in listed.names and listed.read(self.path.name) == self._raw_manifest:
                raise

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def __exit__(self, *reason: object) -> None:
        self.close()


def _read_recorded(directory: DirectoryReader, name: str, manifest: Manifest) -> bytes:
    """Return a document; raise `CheckpointError` if it is not recorded, missing, or differs in size or checksum."""
    record = manifest.documents.get(name)
    path = directory.path / name
    if record is None:
        raise CheckpointError(
            f"{path} is not recorded in the manifest beside it: the files are from different saves, or the manifest is"
            " damaged. Take another copy of the checkpoint"
        )
    raw = directory.read(name)
    record.check(raw, path)
    return raw


def _parse_index(raw: bytes, source_name: str, file_names: FileNames) -> dict[str, list[str]]:
    """Return the tensors of every file in an index, whose names are those of files in its directory."""
    document = parse_json(raw, source_name)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or len(weight_map) > MAX_TENSORS:
        raise CheckpointError(
            f"{source_name} has no weight_map, or one of more than a million tensors: it is damaged or not an index."
            " Take another copy of it"
        )
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in named:
            _check_file_name(file_name, source_name, file_names)
        named.setdefault(file_name, []).append(name)
    return named


def _check_file_name(file_name: Any, source_name: str, file_names: FileNames) -> None:
    """Check that an untrusted name is that of a tensor file in the same directory: no path, and not hidden."""
    is_of_format = isinstance(file_name, str) and file_name.endswith(f".{file_names.suffix}")
    if not is_of_format or not is_safe_name(file_name):
        raise CheckpointError(
            f"{source_name} names the file {str(file_name)[:200]!r}: it may name only .{file_names.suffix} files beside"
            " itself. Do not trust this checkpoint"
        )


def _check_index_entries(names: Iterable[str], specs: Mapping[str, TensorSpec], path: object, index: str) -> None:
    missing = [name for name in names if name not in specs]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors that {index} assigns to it, such as {_format_names(missing)}: the"
            " files are from different saves, or one is damaged"
        )


def _format_names(names: Iterable[str]) -> str:
    """Format the first ten names for a message, and the number of further ones."""
    return format_list((repr(name[:200]) for name in names), _MAX_LISTED) or "nothing"


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
    kind: FileKind,
    *,
    timeout_seconds: float = 0.0,
    requires_manifest: bool = True,
) -> StoredCheckpoint:
    """Open a tensor file, an index, or a directory.

    In a directory, the manifest determines the files of the checkpoint; without one the index does; otherwise the
    single file with the kind's default name is used. Sizes, headers, index and names are compared with the recorded
    ones here; the checksums of the data are compared by `verify_ranges`.

    Args:
        storage: Storage of the files.
        path: File or directory.
        kind: Kind of checkpoint to open in a directory.
        timeout_seconds: Timeout to wait for a missing file: network file systems show new files late on other hosts.
        requires_manifest: If False, also open files whose manifest is missing.

    Raises:
        CheckpointError: No checkpoint, several candidates, names or links that leave the directory, or damaged files.
    """
    opening = _CheckpointOpener(storage, kind, requires_manifest)
    deadline = time.monotonic() + timeout_seconds
    num_attempts = 0
    while True:
        try:
            return opening.open(Path(path))
        except CheckpointError as error:
            num_attempts += 1
            is_late = time.monotonic() >= deadline
            if not _is_transient(error) or (is_late and num_attempts >= _MIN_ATTEMPTS):
                raise
        if not is_late:
            time.sleep(min(_FIRST_PAUSE_SECONDS * 2**num_attempts, _LONGEST_PAUSE_SECONDS))


@dataclass(frozen=True, slots=True)
class _CheckpointOpener:
    """Arguments of one `open_checkpoint` call."""

    _storage: Storage
    _kind: FileKind
    _requires_manifest: bool

    def open(self, path: Path) -> StoredCheckpoint:
        directory: DirectoryReader | None = None
        try:
            directory = DirectoryReader(self._storage, path)
        except NotADirectoryError:
            pass
        except FileNotFoundError as error:
            if path.name not in self._sibling_names(path):  # else it is a dangling link, and opening it raises
                raise CheckpointError(
                    f"{path} does not exist: give a file or a directory that holds the {self._kind.name}"
                ) from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise _cannot_open(path, error) from error
        if directory is not None:
            return self._open_directory(directory, _find_file_names(directory, self._kind))
        if path.suffix == ".json":
            directory = open_directory(self._storage, path.parent)
            file_names = self._kind.names_of(path.name)
            if file_names is None or path.name not in (file_names.index, file_names.manifest):
                expected = self._kind.names(is_safetensors=True).index
                raise CheckpointError(
                    f"{path} is not a {self._kind.name} index: give a directory, a file of tensors, or {expected}"
                )
            return self._open_directory(directory, file_names)
        for name in self._sibling_names(path):
            file_names = self._kind.names_of(name)
            if file_names is not None and name == file_names.manifest and file_names.may_have_written(path.name):
                return self._open_with_manifest(open_directory(self._storage, path.parent), file_names, only=path.name)
        return self._open_single(path, lambda: open_tensor_file(self._storage, path))

    def _sibling_names(self, path: Path) -> Sequence[str]:
        try:
            return DirectoryReader(self._storage, path.parent).names
        except OSError:
            return ()  # the caller raises for the missing path

    def _open_directory(self, directory: DirectoryReader, file_names: FileNames) -> StoredCheckpoint:
        if file_names.manifest in directory.names:
            return self._open_with_manifest(directory, file_names, only=None)
        if file_names.index in directory.names:
            found = self._open_indexed(directory, file_names)
        else:
            single = file_names.single
            found = self._open_single(directory.path / single, lambda: directory.open(single))
        if file_names.manifest in self._sibling_names(directory.path / file_names.manifest):
            found.close()
            raise _changed_error(directory.path)
        return found

    def _open_with_manifest(
        self, directory: DirectoryReader, file_names: FileNames, only: str | None
    ) -> StoredCheckpoint:
        """Open all files of a manifest, or only one, and check that the manifest did not change meanwhile."""
        raw = directory.read(file_names.manifest)
        directory = open_directory(self._storage, directory.path)  # list again, after the manifest was read
        failure: CheckpointError | None = None
        with ExitStack() as stack:
            try:
                found = stack.enter_context(self._open_manifest_files(directory, file_names, raw, only))
            except CheckpointError as error:
                failure = error
            if open_directory(self._storage, directory.path).read(file_names.manifest) != raw:
                raise _changed_error(directory.path)
            if failure is not None:
                raise failure
            stack.pop_all()
        return found

    def _open_manifest_files(
        self, directory: DirectoryReader, file_names: FileNames, raw: bytes, only: str | None
    ) -> StoredCheckpoint:
        path = directory.path / file_names.manifest
        manifest = Manifest.parse(raw, str(path))
        if manifest.kind != self._kind.name:
            raise CheckpointError(f"{path} is the manifest of a {manifest.kind[:200]!r}, not of a {self._kind.name}")
        for name in manifest.files:
            _check_file_name(name, str(path), file_names)
        if only is not None and only not in manifest.files:
            raise CheckpointError(f"{path} does not name {only}, which is a leftover of another save: remove it")
        with ExitStack() as stack:
            files = []
            for name, record in manifest.files.items():
                if only in (None, name):
                    files.append(stack.enter_context(closing(directory.open(name, record))))
                    try:
                        check_ranges_cover(files[-1].specs, record.ranges)
                    except CheckpointError as error:
                        raise CheckpointError(f"{files[-1].path} and its manifest do not match: {error}") from error
            if only is None:
                _check_index(directory, file_names, manifest, files)
            groups = _read_recorded(directory, file_names.groups, manifest) if self._kind == OPTIMIZER else None
            checkpoint = StoredCheckpoint(self._storage, path, files, groups, manifest, raw)
            stack.pop_all()
        return checkpoint

    def _open_indexed(self, directory: DirectoryReader, file_names: FileNames) -> StoredCheckpoint:
        groups = directory.read(file_names.groups) if self._kind == OPTIMIZER else None
        path = directory.path / file_names.index
        with ExitStack() as stack:
            files = []
            named = _parse_index(directory.read(file_names.index), str(path), file_names)
            if not named:  # an optimizer without states: there is one shard, without tensors
                usual, second = file_names.shard(1, 1), file_names.second_shard(file_names.shard(1, 1))
                named = {second if second in directory.names and usual not in directory.names else usual: []}
            for file_name, tensor_names in named.items():
                files.append(stack.enter_context(closing(directory.open(file_name))))
                self._check_manifest_present(files[-1])
                _check_index_entries(tensor_names, files[-1].specs, files[-1].path, file_names.index)
            checkpoint = StoredCheckpoint(self._storage, path, files, groups)
            stack.pop_all()
        return checkpoint

    def _open_single(self, path: Path, open_file: Callable[[], TensorFile]) -> StoredCheckpoint:
        with ExitStack() as stack:
            file = stack.enter_context(closing(open_file()))
            self._check_manifest_present(file)
            text = file.metadata.get(GROUPS_KEY)
            groups = None if text is None else text.encode("utf-8", "surrogatepass")
            checkpoint = StoredCheckpoint(self._storage, path, [file], groups)
            stack.pop_all()
        return checkpoint

    def _check_manifest_present(self, file: TensorFile) -> None:
        manifest_name = file.metadata.get(MANIFEST_KEY)
        if manifest_name is not None and self._requires_manifest:
            raise CheckpointError(
                f"{file.path} was saved with the manifest {manifest_name[:200]!r}, which records its checksums, but is"
                ' missing: copy it beside the file, or pass verify="structure" to load without checksums'
            ) from FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), manifest_name[:200])


def _is_own_save(directory: DirectoryReader, file_names: FileNames) -> bool:
    """Return whether files were saved by this library, if they have checksums."""
    if file_names.manifest in directory.names:
        return True
    if file_names.single not in directory.names or file_names.suffix != "safetensors":
        return False
    with closing(directory.open(file_names.single)) as file:
        return file.embedded_record is not None


def _find_file_names(directory: DirectoryReader, kind: FileKind) -> FileNames:
    names = directory.names
    found = {file_names: None for name in names if (file_names := kind.names_of(name)) is not None}
    candidates = [file_names for file_names in found if file_names.prefix is None] or list(found)
    if len(candidates) == 1:
        return candidates[0]
    are_formats = len({each.prefix for each in candidates}) == 1  # one model, as safetensors and as .bin
    if kind == MODEL and are_formats and not any(_is_own_save(directory, each) for each in candidates):
        # Releases hold both, and transformers reads the former. Of two saves, one may be stale.
        chosen = next(each for each in candidates if each.suffix == "safetensors")
        get_dist_logger().info(f"{directory.path} holds a model as safetensors and as .bin: the former is read", [0])
        return chosen
    if candidates:
        given = sorted(
            file_names.index if file_names.index in names else file_names.single for file_names in candidates
        )
        raise CheckpointError(
            f"{directory.path} holds several {kind.name} checkpoints: {_format_names(given)}. Give the one to load"
        )
    plain = kind.names(is_safetensors=True)
    other_files = [name for name in names if name.endswith((*SINGLE_FILE_SUFFIXES, ".json"))]
    steps = [name for name in names if re.fullmatch(r"step-\d{8,}", name)]
    advice = (
        f"It has directories of steps: give one, such as {directory.path / steps[-1]}" if steps else "Check the path"
    )
    if "adapter_config.json" in names:
        advice = "It is an adapter of peft: booster.enable_lora(model, pretrained_dir=...) loads it, before boost()"
    raise CheckpointError(
        f"{directory.path} holds no {kind.name} checkpoint: found neither {plain.index} nor {plain.single} nor .bin"
        f" files, {f'only {_format_names(other_files)}' if other_files else 'nor any other checkpoint file'}. {advice}"
    ) from FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory.path))


def _check_index(
    directory: DirectoryReader, file_names: FileNames, manifest: Manifest, files: Sequence[TensorFile]
) -> None:
    if file_names.index not in manifest.documents and file_names.index not in directory.names:
        return
    path = directory.path / file_names.index
    named = _parse_index(_read_recorded(directory, file_names.index, manifest), str(path), file_names)
    for file in files:
        tensor_names = named.pop(file.path.name, [])
        _check_index_entries(tensor_names, file.specs, file.path, file_names.index)
        if len(tensor_names) != len(file.specs):
            raise CheckpointError(f"{path} lacks tensors of {file.path}: the files are from different saves")
    if named:
        raise CheckpointError(f"{path} names files that {file_names.manifest} does not: {_format_names(named)}")


def _changed_error(directory: Path) -> CheckpointError:
    error = CheckpointError(
        f"{directory} changed repeatedly while it was opened: another process saves into it. Load after it has finished"
    )
    error.__cause__ = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory))
    return error
