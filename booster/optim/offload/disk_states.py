"""Which parameters have their states on the disk, and the files that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from booster.errors import ConfigError
from booster.logger import get_dist_logger
from booster.optim.memory_order import is_dense
from booster.optim.offload.directory import OwnDirectory
from booster.optim.offload.disk_work import DiskWork
from booster.optim.offload.pipeline import new_buffers
from booster.optim.offload.settings import OffloadSettings
from booster.optim.offload.state_file import Planes, StateFile
from booster.optim.state_form import moment_dtype
from booster.optim.update import MOMENTS, GroupUpdate, StepArguments

__all__ = ["DiskStates"]

# Note [Choice of parameters]
# Of the parameters that are seen together (those of the first step or load, later those of a group that was added),
# each in turn has its states on the disk if these and those before are no more than the fraction of all of them. States
# of one parameter are never divided. Parameters on an accelerator have their states there.


class DiskStates:
    """The states that are not in memory.

    Args:
        settings: How many, and where.
    """

    def __init__(self, settings: OffloadSettings) -> None:
        self._settings = settings
        self._directory: OwnDirectory | None = None
        self._numbers = itertools.count()
        self._files: list[StateFile] = []
        self._places: dict[Tensor, tuple[StateFile, int] | None] = {}
        self._buffers: list[Planes] = []

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Chooses and makes room for those parameters that are new, and gives up the room of those that are gone.

        Args:
            parameters: All that the optimizer has, in order.

        Raises:
            ConfigError: There is no room; nothing was changed.
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
                f"nvme_offload_fraction={self._settings.fraction} moves no optimizer states to the disk: no parameter"
                " on the CPU has states that small. Give a larger fraction"
            )

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether a parameter's states are on the disk."""
        return bool(self._places) and self._places.get(parameter) is not None

    def moment(self, parameter: Tensor, key: str) -> Tensor:
        """Returns the tensor of a state that is about to be filled.

        Raises:
            ConfigError: Its file was cut, and there is no room for another.
        """
        file, index = self._place(parameter)
        if not file.is_whole:
            self._replace(file)
            file, index = self._place(parameter)
        file.touch(index)
        return file.moments(index)[MOMENTS.index(key)]

    def take_over(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Makes a parameter's states those on the disk: zeros where it has none, a copy of what others put there.

        Raises:
            CheckpointError: The file was cut.
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
        """Returns if all states can be read.

        Raises:
            CheckpointError: A file was cut.
        """
        for file in self._files:
            file.check()

    def work(self, groups: Sequence[GroupUpdate], arguments: StepArguments) -> DiskWork:
        """Returns the updates of parameters that are on the disk as a piece of work.

        Args:
            groups: All of their parameters are on the disk, their states taken over.
            arguments: Of the step.
        """
        return DiskWork(self._files, groups, arguments)

    @property
    def buffers(self) -> list[Planes]:
        """The memory through which chunks pass."""
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
        """Returns those of the new parameters whose states go to the disk; see Note [Choice of parameters]."""
        on_host = [one for one in parameters if one.device.type == "cpu"]
        room = self._settings.fraction * sum(self._num_bytes(one) for one in on_host)
        chosen = []
        for parameter in on_host:
            num_bytes = self._num_bytes(parameter)
            if 0 < num_bytes <= room and is_dense(parameter):
                chosen.append(parameter)
                room -= num_bytes
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
                f"the file for optimizer states can't be made: {error}. Give an nvme_offload_dir that can be written to"
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
        """Forgets parameters that the optimizer no longer has, and files of none but such."""
        alive = set(parameters)
        self._places = {parameter: place for parameter, place in self._places.items() if parameter in alive}
        for file in [one for one in self._files if alive.isdisjoint(one.parameters)]:
            self._files.remove(file)
            file.remove()
