"""The compiled crc32 gives zlib's number: any length, alignment, start value, kind of buffer and instruction set."""

from __future__ import annotations

import array
import mmap
import random
import threading
import zlib

import numpy as np
import pytest

from booster.kernels import checksum, loader
from booster.kernels.checksum import crc32

_DATA = random.Random(0).randbytes(3 * 2**20)


@pytest.fixture(scope="module")
def native():
    module = loader.load_kernel("checksum")
    if module is None or not module.instruction_sets():
        pytest.skip("this machine has no such kernel")
    return module


def _content(source, most_bytes):
    start = source.randrange(0, 130)
    return memoryview(_DATA)[start : start + source.randrange(0, most_bytes)]


def test_the_check_value_of_the_standard(native):
    for instruction_set in ("", *native.instruction_sets()):
        assert native.crc32(b"123456789", 0, instruction_set) == 0xCBF43926
        assert native.crc32(bytes(64) + b"\xff" * 64, 0, instruction_set) == zlib.crc32(bytes(64) + b"\xff" * 64)


def test_every_length_and_alignment_up_to_two_steps(native):
    for instruction_set in native.instruction_sets():
        for length in range(1100):
            content = memoryview(_DATA)[length % 67 : length % 67 + length]
            assert native.crc32(content, 0, instruction_set) == zlib.crc32(content), (instruction_set, length)


@pytest.mark.parametrize(("seed", "most_bytes"), [(1, 200), (2, 5000), (3, 300_000)])
def test_random_parts_after_random_values(native, seed, most_bytes):
    source = random.Random(seed)
    for _ in range(2000 if most_bytes < 10_000 else 300):
        content, value = _content(source, most_bytes), source.getrandbits(32)
        expected = zlib.crc32(content, value)
        for instruction_set in native.instruction_sets():
            assert native.crc32(content, value, instruction_set) == expected, (instruction_set, content.nbytes, value)


@pytest.mark.parametrize("seed", range(20))
def test_a_checksum_continues_over_parts(native, seed):
    source = random.Random(seed)
    data = memoryview(_DATA)[: source.randrange(100_000, 400_000)]
    checksum, start = 0, 0
    while start < len(data):
        stop = start + source.choice([1, 63, 4096, 20_000, source.randrange(60_000)])
        checksum, start = crc32(data[start:stop], checksum), stop
    assert checksum == zlib.crc32(data)


def test_a_changed_bit_changes_it(native):
    data = bytearray(_DATA[:40_000])
    expected = crc32(data)
    for bit in random.Random(5).sample(range(8 * len(data)), 200):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32(data) != expected
        data[bit // 8] ^= 1 << bit % 8
    assert crc32(data) == expected


def test_any_contiguous_buffer(tmp_path, native):
    data = _DATA[:50_000]
    expected = zlib.crc32(data)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        for buffer in (
            *(data, bytearray(data), memoryview(data), array.array("h", data)),
            *(np.frombuffer(data, np.uint8), np.frombuffer(data, np.float32).reshape(-1, 5), mapped),
        ):
            assert crc32(buffer) == expected, type(buffer)
        with memoryview(mapped) as view:
            assert crc32(view[7:]) == zlib.crc32(data[7:])
    assert crc32(b"") == 0
    assert crc32(b"", 77) == 77


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (np.zeros((300, 200), np.uint8)[:, ::2], (ValueError, BufferError)),
        (memoryview(bytes(90_000))[::2], BufferError),
        ("x" * 90_000, TypeError),
        (5, TypeError),
    ],
)
def test_what_zlib_refuses_is_refused(native, buffer, error):
    with pytest.raises(error):
        zlib.crc32(buffer)
    with pytest.raises(error):
        crc32(buffer)


@pytest.mark.parametrize("value", [-1, -(2**40) + 3, 2**32, 2**32 + 9, 2**70])
def test_start_values_beyond_32_bits_wrap_as_in_zlib(native, value):
    data = _DATA[:20_000]
    assert crc32(data, value) == zlib.crc32(data, value & 0xFFFFFFFF)


def test_an_unknown_instruction_set_is_refused(native):
    with pytest.raises(ValueError, match="no instruction set"):
        native.crc32(_DATA, 0, "abacus")


def test_threads_sum_at_the_same_time(native):
    expected = zlib.crc32(_DATA)
    found = [[] for _ in range(6)]
    start = threading.Barrier(len(found))

    def work(results):
        start.wait()
        results += [crc32(_DATA) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(results,)) for results in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 50] * len(found)


def test_other_threads_run_meanwhile(native):
    """A thread that needs the interpreter gets it while a long sum is running."""
    data = bytearray(2**20)
    is_over = threading.Event()
    seen = []

    def resize():  # what a held buffer refuses, so it tells whether a sum is running
        while not is_over.is_set():
            try:
                data.append(0)
                data.pop()
            except BufferError:
                seen.append(True)

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(20_000):
            native.crc32(data)
            if seen:
                break
    finally:
        is_over.set()
        thread.join()
    assert seen


@pytest.mark.parametrize("length", [0, 100, 50_000])
def test_without_the_kernel_zlib_stands_in(monkeypatch, length):
    monkeypatch.setenv("BOOSTER_KERNELS", "reference")
    monkeypatch.setattr(loader, "_load", lambda *_, **__: pytest.fail("a kernel was loaded"))
    assert crc32(_DATA[:length], 3) == zlib.crc32(_DATA[:length], 3)


def test_a_cpu_without_the_instructions_uses_zlib(monkeypatch):
    class Slow:
        @staticmethod
        def instruction_sets():
            return []

    monkeypatch.setattr(checksum, "load_kernel", lambda name: Slow)
    assert crc32(_DATA) == zlib.crc32(_DATA)


def test_short_data_needs_no_kernel(monkeypatch):
    monkeypatch.setattr(checksum, "load_kernel", lambda name: pytest.fail("a kernel was asked for"))
    assert crc32(_DATA[:4096]) == zlib.crc32(_DATA[:4096])
