"""The asynchronous disk queue: it against plain system calls, and what is done about errors."""

import contextlib
import errno
import gc
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from disk_cases import MIB, aligned_random, close_quietly, error_of, exit_code_of_fork, largest_file, random_bytes

from booster.errors import ConfigError
from booster.kernels.disk_io import ALIGNMENT, DiskQueue, aligned_buffer, open_data_file

KIB = 1024


@pytest.fixture
def queue():
    with DiskQueue() as queue:
        yield queue


@pytest.fixture
def descriptors():
    """Closes what a test puts into it."""
    with contextlib.ExitStack() as stack:
        yield lambda descriptor: stack.callback(close_quietly, descriptor) and descriptor


@pytest.fixture
def plain_file(tmp_path, descriptors):
    return descriptors(os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT))


@pytest.fixture
def direct_file(tmp_path, descriptors):
    descriptor, is_direct = open_data_file(tmp_path / "direct", 4 * MIB)
    descriptors(descriptor)
    if not is_direct:
        pytest.skip("the temporary directory's file system has no O_DIRECT")
    return descriptor


def _content(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()


def _extents(generator, num_bytes, count, unit=1):
    """Returns the limits of extents that cover all of it, some of them empty."""
    cuts = sorted(generator.randint(0, num_bytes // unit) * unit for _ in range(count - 1))
    return list(zip([0, *cuts], [*cuts, num_bytes], strict=True))


def _write_and_read_back(queue, descriptor, data, extents, generator, make_buffer):
    shuffled = generator.sample(extents, len(extents))
    tickets = [queue.write(descriptor, data[start:end], start) for start, end in shuffled]
    for ticket in generator.sample(tickets, len(tickets)):
        ticket.wait()
    assert _content(descriptor) == bytes(data.numpy())
    buffers = [make_buffer(end - start) for start, end in shuffled]
    tickets = [queue.read(descriptor, buffer, start) for buffer, (start, _) in zip(buffers, shuffled, strict=True)]
    for ticket, buffer, (start, end) in zip(tickets, buffers, shuffled, strict=True):
        ticket.wait()
        assert torch.equal(buffer, data[start:end])


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(queue, plain_file, seed):
    generator = random.Random(seed)
    data = random_bytes(generator.randint(1, 4 * MIB), seed)
    extents = _extents(generator, data.numel(), 300)
    _write_and_read_back(queue, plain_file, data, extents, generator, lambda n: torch.empty(n, dtype=torch.uint8))


@pytest.mark.parametrize("seed", range(3))
def test_random_direct_requests(queue, direct_file, seed):
    generator = random.Random(seed)
    extents = _extents(generator, 4 * MIB, 150, ALIGNMENT)
    _write_and_read_back(queue, direct_file, aligned_random(4 * MIB, seed), extents, generator, aligned_buffer)


def test_tensors_of_any_dtype_and_shape(queue, plain_file):
    tensors = [
        torch.tensor(2.5),
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.randn(7, dtype=torch.float64),
        torch.arange(4, dtype=torch.int64),
        torch.empty(0),
    ]
    offsets = [0, 100, 1000, 5000, 9000]
    for tensor, offset in zip(tensors, offsets, strict=True):
        queue.write(plain_file, tensor, offset).wait()
    for tensor, offset in zip(tensors, offsets, strict=True):
        copy = torch.empty_like(tensor)
        queue.read(plain_file, copy, offset).wait()
        assert torch.equal(copy, tensor)


def test_more_bytes_than_a_system_call_takes(queue, descriptors):
    untouched = torch.empty(3 << 30, dtype=torch.uint8)  # which takes no memory
    queue.write(descriptors(os.open("/dev/null", os.O_WRONLY)), untouched, 0).wait()


def test_threads_of_the_caller(queue, plain_file):
    """Several threads may use one queue, and end while their requests are in flight."""
    data = random_bytes(64 * 64 * KIB)

    def write(parts):
        for part in parts:
            queue.write(plain_file, data[part * 64 * KIB : (part + 1) * 64 * KIB], part * 64 * KIB)

    threads = [threading.Thread(target=write, args=(range(first, 64, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    assert _content(plain_file) == bytes(data.numpy())


# Tickets.


def test_tickets_in_any_order_and_twice(queue, plain_file):
    first, second = queue.write(plain_file, torch.ones(10), 0), queue.write(plain_file, torch.ones(10), 40)
    for ticket in (second, first, second, first):
        ticket.wait()
        assert ticket.done()


def test_ticket_outlives_its_queue(queue, plain_file):
    good, bad = queue.write(plain_file, torch.ones(10), 0), queue.read(plain_file, torch.ones(10), 4000)
    queue.close()
    good.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="shorter than it should be"):
            bad.wait()


def test_waiting_lets_other_threads_run(queue, descriptors):
    zeros, buffer = descriptors(os.open("/dev/zero", os.O_RDONLY)), torch.empty(32 * MIB, dtype=torch.uint8)
    times, is_over = [], False

    def run():
        while not is_over:
            times.append(time.perf_counter())
            time.sleep(0.0005)

    other = threading.Thread(target=run)
    other.start()
    last = [queue.read(zeros, buffer, 0) for _ in range(150)][-1]
    start = time.perf_counter()
    last.wait()
    end, is_over = time.perf_counter(), True
    other.join()
    assert sum(start < moment < end for moment in times) >= 3


def test_idle_queue_takes_no_processor_time(queue, plain_file):
    queue.write(plain_file, torch.ones(10), 0).wait()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


# Errors.


@pytest.mark.parametrize("offset", [0, 50, 99, 100, 5000])
def test_read_past_the_end(queue, plain_file, tmp_path, offset):
    os.pwrite(plain_file, b"x" * 100, 0)
    error = error_of(queue.read(plain_file, torch.empty(101, dtype=torch.uint8), offset))
    assert error.errno == errno.EIO
    assert "shorter than it should be" in str(error)
    assert f"{max(0, 100 - offset)} of 101 bytes at offset {offset} read" in str(error)
    assert error.filename == str(tmp_path / "plain")


def test_direct_read_past_an_end_inside_of_a_block(queue, direct_file):
    os.ftruncate(direct_file, ALIGNMENT + 100)
    error = error_of(queue.read(direct_file, aligned_buffer(4 * ALIGNMENT), 0))
    assert error.errno == errno.EIO
    assert f"{ALIGNMENT + 100} of {4 * ALIGNMENT} bytes" in str(error)


def test_closed_descriptor(queue, plain_file):
    os.close(plain_file)
    for ticket in (queue.read(plain_file, torch.ones(1), 0), queue.write(plain_file, torch.ones(1), 0)):
        error = error_of(ticket)
        assert (error.errno, error.filename) == (errno.EBADF, f"descriptor {plain_file}")


def test_wrong_access(queue, plain_file, tmp_path, descriptors):
    read_only = descriptors(os.open(tmp_path / "plain", os.O_RDONLY))
    assert error_of(queue.write(read_only, torch.ones(1), 0)).errno == errno.EBADF
    write_only = descriptors(os.open(tmp_path / "plain", os.O_WRONLY))
    assert error_of(queue.read(write_only, torch.ones(1), 0)).errno == errno.EBADF


def test_errors_are_of_their_kind(queue, tmp_path, descriptors):
    directory = descriptors(os.open(tmp_path, os.O_RDONLY))
    assert isinstance(error_of(queue.read(directory, torch.ones(1), 0)), IsADirectoryError)


def test_full_device(queue, descriptors):
    error = error_of(queue.write(descriptors(os.open("/dev/full", os.O_WRONLY)), torch.ones(1), 0))
    assert (error.errno, error.filename) == (errno.ENOSPC, "/dev/full")


def test_write_that_only_fits_in_part(queue, plain_file):
    with largest_file(10_000):
        error = error_of(queue.write(plain_file, torch.ones(20_000, dtype=torch.uint8), 1_000))
    assert error.errno == errno.EFBIG
    assert "9000 of 20000 bytes" in str(error)


def test_one_failure_leaves_other_requests_alone(queue, plain_file):
    data = random_bytes(100 * KIB)
    tickets = []
    for part in range(100):
        tickets.append(queue.read(plain_file, torch.ones(8), 1 << 40))
        tickets.append(queue.write(plain_file, data[part * KIB : (part + 1) * KIB], part * KIB))
    for bad, good in zip(tickets[::2], tickets[1::2], strict=True):
        assert error_of(bad).errno == errno.EIO
        good.wait()
    assert _content(plain_file) == bytes(data.numpy())


@pytest.mark.parametrize("wrong", ["address", "length", "offset"])
def test_unaligned_direct_request(queue, direct_file, wrong):
    buffer = aligned_buffer(2 * ALIGNMENT)
    start, end = {"address": (512, 512 + ALIGNMENT), "length": (0, 512), "offset": (0, ALIGNMENT)}[wrong]
    with pytest.raises(AssertionError, match="O_DIRECT"):
        queue.read(direct_file, buffer[start:end], 512 if wrong == "offset" else 0)


def test_unsuitable_tensors(queue, plain_file):
    for tensor, offset in ((torch.ones(4, 4).t()[1:], 0), (torch.ones(4, device="meta"), 0), (torch.ones(4), -1)):
        with pytest.raises(AssertionError):
            queue.write(plain_file, tensor, offset)


# The end of a queue.


def _num_threads():
    return len(os.listdir("/proc/self/task"))


def test_threads_leave_signals_to_the_main_thread(plain_file):
    before = set(os.listdir("/proc/self/task"))
    with DiskQueue(1) as queue:
        queue.write(plain_file, torch.ones(1), 0).wait()
        own = set(os.listdir("/proc/self/task")) - before
        assert own
        for thread in own:
            (blocked,) = re.findall(r"SigBlk:\s(\w+)", Path(f"/proc/self/task/{thread}/status").read_text())
            assert int(blocked, 16) & 1 << (signal.SIGINT - 1)
            assert not int(blocked, 16) & 1 << (signal.SIGSEGV - 1)


@pytest.mark.parametrize("way", ["close", "drop", "cycle"])
def test_end_with_work_under_way(way, plain_file):
    gc.collect()
    data = random_bytes(16 * MIB)
    parts = [one.clone() for one in data.split(512 * KIB)]
    threads = _num_threads()  # with those of torch that copy
    queue = DiskQueue()
    for number, part in enumerate(parts):
        queue.write(plain_file, part, number * 512 * KIB)
    del part, parts
    if way == "close":
        queue.close()
    elif way == "cycle":
        queue.itself = queue
    del queue
    gc.collect()
    assert _content(plain_file) == bytes(data.numpy())
    # Before Python 3.13 a joined thread may still be ending.
    deadline = time.monotonic() + 5
    while _num_threads() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _num_threads() <= threads


def test_closed_queue(queue, plain_file):
    queue.close()
    queue.close()
    with pytest.raises(ConfigError, match="closed"):
        queue.read(plain_file, torch.ones(1), 0)


def test_forked_process(plain_file):
    """It can't use the queue, doesn't hang where it drops it, and opens one of its own."""
    holder = [DiskQueue()]  # the only reference
    ticket = holder[0].write(plain_file, torch.ones(4 * MIB), 0)

    def child():
        for use in (ticket.wait, ticket.done, lambda: holder[0].read(plain_file, torch.ones(1), 0)):
            with pytest.raises(ConfigError, match="was forked from it without its threads: open a queue in each"):
                use()
        holder.clear()
        gc.collect()
        with DiskQueue() as own:
            own.write(plain_file, torch.full((5,), 3.0), 32 * MIB).wait()

    assert exit_code_of_fork(child) == 0
    ticket.wait()
    copy = torch.empty(5)
    holder[0].read(plain_file, copy, 32 * MIB).wait()
    assert copy.tolist() == [3.0] * 5
    holder[0].close()
