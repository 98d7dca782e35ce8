"""Target of a save, and the file layout of Hugging Face: shards and file names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from booster.errors import ConfigError
from booster.interface.checkpoint_io import shard_bytes

# O_DIRECT requires memory, offset and length in multiples of this. So data starts at a page, and ranks that write into
# one file split it at pages.
PAGE_BYTES = 4096

SAFETENSORS_SUFFIXES = (".safetensors",)
BIN_SUFFIXES = (".bin", ".pt", ".pth")
SINGLE_FILE_SUFFIXES = SAFETENSORS_SUFFIXES + BIN_SUFFIXES
TRAINING_STATE = "training_state.json"
TRAINING_STATE_MANIFEST = "training_state.manifest.json"
_SECOND = "b"
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """Kind of checkpoint part, with the stems of its file names in each format."""

    name: str
    safetensors_stem: str
    bin_stem: str

    def names(self, *, is_safetensors: bool, prefix: str | None = None) -> FileNames:
        """Return the file names in one format and with one prefix."""
        stem, suffix = (self.safetensors_stem, "safetensors") if is_safetensors else (self.bin_stem, "bin")
        variant = f".{prefix}" if prefix else ""
        return FileNames(
            stem=stem,
            suffix=suffix,
            prefix=prefix,
            single=f"{stem}{variant}.{suffix}",
            index=f"{stem}.{suffix}.index{variant}.json",
            manifest=f"{stem}.{suffix}.manifest{variant}.json",
            groups=f"optimizer_groups{variant}.json",
        )

    def names_of(self, file_name: str) -> FileNames | None:
        """Return the file names that an index, a manifest or a single file of this kind belongs to, else None."""
        for is_safetensors in (True, False):
            default_names = self.names(is_safetensors=is_safetensors)
            variant = rf"(?:\.({_PREFIX.pattern}))?"
            record = re.fullmatch(
                rf"{default_names.stem}\.{default_names.suffix}\.(?:index|manifest){variant}\.json", file_name
            )
            match = record or re.fullmatch(rf"{default_names.stem}{variant}\.{default_names.suffix}", file_name)
            if match is None:
                continue
            found = self.names(is_safetensors=is_safetensors, prefix=match.group(1))
            if file_name in (found.index, found.manifest, found.single):
                return None if found.is_shard_like(file_name) else found
        return None


# Note [Second names]: transformers and others read a model by its index, which may name any files. A save over an older
# one gives shards names that the older index does not use: by turns the usual ones and second ones, such as
# `model-00001-of-00002.b.safetensors`. So the new shards lie beside the old ones until the new index replaces the old
# one, and every reader finds all of the old model or all of the new one, whenever the save is killed.


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """Names of the files of one checkpoint part.

    Attributes:
        stem: Start of every tensor file's name.
        suffix: "safetensors" or "bin".
        prefix: Hugging Face's `variant`, between stem and number.
        single: Name of an unsharded tensor file.
        index: Name of the index, which maps tensors to shards.
        manifest: Name of the manifest, with sizes and checksums of all other files.
        groups: Name of the file with the optimizer's plain values.
    """

    stem: str
    suffix: str
    prefix: str | None
    single: str
    index: str
    manifest: str
    groups: str

    def shard(self, number: int, num_shards: int) -> str:
        """Return the name of a shard; numbers start at 1."""
        return f"{self.stem}{self._variant}-{number:05d}-of-{num_shards:05d}.{self.suffix}"

    def second_shard(self, shard: str) -> str:
        """Return the other name of a shard, for a save over one that uses the first; see Note [Second names]."""
        return f"{shard.removesuffix(self.suffix)}{_SECOND}.{self.suffix}"

    def may_have_written(self, file_name: str) -> bool:
        """Return whether a save with these names may have written the file."""
        shard = rf"{re.escape(self.stem + self._variant)}-\d{{5,}}-of-\d{{5,}}(\.{_SECOND})?\.{self.suffix}"
        return file_name in (self.single, self.index, self.manifest) or re.fullmatch(shard, file_name) is not None

    @staticmethod
    def is_shard_like(file_name: str) -> bool:
        """Return whether the name is numbered like a shard's."""
        return re.search(r"-\d{5,}-of-\d{5,}\.", file_name) is not None

    @property
    def _variant(self) -> str:
        return f".{self.prefix}" if self.prefix else ""


# In the metadata of a save that leaves out the frozen parameters of its models.
EXCLUDES_FROZEN = "excludes_frozen_parameters"

MODEL = FileKind(name="model", safetensors_stem="model", bin_stem="pytorch_model")
OPTIMIZER = FileKind(name="optimizer", safetensors_stem="optimizer", bin_stem="optimizer")
RANDOM_STATE = FileKind(name="random_state", safetensors_stem="random_state", bin_stem="random_state")
ADAPTER = FileKind(name="adapter", safetensors_stem="adapter_model", bin_stem="adapter_model")
GRADIENTS = FileKind(name="gradients", safetensors_stem="gradients", bin_stem="gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Assignment of tensors to files.

    Attributes:
        files: Tensor names by file name, in the order of the model.
        index: Name of the index file, or None for a single file without one.
    """

    files: dict[str, tuple[str, ...]]
    index: str | None


def is_valid_prefix(prefix: str) -> bool:
    """Return whether the prefix can be parsed from a file name unambiguously."""
    return _PREFIX.fullmatch(prefix) is not None and not FileNames.is_shard_like(f"{prefix}.")


def plan_files(
    sizes: Mapping[str, int], names: FileNames, *, max_shard_bytes: int, always_index: bool = False
) -> FilePlan:
    """Assign full tensors to shards in order; only a single tensor's shard may exceed the maximum.

    Args:
        sizes: Size of every tensor in bytes, by name.
        names: File names.
        max_shard_bytes: Maximum shard size; a single larger tensor gets its own larger shard.
        always_index: If True, number the files and write an index even for a single file.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, size in sizes.items():
        if shards[-1] and shard_bytes + size > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
    if len(shards) == 1 and not always_index:
        return FilePlan(files={names.single: tuple(shards[0])}, index=None)
    files = {names.shard(number, len(shards)): tuple(shard) for number, shard in enumerate(shards, start=1)}
    return FilePlan(files=files, index=names.index)


def index_document(plan: FilePlan, sizes: Mapping[str, int], num_parameters: int | None = None) -> dict[str, Any]:
    """Return the index in the format of transformers.

    Args:
        plan: Files.
        sizes: Size of every tensor in bytes, by name.
        num_parameters: Number of elements of the model's parameters. Optional; omitted for optimizers.
    """
    parameter_count = {} if num_parameters is None else {"total_parameters": num_parameters}
    file_of = {name: file_name for file_name, names in plan.files.items() for name in names}
    return {
        "metadata": {**parameter_count, "total_size": sum(sizes.values())},
        "weight_map": dict(sorted(file_of.items())),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Path and format of a part of a save.

    Attributes:
        path: File or directory, absolute.
        kind: Kind of part.
        names: File names.
        is_directory: If True, write into a directory. If False, write the one file that the path names.
        max_shard_bytes: Maximum file size; a single larger tensor gets its own larger file.
    """

    path: Path
    kind: FileKind
    names: FileNames
    is_directory: bool
    max_shard_bytes: int

    @property
    def other_names(self) -> FileNames:
        """File names of the same part in the other format."""
        return self.kind.names(is_safetensors=self.names.suffix != "safetensors", prefix=self.names.prefix)

    def with_kind(self, kind: FileKind) -> SaveTarget:
        """Return the target of a part of another kind in the same directory, always of safetensors."""
        return replace(self, kind=kind, names=kind.names(is_safetensors=True))


def save_target(
    checkpoint: str | os.PathLike[str],
    kind: FileKind,
    *,
    shard: bool,
    prefix: str | None = None,
    size_per_shard: float | str = 1,
    use_safetensors: bool | None = None,
) -> SaveTarget:
    """Return the target for the arguments of a save; see `CheckpointIO.save_model`.

    Raises:
        ConfigError: Invalid or contradictory arguments.
    """
    path = as_path(checkpoint)
    max_shard_bytes = shard_bytes(size_per_shard)
    is_directory = shard or not path.suffix
    is_safetensors = (shard or path.suffix not in BIN_SUFFIXES) if use_safetensors is None else use_safetensors
    if prefix is not None and not is_directory:
        raise ConfigError(
            f"prefix={prefix!r} goes into the names of files in a directory, but {path} is one file: leave prefix out,"
            f" or give a directory, such as {str(path.with_suffix(''))!r}"
        )
    if prefix is not None and not is_valid_prefix(prefix):
        raise ConfigError(
            f"prefix={prefix!r} is ambiguous within a file name: use letters, digits, '_' and '-', such as 'fp16'"
        )
    if not is_directory:
        check_suffix(path, is_safetensors=is_safetensors)
    return SaveTarget(
        path=path.absolute(),
        kind=kind,
        names=kind.names(is_safetensors=is_safetensors, prefix=prefix),
        is_directory=is_directory,
        max_shard_bytes=max_shard_bytes if shard else sys.maxsize,
    )


def as_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Convert the user's path.

    Raises:
        ConfigError: The path is empty, or no file can have it as its name.
    """
    text = os.fspath(checkpoint)
    if not text:
        raise ConfigError("the checkpoint's path is empty: give a file or a directory")
    if "\0" in text or text.encode(errors="ignore").decode() != text:
        raise ConfigError(
            f"the checkpoint's path {text!r} has a character that is NUL or not in UTF-8: give one without it"
        )
    return Path(text)


def check_suffix(path: Path, *, is_safetensors: bool) -> None:
    """Check that the suffix of a file is one of its format.

    Raises:
        ConfigError: There is no suffix, or it is another one.
    """
    allowed, other = (SAFETENSORS_SUFFIXES, BIN_SUFFIXES) if is_safetensors else (BIN_SUFFIXES, SAFETENSORS_SUFFIXES)
    if path.suffix in allowed:
        return
    if path.suffix in other:
        raise ConfigError(
            f"{path} ends in {path.suffix!r}, but use_safetensors={is_safetensors} writes another format: leave"
            f" use_safetensors out, or give a name that ends in {' or '.join(allowed)}"
        )
    raise ConfigError(
        f"{path} {f'ends in {path.suffix!r}' if path.suffix else 'has no suffix'}, but the suffix determines the format"
        f" of a single file: give a name that ends in {' or '.join(SINGLE_FILE_SUFFIXES)}, or for a directory pass"
        " shard=True"
    )
