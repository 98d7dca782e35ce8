"""The storage seam: what each operation promises, on the real file system."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import socket
import stat
import sys
import threading

import numpy as np
import pytest

from booster.checkpoint_io import storage as storage_module
from booster.checkpoint_io.storage import OpenFile, Storage
from booster.errors import CheckpointError
from booster.kernels import disk_io


@pytest.fixture
def storage():
    return Storage()


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_safetensors_782_files_have_the_modes_of_the_umask(storage, tmp_path):
    """safetensors 0.8 gives every file 0600."""
    storage.make_directory(tmp_path / "new")
    storage.write_file(tmp_path / "new" / "file", b"x")
    assert (_mode(tmp_path / "new"), _mode(tmp_path / "new" / "file")) == (0o750, 0o640)


def test_make_directory_takes_no_directory_that_is_there(storage, tmp_path):
    with pytest.raises(FileExistsError):
        storage.make_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        storage.make_directory(tmp_path / "no" / "parent")


def test_make_parents_makes_what_is_missing_and_syncs_it(tmp_path):
    class Notes(Storage):
        synced = []

        def sync_path(self, path):
            self.synced.append(path)
            super().sync_path(path)

    storage = Notes()
    storage.make_parents(tmp_path / "a" / "b" / "file")
    assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a" / "b" / "file").exists()
    assert set(storage.synced) == {tmp_path, tmp_path / "a"}
    storage.make_parents(tmp_path / "a" / "b" / "file")
    assert len(storage.synced) == 2
    storage.write_file(tmp_path / "file", b"")
    for below in ("x", "x/y"):
        with pytest.raises(FileExistsError):
            storage.make_parents(tmp_path / "file" / below)


def test_make_parents_takes_directories_that_another_made_meanwhile(tmp_path):
    class Slow(Storage):
        def make_directory(self, path):
            path.mkdir()
            super().make_directory(path)

    Slow().make_parents(tmp_path / "a" / "b" / "file")
    assert (tmp_path / "a" / "b").is_dir()


def test_create_makes_only_new_files_and_follows_no_link(storage, tmp_path):
    with storage.create(tmp_path / "file") as file:
        assert file.path == tmp_path / "file"
    with pytest.raises(FileExistsError):
        storage.create(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        storage.create(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_files_are_not_inherited_and_close_once(storage, tmp_path):
    file = storage.create(tmp_path / "file")
    descriptor = file.descriptor
    assert not os.get_inheritable(descriptor)
    storage.close(file)
    storage.close(file)
    assert file.descriptor == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_open_for_writing_keeps_what_is_there(storage, tmp_path):
    storage.write_file(tmp_path / "file", b"abcdef")
    with storage.open_for_writing(tmp_path / "file") as file:
        storage.write_at(file, b"X", 2)
    assert (tmp_path / "file").read_bytes() == b"abXdef"


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "missing"])
def test_open_for_writing_opens_regular_files_only(storage, tmp_path, kind):
    path = tmp_path / "it"
    storage.write_file(tmp_path / "file", b"abc")
    make = {"link": lambda: path.symlink_to("file"), "pipe": lambda: os.mkfifo(path), "directory": path.mkdir}
    make.get(kind, lambda: None)()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, CheckpointError)):
        storage.open_for_writing(path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_direct_writing_takes_aligned_buffers_or_says_einval(storage, tmp_path):
    storage.write_file(tmp_path / "file", bytes(8192))
    try:
        file = storage.open_for_writing(tmp_path / "file", direct=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            pytest.skip("this file system can't go past the page cache")
        raise
    with file, mmap.mmap(-1, 4096) as memory:
        memory[:] = b"y" * 4096
        storage.write_at(file, memory, 4096)
    assert (tmp_path / "file").read_bytes() == bytes(4096) + b"y" * 4096


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 100_001])
def test_resize_gives_the_size_and_the_space(storage, tmp_path, num_bytes):
    with storage.create(tmp_path / "file") as file:
        storage.resize(file, num_bytes)
        assert storage.size(file) == num_bytes
        assert os.fstat(file.descriptor).st_blocks * 512 >= num_bytes
        storage.resize(file, num_bytes // 2)
        assert storage.size(file) == num_bytes // 2


def test_resize_works_where_space_cannot_be_reserved(storage, tmp_path, monkeypatch):
    def unsupported(*_):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(disk_io, "_fallocate", unsupported)
    with storage.create(tmp_path / "file") as file:
        storage.resize(file, 1000)
        assert storage.size(file) == 1000
    monkeypatch.setattr(disk_io, "_fallocate", None)
    with storage.open_for_writing(tmp_path / "file") as file:
        storage.resize(file, 2000)
        assert storage.size(file) == 2000


def test_resize_beyond_what_is_allowed_fails_and_says_which_file(storage, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with storage.create(tmp_path / "file") as file, pytest.raises(OSError, match="File too large") as caught:
            storage.resize(file, 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "file")


class Stuttering(Storage):
    """Writes at most 7 bytes a call, and every third call is interrupted."""

    num_calls = 0

    def _pwrite(self, descriptor, data, offset):
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return super()._pwrite(descriptor, data[:7], offset)


@pytest.mark.parametrize(
    "data",
    [b"", bytes(range(100)), np.arange(33, dtype=np.int64).reshape(3, 11), np.zeros((0, 3)), memoryview(b"abcdefghi")],
    ids=["nothing", "bytes", "array", "empty array", "view"],
)
def test_write_at_writes_all_of_it(tmp_path, data):
    storage = Stuttering()
    with storage.create(tmp_path / "file") as file:
        storage.write_at(file, data, 5)
    assert (tmp_path / "file").read_bytes()[5:] == bytes(memoryview(data).tobytes())


def test_write_at_does_not_turn_in_circles(tmp_path):
    class Full(Storage):
        def _pwrite(self, descriptor, data, offset):
            return 0

    with Full().create(tmp_path / "file") as file, pytest.raises(OSError, match="took none"):
        Full().write_at(file, b"abc", 0)


@pytest.mark.parametrize("name", ["write_at", "sync", "resize"])
def test_errors_of_open_files_name_them(storage, tmp_path, name):
    with storage.create(tmp_path / "file") as file:
        os.close(file.descriptor)
        action = {"write_at": (b"x", 0), "sync": (), "resize": (0,)}[name]
        with pytest.raises(OSError, match=f"Bad file descriptor: '{tmp_path}/file'"):
            getattr(storage, name)(file, *action)
        file.descriptor = -1


def test_a_full_device_is_an_error(storage):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with OpenFile("/dev/full", os.open("/dev/full", os.O_WRONLY)) as file, pytest.raises(OSError, match="No space"):
        storage.write_at(file, b"abc", 0)


def test_threads_may_write_one_file_at_once(storage, tmp_path):
    parts = [bytes([number]) * 5000 for number in range(8)]
    with storage.create(tmp_path / "file") as file:
        threads = [
            threading.Thread(target=storage.write_at, args=(file, part, 5000 * number))
            for number, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_write_file_syncs_after_the_last_write(tmp_path):
    """The fsync of torch.distributed.checkpoint's metadata comes before its write."""
    order = []

    class Notes(Storage):
        def write_at(self, file, data, offset):
            order.append("write")
            super().write_at(file, data, offset)

        def sync(self, file):
            assert os.fstat(file.descriptor).st_size == 3
            order.append("sync")
            super().sync(file)

        def close(self, file):
            order.append("close")
            super().close(file)

    Notes().write_file(tmp_path / "file", b"abc")
    assert order == ["write", "sync", "close"]


def test_sync_path_takes_files_and_directories(storage, tmp_path):
    storage.write_file(tmp_path / "file", b"x")
    storage.sync_path(tmp_path / "file")
    storage.sync_path(tmp_path)
    with pytest.raises(FileNotFoundError):
        storage.sync_path(tmp_path / "nowhere")


@pytest.fixture(params=["one step", "two steps", "no such call"])
def rename_support(request, monkeypatch):
    """File systems that can rename to a new name in one step, that can't, and a C library that can't ask."""

    def unsupported(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    if request.param != "one step":
        monkeypatch.setattr(storage_module, "_renameat2", unsupported if request.param == "two steps" else None)
    return request.param


@pytest.mark.usefixtures("rename_support")
@pytest.mark.parametrize("in_the_way", ["file", "directory", "full directory", "link", "dangling link"])
@pytest.mark.parametrize("moved", ["file", "directory"])
def test_rename_new_never_takes_a_name_that_is_used(storage, tmp_path, moved, in_the_way):
    source, target = tmp_path / "source", tmp_path / "target"
    storage.write_file(source, b"new") if moved == "file" else storage.make_directory(source)
    {
        "file": lambda: target.write_bytes(b"old"),
        "directory": target.mkdir,
        "full directory": lambda: (target / "sub").mkdir(parents=True),
        "link": lambda: target.symlink_to("source"),
        "dangling link": lambda: target.symlink_to("nowhere"),
    }[in_the_way]()
    with pytest.raises(FileExistsError) as caught:
        storage.rename_new(source, target)
    assert (caught.value.filename, caught.value.filename2) == (str(source), str(target))
    assert source.exists()
    storage.rename_new(source, tmp_path / "free")
    assert (tmp_path / "free").exists()
    assert not source.exists()
    with pytest.raises(FileNotFoundError):
        storage.rename_new(source, tmp_path / "other")


def test_rename_new_has_one_winner(storage, tmp_path):
    """The file systems that tests run on rename to a new name in one step: of many at once, one succeeds."""
    for number in range(8):
        storage.make_directory(tmp_path / f"source-{number}")
    start, won = threading.Barrier(8), []

    def race(number):
        start.wait()
        try:
            storage.rename_new(tmp_path / f"source-{number}", tmp_path / "target")
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(os.listdir(tmp_path)) == 8


def test_replace_remove_and_remove_tree(storage, tmp_path):
    storage.write_file(tmp_path / "new", b"new")
    storage.write_file(tmp_path / "old", b"old")
    storage.replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"new"
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "old")
    storage.remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == ["old"]
    (tmp_path / "link").symlink_to("old")
    storage.remove(tmp_path / "link")
    assert os.listdir(tmp_path) == ["old"]
    storage.remove(tmp_path / "old")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", ["replace", "remove", "remove_tree"])
def test_removed_files_are_freed_after_the_context_by_a_thread(storage, tmp_path, monkeypatch, way):
    monkeypatch.setattr("booster.checkpoint_io.storage._LARGE_BYTES", 1)
    (tmp_path / "a" / "b").mkdir(parents=True)
    old = tmp_path / "a" / "b" / "old"
    old.write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    removes = {
        "replace": lambda: storage.replace(tmp_path / "new", old),
        "remove": lambda: storage.remove(old),
        "remove_tree": lambda: storage.remove_tree(tmp_path / "a"),
    }
    before = _open_files()
    with storage.free_space_later():
        removes[way]()
        assert old.exists() == (way == "replace")
        assert len(_open_files()) == len(before) + 1
    storage.wait_for_freed_space()
    assert _open_files() == before


def test_removed_files_are_freed_at_once_elsewhere_and_after_errors(storage, tmp_path, monkeypatch):
    monkeypatch.setattr("booster.checkpoint_io.storage._LARGE_BYTES", 1)
    (tmp_path / "old").write_bytes(b"old")
    before = _open_files()
    with pytest.raises(FileNotFoundError), storage.free_space_later():
        storage.replace(tmp_path / "missing", tmp_path / "old")
    storage.wait_for_freed_space()
    storage.remove(tmp_path / "old")
    assert _open_files() == before


def test_no_more_files_are_held_than_a_process_may_open_and_none_of_a_network(storage, tmp_path, monkeypatch):
    monkeypatch.setattr("booster.checkpoint_io.storage._LARGE_BYTES", 1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(70):
            (tmp_path / name / str(number)).write_bytes(b"old")
    before = _open_files()
    with storage.free_space_later():
        storage.remove_tree(tmp_path / "a")
        assert len(_open_files()) == len(before) + 64
    monkeypatch.setattr("booster.checkpoint_io.storage._file_system", lambda descriptor: 0x6969)  # NFS
    storage.wait_for_freed_space()
    with storage.free_space_later():
        storage.remove_tree(tmp_path / "b")
        assert _open_files() == before
    assert os.listdir(tmp_path) == []


def test_a_file_waits_for_the_space_of_removed_ones(storage, tmp_path, monkeypatch):
    monkeypatch.setattr("booster.checkpoint_io.storage._LARGE_BYTES", 1)
    (tmp_path / "old").write_bytes(b"old")
    closed, refused, real = [], threading.Event(), storage_module._free

    def free(descriptors):
        assert refused.wait(30)
        closed.extend(descriptors)
        real(descriptors)

    def reserve_space(descriptor, num_bytes):
        if not closed:
            refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage_module, "_free", free)
    monkeypatch.setattr(storage_module, "reserve_space", reserve_space)
    with storage.free_space_later():
        storage.remove(tmp_path / "old")
    with storage.create(tmp_path / "new") as file:
        storage.resize(file, 10)
        assert len(closed) == 1
        closed.clear()
        with pytest.raises(OSError, match="No space left"):  # nothing is being freed
            storage.resize(file, 10)


def test_a_forked_process_keeps_neither_locks_nor_removed_files(storage, tmp_path, monkeypatch):
    monkeypatch.setattr("booster.checkpoint_io.storage._LARGE_BYTES", 1)
    (tmp_path / "old").write_bytes(b"old")
    lock = storage.lock(tmp_path)
    with storage.free_space_later():
        storage.remove(tmp_path / "old")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            paths = [f"/proc/self/fd/{one}" for one in _open_files()]
            held = [os.readlink(one) for one in paths if os.path.lexists(one)]
            is_free = not storage.wait_for_freed_space() and not any("old (deleted)" in one for one in held)
            os.read(read, 1)  # it lives until the parent has ended the rest
            os._exit(0 if is_free else 1)
    storage.unlock(lock)
    other = storage.lock(tmp_path)
    assert other is not None
    storage.unlock(other)
    os.close(write)
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0


def _open_files():
    return sorted(os.listdir("/proc/self/fd"))


def test_a_lock_is_held_until_it_is_given_back(storage, tmp_path):
    lock = storage.lock(tmp_path)
    assert lock is not None
    assert storage.lock(tmp_path) is None
    storage.unlock(lock)
    lock = storage.lock(tmp_path)
    storage.unlock(lock)


def test_names_are_sorted(storage, tmp_path):
    for name in ("b", "a", ".c"):
        storage.write_file(tmp_path / name, b"")
    assert storage.names(tmp_path) == [".c", "a", "b"]


def test_kind_follows_no_link(storage, tmp_path):
    storage.write_file(tmp_path / "file", b"")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    kinds = {"file": "file", "link": "link", "loop": "link", "pipe": "other", ".": "directory", "nowhere": None}
    kinds |= {"file/below": None, "loop/below": None, "x" * 300: None, "nul\0": None}
    assert {name: storage.kind(tmp_path / name) for name in kinds} == kinds


def test_free_bytes_of_a_place_that_is_not_there_yet(storage, tmp_path):
    free = storage.free_bytes(tmp_path / "not" / "yet")
    status = os.statvfs(tmp_path)
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)
    assert free > 0


def test_a_file_system_without_blocks_does_not_count_them(storage, tmp_path, monkeypatch):
    """/proc and some network file systems say 0 of 0: that is not a full disk."""
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*status[:2], 0, 0, 0, *status[5:])))
    assert storage.free_bytes(tmp_path) == sys.maxsize


def test_read_at_fills_the_buffer_or_fails(storage, tmp_path):
    storage.write_file(tmp_path / "file", bytes(range(10)))
    with storage.open_regular(tmp_path / "file") as file:
        numbers = np.zeros((2, 2), dtype=np.uint16)
        storage.read_at(file, numbers, 1)
        assert numbers.tobytes() == bytes(range(1, 9))
        storage.read_at(file, bytearray(), 100)
        with pytest.raises(CheckpointError, match="ends at byte 10, 1 bytes too early"):
            storage.read_at(file, bytearray(2), 9)
    with pytest.raises(CheckpointError, match="cannot read"):
        storage.read_at(file, bytearray(2), 0)


def test_read_file_reads_no_more_than_is_allowed(storage, tmp_path):
    storage.write_file(tmp_path / "file", b"abc")
    assert storage.read_file(tmp_path / "file", max_bytes=3) == b"abc"
    with pytest.raises(CheckpointError, match="3 bytes, but at most 2 are allowed"):
        storage.read_file(tmp_path / "file", max_bytes=2)
    storage.write_file(tmp_path / "empty", b"")
    assert storage.read_file(tmp_path / "empty", max_bytes=0) == b""


@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "missing", "nul", "loop", "long"])
def test_open_regular_opens_nothing_else(storage, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / {"nul": "a\0", "long": "x" * 5000}.get(kind, "it")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind("it")
    elif kind == "loop":
        path.symlink_to("it")
    with pytest.raises(CheckpointError):
        storage.open_regular(path)


def test_what_is_exchanged_after_the_check_is_not_read(storage, tmp_path, monkeypatch):
    """Between the look at the name and the opening of it, somebody puts a pipe there."""
    path, real_open = tmp_path / "file", os.open
    storage.write_file(path, b"abc")

    def exchanged(name, *args, **kwargs):
        path.unlink()
        os.mkfifo(path)
        return real_open(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", exchanged)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="is not a regular file"):
        storage.open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_links_stay_inside_where_a_directory_is_given(storage, tmp_path):
    (tmp_path / "inside").mkdir()
    storage.write_file(tmp_path / "outside", b"abc")
    (tmp_path / "inside" / "link").symlink_to("../outside")
    assert storage.read_file(tmp_path / "inside" / "link", max_bytes=9) == b"abc"
    with pytest.raises(CheckpointError, match="leaves its directory"):
        storage.read_file(tmp_path / "inside" / "link", max_bytes=9, inside=tmp_path / "inside")
