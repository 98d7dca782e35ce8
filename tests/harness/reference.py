"""How a function travels to another process: as module, file and qualified name.

Pytest imports test modules by path (import-mode=importlib), under names that another process can't import. So the
file goes along, and the worker imports it from there under the same name, with pytest's rewriting of `assert`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from _pytest.assertion.rewrite import AssertionRewritingHook, rewrite_asserts

BODY_ATTRIBUTE = "__ranks_body__"  # where a decorated test keeps the function that runs on the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReference:
    """A module-level function (or a method of a module-level class) by the place where it is written."""

    module: str
    path: str | None
    qualname: str
    is_rewritten: bool


def reference_to(fn: Callable[..., Any]) -> FunctionReference:
    """Returns what a worker needs to find `fn` again.

    Raises:
        TypeError: `fn` is a closure, a lambda, a local function or another object without a place in a module.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    qualname = getattr(fn, "__qualname__", "")
    if module is None or _lookup(module, qualname) is not fn:
        raise TypeError(
            f"{fn!r} can't run on other ranks: only a function that its module holds under its own name can be found "
            "there, not a lambda, a closure, a partial or a local function. Write it at module level (def name(...):) "
            "and pass what it needs as arguments."
        )
    loader = getattr(module.__spec__, "loader", None)
    return FunctionReference(
        module=module.__name__,
        path=getattr(module, "__file__", None),
        qualname=qualname,
        is_rewritten=isinstance(loader, AssertionRewritingHook),
    )


def resolve(reference: FunctionReference) -> Callable[..., Any]:
    """Returns the function, importing its module where that has not happened yet. Called in the worker."""
    module = _loaded(reference) or _import(reference)
    return _lookup(module, reference.qualname)


def _lookup(module: ModuleType, qualname: str) -> Any:
    """Returns the object at `qualname`, the undecorated body of a distributed test; None where there is none."""
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return getattr(found, BODY_ATTRIBUTE, found)


def _loaded(reference: FunctionReference) -> ModuleType | None:
    module = sys.modules.get(reference.module)
    return module if getattr(module, "__file__", None) == reference.path else None


def _import(reference: FunctionReference) -> ModuleType:
    if reference.is_rewritten:
        return _import_from_path(reference, _RewritingLoader)
    try:
        importlib.import_module(reference.module)
    except ModuleNotFoundError:
        if reference.path is None:
            raise
    return _loaded(reference) or _import_from_path(reference, SourceFileLoader)


def _import_from_path(reference: FunctionReference, loader: type[SourceFileLoader]) -> ModuleType:
    path = str(reference.path)
    spec = importlib.util.spec_from_file_location(reference.module, path, loader=loader(reference.module, path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be imported as {reference.module}: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    _add_parents(reference.module)
    sys.modules[reference.module] = module  # before it runs: its classes must be found when arguments are unpickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[reference.module]
        raise
    return module


def _add_parents(module: str) -> None:
    """Has `import a.b.c` work for a module of that name that was loaded by path, as pytest does. Pickle imports so."""
    *parents, _ = module.split(".")
    for depth in range(1, len(parents) + 1):
        name = ".".join(parents[:depth])
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            sys.modules[name] = ModuleType(name)


class _RewritingLoader(SourceFileLoader):
    """Rewrites asserts as pytest does, so that a failing rank says which values were compared."""

    def get_code(self, fullname: str) -> CodeType:
        # Past the .pyc cache: that one belongs to the module as it is written.
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)
