"""Slices of any box, span, format and memory, filled from files of any kind, against whole tensors cut in memory."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import replace

import pytest
import torch
from oracles.naive_reader import naive_part
from stored_tensors import bits, save_tensors
from torch import nn

from booster.checkpoint_io.copy_elements import assign_elements
from booster.checkpoint_io.formats.manifest import FileRecord, RangeRecord
from booster.checkpoint_io.layout import MODEL
from booster.checkpoint_io.loading import fill, ranges
from booster.checkpoint_io.loading.fill import read_slices, verify_ranges
from booster.checkpoint_io.loading.reader import open_checkpoint
from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError
from booster.interface import TensorSlice

FORMATS = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


class CountingStorage(Storage):
    """Notes every stretch that is read."""

    def __init__(self):
        self.reads = []

    def read_at(self, file, buffer, offset):
        """Reads, and notes it."""
        self.reads.append((offset, memoryview(buffer).nbytes))
        super().read_at(file, buffer, offset)


def _random_box(rng, shape):
    pairs = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
    boxes = (
        (0, size) if rng.random() < 0.4 else (low, high - low) for (low, high), size in zip(pairs, shape, strict=True)
    )
    return tuple(boxes)


def _memory(rng, lengths, numel, dtype):
    """Returns memory for a slice: flat or in the form of its box, contiguous or not."""
    flat = torch.zeros(numel, dtype=dtype)
    if numel != torch.Size(lengths).numel() or rng.random() < 0.3:
        return torch.zeros(2 * numel, dtype=dtype)[::2] if rng.random() < 0.3 else flat
    if rng.random() < 0.4 and len(lengths) > 1:
        return torch.zeros(*lengths[::-1], dtype=dtype).permute(*reversed(range(len(lengths))))
    return flat.reshape(lengths)


def _random_slice(rng, name, logical):
    box = _random_box(rng, logical.shape)
    lengths = [length for _, length in box]
    numel = torch.Size(lengths).numel()
    first, last = sorted((rng.randint(0, numel), rng.randint(0, numel)))
    span = (0, numel) if rng.random() < 0.5 else (first, last)
    dtype = logical.dtype
    if dtype in (torch.float32, torch.bfloat16) and rng.random() < 0.4:
        dtype = rng.choice([torch.float64, torch.float16, torch.bfloat16])
    return TensorSlice(
        name=name,
        dtype=dtype,
        global_shape=tuple(logical.shape),
        box=box,
        span=span,
        tensor=_memory(rng, lengths, span[1] - span[0], dtype),
        primary=True,
    )


def _random_tensor(rng, dtype):
    shape = [rng.choice([1, 2, 3, 5, 8, 40]) for _ in range(rng.randint(0, 4))]
    return (torch.randn(shape) * 50).to(dtype)


def _random_tiles(rng, name, logical):
    """Returns records that cover a tensor once: boxes, cut along one dimension after another, in spans."""
    boxes = [tuple((0, size) for size in logical.shape)]
    for dim, size in enumerate(logical.shape):
        cut = rng.randint(0, size) if rng.random() < 0.6 else size
        halves = [(0, cut), (cut, size - cut)]
        boxes = [(*box[:dim], half, *box[dim + 1 :]) for box in boxes for half in halves if half[1]]
    for box in boxes:
        numel = torch.Size([length for _, length in box]).numel()
        cuts = sorted({0, numel, *(rng.randint(0, numel) for _ in range(rng.randint(0, 2)))})
        for span in itertools.pairwise(cuts):
            crc = zlib.crc32(bits(naive_part(logical, box, span)))
            yield RangeRecord(name=name, box=None if box == boxes[0] and len(boxes) == 1 else box, span=span, crc32=crc)


def _use_records(stored, tensors, rng):
    records = [record for name in tensors for record in _random_tiles(rng, name, tensors[name])]
    rng.shuffle(records)
    record = FileRecord(num_bytes=0, head_bytes=0, head_crc32=0, ranges=tuple(records))
    stored.record_of = lambda file: record
    return records


@pytest.fixture
def small_steps(monkeypatch, seed):
    """So small that every way through the code is taken."""
    rng = random.Random(seed)
    for module, name, value in [
        (fill, "BATCH_BYTES", 512),
        (fill, "STEP_BYTES", 160),
        (ranges, "SCRATCH_BYTES", rng.choice([64, 1024, 2**21])),
        (ranges, "MAX_GAP_BYTES", rng.choice([0, 24, 2**14])),
        (ranges, "_LONG_RUN_BYTES", rng.choice([1, 16, 256])),
        (ranges, "_RUNS_PER_BATCH", rng.choice([3, 16384])),
    ]:
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize("is_safetensors", [True, False])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small_steps")
def test_any_slice_equals_the_part_of_the_whole(tmp_path, seed, is_safetensors, verifies):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {f"t{index}": _random_tensor(rng, dtype) for index, dtype in enumerate(FORMATS * 3)}
    path = tmp_path / ("m.safetensors" if is_safetensors else "m.bin")
    save_tensors(path, tensors, use_safetensors=is_safetensors)
    parts = [_random_slice(rng, name, tensors[name]) for name in tensors for _ in range(12)]
    with open_checkpoint(Storage(), path, MODEL) as stored:
        if verifies:
            _use_records(stored, tensors, rng)
        verify_ranges(stored, 0, 1)
        read_slices(stored, [(part.name, part) for part in parts], verifies=verifies)
    for part in parts:
        expected = naive_part(tensors[part.name], part.box, part.span).to(part.dtype)
        assert bits(part.tensor) == bits(expected), part


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small_steps")
def test_every_damaged_element_that_is_held_is_found(tmp_path, seed):
    rng = random.Random(seed)
    tensors = {f"t{index}": torch.randn(rng.choice([1, 5, 40]), rng.choice([1, 3, 8])) for index in range(5)}
    save_tensors(path := tmp_path / "m.safetensors", tensors)
    with open_checkpoint(Storage(), path, MODEL) as stored:
        _use_records(stored, tensors, rng)
        for name, tensor in tensors.items():
            element = rng.randrange(tensor.numel())
            _flip_bit(path, stored.locate(name)[1] + 4 * element)
            box = tuple((index, 1) for index in divmod(element, tensor.shape[1]))
            part = TensorSlice(
                name=name,
                dtype=tensor.dtype,
                global_shape=tuple(tensor.shape),
                box=box,
                span=(0, 1),
                tensor=torch.zeros(1),
                primary=True,
            )
            with pytest.raises(CheckpointError, match=rf"m\.safetensors is damaged: elements .* of .{name}.*some of"):
                read_slices(stored, [(name, part)], verifies=True)
            with pytest.raises(CheckpointError, match="nothing was loaded"):
                verify_ranges(stored, 0, 1)
            _flip_bit(path, stored.locate(name)[1] + 4 * element)
            read_slices(stored, [(name, part)], verifies=True)


def _flip_bit(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_every_byte_is_read_once_for_all_slices_and_checksums(tmp_path):
    tensors = {f"t{index}": torch.randn(300, 5) for index in range(4)}
    save_tensors(tmp_path / "m", tensors, shard_bytes=8000)
    storage = CountingStorage()
    with open_checkpoint(storage, tmp_path / "m", MODEL) as stored:
        storage.reads.clear()
        half = torch.zeros(750, dtype=torch.bfloat16)
        wanted = [(name, TensorSlice.full(name, torch.zeros(300, 5), primary=True)) for name in ("t0", "t1", "t0")]
        wanted.append(("t1", replace(wanted[1][1], span=(0, 750), tensor=half, dtype=half.dtype)))
        read_slices(stored, wanted, verifies=True)
    assert sum(num_bytes for _, num_bytes in storage.reads) == 2 * 4 * 1500  # those of t0 and t1
    assert all(torch.equal(part.tensor, tensors[name]) for name, part in wanted[:3])
    assert torch.equal(half, tensors["t1"].reshape(-1)[:750].bfloat16())


def test_only_what_is_held_is_read(tmp_path):
    tensors = {"a": torch.randn(64, 1000), "b": torch.randn(500)}
    save_tensors(tmp_path / "m.safetensors", tensors)
    rows = TensorSlice(
        name="a",
        dtype=torch.float32,
        global_shape=(64, 1000),
        box=((8, 16), (0, 1000)),
        span=(100, 15000),
        tensor=torch.zeros(14900),
        primary=True,
    )
    storage = CountingStorage()
    with open_checkpoint(storage, tmp_path / "m.safetensors", MODEL) as stored:
        _, start = stored.locate("a")
        storage.reads.clear()
        read_slices(stored, [("a", rows)])
    assert storage.reads == [(start + 4 * (8 * 1000 + 100), 4 * 14900)]


@pytest.mark.parametrize(("width", "stride", "num_calls"), [(4, 1000, 1), (100, 8192, 64)])
def test_columns_are_read_together_or_one_by_one(tmp_path, width, stride, num_calls):
    tensors = {"a": torch.randn(64, stride)}
    save_tensors(tmp_path / "m.safetensors", tensors)
    part = TensorSlice(
        name="a",
        dtype=torch.float32,
        global_shape=(64, stride),
        box=((0, 64), (10, width)),
        span=(0, 64 * width),
        tensor=torch.zeros(64, width),
        primary=True,
    )
    storage = CountingStorage()
    with open_checkpoint(storage, tmp_path / "m.safetensors", MODEL) as stored:
        storage.reads.clear()
        read_slices(stored, [("a", part)])
    assert len(storage.reads) == num_calls
    assert torch.equal(part.tensor, tensors["a"][:, 10 : 10 + width])


def test_plain_memory_is_filled_in_place_and_autograd_knows(tmp_path):
    save_tensors(tmp_path / "m.safetensors", {"a": torch.arange(6.0)})
    parameter = nn.Parameter(torch.zeros(6))
    loss = (parameter * parameter).sum()
    with open_checkpoint(Storage(), tmp_path / "m.safetensors", MODEL) as stored:
        read_slices(stored, [("a", TensorSlice.full("a", parameter, primary=True))])
    assert parameter.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_buffers_of_all_threads_fit_into_12_mib():
    assert fill.NUM_THREADS * (fill.STEP_BYTES + ranges.SCRATCH_BYTES) <= 12 * 2**20


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    path = tmp_path / "m.safetensors"
    save_tensors(path, {"a": torch.randn(1000), "b": torch.randn(1000)})
    with open_checkpoint(Storage(), path, MODEL) as stored:
        path.write_bytes(path.read_bytes()[:-100])
        wanted = [(name, TensorSlice.full(name, torch.zeros(1000), primary=True)) for name in "ab"]
        with pytest.raises(CheckpointError, match=r"m\.safetensors ends at byte"):
            read_slices(stored, wanted)
        with pytest.raises(CheckpointError, match=r"m\.safetensors ends at byte"):
            verify_ranges(stored, 0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_elements_are_assigned_whatever_the_strides(seed):
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    tensor = torch.zeros(*shape[::-1]).permute(*reversed(range(len(shape))))
    expected = torch.zeros(tensor.numel())
    for _ in range(30):
        first, last = sorted((rng.randint(0, tensor.numel()), rng.randint(0, tensor.numel())))
        values = torch.randn(last - first)
        assign_elements(tensor, first, values)
        expected[first:last] = values
    assert torch.equal(tensor.reshape(-1), expected)


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_shares_of_the_verification_are_all_ranges_once(tmp_path, num_shares):
    tensors = {f"t{index}": torch.randn(40 * index, 3) for index in range(20)}
    save_tensors(tmp_path / "m", tensors, shard_bytes=4000)
    with open_checkpoint(storage := CountingStorage(), tmp_path / "m", MODEL) as stored:
        storage.reads.clear()
        read = [_data_bytes_of(stored, storage, share, num_shares) for share in range(num_shares)]
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(read) == total
    assert max(read) < total / num_shares + max(tensor.nbytes for tensor in tensors.values())


def _data_bytes_of(stored, storage, share, num_shares):
    storage.reads.clear()
    verify_ranges(stored, share, num_shares)
    return sum(num_bytes for offset, num_bytes in storage.reads if offset >= 4096)  # heads and documents begin at 0


def test_what_has_no_checksums_is_not_read(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "m.bin")
    with open_checkpoint(Storage(), tmp_path / "m.bin", MODEL) as stored:
        verify_ranges(stored, 0, 1)
        assert stored.record_of(stored.files[0]) is None
