"""Export of a stored optimizer as a plain torch state_dict with numbered parameters, in one `torch.save` file."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from booster.checkpoint_io.commit import Transaction
from booster.checkpoint_io.destination import SaveTarget
from booster.checkpoint_io.files.optimizer_values import MASTER_SUFFIX, parse_values
from booster.checkpoint_io.inspecting.conversion import check_target
from booster.checkpoint_io.inspecting.inspection import CheckpointContents
from booster.checkpoint_io.inspecting.mapped_tensors import mmap_tensors
from booster.checkpoint_io.layout import OPTIMIZER
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError

__all__ = ["MASTER_WEIGHTS", "PARAMETER_NAMES", "export_optimizer", "torch_state_dict"]

# Exported format: {"state": {number: {name: tensor or number}}, "param_groups": [{..., "params": [numbers]}]}, as in
# torch's optimizers. Numbers count the parameters over all groups in order, so the optimizer that loads it must be
# built over the same parameters in the same order. Two more keys are ignored by torch: the names of the parameters by
# number and, on request, their fp32 master weights. These are not in "state", because load_state_dict would round them
# to the parameters' dtype.
PARAMETER_NAMES = "parameter_names"
MASTER_WEIGHTS = "master_weights"


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
    SaveTarget(target, OPTIMIZER, False, None, 1, use_safetensors=False)  # checks the target's name
    check_target(storage, source, target, overwrites=overwrites)
    with part.open(storage, verifies=True) as stored:
        if stored.groups is None:
            raise CheckpointError(f"{stored.path} holds no param groups: it is not an optimizer of save_optimizer")
        values = parse_values(stored.groups, stored.specs, str(stored.path))
        exported = torch_state_dict(values, mmap_tensors(stored), with_master_weights=with_master_weights)
        _check_plain(exported)
        transaction = Transaction(storage, target, is_directory=False)
        try:
            with storage.create(transaction.begin() / target.name) as file:
                _save(exported, _SequentialFile(storage, file))
                storage.sync(file)
            transaction.commit(is_stale=lambda name: False)
        finally:
            transaction.abort()
    return list(exported[PARAMETER_NAMES])


def torch_state_dict(
    values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, with_master_weights: bool = False
) -> dict[str, Any]:
    """Convert a stored optimizer to a state_dict for `load_state_dict` of a plain torch optimizer.

    Args:
        values: Stored plain values, as returned by `parse_values`.
        tensors: Stored tensors by full name, `<parameter>.<state>`.
        with_master_weights: If True, add the fp32 master weights, by number.

    Raises:
        CheckpointError: A tensor belongs to no parameter, or master weights are requested but not stored.
    """
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
