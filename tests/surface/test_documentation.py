"""README, pages and the site agree with each other and with the code."""

from __future__ import annotations

import ast
import re

import pytest
from documentation import PAGES, ROOT, read_page
from import_graph import FOLDERS

DOCS = ROOT / "docs"
MAX_README_LINES, MAX_README_WORDS = 130, 1200


def test_the_readme_is_read_in_five_minutes():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_README_LINES
    assert len(text.split()) <= MAX_README_WORDS


def test_the_site_has_every_page_once():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1], re.M)
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def functions_of(path):
    """Returns the names of a module's functions, classes and methods."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return names


def test_the_flows_name_functions_that_are_there():
    found = re.findall(
        r"`((?:booster|plugins|checkpoint_io|kernels)/[\w/]+\.py):([\w.]+)`", (DOCS / "architecture.md").read_text()
    )
    assert len(found) > 20
    for path, name in found:
        assert name in functions_of(ROOT / path), f"{path}:{name}"


def test_paths_in_pages_are_there():
    folders = "|".join([*FOLDERS, "tests", "benchmarks", "examples", "docs"])
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)}: {path}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_block_runs_or_says_why_not(path):
    """A command that names a program of another kind has to be marked as not run."""
    page = read_page(path)
    assert all(reason for _, reason in page.not_run)
    assert {line.split()[0] for line in page.commands} <= {"booster", "python"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_files_are_right(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


def test_options_in_tables_are_arguments_of_their_plugin():
    from inspect import signature

    import booster.plugins

    for name, plugin in [
        ("ddp", "TorchDDPPlugin"), ("zero", "LowLevelZeroPlugin"), ("gemini", "GeminiPlugin"),
        ("fsdp", "TorchFSDPPlugin"), ("hybrid", "HybridParallelPlugin"), ("pipeline", "HybridParallelPlugin"),
    ]:  # fmt: skip
        table = (DOCS / "plugins" / f"{name}.md").read_text().split("## Options")[1].split("\n## ")[0]
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        options = {option for row in rows for option in re.findall(r"`(\w+)`", row)}
        assert len(options) > 5
        assert options <= set(signature(getattr(booster.plugins, plugin)).parameters), name
