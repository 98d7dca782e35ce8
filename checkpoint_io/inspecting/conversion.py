"""Conversion of a checkpoint: file format, shard size, dtype, without the optimizer, or into a single file."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from booster.checkpoint_io.commit import list_directory, resolve
from booster.checkpoint_io.destination import SaveTarget
from booster.checkpoint_io.files.optimizer_values import MASTER_SUFFIX
from booster.checkpoint_io.files.strict_json import MAX_JSON_BYTES
from booster.checkpoint_io.inspecting.config_dtype import with_dtype
from booster.checkpoint_io.inspecting.inspection import (
    KINDS,
    CheckpointContents,
    StoredPart,
    dtype_name,
    read_training_state,
)
from booster.checkpoint_io.inspecting.mapped_tensors import mmap_tensors
from booster.checkpoint_io.layout import MODEL, OPTIMIZER, SAFETENSORS_SUFFIXES, SINGLE_FILE_SUFFIXES
from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.checkpoint_io.ranks import CheckpointGroup
from booster.checkpoint_io.saving.component import CheckpointPart
from booster.checkpoint_io.saving.save_request import SaveRequest
from booster.checkpoint_io.saving.saver import Saver
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.training.rotation import TRAINING_STATE, TRAINING_STATE_MANIFEST
from booster.errors import CheckpointError, ConfigError
from booster.interface import TensorSlice

__all__ = ["Conversion", "consolidate", "convert"]

CONVERTIBLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CHECKED_ELEMENTS = 2**20
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Conversion options.

    Attributes:
        is_safetensors: Format of the new files. Optional, defaults to that of the source.
        size_per_shard: Maximum shard size in MB (10**6 bytes).
        dtype: Dtype to convert floats to. Optional, defaults to no conversion. Float8, integers and bools are never
            converted, nor an optimizer's fp32 masters, counters and other scalars.
        keeps_optimizer: If False, keep only the models; training cannot be resumed without the optimizer.
        overwrites: If True, replace an existing checkpoint in the target.
    """

    is_safetensors: bool | None = None
    size_per_shard: int = 1024
    dtype: torch.dtype | None = None
    keeps_optimizer: bool = True
    overwrites: bool = False


def convert(storage: Storage, source: CheckpointContents, target: Path, conversion: Conversion) -> list[str]:
    """Write a converted checkpoint into another directory atomically, and return lines that describe the changes.

    Single process. Tensors are copied through memory mappings in small ranges.

    Args:
        storage: Storage of both.
        source: Checkpoint to convert; it is not changed.
        target: New directory.
        conversion: Conversion options.

    Raises:
        ConfigError: The target is inside the source's directory, is a file, or is not empty.
        CheckpointError: The source is damaged, values overflow the new dtype, or writing failed.
    """
    if target.suffix in SINGLE_FILE_SUFFIXES:
        raise ConfigError(
            f"{target} has the suffix of a file, but convert writes a directory: use consolidate for one file"
        )
    check_target(storage, source, target, overwrites=conversion.overwrites)
    parts = [part for part in source.parts if conversion.keeps_optimizer or part.kind == MODEL]
    if not parts:
        raise ConfigError(f"{source.path} holds nothing but an optimizer: leave --no-optimizer out")
    notes = [f"left out: {part.label}" for part in source.parts if part not in parts]
    with ExitStack() as stack:
        open_parts = [(part, stack.enter_context(part.open(storage, verifies=True))) for part in parts]
        documents = _training_documents(storage, source) if conversion.keeps_optimizer else {}
        request = SaveRequest(
            target=target,
            is_directory=True,
            parts=list(_parts(storage, source, open_parts, target, conversion, notes)),
            documents=documents,
            manifest_name=TRAINING_STATE_MANIFEST if documents else None,
            metadata=_metadata(source, open_parts[0][1]),
            is_stale=_is_stale(storage, target, {part.folder for part in parts}),
            action="converting",
        )
        Saver(CheckpointGroup(), storage).save(request)
    return notes


def consolidate(
    storage: Storage, source: CheckpointContents, part: StoredPart, target: Path, *, overwrites: bool = False
) -> None:
    """Write one part of a checkpoint into one file, atomically.

    Args:
        storage: Storage of both.
        source: Checkpoint; it is not changed.
        part: Part of the checkpoint.
        target: New file; its suffix determines the format.
        overwrites: If True, replace an existing file.

    Raises:
        ConfigError: The target is inside the source's directory, is a directory, has another suffix, or exists.
        CheckpointError: The source is damaged, or writing failed.
    """
    save_target = SaveTarget(target, part.kind, False, None, 1, target.suffix in SAFETENSORS_SUFFIXES)
    check_target(storage, source, target, overwrites=overwrites)
    with part.open(storage, verifies=True) as stored:
        checkpoint_part = CheckpointPart(
            kind=part.kind,
            names=save_target.names,
            slices=[TensorSlice.whole(*named, primary=True) for named in mmap_tensors(stored).items()],
            max_shard_bytes=save_target.max_shard_bytes,
            is_sharded=False,
            values=None if stored.groups is None else stored.groups.decode("utf-8", "surrogatepass"),
        )
    request = SaveRequest(target=target, is_directory=False, parts=[checkpoint_part], action="consolidating")
    Saver(CheckpointGroup(), storage).save(request)


def _parts(
    storage: Storage,
    source: CheckpointContents,
    open_parts: Sequence[tuple[StoredPart, StoredCheckpoint]],
    target: Path,
    conversion: Conversion,
    notes: list[str],
) -> Iterator[CheckpointPart]:
    folders: set[str] = set()
    for part, stored in open_parts:
        save_target = _save_target(part, target, conversion)
        # The documents of a directory go with its first part, which is the model if there is one.
        documents = {} if part.folder in folders else dict(_documents(storage, source, part.folder, notes))
        folders.add(part.folder)
        if part.kind == MODEL and conversion.dtype is not None and _CONFIG in documents:
            documents[_CONFIG] = with_dtype(documents[_CONFIG], dtype_name(conversion.dtype), _CONFIG)
        if part.kind == OPTIMIZER and stored.groups is not None:
            documents[save_target.names.groups] = stored.groups
        yield CheckpointPart(
            kind=part.kind,
            names=save_target.names,
            slices=_convert_dtypes(part, mmap_tensors(stored), conversion.dtype, notes),
            max_shard_bytes=save_target.max_shard_bytes,
            is_sharded=True,
            always_index=part.kind == OPTIMIZER,
            folder=part.folder,
            documents=documents,
        )


def _metadata(source: CheckpointContents, stored: StoredCheckpoint) -> Mapping[str, Any]:
    if source.manifest is not None:
        return source.manifest.metadata
    return {} if stored.manifest is None else stored.manifest.metadata


def _save_target(part: StoredPart, target: Path, conversion: Conversion) -> SaveTarget:
    was_safetensors = part.names.suffix == "safetensors" if part.names else part.path.suffix in SAFETENSORS_SUFFIXES
    is_safetensors = was_safetensors if conversion.is_safetensors is None else conversion.is_safetensors
    prefix = None if part.names is None else part.names.prefix
    if part.kind not in (MODEL, OPTIMIZER):
        is_safetensors = True  # the only format of these parts
    return SaveTarget(target, part.kind, True, prefix, conversion.size_per_shard, is_safetensors)


# Tensors.


def _convert_dtypes(
    part: StoredPart, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, notes: list[str]
) -> list[TensorSlice]:
    slices: list[TensorSlice] = []
    changed: Counter[torch.dtype] = Counter()
    for name, tensor in tensors.items():
        full = TensorSlice.whole(name, tensor, primary=True)
        if dtype is not None and tensor.dtype != dtype and _is_convertible(part, name, tensor):
            _check_range(part, name, tensor, dtype)
            changed[tensor.dtype] += 1
            full = dataclasses.replace(full, dtype=dtype)
        slices.append(full)
    num_packed = sum(tensor.is_floating_point() and tensor.dtype not in CONVERTIBLE for tensor in tensors.values())
    if dtype is not None and num_packed and part.kind == MODEL:
        notes.append(f"{part.label}: {num_packed} tensors in narrower dtypes stay, as they go with scales")
    for before, count in changed.items():
        loss = ", with fewer bits: values are rounded" if dtype is not None and _loses_precision(before, dtype) else ""
        notes.append(f"{part.label}: {count} tensors from {dtype_name(before)} to {dtype_name(dtype or before)}{loss}")
    return slices


def _is_convertible(part: StoredPart, name: str, tensor: torch.Tensor) -> bool:
    if tensor.dtype not in CONVERTIBLE or part.kind not in (MODEL, OPTIMIZER):
        return False
    return part.kind == MODEL or not (name.endswith(MASTER_SUFFIX) or tensor.dim() == 0)


def _loses_precision(source: torch.dtype, target: torch.dtype) -> bool:
    return torch.finfo(target).eps > torch.finfo(source).eps or torch.finfo(target).max < torch.finfo(source).max


def _check_range(part: StoredPart, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max:
        return
    if part.kind == OPTIMIZER and dtype == torch.float16:
        raise ConfigError(
            "fp16 has too small a range for an optimizer's squared gradients, most of which would become 0: give bf16"
            " or fp32, or --no-optimizer"
        )
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHECKED_ELEMENTS):
        chunk = flat[start : start + _CHECKED_ELEMENTS]
        low, high = (float(end) for end in torch.aminmax(chunk))
        if -torch.finfo(dtype).max <= low and high <= torch.finfo(dtype).max:
            continue  # False for NaN and inf, which are converted unchanged
        if bool((chunk.isfinite() & chunk.to(dtype).isinf()).any()):
            raise CheckpointError(
                f"{name!r} of the {part.label} holds values beyond {torch.finfo(dtype).max:g}, the largest of"
                f" {dtype_name(dtype)}: give a dtype with a wider range, such as bf16 or fp32"
            )


# Documents.


def _documents(
    storage: Storage, source: CheckpointContents, folder: str, notes: list[str]
) -> Iterator[tuple[str, bytes]]:
    if not source.is_directory:
        return
    directory = source.path / folder
    is_of_checkpoint = _belongs_to_checkpoint(storage, directory)
    for name in list_directory(storage, directory):
        if name.startswith(".") or is_of_checkpoint(name) or name.startswith(TRAINING_STATE.removesuffix("json")):
            continue
        path = resolve(storage, directory, name)
        reason = _skip_reason(storage, path)
        if reason is None:
            yield name, storage.read_file(path, max_bytes=MAX_JSON_BYTES, inside=directory)
        elif name not in {other.folder for other in source.parts}:
            notes.append(f"left out: {f'{folder}/{name}'.lstrip('/')} ({reason})")


def _skip_reason(storage: Storage, path: Path) -> str | None:
    kind = storage.kind(Path(os.path.realpath(path)))
    if kind != "file":
        return "not a regular file" if kind != "directory" else "a directory"
    if path.suffix in (*SINGLE_FILE_SUFFIXES, ".ckpt", ".pkl"):
        return "tensors or a pickle that do not belong to the checkpoint"
    with storage.open_regular(path) as file:
        return None if storage.size(file) <= MAX_JSON_BYTES else "larger than 64 MiB"


def _training_documents(storage: Storage, source: CheckpointContents) -> dict[str, bytes]:
    raw = read_training_state(storage, source)
    return {} if raw is None else {TRAINING_STATE: raw}


def _belongs_to_checkpoint(storage: Storage, directory: Path) -> Callable[[str], bool]:
    """Return a predicate for names that belong to a checkpoint in the directory, such as its shards."""
    names = list_directory(storage, directory) if storage.kind(directory) == "directory" else []
    all_names = [file_names for kind in KINDS for name in names if (file_names := kind.names_of(name)) is not None]
    return lambda name: any(owner.may_have_written(name) or name == owner.groups for owner in all_names)


def _is_stale(storage: Storage, target: Path, folders: Iterable[str]) -> Callable[[str], bool]:
    """Return a predicate for files of the target, by relative name, that belong to the replaced checkpoint."""
    belongs_to_checkpoint = {folder: _belongs_to_checkpoint(storage, target / folder) for folder in ("", *folders)}

    def is_stale(name: str) -> bool:
        folder, _, base = name.rpartition("/")
        return name in (TRAINING_STATE, TRAINING_STATE_MANIFEST) or (
            folder in belongs_to_checkpoint and belongs_to_checkpoint[folder](base)
        )

    return is_stale


def check_target(storage: Storage, source: CheckpointContents, target: Path, *, overwrites: bool) -> None:
    """Check that the target may be written.

    Args:
        storage: Storage of both.
        source: Checkpoint to convert; it must not be changed.
        target: New file or directory.
        overwrites: If True, an existing target is allowed.

    Raises:
        ConfigError: Source and target are nested, or the target exists.
    """
    real_target, real_source = Path(os.path.realpath(target)), Path(os.path.realpath(source.path))
    if (
        real_target == real_source
        or (source.is_directory and real_target.is_relative_to(real_source))
        or real_source.is_relative_to(real_target)
    ):
        raise ConfigError(
            f"{target} and {source.path} are nested or the same, but the source is never changed: give another path"
        )
    kind = storage.kind(real_target)
    is_empty = kind is None or (kind == "directory" and not list_directory(storage, real_target))
    if not is_empty and not overwrites:
        raise ConfigError(f"{target} exists already: give a new path, or --overwrite to replace the checkpoint there")
