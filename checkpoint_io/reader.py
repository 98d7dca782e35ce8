"""Opens any checkpoint, file or directory, and says what it holds before a tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from booster.checkpoint_io.layout import OPTIMIZER, SINGLE_FILE_SUFFIXES, FileNames, Kind
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.strict_json import parse_json
from booster.checkpoint_io.tensor_files import GROUPS_KEY, TensorFile, open_tensor_file
from booster.errors import CheckpointError
from booster.interface import TensorSpec

__all__ = ["Checkpoint", "open_checkpoint", "read_json"]

MAX_JSON_BYTES = 64 * 2**20


class Checkpoint:
    """An open checkpoint; a context manager that closes its files.

    Args:
        path: What the user gave.
        files: The files of tensors, open.
        groups: The optimizer's plain values as JSON, where the checkpoint is an optimizer's.

    Raises:
        CheckpointError: A tensor is in two files.
    """

    def __init__(self, path: Path, files: Sequence[TensorFile], groups: bytes | None) -> None:
        self.path = path
        self.groups = groups
        self._files = list(files)
        self._file_of: dict[str, TensorFile] = {}
        for file in self._files:
            twice = next((name for name in file.specs if name in self._file_of), None)
            if twice is not None:
                raise CheckpointError(f"{path}: {twice!r} is in two files, one of them stale: remove what is left over")
            self._file_of.update(dict.fromkeys(file.specs, file))

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and format of every tensor, from the files that hold them."""
        return {name: file.specs[name] for name, file in self._file_of.items()}

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor, on the CPU. The caller must not write into it."""
        return self._file_of[name].read(name)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(storage: Storage, path: str | os.PathLike[str], kind: Kind) -> Checkpoint:
    """Opens a file of tensors, an index, or a directory.

    Args:
        storage: Where it is.
        path: The file or directory. In a directory, the index decides which files belong to the checkpoint; without
            one, the single file of the kind's own name is taken.
        kind: Which of the checkpoints of a directory.

    Raises:
        CheckpointError: Nothing there, more than one candidate, names or links that leave the directory, or damage.
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise CheckpointError(f"{path} does not exist: give a file or a directory that holds a {kind.name}")
    if path.is_dir():
        path = path / _find_in_directory(storage, path, kind)
        return _open_named(storage, path, kind, inside=path.parent)
    return _open_named(storage, path, kind, inside=None)


def read_json(storage: Storage, path: Path, *, inside: Path | None = None) -> bytes:
    """Returns the bytes of a JSON file of at most 64 MiB.

    Raises:
        CheckpointError: Missing, no regular file, or larger.
    """
    with storage.open_regular(path, inside=inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, and {MAX_JSON_BYTES} are allowed: it is no index")
        return b"".join(iter(lambda: file.read(2**20), b""))


def _find_in_directory(storage: Storage, directory: Path, kind: Kind) -> str:
    names = storage.names(directory)
    found = [(name, owner) for name in names if (owner := kind.names_of(name)) is not None]
    plain = [(name, owner) for name, owner in found if owner.prefix is None]
    candidates = {owner: owner.index if owner.index in names else owner.single for _, owner in plain or found}
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    tensor_files = [name for name in names if name.endswith((*SINGLE_FILE_SUFFIXES, ".json"))]
    if not candidates:
        plain_names = kind.names(is_safetensors=True)
        raise CheckpointError(
            f"{directory} holds no {kind.name} checkpoint: neither {plain_names.index} nor {plain_names.single} nor"
            f" their .bin forms are there, only {_listed(tensor_files)}. Give the file itself"
        )
    raise CheckpointError(
        f"{directory} holds several {kind.name} checkpoints: {_listed(sorted(candidates.values()))}. Give the one to"
        " load"
    )


def _open_named(storage: Storage, path: Path, kind: Kind, inside: Path | None) -> Checkpoint:
    if path.suffix != ".json":
        with ExitStack() as stack:
            file = open_tensor_file(storage, path, inside=inside)
            stack.callback(file.close)
            text = file.metadata.get(GROUPS_KEY)
            checkpoint = Checkpoint(path, [file], None if text is None else text.encode("utf-8", "surrogatepass"))
            stack.pop_all()
        return checkpoint
    owner = kind.names_of(path.name)
    if owner is None or path.name != owner.index:
        expected = kind.names(is_safetensors=True).index
        raise CheckpointError(f"{path} is no {kind.name} index: give a directory, a file of tensors, or {expected}")
    groups = read_json(storage, path.parent / owner.groups, inside=path.parent) if kind == OPTIMIZER else None
    return _open_indexed(storage, path, owner, inside, groups)


def _open_indexed(
    storage: Storage, path: Path, owner: FileNames, inside: Path | None, groups: bytes | None
) -> Checkpoint:
    directory = path.parent
    named = _parse_index(read_json(storage, path, inside=inside), path, owner)
    with ExitStack() as stack:
        files = []
        for file_name, names in named.items():
            file = open_tensor_file(storage, directory / file_name, inside=directory)
            stack.callback(file.close)
            files.append(file)
            lost = [name for name in names if name not in file.specs]
            if lost:
                raise CheckpointError(
                    f"{directory / file_name} lacks {len(lost)} tensors that {path.name} says it holds, such as"
                    f" {_listed(lost)}: the files are of different saves, or one is damaged"
                )
        checkpoint = Checkpoint(path, files, groups)
        stack.pop_all()
    return checkpoint


def _parse_index(raw: bytes, path: Path, owner: FileNames) -> Mapping[str, list[str]]:
    document = parse_json(raw, str(path))
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no weight_map: it is no index, or damaged. Take another copy of it")
    named: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        named.setdefault(_checked_file_name(file_name, path, owner), []).append(name)
    for file_name in _empty_shards(document, owner):
        named.setdefault(file_name, [])
    return named


def _empty_shards(document: Mapping[str, Any], owner: FileNames) -> Iterator[str]:
    # An optimizer that never stepped has an index over one shard without tensors, which no entry names.
    if not document["weight_map"]:
        yield owner.shard(1, 1)


def _checked_file_name(file_name: Any, path: Path, owner: FileNames) -> str:
    is_plain = (
        isinstance(file_name, str)
        and len(file_name) <= 255
        and not file_name.startswith(".")
        and not any(character in '/\\:*?"<>|' or not character.isprintable() for character in file_name)
        and file_name.endswith(f".{owner.suffix}")
    )
    if not is_plain:
        raise CheckpointError(
            f"{path} names the file {str(file_name)[:200]!r}: an index may name only .{owner.suffix} files beside"
            " itself. Do not trust this checkpoint"
        )
    return str(file_name)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name[:200]) for name in names[:10])
    return (f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown) or "nothing"
