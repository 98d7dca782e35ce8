"""Copies that a save can write later: just the bytes that this rank writes, in memory that stays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from booster.checkpoint_io.layout import MODEL, PAGE_BYTES
from booster.checkpoint_io.planning.save_plan import WriteRange, plan_save
from booster.checkpoint_io.planning.slices import SliceTable
from booster.checkpoint_io.saving import async_save
from booster.checkpoint_io.saving.async_save import Arena, stage_slices
from booster.checkpoint_io.saving.part import safetensors_image
from booster.checkpoint_io.saving.writer import PartWrites, read_range, write_ranges
from booster.checkpoint_io.storage import Storage
from booster.interface import TensorSlice


def _ranges(slices, *spans_of):
    """Returns a range for each span of each slice, given by its place in the list."""
    return [
        WriteRange(owner=0, writer=0, slice_index=index, name=slices[index].name, file=0, box=box, span=span)
        for index, spans in spans_of
        for span in spans
        for box in [slices[index].box]
    ]


def _bytes_of_range(held, part):
    out = torch.full(((part.span[1] - part.span[0]) * held.dtype.itemsize,), 0xA5, dtype=torch.uint8)
    read_range(held, part, out)
    return out.tolist()


def _slices():
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(30, 40, generator=generator)
    part = TensorSlice(
        name="columns",
        dtype=torch.float32,
        global_shape=(30, 40),
        box=((0, 30), (10, 7)),
        span=(0, 210),
        tensor=columns[:, 10:17],
        primary=True,
    )
    flat = torch.randn(100, generator=generator)
    return [
        TensorSlice.full("whole", torch.randn(20, 5, generator=generator), primary=True),
        part,
        replace(TensorSlice.full("span", torch.zeros(10, 30), primary=True), span=(50, 150), tensor=flat),
        replace(TensorSlice.full("converted", torch.randn(8, 8, generator=generator), primary=True), dtype=torch.half),
        TensorSlice.full("scalar", torch.tensor(3), primary=True),
        TensorSlice.full("empty", torch.zeros(0, 3), primary=True),
        TensorSlice.full("conjugate", torch.randn(9, dtype=torch.complex64, generator=generator).conj(), primary=True),
        TensorSlice.full("transposed", torch.arange(35).view(5, 7).t(), primary=True),
        TensorSlice.full("flags", torch.arange(9) % 2 == 0, primary=True),
        TensorSlice.full("small", torch.randn(13, generator=generator).to(torch.float8_e4m3fn), primary=True),
    ]


def _all_spans(slices):
    return [(index, [held.span]) for index, held in enumerate(slices) if held.tensor.numel()]


def test_copies_hold_what_the_tensors_held():
    slices = _slices()
    ranges = _ranges(slices, *_all_spans(slices))
    expected = [_bytes_of_range(slices[part.slice_index], part) for part in ranges]
    arena = Arena()
    copy_of = stage_slices(ranges, slices, arena)
    for held in slices:
        held.tensor.zero_()  # the training continues
    assert [_bytes_of_range(copy_of(part), part) for part in ranges] == expected
    for part in ranges:
        copy, held = copy_of(part), slices[part.slice_index]
        assert (copy.name, copy.box, copy.tensor.dtype) == (held.name, held.box, held.dtype)


@pytest.mark.parametrize("seed", range(5))
def test_only_what_the_ranges_ask_for_is_copied(seed):
    choose = random.Random(seed)
    slices = _slices()
    spans_of = []
    for index, (start, stop) in _all_spans_flat(slices):
        cuts = sorted(choose.sample(range(start, stop + 1), k=min(4, stop - start + 1)))
        spans_of.append((index, [span for span in zip(cuts[::2], cuts[1::2], strict=False) if span[0] < span[1]]))
    ranges = _ranges(slices, *spans_of)
    choose.shuffle(ranges)
    arena = Arena()
    arena.allocate(10**5).fill_(0x5A)
    arena.reset()
    copy_of = stage_slices(ranges, slices, arena)
    for part in ranges:
        held = slices[part.slice_index]
        assert _bytes_of_range(copy_of(part), part) == _bytes_of_range(held, part)
    copied = sum((part.span[1] - part.span[0]) * slices[part.slice_index].dtype.itemsize for part in ranges)
    touched = int((arena._blocks[0].memory != 0x5A).sum())
    assert touched <= copied


def _all_spans_flat(slices):
    return [(index, held.span) for index, held in enumerate(slices) if held.tensor.numel()]


def test_a_rank_that_writes_nothing_needs_no_memory():
    arena = Arena()
    stage_slices([], _slices(), arena)
    assert arena.num_bytes == 0


def test_copies_lie_in_blocks_of_bounded_size(monkeypatch):
    """A slice continues in the next block, each of its ranges in one of them."""
    monkeypatch.setattr(async_save, "MAX_BLOCK_BYTES", 8 * PAGE_BYTES)
    long = TensorSlice.full("long", torch.arange(20 * PAGE_BYTES, dtype=torch.int32), primary=True)
    slices = [*_slices(), long, *_slices()]
    step = PAGE_BYTES // 2 + 10
    numel = long.tensor.numel()
    parts = (len(_slices()), [(start, min(start + step, numel)) for start in range(0, numel, step)])
    spans = [
        *_all_spans(_slices()),
        parts,
        *((index + len(_slices()) + 1, one) for index, one in _all_spans(_slices())),
    ]
    ranges = _ranges(slices, *spans)
    sizes = []
    allocate = Arena.allocate

    def record(self, num_bytes, *, is_pinned=False):
        sizes.append(num_bytes)
        return allocate(self, num_bytes, is_pinned=is_pinned)

    monkeypatch.setattr(Arena, "allocate", record)
    copy_of = stage_slices(ranges, slices, Arena())
    assert len(sizes) > 10
    assert set(sizes[:-1]) == {8 * PAGE_BYTES}
    assert 0 < sizes[-1] <= 8 * PAGE_BYTES
    for part in ranges:
        assert _bytes_of_range(copy_of(part), part) == _bytes_of_range(slices[part.slice_index], part)


def test_copies_are_what_the_writer_takes(tmp_path):
    slices = _slices()[:1] + _slices()[3:]
    plan = plan_save(
        [SliceTable.from_slices(slices)],
        [0],
        MODEL.names(is_safetensors=True),
        max_shard_bytes=10**9,
        is_sharded=False,
        always_index=False,
    )
    image, storage = safetensors_image(plan.files[0], {}), Storage()
    ranges = list(plan.ranges(writer=0))
    copy_of = stage_slices(list(plan.ranges(owner=0)), slices, Arena())
    found = []
    for name, held in (("direct", slices), ("staged", copy_of)):
        path = tmp_path / name
        with storage.create(path) as file:
            storage.resize(file, image.num_bytes)
        found.append((write_ranges(storage, [PartWrites([(path, image)], ranges, held)]), path.read_bytes()))
    assert found[0] == found[1]


def test_memory_stays_from_save_to_save():
    slices = [TensorSlice.full("a", torch.randn(1000, 100), primary=True)]
    ranges = _ranges(slices, *_all_spans(slices))
    arena = Arena()
    addresses = set()
    for _ in range(3):
        copy = stage_slices(ranges, slices, arena)(ranges[0])
        addresses.add(copy.tensor.data_ptr())
        assert 0 <= arena.num_bytes - slices[0].tensor.nbytes < PAGE_BYTES
        del copy
        arena.reset()
    assert len(addresses) == 1


def test_parts_of_one_save_do_not_overlap():
    arena = Arena()
    for _ in range(2):
        taken = [arena.allocate(size) for size in (5000, 1, 100_000, 0, 4096, 7)]
        for number, memory in enumerate(taken):
            memory.fill_(number)
        assert [memory.unique().tolist() for memory in taken] == [[0], [1], [2], [], [4], [5]]
        assert all(memory.data_ptr() % PAGE_BYTES == 0 for memory in taken if memory.numel())
        arena.reset()


def test_an_arena_follows_what_is_saved():
    arena = Arena()
    arena.allocate(10 * PAGE_BYTES)
    arena.reset()
    arena.allocate(100 * PAGE_BYTES)  # more: the old memory goes before the new comes
    assert arena.num_bytes == 100 * PAGE_BYTES
    arena.allocate(50 * PAGE_BYTES)
    arena.reset()
    arena.allocate(20 * PAGE_BYTES)  # less: the rest goes when the next save begins
    arena.reset()
    assert arena.num_bytes == 50 * PAGE_BYTES


def test_copies_to_a_device_are_awaited(monkeypatch):
    """Before the copy, for kernels that still write the tensors; after it, for the copy itself."""
    waited = []

    def wait(tensors):
        waited.append(len(list(tensors)))
        return False

    monkeypatch.setattr(async_save, "synchronize_devices", wait)
    slices = _slices()
    stage_slices(_ranges(slices, *_all_spans(slices)), slices, Arena())
    assert waited == [9, 9]
