"""What the tests of commits share: saves of small files, what is seen of them, and processes killed in between."""

from __future__ import annotations

from oracles.crash_disk import read_tree
from oracles.faulting_storage import UnsyncedStorage

from booster.checkpoint_io.commit import Transaction, paths_in

STORAGE = UnsyncedStorage()
TOKEN = "0123456789abcdef" * 2
OLD = {"a": "old", "b": "old", "c.index.json": "old", "part/a": "old", "part/b": "old"}
NEW = {"a": "new", "c.index.json": "new", "d": "new", "part/a": "new", "part/c": "new"}
OTHERS = {"notes.txt": "mine", "logs/x": "mine", "part/notes.txt": "mine"}


def is_ours(name):
    return not name.endswith(".txt")


def write(storage, directory, files):
    for folder in sorted({name.rpartition("/")[0] for name in files} - {""}):
        storage.make_directory(directory / folder)
    for name, content in files.items():
        storage.write_file(directory / name, content.encode())


def save(storage, target, files, is_stale=is_ours):
    transaction = Transaction(storage, target, is_directory=True)
    try:
        write(storage, transaction.begin(), files)
        transaction.commit(is_stale=is_stale)
    finally:
        transaction.abort()


def save_file(storage, target, content):
    transaction = Transaction(storage, target, is_directory=False)
    try:
        storage.write_file(transaction.begin() / target.name, content.encode())
        transaction.commit(is_stale=lambda name: False)
    finally:
        transaction.abort()


def complete(storage, target):
    """Begins a save and gives it up."""
    transaction = Transaction(storage, target, is_directory=True)
    try:
        transaction.begin()
    finally:
        transaction.abort()


def list_directory(storage, directory):
    return sorted(paths_in(storage, directory))


def resolve(storage, directory, name):
    path = directory / name
    return paths_in(storage, path.parent).get(path.name, path)


def seen(directory, storage=STORAGE):
    """Returns the content of each file as a reader sees the directory and the folders in it."""
    found = {}
    for name in list_directory(storage, directory):
        path = resolve(storage, directory, name)
        if path.is_dir():
            for inner in list_directory(storage, path):
                at = resolve(storage, path, inner)
                assert at == resolve(storage, directory, f"{name}/{inner}")
                found[f"{name}/{inner}"] = at.read_text()
        else:
            found[name] = path.read_text()
    return found


def plain(directory):
    """Returns the content of each file as other libraries see the directory."""
    tree = read_tree(directory)
    return {name: content.decode() for name, content in tree.items() if content is not None}


class Killed(BaseException):
    """What no `except Exception` catches."""


class KilledStorage(UnsyncedStorage):
    """Does so many operations and then, like the storage of a process that is gone, none."""

    def __init__(self, num_operations):
        self.left = num_operations

    def _one(self):
        self.left -= 1
        if self.left < 0:
            raise Killed


def _counted(name):
    def operation(self, *arguments, **options):
        self._one()
        return getattr(UnsyncedStorage, name)(self, *arguments, **options)

    return operation


for _name in ("make_directory", "create", "write_at", "sync", "sync_path", "rename_new", "replace", "remove"):
    setattr(KilledStorage, _name, _counted(_name))
KilledStorage.remove_tree = _counted("remove_tree")


def killed_after(num_operations, action):
    """Returns whether an action was killed."""
    try:
        action(KilledStorage(num_operations))
    except Killed:
        return True
    return False
