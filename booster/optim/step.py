"""One step over all parameters, wherever they and their states lie; it can be finished after a disk failed."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .adam_update import GroupUpdate, ParameterUpdate, StepArguments, update_on_device, update_on_host
from .nvme_offload.pipeline import interrupts_later
from .nvme_offload.states import DiskStates, DiskWork

# Note [Failed steps]
# Chunks of states are updated one after the other, in the order of the parameters. If the disk fails, those before are
# updated and those behind are not, and of one parameter there may be both. The step is then kept, and the next call
# finishes it if it brings the same gradients; with others it is refused, as are saves while one parameter is divided.
# Where only writes failed all may be updated: then the next call with the same gradients has nothing to do, so that
# who is told of a failure need not know of which kind it was, and one with others is the next step.
_BATCH_NUMEL = 2**21


class Step:
    """The work of one step.

    Args:
        groups: What is updated, with complete states.
        arguments: Shared by all.
        disk: The states on the disk.
    """

    def __init__(self, groups: Sequence[GroupUpdate], arguments: StepArguments, disk: DiskStates) -> None:
        self._groups = groups
        self._arguments = arguments
        self._disk = disk
        self._on_device = deque(_select(groups, lambda one: not one.is_cpu))
        on_disk = _select(groups, disk.holds)
        self._on_disk = disk.work(on_disk, arguments) if on_disk else None
        in_memory = _select(groups, lambda one: one.is_cpu and not disk.holds(one))
        self._in_memory = deque(in_memory if self._on_disk is None else _batches(in_memory))
        self._checksums: dict[int, int] = {}

    def run(self) -> None:
        """Do what is not done yet.

        Raises:
            OSError: The disk failed; see Note [Failed steps].
        """
        while self._on_device:  # first, as the host does not wait for it
            update_on_device(self._on_device[0], self._arguments)
            self._on_device.popleft()
        if self._on_disk is not None:
            self._run_disk(self._on_disk)
        while self._update_in_memory():
            pass

    def _run_disk(self, work: DiskWork) -> None:
        try:
            work.run(self._disk.buffers, self._update_in_memory)
        except OSError as error:
            while work.is_done and self._update_in_memory():  # a write failed, and all the rest can be done
                pass
            raise OSError(error.errno, self._account(error)) from error

    @property
    def is_begun(self) -> bool:
        """Whether something was done, so that to begin anew would do it twice."""
        if self._on_disk is None:  # as with torch's optimizers, a failure in memory is not repaired
            return False
        return len(self._left()) < self._num_updates or self.divides_a_parameter

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._left()

    def is_of(self, states: Mapping[Any, Any]) -> bool:
        """Return whether its states are still the optimizer's."""
        return all(states.get(update.parameter) is update.state for group in self._groups for update in group.updates)

    def note_gradients(self) -> None:
        """Store what `is_same` compares with."""
        compared = self._left() or [update for group in self._groups for update in group.updates]
        self._checksums = {id(update.parameter): _checksum(update.gradient) for update in compared}

    def is_same(self, gradients: Mapping[int, Tensor], arguments: StepArguments) -> bool:
        """Return whether a call brings what this step, which failed, was begun with.

        Args:
            gradients: By the `id` of parameters.
            arguments: Of the call.
        """
        return _factor(arguments) == _factor(self._arguments) and all(
            key in gradients and _checksum(gradients[key]) == checksum for key, checksum in self._checksums.items()
        )

    @property
    def divides_a_parameter(self) -> bool:
        """Whether some elements of a parameter are updated and others are not."""
        return self._on_disk is not None and any(
            0 < num_left < update.parameter.numel() for update, num_left in self._on_disk.unfinished()
        )

    def _update_in_memory(self) -> bool:
        """Update some more of the parameters whose states are in memory; returns False if there are none left."""
        if not self._in_memory:
            return False
        with interrupts_later():
            update_on_host(self._in_memory[0], self._arguments)
            self._in_memory.popleft()
        return True

    @property
    def _num_updates(self) -> int:
        return sum(len(group.updates) for group in self._groups)

    def _left(self) -> list[ParameterUpdate]:
        in_memory = [update for group in self._in_memory for update in group.updates]
        return in_memory + ([] if self._on_disk is None else [update for update, _ in self._on_disk.unfinished()])

    def _account(self, error: OSError) -> str:
        """Return a message that says how far the step came."""
        left, total = self._left(), self._num_updates
        divided = "".join(
            f"; of one of these, of shape {tuple(update.parameter.shape)}, all but the last {num_left} elements are"
            " updated"
            for update, num_left in ([] if self._on_disk is None else self._on_disk.unfinished())
            if num_left < update.parameter.numel()
        )
        done = (
            f"All {total} parameters were updated with their states, of which some stay in memory now. Go on with the"
            " next step (one with the same gradients is taken for this one, and does nothing), or load a checkpoint"
            if not left
            else f"{total - len(left)} of {total} parameters were updated with their states, and {len(left)} are as"
            f" they were before the step{divided}. Call step() again with the same gradients to finish the step, or"
            " load a checkpoint"
        )
        return (
            f"{error.strerror or error}: {error.filename}, which holds optimizer states, failed in the middle of a"
            f" step. {done}"
        )


def _select(groups: Sequence[GroupUpdate], is_wanted: Callable[[Tensor], bool]) -> list[GroupUpdate]:
    parts = [group.part([update for update in group.updates if is_wanted(update.parameter)]) for group in groups]
    return [part for part in parts if part.updates]


def _batches(groups: Sequence[GroupUpdate]) -> Iterator[GroupUpdate]:
    """Yield the groups in parts of a few milliseconds, to be done while the disk is awaited."""
    for group in groups:
        batch: list[ParameterUpdate] = []
        for update in group.updates:
            batch.append(update)
            if sum(one.parameter.numel() for one in batch) >= _BATCH_NUMEL:
                yield group.part(batch)
                batch = []
        if batch:
            yield group.part(batch)


def _factor(arguments: StepArguments) -> tuple[float, float, bool]:
    tensor = arguments.multiplier_tensor
    return arguments.multiplier, 1.0 if tensor is None else float(tensor), arguments.zero_grads


def _checksum(gradient: Tensor) -> int:
    elements = gradient.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(elements.numpy().data)
