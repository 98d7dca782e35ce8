"""Reads past the page cache: the bytes of files that are not cached go from the disk into staging blocks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import numpy as np
import torch

from booster.checkpoint_io.layout import PAGE_BYTES
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.comm import SharedBlocks, all_gather_bytes, any_rank
from booster.kernels.disk_io import DiskQueue, aligned_buffer

MIN_DIRECT_BYTES = 16 * 2**20  # below it the readers' start takes longer than the page cache
MAX_CELL_BYTES = 4 * 2**20
_MIN_CELL_BYTES = 256 * 2**10
_MAX_SHARED_BYTES = 48 * 2**20  # of all ranks of a host, which each of them maps
_NUM_BLOCKS = 4
_NUM_PUBLISHED_BLOCKS = 2
_REQUEST_BYTES = 2 * 2**20
_NUM_THREADS = 4
_DIGEST_BYTES = 32

# Note [Direct reads]
# Reading through the page cache costs an allocation and a copy per page: 1 GiB took 0.6 to 0.9 s where the disk gave it
# in 0.4 s by O_DIRECT. So a file that is not cached is read by O_DIRECT, in aligned cells of a grid over the file.
#   Who reads: a cell that one rank of a host needs is read by that rank; one that several need, by these in turn, so
#     the disk reads every cell once per host.
#   Where to: blocks of one cell, four of each rank, in huge pages: into scattered pages of 4 KiB 1 GiB took 0.9 s, as a
#     disk request has a limited number of memory segments. The blocks are memory that all ranks of the host map, so
#     each copies what it needs out of all of them. Where the system makes no huge pages of shared memory, a rank reads
#     into blocks of its own, and publishes what others need too by a copy in shared memory. So it does not for cells of
#     one rank alone, which come first.
#   When: while the blocks of a round are copied to where they belong, the next three rounds are being read. Before each
#     round the ranks exchange whether one has failed. By then all have published this round, and none uses the blocks
#     of the round before any more.
#   Checksums: each rank sums up what it has read, if all need the same ranges, and they exchange the sums.
#   By what: four threads per rank. io_uring was slower: loads of 1 GiB on one rank took 0.71 and 0.78 s, where these
#     took 0.63 and 0.64 s; with the kernel's own threads 0.61 and 0.65 s beside 0.54 and 0.62 s. Containers often
#     forbid it, too.
# The page cache is used for a file of which most is cached, and where the system does not tell what is; where the file
# system refuses O_DIRECT; and for what a direct read did not give, for whatever reason, so that errors are the same.


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a file that this rank needs.

    Attributes:
        file: Index of the file.
        start: Offset of the first byte in the file.
        stop: Offset after the last byte.
    """

    file: int
    start: int
    stop: int


# Called with the index of a range, an offset in the file, the range's bytes from there on that a cell holds, and
# whether this rank is to check them: not if it shares that with the one that has read them.
Consume = Callable[[int, int, np.ndarray, bool], None]


class DirectFiles:
    """Files for direct reads.

    Args:
        storage: Storage of the files.
        files: Open files; the caller closes them.
        sizes: Their sizes.
    """

    def __init__(self, storage: Storage, files: Sequence[OpenFile], sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._storage = storage
        self._files = tuple(files)
        self._direct: dict[int, OpenFile | None] = {}

    def is_cold(self, file: int) -> bool:
        """Return whether a file is to be read by O_DIRECT: supported, and most of the file is not cached."""
        if file not in self._direct:
            opened = self._files[file]
            self._direct[file] = None if self._storage.is_cached(opened) else self._storage.open_direct(opened)
        return self._direct[file] is not None

    def start(self, queue: DiskQueue, file: int, memory: torch.Tensor, offset: int) -> Callable[[], None]:
        """Start reading aligned memory from an aligned offset; what is beyond the end of the file stays as it is.

        Returns:
            Function that waits until the memory is filled, and raises `CheckpointError` if the file is truncated or
            reading failed.
        """
        num_bytes = min(len(memory), self.sizes[file] - offset)
        num_direct = num_bytes // PAGE_BYTES * PAGE_BYTES
        direct, ticket = self._direct.get(file), None
        if direct is not None and num_direct > 0:
            ticket = queue.read(direct.descriptor, memory[:num_direct], offset)

        def wait() -> None:
            num_read = 0
            if ticket is not None:
                with suppress(OSError):  # refused, or failed: the page cache gives the bytes, or the reason
                    ticket.wait()
                    num_read = num_direct
            if num_read < num_bytes:
                rest = memory[num_read:num_bytes].numpy().data
                self._storage.read_at(self._files[file], rest, offset + num_read)

        return wait

    def close(self) -> None:
        """Close what was opened here. Idempotent."""
        for direct in self._direct.values():
            if direct is not None:
                direct.close()


class _Grid:
    """Cells of all files, numbered in file order; the last one of a file may be shorter."""

    def __init__(self, sizes: Sequence[int], cell_bytes: int) -> None:
        self._sizes = sizes
        self._cell_bytes = cell_bytes
        self._first = np.cumsum([0, *(-(-size // cell_bytes) for size in sizes)])
        self.num_cells = int(self._first[-1])

    def cells_of(self, needed: ByteRange) -> range:
        """Return the cells that hold bytes of a range."""
        first = int(self._first[needed.file])
        return range(first + needed.start // self._cell_bytes, first + -(-needed.stop // self._cell_bytes))

    def range_of(self, cell: int) -> ByteRange:
        """Return the bytes of a cell."""
        file = int(np.searchsorted(self._first, cell, side="right")) - 1
        start = (cell - int(self._first[file])) * self._cell_bytes
        return ByteRange(file, start, min(start + self._cell_bytes, self._sizes[file]))


def assign_cells(is_needed: np.ndarray) -> np.ndarray:
    """Return which rank of a host reads each cell: those that need it, in turn; -1 if none does.

    Args:
        is_needed: Whether each rank (row) needs each cell (column).
    """
    num_needing = is_needed.sum(axis=0)
    turn = np.cumsum(num_needing > 1) - 1
    chosen = turn % np.maximum(num_needing, 1)
    chosen[num_needing == 1] = 0
    is_reader = (np.cumsum(is_needed, axis=0) == chosen + 1) & is_needed
    readers: np.ndarray = np.where(num_needing > 0, is_reader.argmax(axis=0), -1)
    return readers


def _plan_host(packed: Sequence[np.ndarray], num_cells: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the cells that only one rank of a host needs, and those that several need, by the rank that reads them."""
    is_needed = np.stack([np.unpackbits(row, count=num_cells).astype(bool) for row in packed])
    readers, is_shared = assign_cells(is_needed), is_needed.sum(axis=0) > 1
    of_rank = [readers == rank for rank in range(len(is_needed))]
    return (
        [np.flatnonzero(is_own & ~is_shared) for is_own in of_rank],
        [np.flatnonzero(is_own & is_shared) for is_own in of_rank],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectOutcome:
    """Outcome of `read_directly`.

    Attributes:
        failure: This rank's failure, which the caller must raise on all ranks.
        left: Indices of the ranges that are not read. Without a failure here, parts may be missing because of one on
            another rank.
        sharers: Ranks that have each checked a part of the same ranges, those of this host; None if each rank has
            checked all of its own, as ranges differ. None on all ranks or on none.
    """

    failure: Exception | None = None
    left: Sequence[int] = ()
    sharers: Sequence[int] | None = None


def read_directly(
    files: DirectFiles, needs: Sequence[ByteRange], consume: Consume, ranks: CheckpointGroup
) -> DirectOutcome:
    """Read ranges of files past the page cache, each byte once per host; see Note [Direct reads]. Collective.

    Args:
        files: Files, the same on all ranks.
        needs: What this rank needs; it may differ between ranks, and ranges may overlap.
        consume: Function that takes the bytes, in parts and in any order, in the calling thread.
        ranks: Ranks that read together.
    """
    hosts = ranks.hosts()
    most_ranks = max(Counter(hosts).values())
    cell_bytes = MAX_CELL_BYTES
    while cell_bytes > _MIN_CELL_BYTES and most_ranks * _NUM_BLOCKS * cell_bytes > _MAX_SHARED_BYTES:
        cell_bytes //= 2
    grid = _Grid(files.sizes, cell_bytes)
    packed, have_same_needs = _needs_of_ranks(grid, needs, ranks)
    if not any(row.any() for row in packed):
        return DirectOutcome()
    ranks_of_host = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in hosts}
    plans = {host: _plan_host([packed[rank] for rank in each], grid.num_cells) for host, each in ranks_of_host.items()}
    num_rounds = max(len(cells) for _, shared_cells in plans.values() for cells in shared_cells)
    members = ranks_of_host[hosts[ranks.rank]]
    local_rank = members.index(ranks.rank)
    private_cells, shared_cells = plans[hosts[ranks.rank]]
    left: list[int] = []
    shared = ranks.share_blocks(_NUM_BLOCKS, cell_bytes) if num_rounds > 0 else None
    if num_rounds > 0 and shared is None:  # on all ranks: every range that has shared cells is left to the caller
        is_shared = np.zeros(grid.num_cells, dtype=bool)
        is_shared[np.concatenate(shared_cells)] = True
        left = [index for index, each in enumerate(needs) if is_shared[list(grid.cells_of(each))].any()]
    sharers = members if have_same_needs and most_ranks > 1 else None
    with _CellReads(files, grid, needs, left, consume, cell_bytes) as reads:
        reads.read_private(private_cells[local_rank])
        if shared is not None:
            reads.read_shared(shared_cells, local_rank, shared, num_rounds, ranks, checks_all=sharers is None)
    return DirectOutcome(failure=reads.failure, left=left, sharers=sharers)


def _needs_of_ranks(grid: _Grid, needs: Sequence[ByteRange], ranks: CheckpointGroup) -> tuple[list[np.ndarray], bool]:
    """Return which cells each rank needs, as packed bits, and whether all need the same ranges. Collective.

    The bits of 2 TiB of cells are 64 KiB.
    """
    is_needed = np.zeros(grid.num_cells, dtype=bool)
    for each in needs:
        cells = grid.cells_of(each)
        is_needed[cells.start : cells.stop] = True
    ranges = np.array([(each.file, each.start, each.stop) for each in needs], dtype=np.int64)
    payload = np.packbits(is_needed).tobytes() + hashlib.sha256(ranges.tobytes()).digest()
    payloads, of_rank = all_gather_bytes(payload, ranks.group)
    rows = [np.frombuffer(payloads[index][:-_DIGEST_BYTES], dtype=np.uint8) for index in of_rank]
    return rows, len({each[-_DIGEST_BYTES:] for each in payloads}) == 1


class _CellReads(AbstractContextManager["_CellReads"]):
    """Reads of one rank, and what becomes of the cells that it needs; a context manager that ends the reads in flight.

    Its first error is kept as `failure`, and ends its reads; the other ranks learn of it between rounds.
    """

    def __init__(
        self,
        files: DirectFiles,
        grid: _Grid,
        needs: Sequence[ByteRange],
        left: Collection[int],
        consume: Consume,
        cell_bytes: int,
    ) -> None:
        self._files = files
        self._grid = grid
        self._needs = needs
        self._consume = consume
        self._needs_of_cell: dict[int, list[int]] = {}
        for index in sorted(set(range(len(needs))) - set(left), key=lambda index: needs[index].start):
            for cell in grid.cells_of(needs[index]):
                self._needs_of_cell.setdefault(cell, []).append(index)
        self._reads: dict[int, list[Callable[[], None]]] = {}  # waits for those in flight, by round
        self._queue: DiskQueue | None = None
        self.failure: Exception | None = None
        self._keep_failure(self._open, cell_bytes)

    def __exit__(self, *reason: object) -> None:
        if self._queue is not None:
            self._queue.close()

    def _open(self, cell_bytes: int) -> None:
        self._blocks = aligned_buffer(_NUM_BLOCKS * cell_bytes).numpy().reshape(_NUM_BLOCKS, cell_bytes)
        self._queue = DiskQueue(_NUM_THREADS)

    def read_private(self, cells: np.ndarray) -> None:
        """Read and consume cells that no other rank of the host needs. An error is kept."""
        own = [self._needed_part(int(cell)) for cell in cells]
        own = [part for part in own if part.start < part.stop]  # its ranges may be left to the caller
        self._keep_failure(self._start, own, range(_NUM_BLOCKS - 1))
        for index, part in enumerate(own):
            self._keep_failure(self._start, own, [index + _NUM_BLOCKS - 1])
            self._keep_failure(self._wait, index)
            if self.failure is not None:
                return
            self._keep_failure(self._take, part, self._blocks[index % _NUM_BLOCKS], True)

    def read_shared(
        self,
        cells_of_readers: Sequence[np.ndarray],
        local_rank: int,
        shared: SharedBlocks,
        num_rounds: int,
        ranks: CheckpointGroup,
        *,
        checks_all: bool,
    ) -> None:
        """Read and consume cells that several ranks of the host need, one of each reader per round. An error is kept.

        Collective over `ranks`, with as many rounds on all hosts.
        """
        parts = [[self._grid.range_of(int(cell)) for cell in cells] for cells in cells_of_readers]
        own, published = parts[local_rank], shared.of_ranks[local_rank]
        if shared.are_huge:
            self._blocks = published
        self._keep_failure(self._start, own, range(_NUM_BLOCKS - 1))
        for index in range(num_rounds):
            if not shared.are_huge:
                self._keep_failure(self._start, own, [index + _NUM_BLOCKS - 1])
            self._keep_failure(self._wait, index)
            if not shared.are_huge and self.failure is None and index < len(own):
                np.copyto(published[index % _NUM_PUBLISHED_BLOCKS], self._blocks[index % _NUM_BLOCKS])
            if any_rank([self.failure is not None], ranks.group)[0]:
                return
            if shared.are_huge:  # all have taken the round before, whose blocks are read to next
                self._keep_failure(self._start, own, [index + _NUM_BLOCKS - 1])
            for reader, of_reader in enumerate(parts):
                if index < len(of_reader):
                    is_published = reader != local_rank and not shared.are_huge
                    blocks = self._blocks if reader == local_rank else shared.of_ranks[reader]
                    block = blocks[index % (_NUM_PUBLISHED_BLOCKS if is_published else _NUM_BLOCKS)]
                    self._keep_failure(self._take, of_reader[index], block, checks_all or reader == local_rank)

    def _keep_failure(self, action: Callable[..., None], *arguments: object) -> None:
        if self.failure is None:
            try:
                action(*arguments)
            except Exception as error:
                self.failure = error

    def _needed_part(self, cell: int) -> ByteRange:
        """Return the part of a cell that holds all that this rank needs of it."""
        place, needs = self._grid.range_of(cell), [self._needs[index] for index in self._needs_of_cell.get(cell, ())]
        start = max(place.start, min((need.start for need in needs), default=place.stop) // PAGE_BYTES * PAGE_BYTES)
        return ByteRange(place.file, start, min(place.stop, max((need.stop for need in needs), default=start)))

    def _start(self, parts: Sequence[ByteRange], rounds: Iterable[int]) -> None:
        """Start reading the parts of some rounds, as far as there are any."""
        assert self._queue is not None, "the queue is opened first"
        for index in (index for index in rounds if index < len(parts)):
            part, reads = parts[index], self._reads.setdefault(index, [])
            for start in range(part.start, part.stop, _REQUEST_BYTES):
                stop = -(-min(start + _REQUEST_BYTES, part.stop) // PAGE_BYTES) * PAGE_BYTES
                memory = self._blocks[index % _NUM_BLOCKS][start - part.start : stop - part.start]
                reads.append(self._files.start(self._queue, part.file, torch.from_numpy(memory), start))

    def _wait(self, index: int) -> None:
        """Wait until the part of a round is read."""
        for wait in self._reads.pop(index, ()):
            wait()

    def _take(self, part: ByteRange, block: np.ndarray, is_to_check: bool) -> None:
        """Consume what this rank needs of a part of a cell that is in a block."""
        cell = self._grid.cells_of(part).start
        for index in self._needs_of_cell.get(cell, ()):
            need = self._needs[index]
            start, stop = max(need.start, part.start), min(need.stop, part.stop)
            self._consume(index, start, block[start - part.start : stop - part.start], is_to_check)
