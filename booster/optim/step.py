"""One step over all parameters, on devices, in memory and on disk; it can be resumed after a disk failure."""

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
# Chunks of states are updated one after the other, in parameter order. After a disk failure the chunks before it are
# updated and those behind it are not, which may leave one parameter partially updated. The step is then kept. The next
# call with the same gradients finishes it; one with other gradients is refused, and so are saves while a parameter is
# partially updated. If only writes failed, all parameters may be updated already. A call with the same gradients is
# then a no-op, so that a caller may retry after any failure, and a call with other gradients is the next step.
_BATCH_NUMEL = 2**21


class Step:
    """Updates of one step.

    Args:
        groups: Updates by param group, with complete states.
        arguments: Arguments shared by all parameters.
        disk: States on disk.
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
        """Run all updates that are not done yet.

        Raises:
            OSError: The disk failed; see Note [Failed steps].
        """
        while self._on_device:  # first, as these are asynchronous
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
            while work.is_done and self._update_in_memory():  # only a write failed: complete the rest
                pass
            raise OSError(error.errno, self._account(error)) from error

    @property
    def is_begun(self) -> bool:
        """Whether some update was applied, so that a new step would apply it twice."""
        if self._on_disk is None:  # as with torch's optimizers, a failure in memory can't be resumed
            return False
        return len(self._left()) < self._num_updates or self.divides_a_parameter

    @property
    def is_complete(self) -> bool:
        """Whether all updates are done."""
        return not self._left()

    def is_of(self, states: Mapping[Any, Any]) -> bool:
        """Return whether `states` still holds the state dicts of this step."""
        return all(states.get(update.parameter) is update.state for group in self._groups for update in group.updates)

    def note_gradients(self) -> None:
        """Store the gradients' checksums for `is_same`."""
        compared = self._left() or [update for group in self._groups for update in group.updates]
        self._checksums = {id(update.parameter): _checksum(update.gradient) for update in compared}

    def is_same(self, gradients: Mapping[int, Tensor], arguments: StepArguments) -> bool:
        """Return whether a call has the gradients and arguments of this failed step.

        Args:
            gradients: Gradients by `id` of their parameter.
            arguments: Arguments of the call.
        """
        return _factor(arguments) == _factor(self._arguments) and all(
            key in gradients and _checksum(gradients[key]) == checksum for key, checksum in self._checksums.items()
        )

    @property
    def divides_a_parameter(self) -> bool:
        """Whether a parameter is partially updated."""
        return self._on_disk is not None and any(
            0 < num_left < update.parameter.numel() for update, num_left in self._on_disk.unfinished()
        )

    def _update_in_memory(self) -> bool:
        """Update the next batch of parameters with states in memory; return False if none is left."""
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
        left, total = self._left(), self._num_updates
        divided = "".join(
            f"; one of these, of shape {tuple(update.parameter.shape)}, is updated but for its last {num_left} elements"
            for update, num_left in ([] if self._on_disk is None else self._on_disk.unfinished())
            if num_left < update.parameter.numel()
        )
        done = (
            f"All {total} parameters were updated with their states; some states stay in memory. Continue with the"
            " next step (a call with the same gradients is a retry of this one, and a no-op), or load a checkpoint"
            if not left
            else f"{total - len(left)} of {total} parameters were updated with their states, and {len(left)}"
            f" were not{divided}. Call step() again with the same gradients to finish the step, or load a checkpoint"
        )
        return (
            f"{error.strerror or error}: {error.filename}, which holds optimizer states, failed during a step. {done}"
        )


def _select(groups: Sequence[GroupUpdate], is_wanted: Callable[[Tensor], bool]) -> list[GroupUpdate]:
    parts = [group.part([update for update in group.updates if is_wanted(update.parameter)]) for group in groups]
    return [part for part in parts if part.updates]


def _batches(groups: Sequence[GroupUpdate]) -> Iterator[GroupUpdate]:
    """Yield the updates in batches of a few milliseconds each, to run while disk I/O is in flight."""
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
