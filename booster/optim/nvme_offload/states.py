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

from booster.errors import ConfigError
from booster.logger import get_dist_logger
from booster.optim.adam_update import (
    MOMENTS,
    GroupUpdate,
    Operands,
    ParameterUpdate,
    StepArguments,
    count_steps,
    flat,
    is_dense,
    laid_out_like,
    run_kernel,
    shaped_like,
)
from booster.optim.base import moment_dtype

from .directory import OwnDirectory
from .pipeline import ChunkPlace, Pipeline, new_buffers
from .settings import OffloadSettings
from .state_file import Piece, Planes, StateFile


@dataclass(slots=True, eq=False)
class _Entry:
    """Update of a parameter as contiguous tensors.

    Attributes:
        numel: Number of elements.
        num_left: Number of elements that are not updated yet.
    """

    group: GroupUpdate
    update: ParameterUpdate
    parameter: Tensor
    gradient: Tensor
    working_copy: Tensor | None
    numel: int
    num_left: int


class DiskWork:
    """Updates of parameters with states on disk.

    Args:
        files: State files.
        groups: Updates of parameters with states in these files.
        arguments: Arguments of the step.
    """

    def __init__(self, files: Sequence[StateFile], groups: Sequence[GroupUpdate], arguments: StepArguments) -> None:
        self._arguments = arguments
        self._entries = {id(update.parameter): _entry(group, update) for group in groups for update in group.updates}
        self._todo: deque[ChunkPlace] = deque(
            (file, number)
            for file in files
            for number, chunk in enumerate(file.layout.chunks)
            if any(self._entry_of(file, piece) is not None for piece in chunk.pieces)
        )

    def run(self, buffers: list[Planes], idle: Callable[[], bool]) -> None:
        """Run all updates that are not done yet.

        Raises:
            OSError: A chunk could not be read or written; see `Pipeline.run`.
        """
        try:
            Pipeline(buffers, self._compute, idle).run(self._todo)
        except BaseException:
            for file, _ in self._todo:
                file.forget_blanks()
            raise

    @property
    def is_done(self) -> bool:
        """Whether every parameter is updated."""
        return not self._todo

    def unfinished(self) -> Iterator[tuple[ParameterUpdate, int]]:
        """Yield each incomplete update with the number of elements that are not updated."""
        for entry in self._entries.values():
            if entry.num_left > 0:
                yield entry.update, entry.num_left

    def _entry_of(self, file: StateFile, piece: Piece) -> _Entry | None:
        return self._entries.get(id(file.parameters[piece.index]))

    def _compute(self, place: ChunkPlace, planes: Planes) -> None:
        file, number = place
        pairs = [(self._entry_of(file, piece), piece) for piece in file.layout.chunks[number].pieces]
        found = [(entry, piece) for entry, piece in pairs if entry is not None]
        typed = {dtype: (planes[0].view(dtype), planes[1].view(dtype)) for dtype in file.dtypes}
        for _, members in groupby(found, key=lambda pair: id(pair[0].group)):
            own = list(members)
            rows = [_operands(entry, piece, file.dtype(piece.index), typed) for entry, piece in own]
            run_kernel(rows, own[0][0].group.hyperparameters, self._arguments)
            self._count([entry for entry, _ in own], [piece for _, piece in own])

    def _count(self, entries: Sequence[_Entry], pieces: Sequence[Piece]) -> None:
        for entry, piece in zip(entries, pieces, strict=True):
            entry.num_left -= piece.stop - piece.start
        complete = [entry for entry in entries if entry.num_left == 0]
        count_steps([entry.update for entry in complete])
        for entry in complete:
            _write_back(entry, self._arguments)


def _entry(group: GroupUpdate, update: ParameterUpdate) -> _Entry:
    model, copy = update.parameter, update.working_copy
    return _Entry(
        group=group,
        update=update,
        parameter=_contiguous(model),
        gradient=_contiguous(laid_out_like(update.gradient, model)),
        working_copy=None if copy is None else _contiguous(laid_out_like(copy, model)),
        numel=model.numel(),
        num_left=model.numel(),
    )


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a dense tensor's memory."""
    return tensor if tensor.is_contiguous() else flat(tensor)


def _operands(
    entry: _Entry, piece: Piece, dtype: torch.dtype, typed: Mapping[torch.dtype, tuple[Tensor, Tensor]]
) -> Operands:
    first, second = typed[dtype]
    start, numel = piece.offset // dtype.itemsize, piece.stop - piece.start
    moments = first.narrow(0, start, numel), second.narrow(0, start, numel)
    if entry.numel == numel:
        return Operands(entry.parameter, entry.gradient, *moments, entry.working_copy, entry.update.next_step)
    elements = slice(piece.start, piece.stop)
    copy = entry.working_copy
    return Operands(
        entry.parameter.view(-1)[elements],
        entry.gradient.view(-1)[elements],
        *moments,
        None if copy is None else copy.view(-1)[elements],
        entry.update.next_step,
    )


def _write_back(entry: _Entry, arguments: StepArguments) -> None:
    """Copy results from reordered temporaries back into the caller's tensors."""
    update, model = entry.update, entry.update.parameter
    if update.working_copy is not None and entry.working_copy is not None:
        _copy_back(update.working_copy, entry.working_copy, model)
    if arguments.zero_grads:
        _copy_back(update.gradient, entry.gradient, model)


def _copy_back(tensor: Tensor, memory: Tensor, model: Tensor) -> None:
    if tensor.data_ptr() != memory.data_ptr():
        tensor.copy_(shaped_like(memory, model))


class DiskStates:
    """Optimizer states on disk.

    Parameters are chosen greedily among those that are new together (at the first step or load, later those of an added
    param group): each in turn if its states fit into the rest of the fraction's bytes. The states of a parameter are
    never split between disk and memory. States of accelerator parameters stay on the accelerator.

    Args:
        settings: Fraction of the states on disk, and directory.
    """

    def __init__(self, settings: OffloadSettings) -> None:
        self._settings = settings
        self._directory: OwnDirectory | None = None
        self._numbers = itertools.count()
        self._files: list[StateFile] = []
        self._places: dict[Tensor, tuple[StateFile, int] | None] = {}
        self._buffers: list[Planes] = []

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Allocate disk space for new parameters, and release that of removed ones.

        Args:
            parameters: All parameters of the optimizer, in order.

        Raises:
            ConfigError: The disk has too little free space; nothing was changed.
        """
        if self._settings.fraction == 0:
            return
        all_parameters = list(parameters)
        new = [one for one in all_parameters if one not in self._places]
        if not new:
            return
        chosen = self._choose(new)
        file = self._new_file(chosen) if chosen else None
        self._drop_others(all_parameters)
        self._places |= dict.fromkeys(new)
        if file is not None:
            self._add(file)
        elif not self._files:
            get_dist_logger().warning(
                f"nvme_offload_fraction={self._settings.fraction} moves no optimizer states to disk, as every CPU"
                " parameter's states are larger than that fraction: give a larger one"
            )

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a parameter's states are on disk."""
        return bool(self._places) and self._places.get(parameter) is not None

    def moment(self, parameter: Tensor, key: str) -> Tensor:
        """Return the tensor of a state that is about to be filled.

        Raises:
            ConfigError: The file is truncated, and the disk has too little free space for a new one.
        """
        file, index = self._place(parameter)
        if not file.is_whole:
            self._replace(file)
            file, index = self._place(parameter)
        file.touch(index)
        return file.moments(index)[MOMENTS.index(key)]

    def take_over(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's state tensors by those on disk, with the same values (zeros if there are none).

        Raises:
            CheckpointError: The file is truncated.
        """
        file, index = self._place(parameter)
        own = file.moments(index)
        values = [state.get(key) for key in MOMENTS]
        if all(value is moment for value, moment in zip(values, own, strict=True)):
            return
        if all(value is None for value in values):
            file.begin(index)
        else:
            file.touch(index)
        for key, value, moment in zip(MOMENTS, values, own, strict=True):
            if value is not None and value is not moment:
                moment.copy_(value)
            state[key] = moment

    def check(self) -> None:
        """Check that all states can be read.

        Raises:
            CheckpointError: A file is truncated.
        """
        for file in self._files:
            file.check()

    def work(self, groups: Sequence[GroupUpdate], arguments: StepArguments) -> DiskWork:
        """Return the updates of parameters with states on disk.

        Args:
            groups: Updates of such parameters, with states from `take_over`.
            arguments: Arguments of the step.
        """
        return DiskWork(self._files, groups, arguments)

    @property
    def buffers(self) -> list[Planes]:
        """Buffers of the pipeline, large enough for the largest chunk."""
        largest = max((file.layout.chunks[0].num_bytes for file in self._files), default=0)
        if not self._buffers or self._buffers[0][0].numel() < largest:
            self._buffers = []
            self._buffers = new_buffers(largest)
        return self._buffers

    def _place(self, parameter: Tensor) -> tuple[StateFile, int]:
        place = self._places.get(parameter)
        assert place is not None, f"a parameter of shape {tuple(parameter.shape)} whose states are in memory"
        return place

    def _choose(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        on_host = [one for one in parameters if one.device.type == "cpu"]
        budget = self._settings.fraction * sum(self._num_bytes(one) for one in on_host)
        chosen = []
        for parameter in on_host:
            num_bytes = self._num_bytes(parameter)
            if 0 < num_bytes <= budget and is_dense(parameter):
                chosen.append(parameter)
                budget -= num_bytes
        return chosen

    def _num_bytes(self, parameter: Tensor) -> int:
        return parameter.numel() * moment_dtype(parameter).itemsize

    def _new_file(self, parameters: Sequence[Tensor]) -> StateFile:
        where = self._settings.directory
        try:
            if self._directory is None:
                self._directory = OwnDirectory(where)
            path = self._directory.path / f"states-{next(self._numbers)}.bin"
            return StateFile(path, parameters, [moment_dtype(one) for one in parameters])
        except OSError as error:
            raise ConfigError(
                f"the file for optimizer states can't be created: {error}. Give an nvme_offload_dir that is writable"
            ) from error

    def _add(self, file: StateFile) -> None:
        self._files.append(file)
        self._places |= {parameter: (file, index) for index, parameter in enumerate(file.parameters)}

    def _replace(self, file: StateFile) -> None:
        fresh = self._new_file(file.parameters)
        self._files.remove(file)
        file.remove()
        self._add(fresh)

    def _drop_others(self, parameters: Sequence[Tensor]) -> None:
        """Drop parameters that the optimizer no longer has, and files that contain only such parameters."""
        alive = set(parameters)
        self._places = {parameter: place for parameter, place in self._places.items() if parameter in alive}
        for file in [one for one in self._files if alive.isdisjoint(one.parameters)]:
            self._files.remove(file)
            file.remove()
