"""Optimizer states on disk: choice of parameters, state files, and updates."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from booster.comm import is_fake_world
from booster.errors import ConfigError
from booster.kernels.disk_io import aligned_buffer
from booster.logger import get_dist_logger
from booster.optim.adam_update import (
    MOMENTS,
    AdamGroupUpdate,
    AdamParamUpdate,
    KernelArguments,
    StepArguments,
    flat_view,
    increment_steps,
    is_dense,
    match_strides,
    run_kernel,
    view_like,
)
from booster.optim.base import moment_dtype

from .directory import OffloadSettings, ScratchDirectory
from .pipeline import NUM_BUFFERS, ChunkRef, Pipeline
from .state_file import StateBlocks, StateFile, StateRange


@dataclass(slots=True, eq=False)
class _PendingUpdate:
    """Update of a parameter as flat tensors."""

    group: AdamGroupUpdate
    update: AdamParamUpdate
    parameter: Tensor
    gradient: Tensor
    model_copy: Tensor | None
    num_left: int  # elements that are not updated yet


class OffloadedStep:
    """Updates of parameters with states on disk.

    Args:
        files: State files.
        groups: Updates of parameters with states in these files, from `DiskStates.adopt`.
        arguments: Arguments of the step.
    """

    def __init__(self, files: Sequence[StateFile], groups: Sequence[AdamGroupUpdate], arguments: StepArguments) -> None:
        self._arguments = arguments
        self._updates = {
            id(update.parameter): _pending_update(group, update) for group in groups for update in group.updates
        }
        self._todo: deque[ChunkRef] = deque(
            (file, number)
            for file in files
            for number, chunk in enumerate(file.layout.chunks)
            if any(id(file.parameters[state_range.index]) in self._updates for state_range in chunk.ranges)
        )

    def run(self, buffers: list[StateBlocks], idle: Callable[[], bool]) -> None:
        """Run all updates that are not done yet.

        Raises:
            OSError: A chunk could not be read or written; see `Pipeline.run`.
        """
        Pipeline(buffers, self._compute, idle).run(self._todo)

    @property
    def is_done(self) -> bool:
        """Whether every parameter is updated."""
        return not self._todo

    def unfinished(self) -> Iterator[tuple[AdamParamUpdate, int]]:
        """Yield each incomplete update with the number of elements that are not updated."""
        for entry in self._updates.values():
            if entry.num_left > 0:
                yield entry.update, entry.num_left

    def _compute(self, chunk: ChunkRef, blocks: StateBlocks) -> None:
        file, chunk_index = chunk
        pairs = [
            (self._updates.get(id(file.parameters[state_range.index])), state_range)
            for state_range in file.layout.chunks[chunk_index].ranges
        ]
        found = [(entry, state_range) for entry, state_range in pairs if entry is not None]
        typed = {dtype: (blocks[0].view(dtype), blocks[1].view(dtype)) for dtype in set(file.dtypes)}
        for _, members in groupby(found, key=lambda pair: id(pair[0].group)):
            entries = list(members)
            rows = [
                _operands(entry, state_range, file.dtypes[state_range.index], typed) for entry, state_range in entries
            ]
            run_kernel(rows, entries[0][0].group.hyperparameters, self._arguments)
            for entry, state_range in entries:
                entry.num_left -= state_range.stop - state_range.start
            complete = [entry for entry, _ in entries if entry.num_left == 0]
            increment_steps([entry.update for entry in complete])
            for entry in complete:
                _write_back(entry, self._arguments)


def _pending_update(group: AdamGroupUpdate, update: AdamParamUpdate) -> _PendingUpdate:
    parameter, copy = update.parameter, update.model_param
    return _PendingUpdate(
        group=group,
        update=update,
        parameter=flat_view(parameter),
        gradient=flat_view(match_strides(update.gradient, parameter)),
        model_copy=None if copy is None else flat_view(match_strides(copy, parameter)),
        num_left=parameter.numel(),
    )


def _operands(
    entry: _PendingUpdate,
    state_range: StateRange,
    dtype: torch.dtype,
    typed: Mapping[torch.dtype, tuple[Tensor, Tensor]],
) -> KernelArguments:
    first, second = typed[dtype]
    start, numel = state_range.offset // dtype.itemsize, state_range.stop - state_range.start
    moments = first.narrow(0, start, numel), second.narrow(0, start, numel)
    if entry.parameter.numel() == numel:
        return KernelArguments(entry.parameter, entry.gradient, *moments, entry.model_copy, entry.update.next_step)
    elements = slice(state_range.start, state_range.stop)
    copy = None if entry.model_copy is None else entry.model_copy[elements]
    return KernelArguments(entry.parameter[elements], entry.gradient[elements], *moments, copy, entry.update.next_step)


def _write_back(entry: _PendingUpdate, arguments: StepArguments) -> None:
    """Copy results from reordered temporaries back into the caller's tensors."""
    update = entry.update
    pairs: list[tuple[Tensor, Tensor]] = []
    if update.model_param is not None and entry.model_copy is not None:
        pairs.append((update.model_param, entry.model_copy))
    if arguments.zero_grads:
        pairs.append((update.gradient, entry.gradient))
    for tensor, memory in pairs:
        if tensor.data_ptr() != memory.data_ptr():
            tensor.copy_(view_like(memory, update.parameter))


class DiskStates:
    """Optimizer states on disk.

    Parameters are chosen greedily among those that are new together (at the first step or load, later those of an added
    param group): each in turn if its states fit into the rest of the fraction's bytes. The states of a parameter are
    never split between disk and memory. States of accelerator parameters stay on the accelerator.

    Args:
        settings: Fraction of the states on disk, and directory.

    Attributes:
        files: State files.
    """

    def __init__(self, settings: OffloadSettings) -> None:
        self._settings = settings
        self._directory: ScratchDirectory | None = None
        self._file_numbers = itertools.count()
        self.files: list[StateFile] = []
        self._locations: dict[Tensor, tuple[StateFile, int] | None] = {}
        self._buffers: list[StateBlocks] = []

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Allocate disk space for new parameters, and release that of removed ones.

        Args:
            parameters: All parameters of the optimizer, in order.

        Raises:
            ConfigError: The disk has too little free space; nothing was changed.
        """
        if self._settings.fraction == 0 or is_fake_world():  # fake states are in memory
            return
        all_parameters = list(parameters)
        new = [one for one in all_parameters if one not in self._locations]
        if not new:
            return
        chosen = self._choose(new)
        file = self._new_file(chosen) if chosen else None
        # Drop parameters that the optimizer no longer has, and files that contain only such parameters.
        alive = set(all_parameters)
        self._locations = {parameter: location for parameter, location in self._locations.items() if parameter in alive}
        for unused in [one for one in self.files if alive.isdisjoint(one.parameters)]:
            self.files.remove(unused)
            unused.remove()
        self._locations |= dict.fromkeys(new)
        if file is not None:
            self._add(file)
        elif not self.files:
            get_dist_logger().warning(
                f"nvme_offload_fraction={self._settings.fraction} moves no optimizer states to disk, as every CPU"
                " parameter's states are larger than that fraction: give a larger one"
            )

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a parameter's states are on disk."""
        return bool(self._locations) and self._locations.get(parameter) is not None

    def moment(self, parameter: Tensor, key: str) -> Tensor:
        """Return the tensor of a state that is about to be filled.

        Raises:
            ConfigError: The file is truncated, and the disk has too little free space for a new one.
        """
        file, index = self._location(parameter)
        if not file.is_complete:
            new_file = self._new_file(file.parameters)
            self.files.remove(file)
            file.remove()
            self._add(new_file)
            file, index = self._location(parameter)
        file.mark_modified(index)
        return file.moments[index][MOMENTS.index(key)]

    def adopt(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's state tensors by those on disk, with the same values (zeros if there are none).

        Raises:
            CheckpointError: The file is truncated.
        """
        file, index = self._location(parameter)
        moments = file.moments[index]
        values = [state.get(key) for key in MOMENTS]
        if all(value is moment for value, moment in zip(values, moments, strict=True)):
            return
        if all(value is None for value in values):
            file.zero(index)
        else:
            file.mark_modified(index)
        for key, value, moment in zip(MOMENTS, values, moments, strict=True):
            if value is not None and value is not moment:
                moment.copy_(value)
            state[key] = moment

    def check(self) -> None:
        """Check that all states can be read.

        Raises:
            CheckpointError: A file is truncated.
        """
        for file in self.files:
            file.check()

    @property
    def buffers(self) -> list[StateBlocks]:
        """Buffers of the pipeline, large enough for the largest chunk."""
        largest = max((file.layout.chunks[0].num_bytes for file in self.files), default=0)
        if not self._buffers or self._buffers[0][0].numel() < largest:
            self._buffers = []
            self._buffers = [(aligned_buffer(largest), aligned_buffer(largest)) for _ in range(NUM_BUFFERS)]
        return self._buffers

    def _location(self, parameter: Tensor) -> tuple[StateFile, int]:
        location = self._locations.get(parameter)
        assert location is not None, f"a parameter of shape {tuple(parameter.shape)} whose states are in memory"
        return location

    def _choose(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        on_host = [one for one in parameters if one.device.type == "cpu"]
        sizes = [one.numel() * moment_dtype(one).itemsize for one in on_host]
        budget = self._settings.fraction * sum(sizes)
        chosen = []
        for parameter, num_bytes in zip(on_host, sizes, strict=True):
            if 0 < num_bytes <= budget and is_dense(parameter):
                chosen.append(parameter)
                budget -= num_bytes
        return chosen

    def _new_file(self, parameters: Sequence[Tensor]) -> StateFile:
        parent = self._settings.directory
        try:
            if self._directory is None:
                self._directory = ScratchDirectory(parent)
            path = self._directory.path / f"states-{next(self._file_numbers)}.bin"
            return StateFile(path, parameters, [moment_dtype(one) for one in parameters])
        except OSError as error:
            raise ConfigError(
                f"the file for optimizer states can't be created: {error}. Give an nvme_offload_dir that is writable"
            ) from error

    def _add(self, file: StateFile) -> None:
        self.files.append(file)
        self._locations |= {parameter: (file, index) for index, parameter in enumerate(file.parameters)}
