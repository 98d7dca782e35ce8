"""Import graph of the package, read from its sources: function-level and TYPE_CHECKING imports count like any other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "booster": "booster",
    "plugins": "booster.plugins",
    "kernels": "booster.kernels",
    "checkpoint_io": "booster.checkpoint_io",
}


def _module_paths() -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_module_paths())
PACKAGES = frozenset(module for module, path in MODULES.items() if path.name == "__init__.py")


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Returns, for each module of the package, the modules of the package that it imports."""
    return {module: frozenset(_imported(module)) - {module} for module in MODULES}


def _imported(module: str) -> Iterator[str]:
    package = module if module in PACKAGES else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from (alias.name,) if alias.name in MODULES else ()
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield from (name,) if name in MODULES else (source,) if source in MODULES else ()
