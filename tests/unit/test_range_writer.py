"""What a rank's threads write: every byte at its place, its checksum, and no failure lost."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import distributed
from safetensors.torch import load_file

from booster.checkpoint_io.layout import MODEL, PAGE_BYTES
from booster.checkpoint_io.planning import slices as byte_runs
from booster.checkpoint_io.planning.save_plan import WriteRange, plan_save
from booster.checkpoint_io.planning.slices import SliceTable
from booster.checkpoint_io.saving import writer
from booster.checkpoint_io.saving.part import safetensors_image, torch_image
from booster.checkpoint_io.saving.writer import (
    PartWrites,
    StagingBuffers,
    read_range,
    write_range_bytes,
    write_ranges,
)
from booster.checkpoint_io.storage import Storage
from booster.interface import TensorSlice

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint8]


class Recording(Storage):
    """Notes what is done, and can be told to refuse or to fail."""

    def __init__(
        self, *, refuses_open=False, refuses_write=False, short=False, fail_at=None, code=errno.ENOSPC, threads=0
    ):
        self.operations = []
        self.opened = []
        self.direct = set()
        self.refuses_open, self.refuses_write, self.short = refuses_open, refuses_write, short
        self.fail_at, self.code = fail_at, code
        self._lock = threading.Lock()
        self._threads = threading.Barrier(threads) if threads else None  # so that one fast thread cannot do it all
        self._started = set()

    def _note(self, *facts):
        with self._lock:
            waits = self._threads and threading.get_ident() not in self._started
            waits = waits and len(self._started) < self._threads.parties
            self._started.add(threading.get_ident())
        if waits:
            self._threads.wait(60)
        with self._lock:
            self.operations.append((threading.current_thread().name, *facts))
            if self.fail_at is not None and len(self.operations) > self.fail_at:
                raise OSError(self.code, os.strerror(self.code))

    def open_for_writing(self, path, *, direct=False):
        self._note("open", path.name, direct)
        if direct and self.refuses_open:
            raise OSError(errno.EINVAL, "no such way here")
        file = super().open_for_writing(path, direct=direct)
        self.opened.append(file)
        if direct:
            self.direct.add(file.descriptor)
        return file

    def write_at(self, file, data, offset):
        self._note("write", file.path.name, file.descriptor in self.direct, offset, memoryview(data).nbytes)
        super().write_at(file, data, offset)

    def _pwrite(self, descriptor, data, offset):
        if self.refuses_write and descriptor in self.direct:
            raise OSError(errno.EINVAL, "no such way here")
        return super()._pwrite(descriptor, data[: -(-len(data) // 2)] if self.short else data, offset)

    def sync(self, file):
        self._note("sync", file.path.name)
        super().sync(file)

    def close(self, file):
        self.direct.discard(file.descriptor)
        super().close(file)

    def kinds(self, kind):
        return [facts[2:] for facts in self.operations if facts[1] == kind]


class Case:
    """Slices of some ranks, the plan, and the files it is written to, as rank 0 creates them."""

    def __init__(self, directory, slices_of, *, suffix="safetensors", shard_bytes=10**9, hosts=None):
        self.slices_of = slices_of
        self.plan = plan_save(
            [SliceTable.from_slices(slices) for slices in slices_of],
            range(len(slices_of)),
            MODEL.names(is_safetensors=suffix == "safetensors"),
            max_shard_bytes=shard_bytes,
            is_sharded=True,
            always_index=False,
            host_of_rank=hosts,
        )
        image_of = (lambda file: safetensors_image(file, {})) if suffix == "safetensors" else _torch_image
        self.files = [(directory / file.name, image_of(file)) for file in self.plan.files]

    def create(self):
        storage = Storage()
        for path, image in self.files:
            with storage.create(path) as file:
                storage.write_at(file, b"\xa5" * image.num_bytes, 0)  # unwritten bytes can't pass for zeros
                for offset, content in image.fragments:
                    storage.write_at(file, content, offset)

    def write(self, rank, storage=None, **options):
        ranges = list(self.plan.ranges(writer=rank))
        found = write_ranges(storage or Storage(), [PartWrites(self.files, ranges, self.slices_of[rank])], **options)
        return dict(zip(ranges, found[0], strict=True))

    def check(self, expected, checksums):
        """Compares the files with the tensors, and the checksums with the files."""
        found = {}
        for path, image in self.files:
            loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            assert sorted(loaded) == sorted(image.specs)
            found |= loaded
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert _bits(found[name]) == _bits(tensor), name
        for part, checksum in checksums.items():
            block = expected[part.name][tuple(slice(start, start + length) for start, length in part.box)]
            assert zlib.crc32(_bits(block.reshape(-1)[slice(*part.span)])) == checksum, part


def _torch_image(file):
    return torch_image(file, None)


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _random_tensor(shape, dtype, generator):
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _ranges(choose, total, count):
    cuts = sorted(choose.choices(range(total + 1), k=count - 1))
    return list(zip([0, *cuts], [*cuts, total], strict=True))


def _split(name, tensor, num_ranks, choose, stored):
    """Yields rank and slice: spans of the whole, blocks of one dimension, or copies that share the work."""
    how = choose.choice(["span", "copies", *range(tensor.dim())])
    shape = tuple(tensor.shape)
    whole = TensorSlice.full(name, tensor, primary=False)
    if how == "copies":
        for rank in range(num_ranks):
            yield rank, replace(whole, primary=rank == 0, dtype=stored)
    elif how == "span":
        for rank, (start, stop) in enumerate(_ranges(choose, tensor.numel(), num_ranks)):
            part = tensor.reshape(-1)[start:stop]
            yield rank, replace(whole, span=(start, stop), tensor=part, primary=True, dtype=stored)
    else:
        for rank, (start, stop) in enumerate(_ranges(choose, shape[how], num_ranks)):
            box = tuple((start, stop - start) if dim == how else (0, size) for dim, size in enumerate(shape))
            block = tensor.narrow(how, start, stop - start)  # strided, and never copied here
            yield (
                rank,
                TensorSlice(
                    name=name,
                    dtype=stored,
                    global_shape=shape,
                    box=box,
                    span=(0, block.numel()),
                    tensor=block,
                    primary=True,
                ),
            )


def _random_case(directory, seed, suffix):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_ranks = choose.choice([1, 2, 3, 4])
    slices_of, expected = [[] for _ in range(num_ranks)], {}
    for number in range(choose.randint(1, 12)):
        shape = tuple(choose.choice([0, 1, 2, 3, 5, 8, 17, 40]) for _ in range(choose.randint(0, 4)))
        if choose.random() < 0.2:
            shape = (choose.randint(1000, 9000), choose.choice([3, 64, 300]))  # several windows
        tensor = _random_tensor(shape, choose.choice(DTYPES), generator)
        stored = tensor.dtype
        if tensor.dtype == torch.float32 and choose.random() < 0.5:
            stored = torch.bfloat16
        if tensor.dim() >= 2 and choose.random() < 0.4:
            tensor = tensor.transpose(0, 1)
        name = f"tensor.{number}"
        expected[name] = tensor.to(stored)
        for rank, part in _split(name, tensor, num_ranks, choose, stored):
            slices_of[rank].append(part)
    return Case(directory, slices_of, suffix=suffix, shard_bytes=choose.choice([10**9, 10**6])), expected


def _small_buffers(monkeypatch):
    """Makes everything small, so that small tensors meet every edge."""
    monkeypatch.setattr(writer, "_staging", StagingBuffers(count=3, num_bytes=2 * PAGE_BYTES))
    monkeypatch.setattr(writer, "_MIN_DIRECT_BYTES", 1)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 20))])
def test_any_parts_of_any_tensors(tmp_path, monkeypatch, seed, suffix):
    _small_buffers(monkeypatch)
    monkeypatch.setattr(writer, "_LONG_RUN_BYTES", random.Random(seed).choice([16, 400, 2**18]))
    case, expected = _random_case(tmp_path, seed, suffix)
    case.create()
    checksums = {}
    for rank in range(len(case.slices_of)):
        checksums |= case.write(rank, num_threads=random.Random(seed).choice([1, 2, 4]))
    case.check(expected, checksums)


def test_checksums_are_in_the_order_of_the_ranges(tmp_path, monkeypatch):
    _small_buffers(monkeypatch)
    tensor = torch.arange(100_000)
    case = Case(tmp_path, [[TensorSlice.full("a", tensor, primary=True)]])
    case.create()
    whole = next(case.plan.ranges(writer=0))
    ranges = [replace(whole, span=(start, start + 1000)) for start in range(0, 100_000, 1000)]
    ranges += [replace(whole, span=(5, 5))]  # nothing
    random.Random(1).shuffle(ranges)
    (found,) = write_ranges(Storage(), [PartWrites(case.files, ranges, case.slices_of[0])])
    assert found == [zlib.crc32(_bits(tensor[slice(*part.span)])) for part in ranges]
    case.check({"a": tensor}, {})


def test_parts_are_written_side_by_side(tmp_path, monkeypatch):
    _small_buffers(monkeypatch)
    cases = []
    for number, (seed, suffix) in enumerate([(3, "safetensors"), (5, "bin"), (3, "safetensors")]):
        (folder := tmp_path / str(number)).mkdir()
        cases.append(_random_case(folder, seed, suffix))
        cases[-1][0].create()
    checksums = [{} for _ in cases]
    for rank in range(max(len(case.slices_of) for case, _ in cases)):
        of_rank = [(number, case) for number, (case, _) in enumerate(cases) if rank < len(case.slices_of)]
        parts = [
            PartWrites(case.files, list(case.plan.ranges(writer=rank)), case.slices_of[rank]) for _, case in of_rank
        ]
        for (number, _), part, found in zip(of_rank, parts, write_ranges(Storage(), parts), strict=True):
            checksums[number] |= dict(zip(part.ranges, found, strict=True))
    for (case, expected), of_case in zip(cases, checksums, strict=True):
        case.check(expected, of_case)


def _float_case(directory, *, num_files=1, num_bytes=5 * 2**20):
    generator = torch.Generator().manual_seed(1)
    expected = {f"t.{number}": torch.rand(num_bytes // 4 // 4 + 3, generator=generator) for number in range(4)}
    shard_bytes = 10**9 if num_files == 1 else num_bytes // 3
    slices = [TensorSlice.full(name, tensor, primary=True) for name, tensor in expected.items()]
    return Case(directory, [slices], shard_bytes=shard_bytes), expected


def test_whole_pages_go_past_the_cache(tmp_path):
    case, expected = _float_case(tmp_path)
    case.create()
    storage = Recording()
    case.check(expected, case.write(0, storage))
    direct = [facts for facts in storage.kinds("write") if facts[1]]
    cached = [facts for facts in storage.kinds("write") if not facts[1]]
    if not direct:
        pytest.skip("this file system has the page cache only")
    assert all(offset % PAGE_BYTES == 0 and num_bytes % PAGE_BYTES == 0 for _, _, offset, num_bytes in direct)
    assert sum(num_bytes for *_, num_bytes in cached) < PAGE_BYTES  # the end of the file
    total = sum(num_bytes for *_, num_bytes in direct + cached)
    assert total == sum(tensor.nbytes for tensor in expected.values())  # nothing twice


@pytest.mark.parametrize("options", [{"refuses_open": True}, {"refuses_write": True}, {"short": True}], ids=str)
def test_file_systems_that_do_less(tmp_path, options):
    case, expected = _float_case(tmp_path)
    case.create()
    case.check(expected, case.write(0, Recording(**options)))


def test_every_file_is_synced_after_its_last_byte_and_closed(tmp_path):
    case, expected = _float_case(tmp_path, num_files=4)
    assert len(case.files) == 4
    case.create()
    storage = Recording()
    case.check(expected, case.write(0, storage))
    for path, _ in case.files:
        of_file = [facts[1] for facts in storage.operations if facts[2] == path.name]
        assert of_file[-1] == "sync"
        assert of_file.count("sync") == 1
    assert all(file.descriptor == -1 for file in storage.opened)


def _num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_failure_at_any_operation_is_raised_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_staging", StagingBuffers(count=4, num_bytes=64 * PAGE_BYTES))
    case, _ = _float_case(tmp_path, num_files=4)
    case.create()
    complete = Recording(threads=2)
    case.write(0, complete)
    threads, descriptors = threading.active_count(), _num_descriptors()
    assert len(complete.operations) > 20
    assert len({facts[0] for facts in complete.operations}) > 1
    for index in range(len(complete.operations)):
        for code in (errno.ENOSPC, errno.EIO):
            storage = Recording(fail_at=index, code=code)
            with pytest.raises(OSError, match=os.strerror(code)):
                case.write(0, storage)
            assert all(file.descriptor == -1 for file in storage.opened)
            # Each thread may have had one more in hand.
            assert len(storage.operations) <= index + writer._staging.count + 1
    assert threading.active_count() == threads
    assert _num_descriptors() == descriptors


def test_a_failure_of_the_copy_is_raised(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("the device is gone")

    case, _ = _float_case(tmp_path)
    case.create()
    monkeypatch.setattr(writer, "copy_elements", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        case.write(0)


def test_an_interrupt_waits_for_the_threads(tmp_path, monkeypatch):
    class Interrupting(Recording):
        def write_at(self, file, data, offset):
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            super().write_at(file, data, offset)

    case, _ = _float_case(tmp_path, num_bytes=80 * 2**20)
    case.create()
    storage = Interrupting()
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        case.write(0, storage)
    assert threading.active_count() == threads
    assert all(file.descriptor == -1 for file in storage.opened)


def test_without_threads_the_caller_does_it(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    case, expected = _float_case(tmp_path)
    case.create()
    monkeypatch.setattr(threading.Thread, "start", start)
    checksums = case.write(0)
    monkeypatch.undo()
    case.check(expected, checksums)


def test_the_staging_memory_is_bounded_and_kept(tmp_path, monkeypatch):
    made = []

    def counted(num_bytes):
        made.append(num_bytes)
        return torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)[:num_bytes]

    monkeypatch.setattr(
        writer, "_staging", StagingBuffers(count=writer._staging.count, num_bytes=writer._staging.num_bytes)
    )
    monkeypatch.setattr("booster.checkpoint_io.saving.writer.aligned_buffer", counted)
    case, _ = _float_case(tmp_path, num_bytes=64 * 2**20)
    case.create()
    for _ in range(3):
        # Memory that starts at no page can't go past the cache: said by the system, and then it goes through it.
        case.write(0, num_threads=9)
    assert 1 <= len(made) <= writer._staging.count
    assert sum(made) <= 64 * 2**20


class Disk(Storage):
    """Takes a second for each write, on its own clock, but does so many at once; notes the number of threads."""

    def __init__(self, num_queues):
        self.num_queues = num_queues
        self.seconds = 0.0
        self.depths = set()
        self._lock = threading.Lock()

    def perf_counter(self):
        return self.seconds

    def write_at(self, file, data, offset):
        with self._lock:
            depth = writer._staging.count
            self.depths.add(depth)
            self.seconds += 1 / min(depth, self.num_queues)
        super().write_at(file, data, offset)


@pytest.mark.parametrize(("num_queues", "depth"), [(16, 8), (4, 4), (1, 4)])
def test_the_first_large_save_measures_the_disk(tmp_path, monkeypatch, num_queues, depth):
    monkeypatch.setattr(writer, "_staging", StagingBuffers(count=4, num_bytes=32 * PAGE_BYTES))
    monkeypatch.setattr(writer, "BLOCK_BYTES", 16 * PAGE_BYTES)  # a write for each job at every depth
    monkeypatch.setattr(writer, "_depth_of", {})
    monkeypatch.setattr(writer, "_SAMPLE_BYTES", 24 * 16 * PAGE_BYTES)
    expected = {f"t.{number}": torch.rand(16 * PAGE_BYTES // 4) for number in range(200)}
    case = Case(tmp_path, [[TensorSlice.full(name, tensor, primary=True) for name, tensor in expected.items()]])
    for depths in ({2, 4, 8}, {depth}):  # while it measures, and later
        for path, _ in case.files:
            path.unlink(missing_ok=True)
        case.create()
        disk = Disk(num_queues)
        monkeypatch.setattr(writer, "time", disk)
        case.check(expected, case.write(0, disk))
        assert disk.depths == depths
        assert list(writer._depth_of.values()) == [depth]
        assert writer._staging.count * writer._staging.num_bytes == 128 * PAGE_BYTES


def test_a_failure_while_the_disk_is_measured_leaves_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_staging", StagingBuffers(count=4, num_bytes=2 * PAGE_BYTES))
    monkeypatch.setattr(writer, "_depth_of", {})
    monkeypatch.setattr(writer, "_SAMPLE_BYTES", 2**20)
    case, _ = _float_case(tmp_path, num_bytes=8 * 2**20)
    case.create()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        case.write(0, Recording(fail_at=5, code=errno.EIO))
    assert writer._depth_of == {}
    assert writer._staging.count == 4


def test_a_small_save_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_depth_of", {})
    case, expected = _float_case(tmp_path, num_bytes=64 * 2**20)
    case.create()
    case.check(expected, case.write(0))
    assert writer._depth_of == {}


def test_buffers_are_lent_to_one_thread_at_a_time():
    buffers = StagingBuffers(count=1, num_bytes=PAGE_BYTES)
    waiting = threading.Event()

    def borrow():
        waiting.set()
        with buffers.borrow() as buffer:
            buffer.fill_(2)

    with buffers.borrow() as buffer:
        assert buffer.data_ptr() % PAGE_BYTES == 0
        other = threading.Thread(target=borrow)
        other.start()
        waiting.wait()
        buffer.fill_(1)
        other.join(0.05)
        assert other.is_alive()
        assert buffer.sum() == PAGE_BYTES
    other.join()
    with buffers.borrow() as buffer:
        assert buffer.sum() == 2 * PAGE_BYTES


def test_a_strided_tensor_is_never_copied_whole(tmp_path):
    # 16 TiB of elements if it were: an element repeated, of which a few ranges are written.
    held = torch.arange(6.0).view(2, 1, 3).expand(2, 2**41 // 3, 3)
    row = held.shape[1] * 3
    part = TensorSlice.full("a", held, primary=True)
    image = safetensors_image(_one_file(part), {})
    path = tmp_path / "a.safetensors"
    storage = Storage()
    size = 4096 * 10
    with storage.create(path) as file:
        os.ftruncate(file.descriptor, size)
    image = replace(image, offsets={"a": 4096 - (row - 30) * 4})  # the file begins just before the range
    ranges = [WriteRange(owner=0, writer=0, slice_index=0, name="a", file=0, box=part.box, span=(row - 30, row + 30))]
    ((checksum,),) = write_ranges(storage, [PartWrites([(path, image)], ranges, [part])])
    written = np.fromfile(path, dtype=np.float32, count=60, offset=4096)
    assert written.tolist() == [0, 1, 2] * 10 + [3, 4, 5] * 10
    assert checksum == zlib.crc32(written.tobytes())


def _one_file(part):
    plan = plan_save(
        [SliceTable.from_slices([replace(part, global_shape=(6,), box=((0, 6),), span=(0, 6), tensor=torch.zeros(6))])],
        [0],
        MODEL.names(is_safetensors=True),
        max_shard_bytes=10**9,
        is_sharded=False,
        always_index=False,
    )
    return plan.files[0]


def test_ranges_of_another_host_are_relayed(tmp_path):
    columns = torch.arange(4000.0).view(50, 80)
    halves = [
        TensorSlice(
            name="a",
            dtype=torch.bfloat16,
            global_shape=(50, 80),
            box=((0, 50), (40 * rank, 40)),
            span=(0, 2000),
            tensor=columns[:, 40 * rank : 40 * rank + 40],
            primary=True,
        )
        for rank in range(2)
    ]
    case = Case(tmp_path, [[half] for half in halves], hosts=[0, 1])
    case.create()
    relayed = [part for part in case.plan.ranges() if part.owner != part.writer]
    assert relayed
    checksums = {}
    for part in case.plan.ranges():
        data = torch.empty((part.span[1] - part.span[0]) * 2, dtype=torch.uint8)
        read_range(case.slices_of[part.owner][part.slice_index], part, data)
        path, image = case.files[part.file]
        with Storage().open_for_writing(path) as file:
            checksums[part] = write_range_bytes(Storage(), file, image, part, data)
    case.check({"a": columns.to(torch.bfloat16)}, checksums)


def test_runs_are_found_as_the_plan_means_them():
    # The writer asks for the runs of a part of a range, counted from the part's own beginning.
    blocks = list(byte_runs.byte_runs((4, 10), ((0, 4), (2, 5)), (3, 12), 4))
    assert [block.local.tolist() for block in blocks] == [[0, 8, 28]]
    assert [block.logical.tolist() for block in blocks] == [[20, 48, 88]]


def _shared_case(directory, num_ranks):
    """Every rank holds uneven spans of every tensor, and shares the work on one that all of them hold."""
    choose, generator = random.Random(5), torch.Generator().manual_seed(5)
    slices_of, expected = [[] for _ in range(num_ranks)], {}
    for number in range(6):
        tensor = torch.rand(200_000 + 37 * number, generator=generator)
        expected[f"tensor.{number}"] = tensor
        whole = TensorSlice.full(f"tensor.{number}", tensor, primary=True)
        for rank, (start, stop) in enumerate(_ranges(choose, tensor.numel(), num_ranks)):
            slices_of[rank].append(replace(whole, span=(start, stop), tensor=tensor[start:stop]))
    expected["shared"] = torch.rand(1_000_003, generator=generator)
    for rank in range(num_ranks):
        slices_of[rank].append(TensorSlice.full("shared", expected["shared"], primary=rank == 0))
    return Case(directory, slices_of), expected


@distributed([2, 3])
def test_ranks_write_into_one_file_at_once(tmp_path, world_size):
    rank = torch.distributed.get_rank()
    case, expected = _shared_case(tmp_path, world_size)
    if rank == 0:
        case.create()
    torch.distributed.barrier()
    checksums = case.write(rank)
    torch.distributed.barrier()
    assert any(part.name == "shared" for part in checksums)
    case.check(expected, checksums)
