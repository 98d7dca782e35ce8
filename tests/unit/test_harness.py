"""The parts of the harness that need no ranks: references, reports, the decorator's signature, the leak fixture."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import threading
from types import SimpleNamespace

import pytest
from default_run import select_part
from harness import RankFailure, RanksFailed, distributed, run_ranks
from harness.messages import pack_arguments
from harness.reference import reference_to, resolve
from subjects import SUBJECTS, TESTS, arguments_of, files_of, targets

pytest_plugins = ["pytester"]


def module_level(a: int, b: int = 2) -> int:
    return a + b


class Owner:
    """Holds a method to refer to."""

    def method(self) -> int:
        return 3


@distributed(world_size=3)
def decorated_body(tmp_path) -> None:
    raise AssertionError("never runs here")


def test_a_reference_leads_back_to_the_function():
    assert resolve(reference_to(module_level))(1) == 3
    assert resolve(reference_to(Owner.method)) is Owner.method
    assert resolve(reference_to(decorated_body.__ranks_body__)) is decorated_body.__ranks_body__


def _local_function():
    def local() -> None: ...

    return local


@pytest.mark.parametrize(
    "fn", [lambda: None, _local_function(), functools.partial(module_level, 1), functools.lru_cache(_local_function())]
)
def test_functions_without_a_place_are_refused(fn):
    with pytest.raises(TypeError, match="Write it at module level"):
        run_ranks(fn, 2)


def test_an_argument_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"argument 'lock' \(lock\) can't be sent to other ranks"):
        pack_arguments([1], {"lock": threading.Lock()})


def test_the_decorator_shows_pytest_the_fixtures_of_the_body():
    assert list(inspect.signature(decorated_body).parameters) == ["tmp_path"]

    several = distributed(world_size=[1, 2])(module_level)
    assert list(inspect.signature(several).parameters) == ["a", "b", "world_size"]
    assert [mark.args for mark in several.pytestmark] == [("world_size", [1, 2])]


def _failure(rank, summary, at, kind="raised"):
    return RankFailure(rank=rank, kind=kind, summary=summary, detail=f"detail {rank}", at=at)


def test_the_first_real_error_comes_before_earlier_echoes():
    failed = RanksFailed(
        [
            _failure(0, "RuntimeError: Connection closed by peer [127.0.0.1]", at=1.0),
            _failure(3, "ValueError: late", at=3.0),
            _failure(2, "ValueError: early\nsecond line", at=2.0),
        ],
        {1: list(range(1000))},
        4,
        "60",
    )
    assert [failure.rank for failure in failed.failures] == [2, 3, 0]
    lines = str(failed).splitlines()
    assert lines[0] == "rank 2 of 4 raised ValueError: early"
    assert lines[2:4] == ["--- rank 2 raised ValueError: early", "detail 2"]
    assert lines[-1].startswith("--- rank 1 returned [0, 1, 2")
    assert len(lines[-1]) < 300


def test_a_timeout_says_which_rank_was_where():
    failed = RanksFailed(
        [_failure(1, "in b (x.py:2)", 2.0, "hung"), _failure(0, "in a (x.py:1)", 2.1, "hung")], {}, 2, "3"
    )
    assert str(failed).splitlines()[0] == (
        "timed out after 3 s on 2 of 2 ranks: rank 0 in a (x.py:1); rank 1 in b (x.py:2)"
    )


LEAKS = {
    "environment variable LEAKED='1', was None": "os.environ['LEAKED'] = '1'",
    "a process group of 1 ranks": "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
    "file left.txt in ": "open('left.txt', 'w').close()",
    "current directory /": "os.chdir('/')",
    "thread keeper": "threading.Thread(target=RELEASE.wait, name='keeper').start()",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leaking_test_fails(pytester, leak):
    pytester.makeconftest(_conftest_source())
    pytester.makepyfile(
        f"""
        import os, threading
        import pytest
        import torch.distributed as dist

        RELEASE = threading.Event()

        def test_leaks():
            {LEAKS[leak]}

        def test_is_clean_again():
            RELEASE.set()
            assert "LEAKED" not in os.environ
            assert not dist.is_initialized()
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([f"*the test left behind: {leak}*"])


def test_the_group_of_a_module_is_not_a_leak(pytester):
    pytester.makeconftest(_conftest_source())
    pytester.makepyfile(
        """
        import pytest
        import torch.distributed as dist

        @pytest.fixture(scope="module")
        def group():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            yield
            dist.destroy_process_group()

        @pytest.mark.usefixtures("group")
        def test_first():
            assert dist.is_initialized()

        @pytest.mark.usefixtures("group")
        def test_second():
            assert dist.is_initialized()
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def _conftest_source() -> str:
    import harness

    path = harness.__file__.replace("harness/__init__.py", "conftest.py")
    with open(path) as file:
        return file.read()


def test_every_subject_has_files_and_a_target():
    large_grids = ("sweep", "loops", "device")  # of few files
    assert all(len(files_of(name)) > (0 if name in large_grids else 5) for name in (*SUBJECTS, "core"))
    command = ["make", "--dry-run", *(f"test-{target}" for target in targets())]
    environment = {**os.environ, "MAKEFLAGS": ""}  # without the options of the make that runs the tests
    printed = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    for target in targets():
        assert f"subjects.py {target})" in printed.stdout, printed.stderr
        assert all((TESTS.parent / one).is_file() for one in arguments_of(target) if not one.startswith("--part="))


def test_parts_have_every_case_once():
    names = [f"test_a.py::test_b[{index}]" for index in range(100)]
    found = []
    for part in (1, 2, 3):
        items = [SimpleNamespace(nodeid=name) for name in names]
        select_part(items, part, 3)
        assert len(items) > 20
        found += [item.nodeid for item in items]
    assert sorted(found) == sorted(names)
