"""What one step does to the states in files; after a failure it can be run again, to do the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from booster.optim.host_update import Operands, count_steps, run_kernel
from booster.optim.memory_order import flat, laid_out_like, shaped_like
from booster.optim.offload.layout import Piece
from booster.optim.offload.pipeline import ChunkPlace, Pipeline
from booster.optim.offload.state_file import Planes, StateFile
from booster.optim.update import GroupUpdate, ParameterUpdate, StepArguments

__all__ = ["DiskWork"]


@dataclass(slots=True, eq=False)
class _Entry:
    """A parameter that is updated, in contiguous tensors.

    Attributes:
        numel: How many elements it has.
        num_left: How many of them are not updated yet.
    """

    group: GroupUpdate
    update: ParameterUpdate
    parameter: Tensor
    gradient: Tensor
    working_copy: Tensor | None
    numel: int
    num_left: int


class DiskWork:
    """The updates of parameters whose states are in files.

    Args:
        files: The files.
        groups: The parameters, all of them in one of the files.
        arguments: Of the step.
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
        """Updates everything that is not updated yet.

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
        """Yields the updates that are not complete, and how many elements each has left."""
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
    """Returns a dense tensor's memory as a contiguous tensor."""
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
    """Copies what was written into memory in another order than the caller's to where it belongs."""
    update, model = entry.update, entry.update.parameter
    if update.working_copy is not None and entry.working_copy is not None:
        _copy_back(update.working_copy, entry.working_copy, model)
    if arguments.zero_grads:
        _copy_back(update.gradient, entry.gradient, model)


def _copy_back(tensor: Tensor, memory: Tensor, model: Tensor) -> None:
    if tensor.data_ptr() != memory.data_ptr():
        tensor.copy_(shaped_like(memory, model))
