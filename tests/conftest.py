"""Fails every test that leaves something behind, and ends the live ranks with the session."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
from default_run import leave_cases_to_the_long_run, select_part

# Threads of an operator that wait for each other leave the core to ranks and commands of other tests; they would spin
# on it for many times what they compute. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Set by pytest around the phases of a test, and by torch's compiler when an optimizer first imports it.
_FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
_JOIN_SECONDS = 1.0  # for a thread that is ending


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fails a test that leaks environment variables, threads, process groups or files in the current directory."""
    environment, directory = _environment(), os.getcwd()
    threads, files = set(threading.enumerate()), _files(directory)
    has_group = _has_group()  # of a fixture of the module
    yield
    leaks = [
        *_environment_leaks(environment),
        *_directory_leaks(directory, files),
        *_thread_leaks(threads),
        *(() if has_group else _process_group_leaks()),
    ]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    devices = ("cpu", "simulated_cuda", "shared_gpu", "simulated_shared_gpu")
    parser.addoption(
        "--device",
        choices=devices,
        default="cpu",
        help="of the ranks, in tests of parity and those that are marked on_device",
    )
    parser.addoption("--part", default="1/1", help="the cases of one part of several, such as 2/7")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        from harness.forkserver import set_default_device  # not at the top: it imports multiprocessing's server

        set_default_device(config.getoption("--device"))


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--device") != "cpu":
        from harness.forkserver import set_job_device

        set_job_device(item.config.getoption("--device") if item.get_closest_marker("on_device") else "cpu")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_cases_to_the_long_run(items)
    part, num_parts = map(int, config.getoption("--part").split("/"))
    select_part(items, part, num_parts)


def pytest_sessionfinish() -> None:
    pool = sys.modules.get("harness.pool")
    if pool is not None:
        pool.close_pools()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}


def _environment_leaks(before: dict[str, str]) -> Iterator[str]:
    """Names the variables that differ, and puts them back for the tests that follow."""
    after = _environment()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        yield f"environment variable {name}={after.get(name)!r}, was {before.get(name)!r}"
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


def _files(directory: str) -> set[str]:
    """Returns what lies in a directory, without the caches that tools keep there."""
    return {entry.name for entry in os.scandir(directory) if not entry.name.startswith((".", "__pycache__"))}


def _directory_leaks(directory: str, before: set[str]) -> Iterator[str]:
    if os.getcwd() != directory:
        yield f"current directory {os.getcwd()}"
        os.chdir(directory)
    yield from (f"file {name} in {directory}" for name in sorted(_files(directory) - before))


def _thread_leaks(before: set[threading.Thread]) -> Iterator[str]:
    for thread in threading.enumerate():
        if thread in before or thread.daemon:
            continue
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            yield f"thread {thread.name}"


def _has_group() -> bool:
    dist = sys.modules.get("torch.distributed")  # not imported here: many tests need no torch
    return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())


def _process_group_leaks() -> Iterator[str]:
    if _has_group():
        dist = sys.modules["torch.distributed"]
        yield f"a process group of {dist.get_world_size()} ranks"
        dist.destroy_process_group()
