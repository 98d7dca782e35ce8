"""The disk tier: live tensors, space that is used again, full and failing disks, and what it leaves behind."""

import ctypes
import errno
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disk_cases import MIB, aligned_random, error_of, exit_code_of_fork, random_bytes
from tier_cases import (
    LONG,
    descriptors,
    disk_tier_in,
    file_of,
    num_threads,
    read,
    run_random_actions,
    some_size,
    some_tensor,
    written,
)

from booster.errors import ConfigError
from booster.kernels import disk_io
from booster.kernels.disk_io import ALIGNMENT, DiskQueue, aligned_buffer
from booster.plugins.gemini import nvme_tier
from booster.plugins.gemini.nvme_tier import DiskTier
from booster.plugins.sharding.pinned_memory import FreeList


@pytest.fixture
def disk(tmp_path):
    with disk_tier_in(tmp_path / "offload") as tier:
        yield tier


@pytest.fixture
def no_direct_way(monkeypatch):
    monkeypatch.setattr(disk_io, "_make_direct", lambda _: False)


# What is written is there.


SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])


@SEEDS
def test_disk_blocks_are_as_plain_bytes(disk, seed):
    run_random_actions(disk, random.Random(100 + seed), 150)


@SEEDS
def test_disk_blocks_are_as_plain_bytes_without_o_direct(no_direct_way, disk, seed):
    run_random_actions(disk, random.Random(200 + seed), 150)
    assert not disk._file._is_direct


# Live tensors.


def test_ways_to_the_file_take_turns(disk):
    blocks = [disk.new_block(LONG) for _ in range(4)]
    wanted = [random_bytes(LONG, seed) for seed in range(4)]
    aligned, other = aligned_buffer(LONG), aligned_buffer(LONG + 1)[1:]
    ways = []
    for turn in range(40):
        block, data, tensor = blocks[turn % 4], wanted[turn % 4], (aligned, other, other)[turn % 3]
        block.write_from(tensor.copy_(data)).wait()
        ways.append(disk._file._is_cached_way)
        tensor = (aligned, other)[turn % 2]
        block.read_into(tensor.zero_()).wait()
        assert torch.equal(tensor, data)
        live = block.as_tensor(torch.uint8)
        assert torch.equal(live, data)
        live[turn * 1000] += 1
        data[turn * 1000] += 1
        block.write_from(aligned.copy_(data)).wait()
        assert disk._file._is_cached_way
        del live
    assert True in ways
    assert (False in ways) == disk._file._is_direct


def test_only_the_end_of_an_odd_tensor_takes_the_detour(disk, monkeypatch):
    block = disk.new_block(LONG + 10)
    moved = []
    queue = disk._file._queue

    def write(descriptor, tensor, offset):
        moved.append(tensor.nbytes)
        return DiskQueue.write(queue, descriptor, tensor, offset)

    monkeypatch.setattr(queue, "write", write)
    data = aligned_random(LONG + 10)
    block.write_from(data).wait()
    assert moved == ([LONG, ALIGNMENT] if disk._file._is_direct else [LONG + 10])
    assert torch.equal(read(block), data)


def test_blocks_between_pages_that_the_system_can_map(disk, monkeypatch):
    """Some systems have larger pages than blocks are aligned to."""
    monkeypatch.setattr(mmap, "ALLOCATIONGRANULARITY", 4 * ALIGNMENT)
    blocks = [written(disk, aligned_random(size, size)) for size in (ALIGNMENT, 5000, LONG, 3)]
    for block in blocks:
        assert torch.equal(block.as_tensor(torch.uint8), random_bytes(block.num_bytes, block.num_bytes))


def test_a_live_tensor_outlives_the_tier(tmp_path):
    tier = DiskTier(str(tmp_path))
    data = random_bytes(10 * ALIGNMENT + 7)
    block = written(tier, data)
    live = block.as_tensor(torch.uint8)
    block.free()
    tier.close()
    assert list(tmp_path.iterdir()) == []
    del tier, block
    gc.collect()
    assert torch.equal(live, data)
    live.zero_()
    assert not live.any()


def test_a_freed_block_that_is_still_shown_is_not_used_again(disk):
    data = random_bytes(5 * ALIGNMENT)
    block = written(disk, data)
    live = block.as_tensor(torch.uint8)
    block.free()
    other = written(disk, random_bytes(5 * ALIGNMENT, 1))
    assert torch.equal(live, data)
    assert other._offset != block._offset
    del live
    gc.collect()
    assert disk.new_block(5 * ALIGNMENT)._offset == block._offset


# Space.


def test_freed_blocks_are_used_again(disk):
    blocks = [written(disk, aligned_random(size * ALIGNMENT, size)) for size in (4, 2, 6, 1)]
    size = file_of(disk).stat().st_size
    assert size == 13 * ALIGNMENT
    blocks[0].free()
    blocks[2].free()
    blocks[2].free()
    again = [disk.new_block(pages * ALIGNMENT - 10) for pages in (5, 3, 1, 1)]
    assert [block._offset // ALIGNMENT for block in again] == [6, 0, 3, 11]
    assert file_of(disk).stat().st_size == size
    for block in again[1:]:
        assert not read(block).any()
    assert not again[0].as_tensor(torch.uint8).any()
    for number in (1, 3):
        assert torch.equal(read(blocks[number]), random_bytes(blocks[number].num_bytes, (4, 2, 6, 1)[number]))
    disk.new_block(2 * ALIGNMENT)
    assert file_of(disk).stat().st_size == size + 2 * ALIGNMENT


@pytest.mark.parametrize("seed", range(50))
def test_space_is_taken_once(seed):
    generator, free_list = random.Random(seed), FreeList()
    free_list.freed.append((0, 200))
    held, free = [], set(range(200))
    for _ in range(200):
        if held and generator.random() < 0.45:
            extent = held.pop(generator.randrange(len(held)))
            free_list.freed.append(extent)
            free |= set(range(extent[0], sum(extent)))
            continue
        length = generator.randrange(1, 40)
        fits = [start for start in sorted(free) if all(start + index in free for index in range(length))]
        offset = free_list.allocate(length)
        assert offset == (fits[0] if fits else None)
        if offset is not None:
            held.append((offset, length))
            free -= set(range(offset, offset + length))
    for extent in held:
        free_list.freed.append(extent)
    assert free_list.allocate(0) is None
    assert free_list.allocate(200) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_found_when_the_block_is_made(disk, monkeypatch, code):
    data = aligned_random(3 * ALIGNMENT)
    block = written(disk, data)

    def fill_up(descriptor, num_bytes):
        os.ftruncate(descriptor, num_bytes // 2)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(nvme_tier, "reserve_space", fill_up)
        with pytest.raises(ConfigError, match=rf"need {MIB} bytes.* bytes are free there.*offload_dir") as caught:
            disk.new_block(MIB)
    assert str(file_of(disk).parent) in str(caught.value)
    assert file_of(disk).stat().st_size == 3 * ALIGNMENT
    assert disk.bytes_held == 3 * ALIGNMENT
    assert torch.equal(read(block), data)
    assert not read(disk.new_block(MIB)).any()


def test_a_disk_that_has_less_than_the_block_is_not_filled(disk, monkeypatch):
    monkeypatch.setattr(nvme_tier.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB - 1))
    monkeypatch.setattr(nvme_tier, "reserve_space", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(ConfigError, match=f"need {MIB} bytes.* {MIB - 1} bytes are free"):
        disk.new_block(MIB)
    disk.new_block(0)


def test_a_file_system_that_can_not_reserve(disk, monkeypatch):
    def refuse(*_):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(disk_io, "_fallocate", refuse)
    data = aligned_random(MIB)
    assert torch.equal(read(written(disk, data)), data)


def test_space_is_reserved(disk):
    disk.new_block(MIB)
    assert file_of(disk).stat().st_blocks * 512 >= MIB


def test_another_error_of_the_disk_names_the_file(disk, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(nvme_tier, "reserve_space", fail)
    with pytest.raises(OSError, match="broken") as caught:
        disk.new_block(MIB)
    assert caught.value.filename == str(file_of(disk))


# Disks that fail.


def test_a_file_that_was_cut(disk):
    blocks = [written(disk, aligned_random(LONG + 100, seed)) for seed in range(2)]
    os.truncate(file_of(disk), LONG + ALIGNMENT)
    transfer = blocks[1].read_into(aligned_buffer(LONG + 100))
    for _ in range(2):
        error = error_of(transfer)
        assert error.errno == errno.EIO
        assert error.filename == str(file_of(disk))
    error = error_of(blocks[1].read_into(torch.empty(LONG + 100, dtype=torch.uint8)))
    assert "shorter than it should be" in str(error)
    with pytest.raises(OSError, match="shorter than it should be") as caught:
        blocks[1].as_tensor(torch.uint8)
    assert caught.value.filename == str(file_of(disk))
    assert torch.equal(read(blocks[0]), random_bytes(LONG + 100, 0))
    blocks[1].write_from(aligned_random(LONG + 100, 5)).wait()  # which makes the file whole
    assert torch.equal(read(blocks[1]), random_bytes(LONG + 100, 5))


def test_what_a_failed_write_left_is_not_read(disk, monkeypatch):
    data = aligned_random(LONG)
    block, other = written(disk, data), written(disk, data)
    with monkeypatch.context() as patch:
        patch.setattr(disk._file, "_direct", -1)
        patch.setattr(disk._file, "_cached", -1)
        dropped = block.write_from(data)
    error = error_of(block.read_into(aligned_buffer(LONG)))
    assert error.errno == errno.EBADF
    assert error_of(dropped).errno == errno.EBADF
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        block.as_tensor(torch.uint8)
    assert torch.equal(read(other), data)
    block.write_from(data).wait()
    assert torch.equal(read(block), data)


def test_a_block_whose_write_failed_can_be_freed(disk, monkeypatch):
    block = disk.new_block(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(disk._file, "_direct", -1)
        patch.setattr(disk._file, "_cached", -1)
        block.write_from(aligned_random(LONG))
    block.free()
    assert not read(disk.new_block(LONG)).any()


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_a_directory_that_can_not_be_used(tmp_path, directory):
    (tmp_path / "file").write_text("")
    before = descriptors(), num_threads()
    with pytest.raises(ConfigError, match="offload_dir"):
        DiskTier(str(tmp_path / directory))
    assert (descriptors(), num_threads()) == before


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no file system in memory to try")
def test_a_directory_in_memory_is_said(capsys):
    tier = DiskTier("/dev/shm")
    data = aligned_random(LONG)
    assert torch.equal(read(written(tier, data)), data)
    tier.close()
    said = capsys.readouterr().err
    assert "model data go to files" in said
    assert "directory on a disk as offload_dir" in said


# Ends.


def test_a_closed_tier(tmp_path):
    before = descriptors(), num_threads()
    tier = DiskTier(str(tmp_path))
    (inside,) = tmp_path.iterdir()
    blocks = [tier.new_block(LONG + 5) for _ in range(5)]
    transfers = [block.write_from(aligned_random(LONG + 5)) for block in blocks]
    tier.close()
    tier.close()
    for transfer in transfers:
        transfer.wait()
    assert not inside.exists()
    for begin in (blocks[0].read_into, blocks[0].write_from):
        with pytest.raises(ConfigError, match="closed"):
            begin(aligned_buffer(LONG + 5))
    with pytest.raises(ConfigError, match="closed"):
        blocks[0].as_tensor(torch.uint8)
    with pytest.raises(ConfigError, match="closed"):
        tier.new_block(10)
    blocks[0].free()
    del transfers, transfer, blocks, begin, tier
    assert (descriptors(), num_threads()) == before


def test_a_tier_that_is_dropped(tmp_path):
    before = descriptors(), num_threads()
    tier = DiskTier(str(tmp_path))
    block = written(tier, aligned_random(LONG))
    del tier
    gc.collect()
    assert torch.equal(read(block), random_bytes(LONG))
    block.write_from(aligned_random(LONG))
    del block
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert (descriptors(), num_threads()) == before


def test_live_tensors_hold_no_descriptors_once_they_are_gone(disk):
    before = descriptors()
    blocks = [written(disk, aligned_random(LONG, seed)) for seed in range(10)]
    live = [block.as_tensor(torch.uint8) for block in blocks]
    del live
    assert descriptors() == before
    assert len(disk._file._mapped) == 0


def test_a_forked_process_hangs_nowhere(disk, tmp_path):
    data = aligned_random(LONG)
    block = written(disk, data)
    under_way = block.write_from(data)

    def child():
        for use in (under_way.wait, lambda: block.read_into(data), lambda: disk.new_block(10)):
            try:
                use()
            except ConfigError:
                continue
            raise AssertionError("it was used")
        disk.close()

    assert exit_code_of_fork(child) == 0
    under_way.wait()
    assert torch.equal(read(block), data)


# torch is imported once; each end is that of a process forked from there.
USES = """
import os, signal, sys, torch
from booster.plugins.gemini.nvme_tier import DiskTier
for end in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        break
    print("code", end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
tier = DiskTier(os.path.join(sys.argv[1], end))
blocks = [tier.new_block(1000003) for _ in range(8)]
live = blocks[0].as_tensor(torch.uint8)
for block in blocks:
    block.write_from(torch.ones(1000003, dtype=torch.uint8))
print("path", end, tier._file._path.parent, flush=True)
if end == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "error":
    raise KeyError("made up for the test")
"""
CODES = {"exit": 0, "error": 1, "kill": -signal.SIGKILL}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The directory above those of all processes, and by its end the code that each left with and its directory."""
    root = tmp_path_factory.mktemp("ended")
    command = [sys.executable, "-c", USES, str(root), *CODES]
    for end in CODES:
        (root / end).mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = {tuple(line.split()[:2]): line.split()[2] for line in done.stdout.splitlines()}
    return root, {end: (int(said["code", end]), Path(said["path", end])) for end in CODES}


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), CODES.items())
def test_the_file_goes_with_the_process_or_the_next_one(ended, end, code):
    root, found = ended
    found_code, path = found[end]
    assert found_code == code
    assert path.parent == root / end
    assert path.exists() == (end == "kill")
    tier = DiskTier(str(root / end))
    assert list((root / end).iterdir()) == [file_of(tier).parent]
    tier.close()


def test_threads_that_use_blocks_of_their_own(disk):
    failures = []

    def work(number):
        generator = random.Random(number)
        blocks = [disk.new_block(some_size(generator)) for _ in range(4)]
        for turn in range(40):
            block = generator.choice(blocks)
            tensor = some_tensor(generator, block.num_bytes)
            tensor.view(torch.uint8).fill_((number * 40 + turn) % 256)
            block.write_from(tensor)
            if turn % 10 == 0 and not (block.as_tensor(torch.uint8) == (number * 40 + turn) % 256).all():
                failures.append((number, turn))
            if not (read(block) == (number * 40 + turn) % 256).all():
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
