"""Conversion of a checkpoint: file format, shard size, dtype, without the optimizer, or into a single file."""

from __future__ import annotations

import dataclasses
import io
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from booster.checkpoint_io.commit import paths_in, replaced_file
from booster.checkpoint_io.formats.json import MAX_JSON_BYTES
from booster.checkpoint_io.formats.optimizer_values import (
    MASTER_SUFFIX,
    MASTER_WEIGHTS,
    PARAMETER_NAMES,
    parse_values,
)
from booster.checkpoint_io.layout import (
    BIN_SUFFIXES,
    MODEL,
    OPTIMIZER,
    SAFETENSORS_SUFFIXES,
    SINGLE_FILE_SUFFIXES,
    TRAINING_STATE,
    TRAINING_STATE_MANIFEST,
    save_target,
)
from booster.checkpoint_io.loading.reader import StoredCheckpoint, open_directory
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.saving.part import CheckpointPart
from booster.checkpoint_io.saving.save import Saver, SaveRequest
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError, ConfigError
from booster.interface import TensorSlice

from .inspect import KINDS, CheckpointContents, StoredPart, dtype_name, read_training_state

_KEYS = ("dtype", "torch_dtype")  # transformers 5, and earlier versions
_SUB_CONFIG = "_config"
_QUANTIZATION_CONFIG = "quantization_config"  # describes how some weights are packed, not the dtype of all weights


def with_dtype(raw: bytes, dtype: str, source_name: str) -> bytes:
    """Replace the dtype in a config; return the same bytes if it does not change or the config has none.

    Args:
        raw: JSON text; infinities are accepted, because some models' configs have them.
        dtype: New dtype, as torch's name without "torch.".
        source_name: File name for messages.

    Raises:
        CheckpointError: The text is not a JSON object.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source_name} is not JSON ({error}): take another copy of it") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{source_name} is not a JSON object: take another copy of it")
    if not _replace(config, dtype):
        return raw
    return (json.dumps(config, indent=2) + "\n").encode("utf-8")


def _replace(config: dict[str, Any], dtype: str) -> bool:
    has_changed = False
    for key, value in config.items():
        if key in _KEYS and isinstance(value, str) and value != dtype:
            config[key] = dtype
            has_changed = True
        elif key.endswith(_SUB_CONFIG) and key != _QUANTIZATION_CONFIG and isinstance(value, dict):
            has_changed = _replace(value, dtype) or has_changed
    return has_changed


def _mmap_tensors(stored: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """Map every tensor of a checkpoint, by name; pages are read on access and can be evicted.

    The tensors stay valid after the checkpoint is closed. Writes change the process's memory, never the file.
    """
    mappings: dict[int, mmap.mmap] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in stored.specs.items():
        location = stored.locate(name)
        if location is None:
            tensors[name] = stored.read(name)  # .bin files are mapped by torch
            continue
        file, offset = location
        if spec.num_bytes > 0 and file.descriptor not in mappings:
            # One mapping per file, because the number of mappings is limited. Private: copy on write.
            num_bytes = stored.storage.size(file)
            mappings[file.descriptor] = mmap.mmap(file.descriptor, num_bytes, access=mmap.ACCESS_COPY)
        if spec.num_bytes == 0:
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            flat = torch.frombuffer(mappings[file.descriptor], dtype=spec.dtype, count=spec.numel, offset=offset)
            tensors[name] = flat.reshape(spec.shape)
    return tensors


CONVERTIBLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CHECKED_ELEMENTS = 2**20
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Conversion options.

    Attributes:
        is_safetensors: Format of the new files. Optional, defaults to that of the source.
        size_per_shard: Maximum shard size in MB (10**6 bytes), or with a unit, such as "5GB".
        dtype: Dtype to convert floats to. Optional, defaults to no conversion. Float8, integers and bools are never
            converted, nor an optimizer's fp32 masters, counters and other scalars.
        keeps_optimizer: If False, keep only the models; training cannot be resumed without the optimizer.
        overwrites: If True, replace an existing checkpoint in the target.
    """

    is_safetensors: bool | None = None
    size_per_shard: float | str = 1024
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
    _check_target(storage, source, target, overwrites=conversion.overwrites)
    parts = [part for part in source.parts if conversion.keeps_optimizer or part.kind == MODEL]
    if not parts:
        raise ConfigError(f"{source.path} holds nothing but an optimizer: leave --no-optimizer out")
    notes = [f"left out: {part.label}" for part in source.parts if part not in parts]
    with ExitStack() as stack:
        open_parts = [(part, stack.enter_context(part.open(storage, verifies=True))) for part in parts]
        training_state = read_training_state(storage, source) if conversion.keeps_optimizer else None
        documents = {} if training_state is None else {TRAINING_STATE: training_state}
        manifest = source.manifest or open_parts[0][1].manifest
        request = SaveRequest(
            parts=list(_parts(storage, source, open_parts, target, conversion, notes)),
            documents=documents,
            manifest_name=TRAINING_STATE_MANIFEST if documents else None,
            metadata={} if manifest is None else manifest.metadata,
            is_stale=_is_stale(storage, target, {part.folder for part in parts}),
        )
        Saver(CheckpointGroup(), storage).save(lambda: request, "converting")
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
    _check_suffix(target, SINGLE_FILE_SUFFIXES)
    file = save_target(target, part.kind, shard=False)
    _check_target(storage, source, target, overwrites=overwrites)
    with part.open(storage, verifies=True) as stored:
        checkpoint_part = CheckpointPart(
            target=file,
            slices=[TensorSlice.full(*named, primary=True) for named in _mmap_tensors(stored).items()],
            values=None if stored.groups is None else stored.groups.decode("utf-8", "surrogatepass"),
        )
    Saver(CheckpointGroup(), storage).save(lambda: SaveRequest(parts=[checkpoint_part]), "consolidating")


def _check_suffix(target: Path, allowed: Sequence[str]) -> None:
    if target.suffix not in allowed:
        raise ConfigError(f"{target} is to be one file: give a name that ends in {' or '.join(allowed)}")


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
        was_safetensors = part.names.suffix == "safetensors" if part.names else part.path.suffix in SAFETENSORS_SUFFIXES
        is_safetensors = was_safetensors if conversion.is_safetensors is None else conversion.is_safetensors
        if part.kind not in (MODEL, OPTIMIZER):
            is_safetensors = True  # the only format of these parts
        prefix = None if part.names is None else part.names.prefix
        shards = save_target(
            target,
            part.kind,
            shard=True,
            prefix=prefix,
            size_per_shard=conversion.size_per_shard,
            use_safetensors=is_safetensors,
        )
        # The documents of a directory go with its first part, which is the model if there is one.
        documents = {} if part.folder in folders else dict(_documents(storage, source, part.folder, notes))
        folders.add(part.folder)
        if part.kind == MODEL and conversion.dtype is not None and _CONFIG in documents:
            documents[_CONFIG] = with_dtype(documents[_CONFIG], dtype_name(conversion.dtype), _CONFIG)
        if part.kind == OPTIMIZER and stored.groups is not None:
            documents[shards.names.groups] = stored.groups
        yield CheckpointPart(
            target=shards,
            slices=_convert_dtypes(part, _mmap_tensors(stored), conversion.dtype, notes),
            always_index=part.kind == OPTIMIZER,
            folder=part.folder,
            documents=documents,
        )


def _convert_dtypes(
    part: StoredPart, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, notes: list[str]
) -> list[TensorSlice]:
    slices: list[TensorSlice] = []
    changed: Counter[torch.dtype] = Counter()
    for name, tensor in tensors.items():
        full = TensorSlice.full(name, tensor, primary=True)
        is_kept = part.kind == OPTIMIZER and (name.endswith(MASTER_SUFFIX) or tensor.dim() == 0)
        is_convertible = tensor.dtype in CONVERTIBLE and part.kind in (MODEL, OPTIMIZER) and not is_kept
        if dtype is not None and tensor.dtype != dtype and is_convertible:
            _check_range(part, name, tensor, dtype)
            changed[tensor.dtype] += 1
            full = dataclasses.replace(full, dtype=dtype)
        slices.append(full)
    num_packed = sum(tensor.is_floating_point() and tensor.dtype not in CONVERTIBLE for tensor in tensors.values())
    if dtype is not None and num_packed and part.kind == MODEL:
        notes.append(f"{part.label}: {num_packed} tensors in narrower dtypes stay, as they go with scales")
    for before, count in changed.items():
        assert dtype is not None, "tensors change only with a dtype"
        old, new = torch.finfo(before), torch.finfo(dtype)
        loss = ", with fewer bits: values are rounded" if new.eps > old.eps or new.max < old.max else ""
        notes.append(f"{part.label}: {count} tensors from {dtype_name(before)} to {dtype_name(dtype)}{loss}")
    return slices


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


def _documents(
    storage: Storage, source: CheckpointContents, folder: str, notes: list[str]
) -> Iterator[tuple[str, bytes]]:
    if not source.is_directory:
        return
    directory = open_directory(storage, source.path / folder)
    is_of_checkpoint = _belongs_to_checkpoint(storage, directory.path)
    for name in directory.names:
        if name.startswith(".") or is_of_checkpoint(name) or name.startswith(TRAINING_STATE.removesuffix("json")):
            continue
        reason = _skip_reason(storage, directory.paths[name])
        if reason is None:
            yield name, directory.read(name)
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


def _belongs_to_checkpoint(storage: Storage, directory: Path) -> Callable[[str], bool]:
    """Return a predicate for names that belong to a checkpoint in the directory, such as its shards."""
    names = sorted(paths_in(storage, directory)) if storage.kind(directory) == "directory" else []
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


def _check_target(storage: Storage, source: CheckpointContents, target: Path, *, overwrites: bool) -> None:
    """Raise `ConfigError` if source and target are nested, or the target exists and may not be overwritten."""
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
    is_empty = kind is None or (kind == "directory" and not paths_in(storage, real_target))
    if not is_empty and not overwrites:
        raise ConfigError(f"{target} exists already: give a new path, or --overwrite to replace the checkpoint there")


# Exported format: {"state": {number: {name: tensor or number}}, "param_groups": [{..., "params": [numbers]}]}, as in
# torch's optimizers. Numbers count the parameters over all groups in order, so the optimizer that loads it must be
# built over the same parameters in the same order. Two more keys are ignored by torch: the names of the parameters by
# number and, on request, their fp32 master weights. These are not in "state", because load_state_dict would round them
# to the parameters' dtype.


def export_optimizer(
    storage: Storage,
    source: CheckpointContents,
    target: Path,
    *,
    with_master_weights: bool = False,
    overwrites: bool = False,
) -> list[str]:
    """Write the optimizer of a checkpoint as a torch state_dict, and return the parameters' names by number.

    Single process. Tensors are copied through memory mappings one at a time.

    Args:
        storage: Storage of both.
        source: Checkpoint; it is not changed.
        target: New file.
        with_master_weights: If True, add the fp32 master weights.
        overwrites: If True, replace an existing file.

    Raises:
        ConfigError: The target is inside the source's directory, is a directory, has another suffix, or exists.
        CheckpointError: The source is damaged, values cannot be loaded by torch, or writing failed.
    """
    part = source.only_part(OPTIMIZER)
    _check_suffix(target, BIN_SUFFIXES)
    _check_target(storage, source, target, overwrites=overwrites)
    with part.open(storage, verifies=True) as stored:
        if stored.groups is None:
            raise CheckpointError(f"{stored.path} holds no param groups: it is not an optimizer of save_optimizer")
        values = parse_values(stored.groups, stored.specs, str(stored.path))
        exported = _torch_state_dict(values, _mmap_tensors(stored), with_master_weights=with_master_weights)
        _check_plain(exported)
        with replaced_file(storage, target) as new_path, storage.create(new_path) as file:
            _save(exported, _SequentialFile(storage, file))
            storage.sync(file)
    return list(exported[PARAMETER_NAMES])


def _torch_state_dict(
    values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, with_master_weights: bool = False
) -> dict[str, Any]:
    """Convert a stored optimizer, with tensors by `<parameter>.<state>`, to a state_dict of a torch optimizer."""
    names = [name for group in values["param_groups"] for name in group["params"]]
    number_of = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, torch.Tensor] = {}
    for full_name, tensor in tensors.items():
        number, key = _split_state_name(full_name, number_of)
        if f".{key}" == MASTER_SUFFIX:
            masters[number] = tensor
        else:
            state.setdefault(number, {})[key] = tensor
    for name, numbers in values["numbers"].items():
        state.setdefault(number_of[name], {}).update(numbers)
    exported = {
        "state": dict(sorted(state.items())),
        "param_groups": [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in values["param_groups"]
        ],
        PARAMETER_NAMES: names,
    }
    if not with_master_weights:
        return exported
    if not masters:
        raise CheckpointError(
            "the optimizer holds no fp32 master weights, because its parameters were fp32: leave --master-weights out"
        )
    return {**exported, MASTER_WEIGHTS: dict(sorted(masters.items()))}


def _save(exported: Mapping[str, Any], file: _SequentialFile) -> None:
    try:
        torch.save(exported, cast("IO[bytes]", file))
    except RuntimeError as error:
        # torch's writer replaces the OSError of the file, such as a full disk, with an error of its own.
        raise file.failure or error from error


class _SequentialFile:
    """Sequential file object for `torch.save` over a storage."""

    def __init__(self, storage: Storage, file: OpenFile) -> None:
        self._storage = storage
        self._file = file
        self._offset = 0
        self.failure: OSError | None = None

    def write(self, data: memoryview) -> int:
        try:
            self._storage.write_at(self._file, data, self._offset)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._offset += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


def _check_plain(exported: Mapping[str, Any]) -> None:
    for index, group in enumerate(exported["param_groups"]):
        for key, value in group.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            try:
                torch.load(buffer, weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    f"{key!r} of param group {index} is a {type(value).__name__}, which torch.load(weights_only=True)"
                    " rejects: use plain numbers, tuples or tensors there"
                ) from error


def _split_state_name(full_name: str, number_of: Mapping[str, int]) -> tuple[int, str]:
    name, _, key = full_name.rpartition(".")
    if name not in number_of:
        raise CheckpointError(
            f"the state {full_name!r} belongs to no parameter of the groups: the checkpoint is damaged. Take another"
            " copy of it"
        )
    return number_of[name], key
