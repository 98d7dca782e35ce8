"""Kernels are compiled on first use, kept, and replaced by plain torch with a reason where that can't be done."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from tiny_kernel import CODE, TINY, num_compiled, tiny_kernel, write_compiler, write_sources

from booster.errors import ConfigError
from booster.kernels import build, loader
from booster.kernels.build import find_toolchain
from booster.kernels.loader import BuildCache, default_folder, find_built, kernel_status, load_kernel


@pytest.fixture
def folder(tmp_path):
    write_sources(tmp_path / "csrc")
    return tmp_path


@pytest.fixture
def log(monkeypatch):
    """What the library says, as (level, text)."""
    lines = []

    class Log:
        def info(self, text):
            lines.append(("info", text))

        def warning(self, text):
            lines.append(("warning", text))

    monkeypatch.setattr(loader, "get_dist_logger", Log)
    return lines


def forget():
    """Makes the next load look at the disk again, as a new process would."""
    loader._load_results.clear()
    find_toolchain.cache_clear()


def status():
    [found] = [one for one in kernel_status() if one.name == "tiny"]
    return found


def test_first_use_builds_and_says_so(folder, log):
    compiler = write_compiler(folder)
    with tiny_kernel(folder, CXX=compiler):
        assert status().status == "buildable"
        assert load_kernel("tiny").answer() == 42
        assert status().status == "native"
        assert "about 8 s" in log[0][1]
        assert str(folder / "cache") in log[0][1]
        assert "built the kernel 'tiny' in" in log[1][1]
        forget()
        assert load_kernel("tiny").answer() == 42
    assert num_compiled(folder) == 1
    assert len(log) == 2


def test_a_changed_source_or_header_is_another_kernel(folder, log):
    with tiny_kernel(folder):
        assert load_kernel("tiny").answer() == 42
        write_sources(folder / "csrc", answer=43)
        assert status().status == "buildable"
        forget()
        assert load_kernel("tiny").answer() == 43
        write_sources(folder / "csrc", code=CODE.replace("(ANSWER)", "(ANSWER + 1)"), answer=43)
        forget()
        assert load_kernel("tiny").answer() == 44


@pytest.mark.parametrize("what", ["torch", "compiler", "features"])
def test_a_build_belongs_to_its_surroundings(folder, log, monkeypatch, what):
    with tiny_kernel(folder):
        load_kernel("tiny")
        built = find_built(TINY)
        if what == "torch":
            monkeypatch.setattr("torch.__version__", "99.0")
        elif what == "features":
            monkeypatch.setattr("booster.kernels.loader._cpu_features", lambda: "flags: other")
        else:
            os.environ["CXX"] = str(write_compiler(folder))
            find_toolchain.cache_clear()
        assert find_built(TINY) is None
        forget()
        assert load_kernel("tiny").answer() == 42
        assert find_built(TINY) != built


def test_sources_that_do_not_compile(folder, log):
    write_sources(folder / "csrc", code="this isn't C++")
    with tiny_kernel(folder):
        assert load_kernel("tiny") is None
        assert load_kernel("tiny") is None
        warnings = [text for level, text in log if level == "warning"]
        assert len(warnings) == 1
        assert "plain torch" in warnings[0]
        assert "tiny.cpp:1:1: error" in warnings[0]
        assert not list((folder / "cache").glob("*building*"))
        os.environ["BOOSTER_KERNELS"] = "native"
        with pytest.raises(ConfigError, match=r"(?s)BOOSTER_KERNELS=native.*error.*or unset BOOSTER_KERNELS"):
            load_kernel("tiny")
        # A later process tries again, with sources of the same identity too: the disk may have been full.
        write_sources(folder / "csrc")
        forget()
        assert load_kernel("tiny").answer() == 42


def test_no_compiler(folder, log):
    with tiny_kernel(folder, CXX="no-such-compiler"):
        assert load_kernel("tiny") is None
        assert status().status == "reference"
        assert "CXX='no-such-compiler' was not found" in status().reason
    assert "was not found: set it to a C++ compiler" in log[0][1]


def which_without_ninja(command, path=None, find=shutil.which):
    return None if command == "ninja" else find(command, path=path)


def test_no_ninja_and_no_headers(folder, log, monkeypatch):
    def is_missing(reason):
        find_toolchain.cache_clear()
        assert reason in status().reason
        forget()
        assert load_kernel("tiny") is None
        monkeypatch.undo()

    with tiny_kernel(folder):
        monkeypatch.setattr("booster.kernels.build.importlib.util.find_spec", lambda name: None)
        is_missing("pip install pybind11")
        monkeypatch.setattr("booster.kernels.build.sysconfig.get_paths", lambda: {"include": "/nowhere"})
        is_missing("-dev")
        find = shutil.which
        monkeypatch.setattr(
            "booster.kernels.build.shutil.which", lambda c, path=None: None if c == "ninja" else find(c)
        )
        is_missing("pip install ninja")


def test_the_reference_is_asked_for(folder, log):
    with tiny_kernel(folder, BOOSTER_KERNELS="reference"):
        assert load_kernel("tiny") is None
        assert status().status == "reference"
        assert status().reason == "BOOSTER_KERNELS=reference is set"
        assert not (folder / "cache").exists()
    assert not log


def test_an_unknown_mode(folder):
    with tiny_kernel(folder, BOOSTER_KERNELS="fast"), pytest.raises(ConfigError, match="'fast' is unknown: set it to"):
        load_kernel("tiny")


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_cache_that_others_may_write_to(folder, log, mode):
    (folder / "cache").mkdir()
    (folder / "cache").chmod(mode)
    with tiny_kernel(folder):
        assert load_kernel("tiny") is None
    assert "code is loaded from it: make it private" in log[-1][1]


def test_a_cache_behind_a_link(folder, log):
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / "cache").symlink_to(folder / "elsewhere")
    with tiny_kernel(folder):
        assert load_kernel("tiny") is None
    assert "is a link" in log[-1][1]


def test_a_chosen_cache_that_can_not_be_made(folder, log):
    (folder / "cache").write_text("a file, where a folder cannot be made")
    with tiny_kernel(folder):
        assert load_kernel("tiny") is None
    assert "BOOSTER_KERNEL_CACHE=" in log[-1][1]
    assert "can't be created or is not writable" in log[-1][1]


def test_where_there_is_no_home(folder, log, monkeypatch):
    (folder / "home").write_text("a file, where a folder cannot be made")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    with tiny_kernel(folder, BOOSTER_KERNEL_CACHE=None, XDG_CACHE_HOME=folder / "home"):
        assert load_kernel("tiny").answer() == 42
        assert find_built(TINY).is_relative_to(folder / f"torch-booster-kernels-{os.getuid()}")


def test_a_damaged_build_is_not_used(folder, log):
    with tiny_kernel(folder):
        damaged = BuildCache(default_folder()).path_of(TINY, find_toolchain())
        damaged.parent.mkdir()
        damaged.write_bytes(b"")
        assert load_kernel("tiny") is None
    assert "plain torch" in log[-1][1]


def test_what_was_built_ahead(folder, log):
    with tiny_kernel(folder):
        load_kernel("tiny")
        (folder / "prebuilt").mkdir()
        shutil.copy(find_built(TINY), folder / "prebuilt" / TINY.file_name)
        record = folder / "prebuilt" / loader.PREBUILT_RECORD
        record.write_text(json.dumps({"tiny": TINY.source_hash()}))
        shutil.rmtree(folder / "cache")
        os.environ["CXX"] = "no-such-compiler"
        forget()
        assert load_kernel("tiny").answer() == 42
        assert status().reason == str(folder / "prebuilt" / TINY.file_name)
        write_sources(folder / "csrc", answer=43)  # an edited checkout
        forget()
        assert load_kernel("tiny") is None


@pytest.mark.parametrize("name", sorted(build.KERNELS))
def test_every_kernel_of_the_library_compiles_here(name):
    assert load_kernel(name) is not None
