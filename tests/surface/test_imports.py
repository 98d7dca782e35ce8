"""Which modules import which, how large a module may be, and what may appear in none of them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from import_graph import MODULES, PACKAGES, ROOT, import_graph

# What each top-level folder may import of the project, besides itself. `booster` may import everything but the plugins:
# only the registry and the benchmark know them.
ALLOWED = {
    "kernels": ("booster.kernels", "booster.errors", "booster.logger"),
    "checkpoint_io": (
        "booster.checkpoint_io",
        "booster.version",
        "booster.interface",
        "booster.core",
        "booster.errors",
        "booster.comm",
        "booster.fault_tolerance",
        "booster.kernels",
        "booster.logger",
        "booster.lr_scheduler",
    ),
}
KNOW_PLUGINS = ("booster.cli.benchmark", "booster.registry")
MAX_LINES = 900
GENERIC_NAMES = {"utils", "util", "misc", "common", "helpers", "helper"}


def _cycles(graph: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """Yields the strongly connected components of more than one node (Tarjan, SIAM J. Computing 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    yield from found


def _folder_graphs(graph: Mapping[str, Iterable[str]]) -> dict[str, dict[str, set[str]]]:
    """Returns, for each package, the imports between its modules and subpackages."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, imported_modules in graph.items():
        for imported in imported_modules:
            one, two = importer.split("."), imported.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
            if depth is not None:  # else one of them is the package of the other
                graphs[".".join(one[:depth])][one[depth]].add(two[depth])
    return graphs


def test_modules_import_each_other_in_no_circle():
    assert not list(_cycles(import_graph()))


def test_folders_import_each_other_in_no_circle():
    circles = {package: list(_cycles(graph)) for package, graph in _folder_graphs(import_graph()).items()}
    assert not {package: found for package, found in circles.items() if found}


def test_no_module_imports_a_package_that_it_is_part_of():
    assert not [
        f"{importer} imports {imported}"
        for importer, imported_modules in import_graph().items()
        for imported in imported_modules
        if importer.startswith(f"{imported}.") and importer != f"{imported}.__main__"
    ]


def test_top_level_folders_import_one_way():
    graph = import_graph()
    for module, path in MODULES.items():
        folder = path.relative_to(ROOT).parts[0]
        for name in graph[module]:
            if folder == "booster" and not module.startswith(KNOW_PLUGINS):
                assert not name.startswith("booster.plugins"), f"{module}: the facade must not know a strategy"
            assert folder not in ALLOWED or name.startswith(ALLOWED[folder]), f"{module} imports {name}"


def test_imports_inside_a_folder_are_relative_and_others_are_absolute():
    for module, path in MODULES.items():
        package = module if module in PACKAGES else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path}:{node.lineno}: write the whole name of a module of another folder"
                inside = node.level == 0 and f"{node.module}.".startswith(f"{package}.")
                assert not inside or package == "booster", f"{path}:{node.lineno}: write `from .module import ...`"
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "booster" for name in names), f"{path}:{node.lineno}: import names"


def test_no_module_is_imported_by_its_name_as_a_string():
    for module, path in MODULES.items():
        for match in re.finditer(r"import_module\((?P<name>[^)]*)\)", path.read_text()):
            assert "booster" not in match["name"], f"{module}: {match[0]}"


def test_only_packages_list_their_names():
    assert not [m for m, path in MODULES.items() if m not in PACKAGES and "\n__all__" in path.read_text()]


def test_modules_are_neither_too_long_nor_named_after_nothing():
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert not {module: length for module, length in lengths.items() if length > MAX_LINES}
    assert not [module for module in MODULES if module.rpartition(".")[2] in GENERIC_NAMES]


def test_nothing_unsafe_enters():
    for module, path in MODULES.items():
        text = path.read_text()
        assert not re.search(r"^\s*(import|from) pickle", text, re.M), module
        assert "shell=True" not in text, module
        for call in re.finditer(r"torch\.load\((?P<arguments>[^)]*)\)", text):
            assert "weights_only=True" in call["arguments"], f"{module}: {call[0]}"
        if path.name != "device.py":
            assert "torch.cuda" not in text, f"{module}: ask booster.device"
        assert text.isascii(), module
