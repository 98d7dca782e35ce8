"""One step over all parameters, on devices, in memory and on disk; it can be resumed after a disk failure."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .adam_update import AdamGroupUpdate, AdamParamUpdate, StepArguments, update_on_device, update_on_host
from .nvme_offload.pipeline import defer_sigint
from .nvme_offload.states import DiskStates, OffloadedStep

# Note [Failed disk steps]
# Chunks of states are updated one after the other, in parameter order. After a disk failure the chunks before it are
# updated and those behind it are not, which may leave one parameter partially updated. The step is then kept. The next
# call with the same gradients finishes it; one with other gradients is refused, and so are saves while a parameter is
# partially updated. If only writes failed, all parameters may be updated already. A call with the same gradients is
# then a no-op, so that a caller may retry after any failure, and a call with other gradients is the next step.
_BATCH_NUMEL = 2**21


class AdamStep:
    """Updates of one step.

    Args:
        groups: Updates by param group, with complete states.
        arguments: Arguments shared by all parameters.
        disk: States on disk.
    """

    def __init__(self, groups: Sequence[AdamGroupUpdate], arguments: StepArguments, disk: DiskStates) -> None:
        self._groups = groups
        self._num_updates = sum(len(group.updates) for group in groups)
        self._arguments = arguments
        self._disk = disk
        self._on_device = deque(_select(groups, lambda one: not one.is_cpu))
        on_disk = _select(groups, disk.holds)
        self._on_disk = OffloadedStep(disk.files, on_disk, arguments) if on_disk else None
        in_memory = _select(groups, lambda one: one.is_cpu and not disk.holds(one))
        self._in_memory = deque(in_memory if self._on_disk is None else _batches(in_memory))
        self._checksums: dict[int, int] = {}

    def run(self) -> None:
        """Run all updates that are not done yet.

        Raises:
            OSError: The disk failed; see Note [Failed disk steps].
        """
        while self._on_device:  # first, as these are asynchronous
            update_on_device(self._on_device[0], self._arguments)
            self._on_device.popleft()
        if self._on_disk is not None:
            try:
                self._on_disk.run(self._disk.buffers, self._update_in_memory)
            except OSError as error:
                while self._on_disk.is_done and self._update_in_memory():  # only a write failed: complete the rest
                    pass
                raise OSError(error.errno, self._failure_message(error)) from error
        while self._update_in_memory():
            pass

    @property
    def is_started(self) -> bool:
        """Whether some update was applied, so that a new step would apply it twice."""
        if self._on_disk is None:  # as with torch's optimizers, a failure in memory can't be resumed
            return False
        return len(self._remaining_updates()) < self._num_updates or self.has_partial_update

    @property
    def is_complete(self) -> bool:
        return not self._remaining_updates()

    def has_same_states(self, states: Mapping[Any, Any]) -> bool:
        """Return whether `states` still holds the state dicts of this step."""
        return all(states.get(update.parameter) is update.state for group in self._groups for update in group.updates)

    def record_checksums(self) -> None:
        """Store the gradients' checksums for `matches_call`."""
        compared = self._remaining_updates() or [update for group in self._groups for update in group.updates]
        self._checksums = {id(update.parameter): _checksum(update.gradient) for update in compared}

    def matches_call(self, gradients: Mapping[int, Tensor], arguments: StepArguments) -> bool:
        """Return whether a call has the gradients and arguments of this failed step.

        Args:
            gradients: Gradients by `id` of their parameter.
            arguments: Arguments of the call.
        """
        given, own = (
            (one.grad_scale, 1.0 if one.clip_coef is None else float(one.clip_coef), one.zero_grads)
            for one in (arguments, self._arguments)
        )
        return given == own and all(
            key in gradients and _checksum(gradients[key]) == checksum for key, checksum in self._checksums.items()
        )

    @property
    def has_partial_update(self) -> bool:
        return self._on_disk is not None and any(
            0 < num_left < update.parameter.numel() for update, num_left in self._on_disk.unfinished()
        )

    def _update_in_memory(self) -> bool:
        """Update the next batch of parameters with states in memory; return False if none is left."""
        if not self._in_memory:
            return False
        with defer_sigint():
            update_on_host(self._in_memory[0], self._arguments)
            self._in_memory.popleft()
        return True

    def _remaining_updates(self) -> list[AdamParamUpdate]:
        in_memory = [update for group in self._in_memory for update in group.updates]
        return in_memory + ([] if self._on_disk is None else [update for update, _ in self._on_disk.unfinished()])

    def _failure_message(self, error: OSError) -> str:
        remaining, total = self._remaining_updates(), self._num_updates
        partial = "".join(
            f"; one of these, of shape {tuple(update.parameter.shape)}, is updated but for its last {num_left} elements"
            for update, num_left in ([] if self._on_disk is None else self._on_disk.unfinished())
            if num_left < update.parameter.numel()
        )
        done = (
            f"All {total} parameters were updated with their states; some states stay in memory. Continue with the"
            " next step (a call with the same gradients is a retry of this one, and a no-op), or load a checkpoint"
            if not remaining
            else f"{total - len(remaining)} of {total} parameters were updated with their states, and {len(remaining)}"
            f" were not{partial}. Call step() again with the same gradients to finish the step, or load a checkpoint"
        )
        return (
            f"{error.strerror or error}: {error.filename}, which holds optimizer states, failed during a step. {done}"
        )


def _select(groups: Sequence[AdamGroupUpdate], predicate: Callable[[Tensor], bool]) -> list[AdamGroupUpdate]:
    selected = []
    for group in groups:
        updates = [update for update in group.updates if predicate(update.parameter)]
        if updates:
            selected.append(AdamGroupUpdate(group.hyperparameters, updates))
    return selected


def _batches(groups: Sequence[AdamGroupUpdate]) -> Iterator[AdamGroupUpdate]:
    """Yield the updates in batches of a few milliseconds each, to run while disk I/O is in flight."""
    for group in groups:
        batch: list[AdamParamUpdate] = []
        for update in group.updates:
            batch.append(update)
            if sum(one.parameter.numel() for one in batch) >= _BATCH_NUMEL:
                yield AdamGroupUpdate(group.hyperparameters, batch)
                batch = []
        if batch:
            yield AdamGroupUpdate(group.hyperparameters, batch)


def _checksum(gradient: Tensor) -> int:
    elements = gradient.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(elements.numpy().data)
