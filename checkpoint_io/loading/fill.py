"""Parallel reading of a checkpoint: this rank's slices are filled, and the checksums verified in the same pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from booster.checkpoint_io.copy_elements import assign_elements, bytes_of, needs_no_conversion
from booster.checkpoint_io.formats.manifest import RangeRecord
from booster.checkpoint_io.parallel import CheckpointGroup, batches_by_bytes, run_in_threads
from booster.checkpoint_io.planning.slices import Box, full_box, overlapping_runs, run_length, run_start
from booster.comm import all_gather_bytes, any_rank, is_fake_world, max_of_numbers
from booster.errors import CheckpointError
from booster.interface import TensorSlice, TensorSpec
from booster.kernels.checksum import crc32, shift_crc32

from .direct_reads import MIN_DIRECT_BYTES, ByteRange, DirectFiles, DirectOutcome, read_directly
from .ranges import ElementReader
from .reader import StoredCheckpoint

NUM_THREADS = 4
BATCH_BYTES = 16 * 2**20
STEP_BYTES = 2**20  # small enough to stay in cache between read and checksum

# Note [Blocks]
# A block is what one thread reads in steps that fit into its core's cache: a stored range, of which the checksum is
# known, or, if no checksum is verified, part of the slice to fill. A range is read completely even if this rank holds
# only some of its elements, as its checksum is that of all. It has at most 16 MiB, so the bytes that no slice needs
# are few: those at the ends of a shard, or the other ranks' columns of a tensor that was saved in whole rows.
# A block that one slice has in its memory as it is in the file is read there directly; other slices copy from there.
# All other blocks go through a buffer of one step.
# Ranks of a host that read the same blocks here do so in the same order at the same time, through the page cache, so
# the disk reads every byte once per host, and each of them verifies a share of the blocks. Files that are not cached
# are read otherwise, see Note [Direct reads].


@dataclass(slots=True, eq=False)
class _Region:
    """Flat range of a box of a tensor, and where it lies in the logical tensor, in elements."""

    shape: tuple[int, ...]
    box: Box
    span: tuple[int, int]
    numel: int = field(init=False)
    start: int = field(init=False)
    stop: int = field(init=False)
    is_run: bool = field(init=False)

    def __post_init__(self) -> None:
        first, last = self.span
        self.numel = last - first
        if self.box == full_box(self.shape):  # the usual case, often for 100,000 tensors
            self.start, self.stop, self.is_run = first, last, True
            return
        length = run_length(self.shape, self.box)
        self.start = run_start(self.shape, self.box, first)
        self.stop = run_start(self.shape, self.box, last - 1) + 1
        self.is_run = first // length == (last - 1) // length

    def shared_range(self, other: _Region) -> tuple[int, int, int] | None:
        """Return the elements in common as one range, or None if they may be several.

        Returns:
            Offset in this region, offset in the other one, and length, which is 0 without common elements.
        """
        if self.box == other.box:
            (start, stop), (other_start, other_stop) = self.span, other.span
        elif self.is_run and other.is_run:
            start, stop, other_start, other_stop = self.start, self.stop, other.start, other.stop
        else:
            may_share_any = all(
                offset < other_offset + other_length and other_offset < offset + length
                for (offset, length), (other_offset, other_length) in zip(self.box, other.box, strict=True)
            )
            return None if may_share_any else (0, 0, 0)
        first = max(start, other_start)
        return first - start, first - other_start, max(min(stop, other_stop) - first, 0)


@dataclass(slots=True, eq=False)
class _Target:
    """Slice to fill, with its memory as bytes if the file's bytes can be copied there as they are."""

    region: _Region
    tensor: torch.Tensor
    memory: np.ndarray | None


@dataclass(slots=True, eq=False)
class _Block:
    """Elements to read, the slices that hold some of them, and their checksum; see Note [Blocks]."""

    name: str
    dtype: torch.dtype
    region: _Region
    targets: Sequence[_Target]
    record: RangeRecord | None


def empty_slice(name: str, spec: TensorSpec, span: tuple[int, int]) -> TensorSlice:
    """Return a slice over new memory, for elements of the flattening of a tensor."""
    tensor = torch.empty(span[1] - span[0], dtype=spec.dtype)
    box = full_box(spec.shape)
    return TensorSlice(
        name=name, dtype=spec.dtype, global_shape=spec.shape, box=box, span=span, tensor=tensor, primary=False
    )


def read_slices(
    stored: StoredCheckpoint,
    named_slices: Sequence[tuple[str, TensorSlice]],
    *,
    verifies: bool = False,
    num_threads: int = NUM_THREADS,
) -> None:
    """Fill slices from a checkpoint. Not collective.

    Every byte is read once, for any number of slices that need it. Peak extra memory is 12 MiB with four threads, for
    any tensor size.

    Args:
        stored: Open checkpoint.
        named_slices: Stored name and slice to fill; floats are converted to the dtype of the slice's memory.
        verifies: If True, compare the recorded checksums of what is read. They are known only when the bytes are in
            place.
        num_threads: Number of reader threads.

    Raises:
        CheckpointError: A file is truncated, changed since it was opened, or damaged; some slices may be filled.
    """
    _read(stored, _blocks_to_fill(stored, named_slices, verifies=verifies), "some of it is loaded", num_threads)


def read_slices_on_all_ranks(
    stored: StoredCheckpoint,
    named_slices: Sequence[tuple[str, TensorSlice]],
    ranks: CheckpointGroup,
    action: str,
    *,
    verifies: bool = False,
) -> None:
    """Fill slices as `read_slices` does, and files that are not cached past the page cache; see Note [Direct reads].

    Peak extra memory is at most 16 MiB for this rank's staging blocks, and 48 MiB that the ranks of a host share, or
    1 MiB for each if there are more than 48.

    Args:
        stored: Open checkpoint, the same on all ranks.
        named_slices: Stored name and slice to fill on this rank.
        ranks: Ranks that read together. Collective over them.
        action: Description of the operation for messages.
        verifies: If True, compare the recorded checksums of what is read.

    Raises:
        CheckpointError: On all ranks, as in `read_slices`.
    """
    blocks = ranks.run_on_all_ranks(lambda: _blocks_to_fill(stored, named_slices, verifies=verifies), action)
    num_bytes, failure = sum(block.region.numel * block.dtype.itemsize for block in blocks), None
    if ranks.size > 1:
        num_bytes = max_of_numbers([num_bytes], ranks.group)[0]
    if num_bytes >= MIN_DIRECT_BYTES and not is_fake_world():
        failure, blocks = _read_directly(stored, blocks, ranks, action)
        blocks = _share_of_checksums(blocks, ranks)
    consequence = "some of it is loaded"
    ranks.run_on_all_ranks(
        lambda: _raise(failure) if failure is not None else _read(stored, blocks, consequence, NUM_THREADS), action
    )


def _raise(failure: Exception) -> None:
    raise failure


def _blocks_to_fill(
    stored: StoredCheckpoint, named_slices: Sequence[tuple[str, TensorSlice]], *, verifies: bool
) -> list[_Block]:
    """Return the blocks that fill slices, whose tensors count as modified from now on."""
    targets: dict[str, list[_Target]] = {}
    for name, tensor_slice in named_slices:
        tensor = tensor_slice.tensor.detach()
        if tensor.numel() == 0:
            continue
        region = _Region(stored.specs[name].shape, tensor_slice.box, tensor_slice.span)
        is_plain = needs_no_conversion(tensor, stored.specs[name].dtype)
        memory = np.frombuffer(bytes_of(tensor), dtype=np.uint8) if is_plain else None
        if memory is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # as a copy_ does for the others
        targets.setdefault(name, []).append(_Target(region, tensor, memory))
    blocks = _recorded_blocks(stored, targets) if verifies else []
    verified = {block.name for block in blocks}
    rest = {name: of_name for name, of_name in targets.items() if name not in verified}
    return [*blocks, *(_unverified_blocks(stored, rest) if rest else ())]


def _read_directly(
    stored: StoredCheckpoint, blocks: Sequence[_Block], ranks: CheckpointGroup, action: str
) -> tuple[Exception | None, list[_Block]]:
    """Read blocks past the page cache; return this rank's failure and the blocks that are not read. Collective."""
    direct = _DirectBlocks(stored)
    with closing(direct.files):
        rest = ranks.run_on_all_ranks(lambda: [block for block in blocks if not direct.add(block)], action)
        outcome = read_directly(direct.files, direct.needs, direct.take, ranks)
    failure = direct.check_sums(outcome, ranks)
    return failure, [*rest, *(direct.blocks[index] for index in outcome.left)]


def _share_of_checksums(blocks: Sequence[_Block], ranks: CheckpointGroup) -> list[_Block]:
    """Return the blocks; if all ranks of this host read and verify the same, each verifies a share. Collective."""
    if ranks.size == 1:
        return list(blocks)
    places = [(block.name, block.region.box, block.region.span, block.record is None) for block in blocks]
    digest = hashlib.sha256(repr(places).encode()).digest()
    payloads, of_rank = all_gather_bytes(digest, ranks.group)
    members = ranks.ranks_of_this_host()
    if any(payloads[of_rank[rank]] != digest for rank in members):
        return list(blocks)
    shared, begin = [], 0
    for block in blocks:
        is_own = members[begin // BATCH_BYTES % len(members)] == ranks.rank
        shared.append(block if is_own else replace(block, record=None))
        begin += block.region.numel * block.dtype.itemsize
    return shared


class _DirectBlocks:
    """Blocks to read past the page cache, whose bytes are consecutive in a file, and what they need of the files.

    The caller closes `files`.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self.blocks: list[_Block] = []
        self.needs: list[ByteRange] = []
        self._stored = stored
        self._parts: list[tuple[int, int, int, int]] = []  # block, offset in it, number of bytes, their checksum
        firsts = [(file, next(iter(file.specs))) for file in stored.files if file.specs]
        located = [(file, place[0]) for file, name in firsts if (place := file.locate(name)) is not None]
        self._numbers = {file.path: number for number, (file, _) in enumerate(located)}
        self.files = DirectFiles(
            stored.storage, [opened for _, opened in located], [file.num_bytes for file, _ in located]
        )

    def add(self, block: _Block) -> bool:
        """Add a block; return False if it must be read through the page cache."""
        place, itemsize = self._stored.locate(block.name), block.dtype.itemsize
        if place is None or not block.region.is_run or place[1] % itemsize:
            return False
        file = self._numbers[self._stored.file_of(block.name).path]
        if not self.files.is_cold(file):
            return False
        start = place[1] + block.region.start * itemsize
        self.blocks.append(block)
        self.needs.append(ByteRange(file, start, start + block.region.numel * itemsize))
        return True

    def take(self, index: int, offset: int, data: np.ndarray, is_to_check: bool) -> None:
        """Copy bytes of a block, from an offset of the file on, to its targets, and note their checksum if asked to."""
        block, need = self.blocks[index], self.needs[index]
        region, itemsize = block.region, block.dtype.itemsize
        first = region.span[0] + (offset - need.start) // itemsize
        # Not in smaller steps: copies of 1 MiB and more bypass the caches, which takes half of the time.
        for target in block.targets:
            _copy(data, block.dtype, _Region(region.shape, region.box, (first, first + len(data) // itemsize)), target)
        if block.record is not None and is_to_check:
            self._parts.append((index, offset - need.start, len(data), crc32(data.data)))

    def check_sums(self, outcome: DirectOutcome, ranks: CheckpointGroup) -> Exception | None:
        """Return this rank's failure of the reads, or a checksum that differs from the recorded one. Collective."""
        if any_rank([outcome.failure is not None], ranks.group)[0]:
            return outcome.failure  # parts are missing
        parts = np.array(self._parts, dtype=np.int64).reshape(-1, 4)
        if outcome.sharers is not None:
            payloads, of_rank = all_gather_bytes(parts.tobytes(), ranks.group)
            of_sharers = [np.frombuffer(payloads[of_rank[rank]], dtype=np.int64) for rank in outcome.sharers]
            parts = np.concatenate(of_sharers).reshape(-1, 4)
        checksums, ends = [0] * len(self.blocks), [0] * len(self.blocks)
        for index, offset, length, checksum in parts[np.lexsort((parts[:, 1], parts[:, 0]))].tolist():
            if offset == ends[index]:
                checksums[index] = shift_crc32(checksums[index], length) ^ checksum
                ends[index] += length
        left = set(outcome.left)
        for index, (block, checksum) in enumerate(zip(self.blocks, checksums, strict=True)):
            if block.record is not None and index not in left and checksum != block.record.crc32:
                return _checksum_error(self._stored, block.record, checksum, "some of it is loaded")
        return None


def verify_ranges(stored: StoredCheckpoint, share: int, num_shares: int) -> None:
    """Verify one share of the checksummed data. Not collective.

    Data without checksums, as in files of other programs, is skipped. Heads, index and param groups were verified when
    the checkpoint was opened. Other documents, such as a config that the user may edit, do not matter for a load.

    Args:
        stored: Open checkpoint.
        share: Index of the share, from 0.
        num_shares: Number of shares of about equal size.

    Raises:
        CheckpointError: Data differs from its checksum; the message names file and tensor.
    """
    blocks = _recorded_blocks(stored, None)
    total, begin = max(sum(block.region.numel * block.dtype.itemsize for block in blocks), 1), 0
    blocks_of_share: list[_Block] = []
    for block in blocks:
        if begin * num_shares // total == share:  # where its first byte is, counted over all blocks
            blocks_of_share.append(block)
        begin += block.region.numel * block.dtype.itemsize
    _read(stored, blocks_of_share, "nothing was loaded", NUM_THREADS)


def _recorded_blocks(stored: StoredCheckpoint, targets: Mapping[str, Sequence[_Target]] | None) -> list[_Block]:
    """Return the ranges with checksums in file order: those that the targets need, or without targets all of them."""
    blocks: list[_Block] = []
    for file in stored.files:
        record = stored.record_of(file)
        for each in () if record is None else record.ranges:
            if (targets is not None and each.name not in targets) or each.span[0] == each.span[1]:
                continue
            spec = file.specs[each.name]
            region = _Region(spec.shape, full_box(spec.shape) if each.box is None else each.box, each.span)
            of_name = [] if targets is None else targets[each.name]
            holders = [target for target in of_name if (region.shared_range(target.region) or (0, 0, 1))[2] > 0]
            if holders or targets is None:
                blocks.append(_Block(each.name, spec.dtype, region, holders, each))
    return blocks


def _unverified_blocks(stored: StoredCheckpoint, targets: Mapping[str, Sequence[_Target]]) -> Iterator[_Block]:
    """Yield parts of all targets."""
    for name, of_name in targets.items():
        dtype = stored.specs[name].dtype
        size = BATCH_BYTES // dtype.itemsize
        for target in of_name:
            region, (first, last) = target.region, target.region.span
            for start in range(first, last, size):
                span = (start, min(start + size, last))
                yield _Block(name, dtype, _Region(region.shape, region.box, span), [target], None)


def _read(stored: StoredCheckpoint, blocks: Iterable[_Block], consequence: str, num_threads: int) -> None:
    batches = list(batches_by_bytes(blocks, lambda block: block.region.numel * block.dtype.itemsize, BATCH_BYTES))
    run_in_threads(lambda batch: _read_blocks(stored, batch, consequence), batches, min(num_threads, len(batches)))


def _read_blocks(stored: StoredCheckpoint, batch: Sequence[_Block], consequence: str) -> None:
    reader, buffer = ElementReader(stored), np.empty(0, dtype=np.uint8)
    for block in batch:
        region, itemsize, (first, last) = block.region, block.dtype.itemsize, block.region.span
        direct, memory = _direct_target(block)
        if direct is None and len(buffer) == 0:
            buffer = np.empty(STEP_BYTES, dtype=np.uint8)
        checksum = 0
        for start in range(first, last, STEP_BYTES // itemsize):
            stop = min(start + STEP_BYTES // itemsize, last)
            place = 0 if direct is None else start - first
            elements = (buffer if direct is None else memory)[place * itemsize : (place + stop - start) * itemsize]
            reader.read(block.name, region.box, (start, stop), elements)
            if block.record is not None:
                checksum = crc32(elements.data, checksum)
            for target in block.targets:
                if target is not direct:
                    _copy(elements, block.dtype, _Region(region.shape, region.box, (start, stop)), target)
        if block.record is not None and checksum != block.record.crc32:
            raise _checksum_error(stored, block.record, checksum, consequence)


def _direct_target(block: _Block) -> tuple[_Target | None, np.ndarray]:
    """Return the slice that holds all of the block as it is in the file, if there is one, and the memory for it."""
    region, itemsize = block.region, block.dtype.itemsize
    for target in block.targets:
        shared = None if target.memory is None else region.shared_range(target.region)
        if target.memory is not None and shared is not None and shared[2] == region.numel:
            return target, target.memory[shared[1] * itemsize : (shared[1] + region.numel) * itemsize]
    return None, np.empty(0, dtype=np.uint8)


def _checksum_error(stored: StoredCheckpoint, record: RangeRecord, checksum: int, consequence: str) -> CheckpointError:
    where = "its own header" if stored.manifest is None else stored.path.name
    first, last = record.span
    return CheckpointError(
        f"{stored.file_of(record.name).path} is damaged: elements {first} to {last} of {record.name!r} have the"
        f" checksum {checksum:08x}, but {where} records {record.crc32:08x}, so {consequence}. Take another copy of the"
        ' checkpoint, or pass verify="structure" to load it as it is'
    )


def _copy(elements: np.ndarray, dtype: torch.dtype, region: _Region, target: _Target) -> None:
    """Copy what a slice holds of the elements of a region."""
    shared = region.shared_range(target.region)
    if shared is not None:
        source, first, length = shared
        itemsize = dtype.itemsize
        if target.memory is not None:
            stored = elements[source * itemsize : (source + length) * itemsize]
            target.memory[first * itemsize : (first + length) * itemsize] = stored
        else:
            assign_elements(target.tensor, first, torch.from_numpy(elements).view(dtype)[source : source + length])
        return
    runs = overlapping_runs(region.shape, region.box, region.span, target.region.box, target.region.span)
    values = torch.from_numpy(elements).view(dtype)
    for sources, firsts, lengths in _regular(*runs):
        count, length = len(lengths), int(lengths[0])
        source, first = int(sources[0]), int(firsts[0])
        step, target_step = (int(each[1] - each[0]) if count > 1 else length for each in (sources, firsts))
        if target_step == length or target.tensor.is_contiguous():
            rows = values.as_strided((count, length), (step, 1), source)
            if target_step == length:
                assign_elements(target.tensor, first, rows.reshape(-1))
            else:
                # Relative to the tensor itself: `as_strided` counts from the start of the storage.
                offset = target.tensor.storage_offset() + first
                target.tensor.as_strided((count, length), (target_step, 1), offset).copy_(rows)
        else:
            for index in range(count):
                row = values[source + index * step : source + index * step + length]
                assign_elements(target.tensor, first + index * target_step, row)


def _regular(
    sources: np.ndarray, targets: np.ndarray, lengths: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield groups of runs of equal length with equal distances, each as its part of the three columns."""
    if len(lengths) == 0:
        return
    is_other_length = lengths[1:] != lengths[:-1]
    steps, target_steps = np.diff(sources), np.diff(targets)
    is_other_step = np.zeros(len(steps), dtype=bool)
    is_other_step[1:] = (steps[1:] != steps[:-1]) | (target_steps[1:] != target_steps[:-1])
    breaks = (np.flatnonzero(is_other_length | is_other_step) + 1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, len(lengths)], strict=True):
        yield sources[start:stop], targets[start:stop], lengths[start:stop]
