"""A kernel that compiles in a moment, from sources that a test writes, into a cache of the test's own."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

from booster.kernels import build, loader

CODE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny_native", "", -1, methods,
                             nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_tiny_native() { return PyModule_Create(&module); }
"""
# Runs the compiler, and notes every source that it compiled.
COUNTING_COMPILER = """#!/bin/sh
case "$*" in *" -c "*) echo compiled >> {log}; {slow};; esac
exec c++ "$@"
"""
TINY = build.KernelSource(name="tiny", purpose="nothing", sources=("tiny.cpp",))


def write_sources(folder, code=CODE, answer=42):
    folder.mkdir(exist_ok=True)
    (folder / "tiny.cpp").write_text(code)
    (folder / "answer.h").write_text(f"#define ANSWER {answer}\n")


def write_compiler(folder, *, slow=":"):
    """Returns the path of a compiler that notes what it does in `<folder>/compiled`."""
    path = folder / "compiler.sh"
    path.write_text(COUNTING_COMPILER.format(log=folder / "compiled", slow=slow))
    path.chmod(0o700)
    return path


def num_compiled(folder):
    log = folder / "compiled"
    return len(log.read_text().splitlines()) if log.exists() else 0


@contextlib.contextmanager
def tiny_kernel(folder, **variables):
    """Makes `tiny` the only kernel, with its sources in `<folder>/csrc` and its builds in `<folder>/cache`.

    Args:
        folder: Of the test.
        variables: The environment; None takes a variable away.
    """
    given = {"BOOSTER_KERNEL_CACHE": str(folder / "cache"), "BOOSTER_KERNELS": None, "CXX": None} | variables
    before = {name: os.environ.get(name) for name in given}
    with contextlib.ExitStack() as stack:
        stack.callback(_set_environment, before)
        _set_environment(given)
        stack.enter_context(mock.patch.object(build, "SOURCE_FOLDER", folder / "csrc"))
        stack.enter_context(mock.patch.dict(build.KERNELS, {"tiny": TINY}, clear=True))
        stack.enter_context(mock.patch.dict(loader._load_results, clear=True))
        stack.enter_context(mock.patch.object(loader, "PREBUILT_FOLDER", folder / "prebuilt"))
        build.find_toolchain.cache_clear()
        stack.callback(build.find_toolchain.cache_clear)
        yield


def _set_environment(variables):
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = str(value)
