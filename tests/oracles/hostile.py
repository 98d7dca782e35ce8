"""Checkpoints made to harm who opens them, opened in a process of its own under an audit hook, which nothing removes.

python -m oracles.hostile DIRECTORY (in `tests`) makes and opens all of them and prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from oracles.hostile_pickles import as_archive, call, hostile_pickles
from oracles.malformed import with_header, with_seal
from safetensors.torch import save_file
from stored_tensors import load_tensors, save_tensors

from booster.checkpoint_io.storage import Storage
from booster.errors import CheckpointError

INDEX, MANIFEST = "model.safetensors.index.json", "model.safetensors.manifest.json"
SHARD = "model-00001-of-00002.safetensors"
TARGET = "outside.safetensors"  # what a name would lead to: a good file

NAMES = [
    *(f"{'../' * depth}{TARGET}" for depth in (1, 2, 3, 10)),
    f"a/../../{TARGET}",
    f"./{TARGET}",
    f"sub/{TARGET}",
    f"sub//{TARGET}",
    f"{SHARD}/../../{TARGET}",
    f"/{TARGET}",
    f"//{TARGET}",
    "/etc/passwd",
    "/dev/zero",
    "/dev/stdin",
    "/proc/self/environ",
    "/proc/self/fd/0",
    "~/x.safetensors",
    "$HOME/x.safetensors",
    "%2e%2e/x.safetensors",
    f"..%2f{TARGET}",
    "file:///etc/passwd",
    "https://example.com/x.safetensors",
    "C:x.safetensors",
    "C:\\x.safetensors",
    "\\\\srv\\share\\x.safetensors",
    "\\\\?\\C:\\x.safetensors",
    f"..\\{TARGET}",
    "x.safetensors:stream",
    "x\0.safetensors",
    f"{SHARD}\0",
    f"\0../{TARGET}",
    "x\n.safetensors",
    "x\r.safetensors",
    "x\t.safetensors",
    "x\x1b[2J.safetensors",
    "x\x7f.safetensors",
    ".",
    "..",
    "...",
    "",
    " ",
    ".safetensors",
    ".hidden.safetensors",
    ".booster-commit-0/x.safetensors",
    "x" * 4096 + ".safetensors",
    "x" * 245 + ".safetensors",
    "\u00e9" * 130 + ".safetensors",
    "x.bin",
    "x.safetensors ",
    "x.safetensors.",
    "x.SAFETENSORS",
    "x.safetensors.exe",
    "*.safetensors",
    "model-?????-of-00002.safetensors",
    "<x>.safetensors",
    '"x".safetensors',
    "x|y.safetensors",
    "\u202exmodel.safetensors",
    "x\u200b.safetensors",
    "model-00001-\u043ef-00002.safetensors",
    SHARD.upper(),
    "CON.safetensors",
    "missing.safetensors",
    3,
    -1.5,
    None,
    True,
    ["x.safetensors"],
    {"x": "x.safetensors"},
]


class WatchedStorage(Storage):
    """Notes what is opened for reading."""

    def __init__(self):
        self.opened = []

    def open_regular(self, path, *, inside=None):
        """Opens, and notes where that led."""
        file = super().open_regular(path, inside=inside)
        self.opened.append(os.path.realpath(f"/proc/self/fd/{file.descriptor}"))
        return file


class Audit:
    """Notes what the interpreter reports while it is told to."""

    WATCHED = ("open", "import", "exec", "compile", "pickle.", "os.", "subprocess.", "socket.", "shutil.", "ctypes.")
    HARMLESS = ("os.listdir", "os.scandir", "socket.gethostname")

    def __init__(self):
        self.events = None
        sys.addaudithook(self._note)

    def _note(self, event, arguments):
        if self.events is not None and event.startswith(self.WATCHED) and event not in self.HARMLESS:
            self.events.append((event, str(arguments[0])[:300] if arguments else ""))

    @contextmanager
    def on(self):
        """Notes what happens in the block."""
        self.events = events = []
        try:
            yield events
        finally:
            self.events = None


def _tensors():
    return {"a": torch.arange(6.0), "b": torch.arange(8.0)}


def _save(directory):
    """Saves a good checkpoint, or copies the first one."""
    first = directory.parent / "warm-up"
    if first.is_dir():
        shutil.copytree(first, directory)
    else:
        save_tensors(directory, _tensors(), shard_bytes=40)
    return directory


def _edited_json(path, edit):
    document = json.loads(path.read_bytes())
    edit(document)
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()


def name_cases(root):
    """Yields the name and the path of every checkpoint that names a hostile file."""
    for number, name in enumerate(NAMES):
        for place, make in (("index", _in_index), ("manifest", _in_manifest), ("metadata", _in_metadata)):
            directory = root / f"{place}-{number}"
            make(directory, name)
            yield f"{place}: {str(name)[:60]!r}", directory


def _in_index(directory, name):
    directory.mkdir()
    for shard, tensor in _tensors().items():
        save_file({shard: tensor}, directory / f"model-{shard}.safetensors")
    files = {"a": name, "b": "model-b.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))


def _in_manifest(directory, name):
    path = _save(directory) / MANIFEST

    def rename(document):
        key = name if isinstance(name, str) else json.dumps(name)
        document["files"][key] = document["files"].pop(SHARD)

    path.write_bytes(with_seal(_edited_json(path, rename)))


def _in_metadata(directory, name):
    (_save(directory) / MANIFEST).unlink()
    path = directory / SHARD
    raw = path.read_bytes()
    stop = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:stop])
    header["__metadata__"]["booster_manifest"] = name
    path.write_bytes(with_header(json.dumps(header).encode(), raw[stop:]))


def link_cases(root):
    """Yields name, path and whether it may load, of every checkpoint with a link or a special file."""
    for number, (what, may_load, make) in enumerate(LINKS):
        directory = _save(root / f"links-{number}")
        make(directory, root)
        yield what, directory, may_load


def _linked(name, target):
    def make(directory, root):
        path = directory / name
        goal = Path(str(target).format(root=root, name=name))
        if str(target).startswith("{root}/elsewhere"):
            goal.parent.mkdir(exist_ok=True)
            shutil.copy(path, goal)
        path.unlink()
        path.symlink_to(goal)

    return make


def _replaced(name, make_other):
    def make(directory, root):
        (directory / name).unlink()
        make_other(str(directory / name))

    return make


def _socket(path):
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")  # a name of at most 107 bytes
    os.close(directory)


def _hard_link(directory, root):
    os.link(directory / SHARD, root / "twin")


def _two_links(directory, root):
    (directory / SHARD).unlink()
    (directory / SHARD).symlink_to("round")
    (directory / "round").symlink_to(SHARD)


def _link_inside(directory, root):
    (directory / SHARD).rename(directory / "real.safetensors")
    (directory / SHARD).symlink_to("real.safetensors")


def _whole_directory(directory, root):
    directory.rename(root / "real-directory")
    directory.symlink_to(root / "real-directory")


LINKS = [
    ("shard out", False, _linked(SHARD, "{root}/elsewhere-1/{name}")),
    ("index out", False, _linked(INDEX, "{root}/elsewhere-2/{name}")),
    ("manifest out", False, _linked(MANIFEST, "{root}/elsewhere-3/{name}")),
    ("shard dangling", False, _linked(SHARD, "nowhere")),
    ("index dangling", False, _linked(INDEX, "nowhere")),
    ("manifest dangling", False, _linked(MANIFEST, "nowhere")),
    ("shard to itself", False, _linked(SHARD, SHARD)),
    ("manifest to itself", False, _linked(MANIFEST, MANIFEST)),
    ("round of two", False, _two_links),
    ("shard to a device", False, _linked(SHARD, "/dev/zero")),
    ("manifest to a device", False, _linked(MANIFEST, "/dev/zero")),
    ("pipe as shard", False, _replaced(SHARD, os.mkfifo)),
    ("pipe as index", False, _replaced(INDEX, os.mkfifo)),
    ("pipe as manifest", False, _replaced(MANIFEST, os.mkfifo)),
    ("socket as shard", False, _replaced(SHARD, _socket)),
    ("directory as shard", False, _replaced(SHARD, os.mkdir)),
    ("directory as manifest", False, _replaced(MANIFEST, os.mkdir)),
    ("link inside", True, _link_inside),
    ("hard link", True, _hard_link),
    ("user's link to a directory", True, _whole_directory),
]


def pickle_cases(root, marker):
    """Yields the name and the path of every hostile pickle under every suffix."""
    for number, (what, raw) in enumerate(hostile_pickles(marker).items()):
        for suffix, pack in ((".bin", as_archive), (".pt", bytes), (".pth", as_archive), (".safetensors", bytes)):
            path = root / f"pickle-{number}{suffix}"
            path.write_bytes(pack(raw))
            yield f"{what} as {suffix}", path
        directory = root / f"pickle-{number}"
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(as_archive(raw))
        yield f"{what} in a directory", directory


def open_case(audit, path):
    """Loads one checkpoint and returns what happened."""
    storage, targets = WatchedStorage(), {name: torch.full_like(tensor, 7.0) for name, tensor in _tensors().items()}
    started, error = time.monotonic(), None
    with audit.on() as events:
        try:
            load_tensors(path, targets, storage=storage)
        except CheckpointError as caught:
            error = f"CheckpointError: {caught}"
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
    is_changed = not all(bool((tensor == 7).all()) for tensor in targets.values())
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "is_changed": is_changed,
        "is_exact": all(torch.equal(targets[name], tensor) for name, tensor in _tensors().items()),
        "outside": _outside(path, storage.opened, events),
        "events": [list(event) for event in events if event[0] != "open"],
    }


def _outside(path, opened, events):
    place = os.path.realpath(path if path.is_dir() else path.parent)
    named = [os.path.realpath(name) for event, name in events if event == "open" and not name.isdigit()]
    allowed = (place + os.sep, "/proc/self/fd/", f"/proc/{os.getpid()}/fd/")
    return [name for name in [*opened, *named] if not name.startswith(allowed)]


def _control(audit, root, marker):
    """Returns what the hook sees where a pickle is loaded, and a name followed, as many programs do."""
    path = root / "control.pt"
    path.write_bytes(as_archive(call("os", "system", f"touch {marker}-control")))
    with audit.on() as events:
        torch.load(path, weights_only=False)
    inside = root / "index-0"
    with audit.on() as opens:
        (inside / NAMES[0]).read_bytes()
    return {
        "events": sorted({event for event, _ in events}),
        "ran": Path(f"{marker}-control").exists(),
        "outside": _outside(inside, [], opens),
    }


def main(root):
    """Makes and opens all cases; prints the results."""
    root.mkdir()
    save_file({"a": _tensors()["a"]}, root / TARGET)
    audit, marker = Audit(), root / "ran"
    load_tensors(_save(root / "warm-up"), _tensors())  # imports what a load imports
    torch.save(_tensors(), root / "warm-up.bin")
    load_tensors(root / "warm-up.bin", _tensors())
    results = {"names": {}, "links": {}, "pickles": {}}
    for what, path in name_cases(root):
        results["names"][what] = open_case(audit, path)
    for what, path, may_load in link_cases(root):
        results["links"][what] = open_case(audit, path) | {"may_load": may_load}
    for what, path in pickle_cases(root, marker):
        results["pickles"][what] = open_case(audit, path)
    results["ran"] = marker.exists()
    results["control"] = _control(audit, root, marker)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
