"""Storage that writes down what is done to it, as data that can be done again elsewhere, in one order over all ranks.

Every operation is done and noted under one lock that all processes share, so the notes are in the order of the deeds:
what a process finds that is killed after the n-th is what the first n give.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from booster.checkpoint_io.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that was done.

    Attributes:
        kind: make_directory, create, write, resize, sync, sync_path, rename (of both kinds), remove or remove_tree.
        rank: Who did it.
        path: Below the root; starts with ".." where it is outside.
        target: The new name of a rename.
        inode: The number of a file that is open, which renames don't change.
        offset: Of a write.
        content: Of a write, as hexadecimal text.
        num_bytes: Of a resize.
    """

    kind: str
    rank: int = 0
    path: str = ""
    target: str = ""
    inode: int = 0
    offset: int = 0
    content: str = ""
    num_bytes: int = 0

    def __str__(self) -> str:
        renamed = f" -> {self.target}" if self.target else ""
        detail = f" {len(self.content) // 2} bytes at {self.offset}" if self.kind == "write" else ""
        return f"rank {self.rank} {self.kind} {self.path}{renamed}{detail}"


class RecordingStorage(Storage):
    """The file system, with notes.

    Args:
        root: The directory that is watched.
        log: Where the notes go, outside of the root; all ranks give the same.
        rank: Who notes.
        syncs: Whether what should reach the disk does; it is noted in either case.
    """

    def __init__(self, root, log, rank=0, *, syncs=False):
        self.root = Path(os.path.realpath(root))
        self.log = Path(log)
        self.rank = rank
        self.syncs = syncs

    def make_directory(self, path):
        with self._noted("make_directory", path=path):
            super().make_directory(path)

    def create(self, path):
        with self._noted("create", path=path) as facts:
            file = super().create(path)
            facts["inode"] = os.fstat(file.descriptor).st_ino
        return file

    def resize(self, file, num_bytes):
        with self._noted("resize", path=file.path, inode=_inode(file.descriptor), num_bytes=num_bytes):
            super().resize(file, num_bytes)

    def _pwrite(self, descriptor, data, offset):
        with self._noted("write", path=None, inode=_inode(descriptor), offset=offset) as facts:
            count = super()._pwrite(descriptor, data, offset)
            facts["content"] = bytes(data[:count]).hex()
        return count

    def sync(self, file):
        with self._noted("sync", path=file.path, inode=_inode(file.descriptor)):
            if self.syncs:
                super().sync(file)

    def sync_path(self, path):
        with self._noted("sync_path", path=path):
            if self.syncs:
                super().sync_path(path)
            else:
                os.stat(path)  # it must be there

    def rename_new(self, source, target):
        with self._noted("rename", path=source, target=target):
            super().rename_new(source, target)

    def replace(self, source, target):
        with self._noted("rename", path=source, target=target):
            super().replace(source, target)

    def remove(self, path):
        with self._noted("remove", path=path):
            super().remove(path)

    def remove_tree(self, path):
        with self._noted("remove_tree", path=path):
            super().remove_tree(path)

    @contextmanager
    def _noted(self, kind, *, path, target=None, **facts):
        """Does the block as one operation; one that raises is not noted."""
        if path is not None:
            facts["path"] = self._below_root(path)
        if target is not None:
            facts["target"] = self._below_root(target)
        with self.log.open("a") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            yield facts
            log.write(json.dumps({"kind": kind, "rank": self.rank, **facts}) + "\n")
            log.flush()

    def _below_root(self, path):
        real = Path(os.path.realpath(Path(path).parent)) / Path(path).name
        return os.path.relpath(real, self.root)


def _inode(descriptor):
    return os.fstat(descriptor).st_ino


def read_operations(log):
    """Returns what was noted, in order."""
    return [Operation(**json.loads(line)) for line in Path(log).read_text().splitlines()]


def write_operations(log, operations):
    """Writes notes as a file that `read_operations` reads."""
    Path(log).write_text("".join(json.dumps(asdict(operation)) + "\n" for operation in operations))
