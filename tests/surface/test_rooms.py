"""Who may import whom, and what may appear nowhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("booster", "plugins", "kernels", "checkpoint_io")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

# What a room may import of the project, besides itself.
ALLOWED = {
    "kernels": ("booster.kernels", "booster.errors", "booster.logger"),
    "checkpoint_io": (
        "booster.checkpoint_io",
        "booster.interface",
        "booster.errors",
        "booster.comm",
        "booster.kernels",
        "booster.logger",
        "booster.fault_tolerance.progress",
    ),
    "booster": None,  # everything but the plugins, see below
    "plugins": None,
}

# Within checkpoint_io: the rooms below it that each of them may import, besides its own.
CHECKPOINT_ROOMS = {
    "planning": (),
    "files": ("planning",),
    "saving": ("planning", "files"),
    "loading": ("planning", "files"),
    "training": ("files", "saving", "loading"),
    "inspecting": ("planning", "files", "saving", "loading", "training"),
}


def _imports(path: Path) -> list[str]:
    """Returns what a file imports of the project, what serves type checkers alone left out."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: list[str] = []
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the whole name of the module"
            names.append(node.module or "")
    return [name for name in names if name.split(".")[0] == "booster"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for name in _imports(path):
        if room == "booster":
            assert not name.startswith("booster.plugins"), f"{path}: the facade must not know a strategy"
        allowed = ALLOWED[room]
        assert allowed is None or name.startswith(allowed), f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 500
    assert path.stem not in ("utils", "misc", "common", "helpers", "helper")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_unsafe_enters(path):
    text = path.read_text()
    assert not re.search(r"^\s*(import|from) pickle", text, re.M)
    assert "shell=True" not in text
    for call in re.finditer(r"torch\.load\((?P<arguments>[^)]*)\)", text):
        assert "weights_only=True" in call["arguments"], f"{path}: {call[0]}"
    if path.name != "device.py":
        assert "torch.cuda" not in text, f"{path}: ask booster.device"
    text.encode("ascii")


@pytest.mark.parametrize("room", CHECKPOINT_ROOMS)
def test_the_rooms_of_checkpoints_build_on_each_other(room):
    paths = sorted((ROOT / "checkpoint_io" / room).glob("*.py"))
    assert paths
    for path in paths:
        rooms = {name.split(".")[2] for name in _imports(path) if name.startswith("booster.checkpoint_io.")}
        beyond = rooms & set(CHECKPOINT_ROOMS) - {room, *CHECKPOINT_ROOMS[room]}
        assert not beyond, f"{path} imports {beyond}"
