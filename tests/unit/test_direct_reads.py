"""Reads past the page cache give the file's bytes, whatever their places, and fall back where the disk gives none."""

from __future__ import annotations

import errno
import os
import random
import sys
import zlib
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_tensors import load_tensors, save_tensors

from booster.checkpoint_io import GeneralCheckpointIO
from booster.checkpoint_io.loading import direct_reads, fill
from booster.checkpoint_io.loading.direct_reads import ByteRange, DirectFiles, assign_cells, read_directly
from booster.checkpoint_io.parallel import CheckpointGroup
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError
from booster.kernels.checksum import shift_crc32

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux's")


class ColdStorage(Storage):
    """Takes every file for one that is not cached, and counts what goes through the page cache."""

    def __init__(self, refusal=None):
        self.refusal = refusal
        self.num_cached_bytes = 0

    def is_cached(self, file):
        """Returns False."""
        return False

    def open_direct(self, file):
        """Opens it; or refuses then, or at every read."""
        if self.refusal == "open":
            return None
        if self.refusal == "read":
            return OpenFile(file.path, os.open(file.path, os.O_WRONLY))
        return super().open_direct(file)

    def read_at(self, file, buffer, offset):
        """Reads, and counts it."""
        self.num_cached_bytes += memoryview(buffer).nbytes
        super().read_at(file, buffer, offset)


@pytest.fixture
def small_cells(monkeypatch):
    """Cells and requests of a few pages, so that small files have many."""
    monkeypatch.setattr(direct_reads, "MAX_CELL_BYTES", 16384)
    monkeypatch.setattr(direct_reads, "_MIN_CELL_BYTES", 8192)
    monkeypatch.setattr(direct_reads, "_REQUEST_BYTES", 8192)
    monkeypatch.setattr(fill, "MIN_DIRECT_BYTES", 0)


def _supports_direct(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _read(storage, paths, needs, sizes=None):
    """Returns the bytes of each range, each taken once, or raises what failed."""
    opened = [storage.open_regular(path) for path in paths]
    parts = [bytearray(need.stop - need.start) for need in needs]
    taken = Counter()

    def take(index, offset, data, is_to_check):
        assert is_to_check  # there is no other rank
        start = offset - needs[index].start
        parts[index][start : start + len(data)] = data.tobytes()
        taken[index] += len(data)

    files = DirectFiles(storage, opened, sizes or [path.stat().st_size for path in paths])
    with closing(files):
        assert all(files.is_cold(file) for file in range(len(paths))) or storage.refusal == "open"
        outcome = read_directly(files, needs, take, CheckpointGroup())
    for file in opened:
        file.close()
    if outcome.failure is not None:
        raise outcome.failure
    assert (outcome.left, outcome.sharers) == ([], None)
    assert [taken[index] for index in range(len(needs))] == [len(part) for part in parts]
    return [bytes(part) for part in parts]


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("refusal", [None, "open", "read"])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_of_any_place_and_length(tmp_path, seed, refusal):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 4095, 4096, 4097, 16384, 50_000, 70_001, 131_072]) for _ in range(4)]
    contents = [rng.randbytes(size) for size in sizes]
    paths = [tmp_path / f"{index}" for index in range(4)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    places = [(file, *sorted(rng.sample(range(sizes[file] + 1), 2))) for file in range(4) for _ in range(5)]
    needs = [ByteRange(*place) for place in places] + [ByteRange(file, 0, sizes[file]) for file in range(4)]
    storage = ColdStorage(refusal)
    assert _read(storage, paths, needs) == [contents[need.file][need.start : need.stop] for need in needs]
    if refusal is None and _supports_direct(paths[0]):
        assert storage.num_cached_bytes == sum(size % 4096 for size in sizes)  # the last page of each file


@pytest.mark.usefixtures("small_cells")
def test_nothing_between_distant_ranges_is_read(tmp_path):
    (tmp_path / "f").write_bytes(bytes(10 * 16384))
    storage = ColdStorage("read")
    _read(storage, [tmp_path / "f"], [ByteRange(0, 100, 200), ByteRange(0, 9 * 16384 + 5000, 9 * 16384 + 5001)])
    assert storage.num_cached_bytes == 2 * 4096  # the page of each


@pytest.mark.usefixtures("small_cells")
def test_a_file_that_became_shorter(tmp_path):
    (tmp_path / "f").write_bytes(bytes(40_000))
    with pytest.raises(CheckpointError, match="ends at byte 40000, "):
        _read(ColdStorage(), [tmp_path / "f"], [ByteRange(0, 0, 50_000)], sizes=[50_000])


def test_every_cell_is_read_by_one_rank_that_needs_it():
    is_needed = np.random.default_rng(0).random((5, 400)) < 0.4
    readers = assign_cells(is_needed)
    for cell, reader in enumerate(readers):
        assert is_needed[reader, cell] if is_needed[:, cell].any() else reader == -1
    assert np.bincount(assign_cells(np.ones((4, 100), dtype=bool))).tolist() == [25] * 4


def test_checksums_of_parts():
    rng = random.Random(0)
    for num_parts in (1, 2, 3, 9):
        parts = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(num_parts)]
        total = 0
        for part in parts:
            total = shift_crc32(total, len(part)) ^ zlib.crc32(part)
        assert total == zlib.crc32(b"".join(parts))
    assert shift_crc32(zlib.crc32(b"a"), 2**40) == shift_crc32(shift_crc32(zlib.crc32(b"a"), 2**39), 2**39)


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("verify", ["checksums", "structure"])
def test_a_load_past_the_page_cache(tmp_path, verify):
    """Slices that need a conversion, are columns, or of another format of memory, too."""
    tensors = {
        "a": torch.randn(300, 100),
        "b": torch.randn(77).to(torch.bfloat16),
        "c": torch.arange(20_000),
        "d": torch.randn(64, 64),
    }
    save_tensors(tmp_path / "m", tensors, shard_bytes=90_000)
    found = {
        "a": torch.zeros(300, 100, dtype=torch.float16),
        "b": torch.zeros(77),
        "c": torch.zeros(20_000, dtype=torch.int64),
        "d": torch.zeros(64, 64).t(),
    }
    storage = ColdStorage()
    load_tensors(tmp_path / "m", found, verify=verify, storage=storage)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.usefixtures("small_cells")
def test_a_damaged_byte_is_found(tmp_path):
    save_tensors(path := tmp_path / "m.safetensors", {"a": torch.randn(200, 100)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: elements 0 to 20000 of 'a' have the checksum"):
        load_tensors(path, {"a": torch.zeros(200, 100)}, storage=ColdStorage())


def _drop(path):
    """Has the kernel forget the file's pages; skips the test where it keeps them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Storage().open_regular(path) as opened:
        if Storage().is_cached(opened) or not _supports_direct(path):
            pytest.skip("this file system keeps its files in memory, or can't go past the page cache")


def _num_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def test_a_cold_file_is_read_from_the_disk_once_and_a_warm_one_not_at_all(tmp_path):
    tensors = {f"t{index}": torch.randn(1000, 1001) for index in range(8)}
    save_tensors(path := tmp_path / "m.safetensors", tensors)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    _drop(path)
    before = _num_read()
    load_tensors(path, found)
    assert 0 <= _num_read() - before - path.stat().st_size < 2 * MIB  # the head, read ahead
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with Storage().open_regular(path) as opened:
        assert not Storage().is_cached(opened)
        path.read_bytes()
        assert Storage().is_cached(opened)
    before = _num_read()
    load_tensors(path, found)
    assert _num_read() == before


def test_an_empty_file_counts_as_cached(tmp_path):
    (tmp_path / "f").touch()
    with Storage().open_regular(tmp_path / "f") as file:
        assert Storage().is_cached(file)


def test_plain_models_and_optimizers_are_refused_after_a_failed_load(tmp_path):
    """They have no wrapper that could refuse: the objects themselves do."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    io = GeneralCheckpointIO()
    for save, load, part, use, kind in (
        (io.save_model, io.load_model, model, lambda: model(torch.ones(1, 8)), "model"),
        (io.save_optimizer, io.load_optimizer, optimizer, optimizer.step, "optimizer"),
    ):
        save(part, path := tmp_path / f"{kind}.safetensors")
        good = path.read_bytes()
        path.write_bytes(good[:-2] + bytes([good[-2] ^ 1]) + good[-1:])
        for _ in range(2):
            with pytest.raises(CheckpointError, match="is damaged"):
                load(part, path)
            with pytest.raises(CheckpointError, match=f"this {kind} is incomplete"):
                use()
            with pytest.raises(CheckpointError, match=f"this {kind} is incomplete"):
                save(part, tmp_path / "other.safetensors")
        path.write_bytes(good)
        load(part, path)
        use()
