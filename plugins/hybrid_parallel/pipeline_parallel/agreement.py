"""Consistency check of batches and options over all ranks, before each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_gather_equal, raise_on_all_ranks
from booster.errors import DesyncError
from booster.kernels.checksum import crc32
from booster.tensor_tree import map_tensors

__all__ = ["BatchConsistency", "NextBatch", "fetch"]

_HAS_BATCH, _ENDED, _FAILED = range(3)
_COMPARED_BATCHES = 3  # batches of which also tensors on an accelerator are compared, which costs a device sync


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Result of a rank's iterator: a batch, an error, or its end."""

    batch: Any = None
    error: Exception | None = None
    has_ended: bool = False

    @property
    def status(self) -> int:
        """Kind of the result as a number."""
        return _ENDED if self.has_ended else _HAS_BATCH if self.error is None else _FAILED


def fetch(data_iter: Iterator[Any]) -> NextBatch:
    """Return the next result of an iterator."""
    try:
        return NextBatch(batch=next(data_iter))
    except StopIteration:
        return NextBatch(has_ended=True)
    except Exception as error:  # raised on all ranks, see `BatchConsistency.check`
        return NextBatch(error=error)


class BatchConsistency:
    """Compares batches and options over the ranks.

    Args:
        group: CPU group of all ranks; None for the world group.
        data_rank: Data-parallel rank; ranks with the same one must have equal batches.
    """

    def __init__(self, group: dist.ProcessGroup | None, data_rank: int) -> None:
        self._group = group
        self._data_rank = data_rank
        self._num_compared = 0

    def check(
        self, next_batch: NextBatch, signatures: Sequence[Any], options: Sequence[bool], *, changed: bool
    ) -> bool:
        """Check that all ranks have consistent batches and options; return whether `changed` is True on any rank.

        Args:
            next_batch: This rank's result of the iterator.
            signatures: Signatures of its microbatches.
            options: Options of the call.
            changed: Flag of this rank.

        Collective over all ranks.

        Raises:
            StopIteration: The iterators of all ranks are exhausted.
            DesyncError: Those of some ranks are; or batches or options differ.
        """
        compares = self._num_compared < _COMPARED_BATCHES
        self._num_compared += 1
        own = [
            next_batch.status,
            self._data_rank,
            crc32(repr(signatures).encode()),
            _checksum(next_batch.batch, everywhere=compares),
            sum(option << place for place, option in enumerate(options)),
            int(changed),
        ]
        table = all_gather_equal(torch.tensor([own]), self._group).tolist()
        statuses = [row[0] for row in table]
        if any(status != _HAS_BATCH for status in statuses):
            self._raise_without_batch(next_batch, statuses)
        for column, what in (
            (4, "another call (training or evaluation, with or without an optimizer, return_loss, return_outputs)"),
            (2, "batches of other shapes"),
            (3, "batches with other contents"),
        ):
            self._require_equal(table, column, what)
        return any(row[5] for row in table)

    def _raise_without_batch(self, next_batch: NextBatch, statuses: Sequence[int]) -> None:
        if all(status == _ENDED for status in statuses):
            raise StopIteration
        if any(status == _FAILED for status in statuses):
            raise_on_all_ranks(next_batch.error, self._group)
        ended = [rank for rank, status in enumerate(statuses) if status == _ENDED]
        others = [rank for rank, status in enumerate(statuses) if status == _HAS_BATCH]
        raise DesyncError(
            f"the data iterator has ended on the ranks {ended} and not on the ranks {others}, but a pipeline's stages"
            " process a batch together: give every rank the same number of batches, as the loaders of boost() and"
            " plugin.prepare_dataloader() do"
        )

    def _require_equal(self, table: Sequence[Sequence[int]], column: int, what: str) -> None:
        for data_rank in sorted({row[1] for row in table}):
            ranks = [rank for rank, row in enumerate(table) if row[1] == data_rank]
            differing = [rank for rank in ranks if table[rank][column] != table[ranks[0]][column]]
            if differing:
                raise DesyncError(
                    f"execute_pipeline() got {what} on the ranks {differing} than on rank {ranks[0]} of the same"
                    " pipeline: call it alike on all ranks, and shard the data by plugin.dp_rank and plugin.dp_size, as"
                    " the loaders of boost() and plugin.prepare_dataloader() do"
                )


def _checksum(batch: Any, *, everywhere: bool) -> int:
    """Return a checksum of the batch's tensors in host memory, or of all of them if `everywhere`."""
    sums: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not everywhere and tensor.device.type != "cpu":
            return tensor
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        sums.append(crc32(content))
        return tensor

    map_tensors(note, batch)
    return crc32(repr(sums).encode())
