"""Writers with the mistakes of real ones, and one without: what proves that an enumeration of crashes can find them.

A checkpoint of theirs is two parts and an index that names them with their sizes; an honest reader trusts the index.
Every one keeps the rule "parts before the index", and each but the last breaks one other.
"""

from __future__ import annotations

import json

PART_BYTES = 64
VALUES = {"old": b"O", "new": b"N", "next": b"X"}


def in_place(storage, directory, value):
    """Overwrites, and never fsyncs."""
    _parts(storage, directory, value, ["part-0", "part-1"], write=_overwritten)
    _overwritten(storage, directory / "index", _index(["part-0", "part-1"]))


def sync_before_flush(storage, directory, value):
    """fsyncs what it has not written yet: torch.distributed.checkpoint's metadata, nvidia-resiliency-ext, DLRover."""
    _committed(storage, directory, value, write=_synced_before_it_is_written)


def unlink_before_rename(storage, directory, value):
    """Removes the old files for the new index before it moves it in: torch.distributed.checkpoint's metadata."""

    def install(temporary, index):
        if storage.kind(index) is not None:
            storage.remove(index)
        storage.rename_new(temporary, index)

    _committed(storage, directory, value, install=install)


def no_directory_sync(storage, directory, value):
    """fsyncs the files, and not their names."""
    _committed(storage, directory, value, sync_directory=lambda path: None)


def torch_distributed_checkpoint(storage, directory, value):
    """Overwrites parts under the old index, then unlinks and renames it, the fsync before the flush."""
    _parts(storage, directory, value, ["part-0", "part-1"], write=_overwritten_and_synced)
    temporary, index = directory / "index.tmp", directory / "index"
    _synced_before_it_is_written(storage, temporary, _index(["part-0", "part-1"]))
    if storage.kind(index) is not None:
        storage.remove(index)
    storage.replace(temporary, index)


def sound(storage, directory, value):
    """Makes no mistake: new parts under new names, all on the disk before the index moves over the old one."""
    _committed(storage, directory, value)


def read(directory):
    """Returns "old", "new" or "next" where all of one is there, "nothing" without an index, and else what is wrong."""
    index = directory / "index"
    if not index.exists():
        return "nothing"
    try:
        parts = json.loads(index.read_bytes())
    except ValueError:
        return "error: damaged index"
    content = b""
    for name, num_bytes in parts.items():
        part = directory / name
        if not part.exists() or part.stat().st_size != num_bytes:
            return f"error: {name} is missing or cut"
        content += part.read_bytes()
    for value, letter in VALUES.items():
        if content == letter * len(content):
            return value
    return "mixture" if set(content) <= set(b"".join(VALUES.values())) else "damaged bytes"


def _index(names):
    return json.dumps(dict.fromkeys(names, PART_BYTES)).encode()


def _parts(storage, directory, value, names, write):
    for name in names:
        write(storage, directory / name, VALUES[value] * PART_BYTES)


def _overwritten(storage, path, content):
    file = storage.open_for_writing(path) if storage.kind(path) else storage.create(path)
    with file:
        storage.write_at(file, content, 0)
        storage.resize(file, len(content))


def _overwritten_and_synced(storage, path, content):
    _overwritten(storage, path, content)
    storage.sync_path(path)


def _synced_before_it_is_written(storage, path, content):
    if storage.kind(path) is not None:
        storage.remove(path)
    with storage.create(path) as file:
        storage.sync(file)
        storage.write_at(file, content, 0)


def _written(storage, path, content):
    if storage.kind(path) is not None:  # left by a dead writer
        storage.remove(path)
    storage.write_file(path, content)


def _committed(storage, directory, value, *, write=_written, install=None, sync_directory=None):
    sync_directory = sync_directory or storage.sync_path
    names = [f"{value}-0", f"{value}-1"]
    before = [name for name in storage.names(directory) if name not in (*names, "index")]
    _parts(storage, directory, value, names, write)
    write(storage, directory / "index.tmp", _index(names))
    sync_directory(directory)
    (install or storage.replace)(directory / "index.tmp", directory / "index")
    sync_directory(directory)
    for name in before:
        if name != "index.tmp":
            storage.remove(directory / name)
    sync_directory(directory)
