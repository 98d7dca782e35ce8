"""Transfer of shards to writer ranks on other hosts: a file on a shared file system is written by one host only.

Network file systems cache pages per host, so two hosts that write into one page of a file lose each other's bytes. The
plan assigns every file to one host. Ranges held by other hosts are sent in messages of at most one staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from booster.checkpoint_io.files.file_image import FileImage
from booster.checkpoint_io.planning.plan import SavePlan, WriteRange
from booster.checkpoint_io.saving.range_writer import read_range, write_range_bytes
from booster.checkpoint_io.storage import Storage
from booster.comm import receive, send
from booster.interface import TensorSlice

__all__ = ["Relay"]


class Relay:
    """Point-to-point transfer of ranges from the ranks that hold them to the ranks that write them.

    Args:
        group: Dedicated gloo group, so that it can run concurrently with the training's collectives.
        rank: Rank of this process in the group.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def exchange(
        self,
        storage: Storage,
        plan: SavePlan,
        files: Sequence[tuple[Path, FileImage]],
        slices: Sequence[TensorSlice],
    ) -> dict[WriteRange, int]:
        """Send this rank's ranges to their writers, write the ranges of other ranks, and return the latter's checksums.

        Every rank iterates over the same list in the same order, so there is no deadlock.
        """
        written: dict[WriteRange, int] = {}
        touched: set[Path] = set()
        for write_range in (
            write_range for write_range in plan.all_ranges() if write_range.owner != write_range.writer
        ):
            num_bytes = (write_range.span[1] - write_range.span[0]) * plan.specs[write_range.name].dtype.itemsize
            if write_range.owner == self._rank:
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
                read_range(slices[write_range.slice_index], write_range, buffer)
                send(buffer, write_range.writer, self._group)
            elif write_range.writer == self._rank:
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
                receive(buffer, write_range.owner, self._group)
                path, image = files[write_range.file]
                with storage.open_for_writing(path) as file:
                    written[write_range] = write_range_bytes(storage, file, image, write_range, buffer)
                touched.add(path)
        for path in sorted(touched):
            storage.sync_path(path)
        return written
