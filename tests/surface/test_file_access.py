"""The engine touches the file system through its storage seam, and nowhere else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "checkpoint_io"
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.name != "storage.py")

MODULES = {"shutil", "tempfile", "glob", "fcntl", "fileinput"}
# Of `os` and `os.path`, what asks no disk; and where a name leads, which does not access the file.
HARMLESS = {"PathLike", "environ", "fsdecode", "fsencode", "fspath", "getpid", "path", "sep", "strerror"}
HARMLESS |= {"cpu_count", "sched_getaffinity", "register_at_fork"}
HARMLESS_PATHS = {"abspath", "basename", "commonpath", "dirname", "isabs", "join", "normpath", "realpath", "relpath"}
METHODS = {"chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_mount", "is_symlink", "iterdir", "lstat"}
METHODS |= {"mkdir", "read_bytes", "read_text", "readlink", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch"}
METHODS |= {"unlink", "walk", "write_bytes", "write_text", "fromfile", "memmap", "tofile"}
METHODS |= {"load_file", "safe_open", "save_file", "save_pretrained"}
OPENS = {"memmap", "open", "open_code", "safe_open"}


def accesses(source):
    """Returns "line: what" for everything in a Python source that touches the file system by itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = _access(node)
        if what is not None:
            found.append(f"{node.lineno}: {what}")
    return found


def _access(node):
    if isinstance(node, ast.Import):
        return next((f"import {alias.name}" for alias in node.names if alias.name in MODULES), None)
    if isinstance(node, ast.ImportFrom):
        is_os = (node.module or "").split(".")[0] == "os"
        return f"from {node.module} import" if is_os or node.module in MODULES else None
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if owner == "os" and node.attr not in HARMLESS and not node.attr.isupper():
            return f"os.{node.attr}"
        if owner == "os.path" and node.attr not in HARMLESS_PATHS:
            return f"os.path.{node.attr}"
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in OPENS:
            return f"{node.func.id}()"
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            return ast.unparse(node.func)
    return None


def test_only_storage_touches_the_file_system():
    for path in FILES:
        found = accesses(path.read_text())
        assert not found, f"{path.name} goes past storage.py: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "import shutil",
        "from os import remove",
        "import os\nos.remove('x')",
        "import os\nos.path.exists('x')",
        "path.mkdir()",
        "path.parent.exists()",
        "torch.from_numpy(np.memmap('x'))",
        "model.save_pretrained('x')",
        "from os.path import exists",
    ],
)
def test_the_search_finds_what_it_must(source):
    assert accesses(source)


def test_the_search_finds_nothing_in_plain_code():
    source = (
        "import os\nos.fspath(x)\nos.path.join('a', 'b')\nname.replace('a', 'b')\nstorage.create(path)\nos.O_RDONLY"
    )
    assert not accesses(source)


# Every file that Python opens, makes, lists, renames or removes below the current directory while the engine saves and
# loads, with the innermost file of the engine that did it. The hook can't be removed, so it runs in a separate process.
SCRIPT = """
import os, sys, torch
from booster.checkpoint_io import GeneralCheckpointIO
from booster.interface import ModelWrapper, OptimizerWrapper

folder, events = sys.argv[1], []

def hook(event, arguments):
    if event not in EVENTS or not arguments or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    path = os.path.abspath(os.fsdecode(os.fspath(arguments[0])))
    if not path.startswith(os.getcwd() + os.sep):
        return
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    events.append((event, "unknown" if frame is None else os.path.basename(frame.f_code.co_filename)))

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.truncate",
          "os.link", "os.symlink", "os.chmod", "os.utime", "shutil.rmtree", "tempfile.mkstemp", "glob.glob"}

model = ModelWrapper(torch.nn.Linear(3, 2))
optimizer = OptimizerWrapper(torch.optim.AdamW(model.parameters()), model)
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
io = GeneralCheckpointIO()
sys.addaudithook(hook)
for options in ({"shard": True}, {"shard": True, "use_safetensors": False}, {}):
    path = "d" if options == {"shard": True} else "d" + str(len(options)) if options else "f.safetensors"
    for _ in range(2):
        io.save_model(model, path, **options)
        io.load_model(model, path)
    path = "o" + str(len(options)) if options else "o.safetensors"
    io.save_optimizer(optimizer, path, **options)
    io.load_optimizer(optimizer, path)
for event in sorted(set(events)):
    print(*event)
print("events", len(events))
"""


def test_python_s_own_record_of_file_accesses_names_the_seam_alone(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, _imported_folder()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    *events, count = run.stdout.splitlines()
    assert int(re.search(r"events (\d+)", count)[1]) > 50
    assert {event.split()[1] for event in events} == {"storage.py"}, events


def _imported_folder():
    import booster.checkpoint_io

    return str(Path(booster.checkpoint_io.__file__).parent)
