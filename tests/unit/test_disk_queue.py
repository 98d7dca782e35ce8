"""What the disk queue does around its system calls: tickets, calls that stop short; files and buffers."""

import contextlib
import errno
import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from disk_cases import MIB, aligned_random, close_quietly, error_of, exit_code_of_fork, largest_file, random_bytes

from booster.errors import ConfigError
from booster.kernels import disk_io
from booster.kernels.disk_io import ALIGNMENT, DiskQueue, aligned_buffer, open_data_file


@pytest.fixture
def descriptors():
    """Closes what a test puts into it."""
    with contextlib.ExitStack() as stack:
        yield lambda descriptor: stack.callback(close_quietly, descriptor) and descriptor


@pytest.fixture
def plain_file(tmp_path, descriptors):
    return descriptors(os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT))


@pytest.fixture
def gate(monkeypatch):
    """Holds up reads until the test releases them, one by one."""
    gate, read = threading.Semaphore(0), os.preadv

    def read_later(*arguments):
        assert gate.acquire(timeout=60)
        return read(*arguments)

    monkeypatch.setattr(disk_io.os, "preadv", read_later)
    return gate


def test_queue_keeps_tensors_until_they_are_done(gate, plain_file):
    os.pwrite(plain_file, bytes(4), 0)
    tensors = [torch.ones(1) for _ in range(2)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    with DiskQueue(1) as queue:
        tickets = [queue.read(plain_file, tensor, 0) for tensor in tensors]
        del tickets[0]
        tensors.clear()
        gc.collect()
        assert all(reference() is not None for reference in alive)
        gate.release()
        deadline = time.monotonic() + 60
        while alive[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [reference() is not None for reference in alive] == [False, True]
        gate.release()
        tickets[0].wait()
        assert alive[1]() is None


def test_wait_can_be_interrupted(gate, plain_file):
    with DiskQueue() as queue:
        ticket = queue.read(plain_file, torch.ones(1), 0)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                ticket.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            gate.release()
        assert error_of(ticket).errno == errno.EIO


def test_number_of_threads():
    with pytest.raises(ConfigError, match="num_threads=0"):
        DiskQueue(0)


def test_an_error_that_was_handled_keeps_nothing_alive(monkeypatch, plain_file):
    class Local:
        pass

    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    def handled(queue):
        local = Local()
        with pytest.raises(OSError, match="full"):
            queue.write(plain_file, torch.ones(1), 0).wait()
        return weakref.ref(local)

    monkeypatch.setattr(disk_io.os, "pwrite", fail)
    with DiskQueue(1) as queue:
        local = handled(queue)
        gc.collect()
        assert local() is None


# System calls that move a part of what they were asked for.


def test_requests_are_split_at_the_limit_of_a_call(monkeypatch, plain_file):
    sizes, write = [], os.pwrite
    monkeypatch.setattr(disk_io, "_MAX_CALL_BYTES", 4096)
    monkeypatch.setattr(disk_io.os, "pwrite", lambda fd, data, at: sizes.append(len(data)) or write(fd, data, at))
    data, copy = random_bytes(10_000), torch.empty(10_000, dtype=torch.uint8)
    with DiskQueue() as queue:
        queue.write(plain_file, data, 0).wait()
        queue.read(plain_file, copy, 0).wait()
    assert sizes == [4096, 4096, 1808]
    assert torch.equal(copy, data)


def test_short_calls(monkeypatch, plain_file):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(disk_io.os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:777], at))
    monkeypatch.setattr(disk_io.os, "preadv", lambda fd, data, at: read(fd, [memoryview(data[0])[:555]], at))
    data, copy = random_bytes(10_000), torch.empty(10_000, dtype=torch.uint8)
    with DiskQueue() as queue:
        queue.write(plain_file, data, 0).wait()
        queue.read(plain_file, copy, 0).wait()
        monkeypatch.setattr(disk_io.os, "pwrite", lambda *_: 0)
        assert error_of(queue.write(plain_file, data, 0)).errno == errno.EIO
    assert torch.equal(copy, data)


# Files and buffers.


def test_data_file(tmp_path, descriptors):
    mask = os.umask(0)
    try:
        descriptor, is_direct = open_data_file(tmp_path / "data", 10_000)
    finally:
        os.umask(mask)
    status = os.fstat(descriptors(descriptor))
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 3 * ALIGNMENT
    assert status.st_blocks * 512 >= status.st_size
    assert not os.get_inheritable(descriptor)
    data, copy = aligned_random(3 * ALIGNMENT), aligned_buffer(3 * ALIGNMENT)
    with DiskQueue() as queue:
        queue.write(descriptor, data, 0).wait()
        queue.read(descriptor, copy, 0).wait()
    assert torch.equal(data, copy)
    assert is_direct == disk_io._is_direct(descriptor)


def test_data_file_in_memory(descriptors):
    path = Path(f"/dev/shm/test-disk-io-{os.getpid()}")  # tmpfs: new kernels have O_DIRECT there, older ones don't
    if not path.parent.is_dir():
        pytest.skip("no /dev/shm")
    try:
        descriptor, _ = open_data_file(path, ALIGNMENT)
        data, copy = aligned_random(ALIGNMENT), aligned_buffer(ALIGNMENT)
        with DiskQueue() as queue:
            queue.write(descriptors(descriptor), data, 0).wait()
            queue.read(descriptor, copy, 0).wait()
    finally:
        path.unlink()
    assert torch.equal(data, copy)


def test_data_file_without_o_direct(tmp_path, monkeypatch, descriptors):
    def refuse(*_):
        raise OSError(errno.EINVAL, "not with O_DIRECT")

    monkeypatch.setattr(disk_io.os, "preadv", refuse)
    descriptor, is_direct = open_data_file(tmp_path / "data", ALIGNMENT)
    assert not is_direct
    assert not disk_io._is_direct(descriptors(descriptor))


def test_empty_data_file(tmp_path, descriptors):
    descriptor, _ = open_data_file(tmp_path / "data", 0)
    assert os.fstat(descriptors(descriptor)).st_size == 0


def test_data_file_that_is_there(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").write_text("kept")
    for name in ("link", "file"):
        with pytest.raises(FileExistsError):
            open_data_file(tmp_path / name, ALIGNMENT)
    assert (tmp_path / "file").read_text() == "kept"
    assert not (tmp_path / "target").exists()


def test_data_file_that_does_not_fit(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with largest_file(MIB), pytest.raises(OSError, match="File too large") as caught:
        open_data_file(tmp_path / "data", 2 * MIB)
    assert caught.value.filename == str(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 3 * MIB])
def test_aligned_buffer(num_bytes):
    buffer = aligned_buffer(num_bytes)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (num_bytes,))
    assert buffer.data_ptr() % ALIGNMENT == 0
    assert not buffer.any()


def test_aligned_buffer_in_a_forked_process():
    """It has pages of its own there: copies could get what the disk writes, in place of this process's."""
    buffer = aligned_buffer(3 * MIB).fill_(1)

    def child():
        pages = buffer[::ALIGNMENT]  # few enough for one thread: torch's others are not there
        assert not any(pages.tolist())
        pages.fill_(2)

    assert exit_code_of_fork(child) == 0
    assert buffer.eq(1).all()
