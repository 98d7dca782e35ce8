"""A disk in memory that knows what has reached the platter: operations go in, and what a crash would leave comes out.

Two things are forgotten apart from each other, as POSIX allows: bytes of a file that were not fsynced, and entries of a
directory that were not fsynced. A rename is one change of one or two directories, there wholly or not at all, as all
journalling file systems keep it, and on the disk when one of the two is fsynced. Everything else may be kept or lost
each for itself, which no real file system does to its full extent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

ROOT = 0


@dataclass(slots=True)
class Node:
    """A file: what processes see, and what is on the disk. A directory has neither."""

    is_directory: bool
    content: bytes = b""
    durable: bytes = b""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of entries that is not on the disk yet: (directory, name, node or None for gone)."""

    what: str
    effects: tuple[tuple[int, str, int | None], ...]


@dataclass(slots=True)
class Disk:
    """Files and directories by number; number 0 is the root.

    Attributes:
        nodes: All that ever were.
        entries: Names in each directory, as processes see them.
        durable_entries: Names in each directory on the disk.
        pending: What lies between the two, in order.
        by_inode: The node of each file that has the number of an open one.
    """

    nodes: list[Node] = field(default_factory=lambda: [Node(is_directory=True)])
    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    durable_entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    pending: list[Change] = field(default_factory=list)
    by_inode: dict[int, int] = field(default_factory=dict)

    def apply(self, operation):
        """Does what was recorded."""
        getattr(self, f"_{operation.kind}")(operation)

    def unsynced(self):
        """Returns the files, among those that have a name, whose bytes are not all on the disk."""
        named = {number for names in self.entries.values() for number in names.values()}
        return [number for number in sorted(named) if self.nodes[number].content != self.nodes[number].durable]

    def entries_with(self, kept):
        """Returns the names in each directory when of the pending changes only some have reached the disk."""
        entries = {directory: dict(names) for directory, names in self.durable_entries.items()}
        for change in kept:
            _take(entries, change)
        return entries

    def tree(self, entries=None, contents=None):
        """Returns a map from path to bytes, None for a directory.

        Args:
            entries: The names in each directory; without, as processes see them.
            contents: Bytes of files that differ from what processes see.
        """
        entries, contents = self.entries if entries is None else entries, contents or {}
        found = {}

        def walk(directory, prefix):
            for name, number in sorted(entries.get(directory, {}).items()):
                path = prefix + name
                if self.nodes[number].is_directory:
                    found[path] = None
                    walk(number, path + "/")
                else:
                    found[path] = contents.get(number, self.nodes[number].content)

        walk(ROOT, "")
        return found

    # Operations.

    def _make_directory(self, operation):
        number = self._new(Node(is_directory=True))
        self.entries[number], self.durable_entries[number] = {}, {}
        self._change(operation, (*self._place(operation.path), number))

    def _create(self, operation):
        number = self.by_inode[operation.inode] = self._new(Node(is_directory=False))
        self._change(operation, (*self._place(operation.path), number))

    def _write(self, operation):
        node, start, data = self._open(operation), operation.offset, bytes.fromhex(operation.content)
        content = node.content.ljust(start, b"\0")
        node.content = content[:start] + data + content[start + len(data) :]

    def _resize(self, operation):
        node = self._open(operation)
        node.content = node.content[: operation.num_bytes].ljust(operation.num_bytes, b"\0")

    def _sync(self, operation):
        node = self._open(operation)
        node.durable = node.content

    def _sync_path(self, operation):
        if operation.path.startswith(".."):
            return
        number = self._find(operation.path)
        if not self.nodes[number].is_directory:
            self.nodes[number].durable = self.nodes[number].content
            return
        for change in [change for change in self.pending if any(effect[0] == number for effect in change.effects)]:
            _take(self.durable_entries, change)
            self.pending.remove(change)

    def _rename(self, operation):
        source, target = self._place(operation.path), self._place(operation.target)
        self._change(operation, (*source, None), (*target, self.entries[source[0]][source[1]]))

    def _remove(self, operation):
        self._change(operation, (*self._place(operation.path), None))

    def _remove_tree(self, operation):
        for path in self.below(operation.path):
            self._change(f"remove {path}", (*self._place(path), None))

    def below(self, path):
        """Returns a directory and all paths in it, in an order in which they can be removed."""
        tree = self.tree()
        return sorted((found for found in tree if found == path or found.startswith(path + "/")), reverse=True)

    def remove_one(self, path):
        """Removes a file or an empty directory: a part of the removal of a tree."""
        self._change(f"remove {path}", (*self._place(path), None))

    def _new(self, node):
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _open(self, operation):
        return self.nodes[self.by_inode[operation.inode]]

    def _find(self, path):
        number = ROOT
        for name in Path(path).parts:
            number = self.entries[number][name]
        return number

    def _place(self, path):
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def _change(self, what, *effects):
        change = Change(str(what), effects)
        _take(self.entries, change)
        self.pending.append(change)


def _take(entries, change):
    for directory, name, number in change.effects:
        if number is None:
            entries[directory].pop(name, None)
        else:
            entries[directory][name] = number


def disk_of(root):
    """Returns a disk that holds what is in a directory, all of it on the platter."""
    disk = Disk()

    def walk(directory, number):
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            is_directory = entry.is_dir(follow_symlinks=False)
            assert is_directory or entry.is_file(follow_symlinks=False), f"{entry.path} is neither file nor directory"
            content = b"" if is_directory else Path(entry.path).read_bytes()
            found = disk._new(Node(is_directory=is_directory, content=content, durable=content))
            disk.entries[number][entry.name] = disk.durable_entries[number][entry.name] = found
            if is_directory:
                disk.entries[found], disk.durable_entries[found] = {}, {}
                walk(entry.path, found)
            else:
                disk.by_inode[entry.inode()] = found

    walk(root, ROOT)
    return disk


def write_tree(tree, root):
    """Makes a directory of what a disk holds; what is there is removed."""
    import shutil

    shutil.rmtree(root, ignore_errors=True)
    os.mkdir(root)
    for path, content in tree.items():  # a directory comes before what is in it
        if content is None:
            os.mkdir(os.path.join(root, path))
        else:
            with open(os.path.join(root, path), "wb") as file:
                file.write(content)


def read_tree(root):
    """Returns the map that `write_tree` takes, of a directory."""
    return disk_of(root).tree()
