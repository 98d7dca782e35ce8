"""What the disk queue does around its backends: tickets, the choice, calls that stop short; files and buffers."""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disk_cases import MIB, aligned_random, close_quietly, error_of, exit_code_of_fork, largest_file, random_bytes

from booster.errors import ConfigError
from booster.kernels import disk_io
from booster.kernels.build import COMPILE_FLAGS, SOURCE_FOLDER, BuildError, find_toolchain
from booster.kernels.disk_io import ALIGNMENT, DiskQueue, aligned_buffer, open_data_file
from booster.kernels.loader import load_kernel


@pytest.fixture
def descriptors():
    """Closes what a test puts into it."""
    with contextlib.ExitStack() as stack:
        yield lambda descriptor: stack.callback(close_quietly, descriptor) and descriptor


@pytest.fixture
def plain_file(tmp_path, descriptors):
    return descriptors(os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT))


# A backend that does what it is told.


class _Pending:
    def __init__(self):
        self.code = None

    def wait(self, seconds):
        time.sleep(min(seconds, 0.01))
        return self.done()

    def done(self):
        return self.code is not None

    def result(self):
        return self.code, 0


class _Backend:
    def __init__(self):
        self.requests = []

    def submit(self, *_):
        self.requests.append(_Pending())
        return self.requests[-1]

    def close(self):
        for request in self.requests:
            request.code = 0


@pytest.fixture
def backend(monkeypatch):
    backend = _Backend()
    monkeypatch.setattr(disk_io, "_open_backend", lambda *_: ("fake", backend))
    return backend


def test_queue_keeps_tensors_until_they_are_done(backend, plain_file):
    queue = DiskQueue()
    tensors = [torch.ones(1) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors[:2]:
        queue.read(plain_file, tensor, 0)
    del tensor
    tensors[:2] = []
    gc.collect()
    assert all(reference() is not None for reference in alive[:2])
    backend.requests[0].code = 0
    queue.read(plain_file, tensors[0], 0)
    assert [reference() is not None for reference in alive] == [False, True, True]
    tensors.clear()
    queue.close()
    assert [reference() is not None for reference in alive] == [False, False, False]


def test_ticket_lets_go_of_its_tensor_when_it_is_done(backend, plain_file):
    queue, tensor = DiskQueue(), torch.ones(1)
    ticket, alive = queue.read(plain_file, tensor, 0), weakref.ref(tensor)
    del tensor
    backend.requests[0].code = 0
    assert alive() is not None
    ticket.wait()
    assert alive() is None
    queue.close()


def test_wait_can_be_interrupted(backend, plain_file):
    queue = DiskQueue()
    ticket = queue.read(plain_file, torch.ones(1), 0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    backend.requests[0].code = errno.EIO
    assert error_of(ticket).errno == errno.EIO


def test_choice_of_the_backend(monkeypatch):
    with pytest.raises(ConfigError, match="choose io_uring, threads, python"):
        DiskQueue(backend="aio")
    with pytest.raises(ConfigError, match="num_threads=0"):
        DiskQueue(0)
    monkeypatch.setenv("BOOSTER_KERNELS", "reference")
    with DiskQueue() as queue:
        assert queue.backend == "python"
    with pytest.raises(ConfigError, match="needs the compiled kernel"):
        DiskQueue(backend="threads")


def test_forbidden_io_uring(monkeypatch):
    def refuse():
        raise PermissionError(errno.EPERM, "io_uring_setup")

    native = load_kernel("disk_io")
    if native is None:
        pytest.skip("no compiled kernel")
    fake = SimpleNamespace(RingQueue=refuse, ThreadedQueue=native.ThreadedQueue)
    monkeypatch.setattr(disk_io, "load_kernel", lambda _: fake)
    with DiskQueue() as queue:
        assert queue.backend == "threads"
    with pytest.raises(ConfigError, match="io_uring_setup"):
        DiskQueue(backend="io_uring")


# System calls that move a part of what they were asked for.


def test_short_calls_of_the_reference(monkeypatch, plain_file):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(disk_io.os, "pwrite", lambda fd, data, at: write(fd, memoryview(data)[:777], at))
    monkeypatch.setattr(disk_io.os, "preadv", lambda fd, data, at: read(fd, [memoryview(data[0])[:555]], at))
    data, copy = random_bytes(10_000), torch.empty(10_000, dtype=torch.uint8)
    with DiskQueue(backend="python") as queue:
        queue.write(plain_file, data, 0).wait()
        queue.read(plain_file, copy, 0).wait()
        monkeypatch.setattr(disk_io.os, "pwrite", lambda *_: 0)
        assert error_of(queue.write(plain_file, data, 0)).errno == errno.EIO
    assert torch.equal(copy, data)


_SHORT_CALLS = r"""
#include <fcntl.h>
#include <cstdio>
#include "disk_request.h"
#define CHECK(claim) if (!(claim)) { std::printf("%d: %s\n", __LINE__, #claim); return 1; }
using booster::Request;
int main() {
    const int file = open("file", O_RDWR | O_CREAT, 0600);
    CHECK(ftruncate(file, 5000) == 0);
    Request read(false, file, 1 << 20, 4000, 100);
    CHECK(read.has_work());
    CHECK(read.advance(1500));          // short, and not the end
    CHECK(read.next_length() == 2500 && read.next_offset() == 1600);
    CHECK(read.next_address() == reinterpret_cast<void*>((1 << 20) + 1500));
    CHECK(read.advance(-EINTR) && read.next_offset() == 1600);
    CHECK(!read.advance(2500) && read.code() == 0 && read.num_done() == 4000);
    Request over(false, file, 1 << 20, 4000, 4000);
    CHECK(!over.advance(1000) && over.code() == booster::END_OF_FILE && over.num_done() == 1000);
    Request cut(false, file, 1 << 20, 4000, 100);
    CHECK(cut.advance(1000) && !cut.advance(0) && cut.code() == booster::END_OF_FILE);
    Request write(true, file, 1 << 20, 4000, 100);
    CHECK(write.advance(1) && write.next_length() == 3999);
    CHECK(!write.advance(-ENOSPC) && write.code() == ENOSPC && write.num_done() == 1);
    Request nothing(true, file, 1 << 20, 4000, 100);
    CHECK(!nothing.advance(0) && nothing.code() == EIO);
    Request large(true, file, 1 << 20, std::size_t{3} << 30, 100);
    CHECK(large.next_length() == std::size_t{1} << 30 && large.advance(1 << 30) && large.advance(1 << 30));
    CHECK(!large.advance(1 << 30) && large.code() == 0);
    CHECK(!large.wait(0.01) && !large.done());
    large.finish();
    CHECK(large.wait(0) && large.done());
}
"""


def test_short_calls_of_the_kernel(tmp_path):
    try:
        compiler = find_toolchain().compiler
    except BuildError as error:
        pytest.skip(str(error))
    (tmp_path / "check.cpp").write_text(_SHORT_CALLS)
    command = [compiler, *COMPILE_FLAGS, "-O0", "-Werror", "-I", str(SOURCE_FOLDER), "check.cpp", "-o", "check"]
    subprocess.run(command, cwd=tmp_path, check=True)
    checked = subprocess.run(["./check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


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
