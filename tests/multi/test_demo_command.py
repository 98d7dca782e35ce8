"""`booster demo` trains, resumes and draws."""

from __future__ import annotations

import tempfile

import pytest

from booster.cli import main
from booster.cli.demo import chart


@pytest.fixture
def demo(tmp_path, monkeypatch, capfd):
    """Runs the command in a directory of its own; returns its exit code, and what it and its ranks wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*arguments):
        return main(["demo", *arguments]), *capfd.readouterr()

    return run


@pytest.mark.parametrize(
    "plugin",
    [
        "torch_ddp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("low_level_zero", "gemini", "torch_fsdp", "hybrid_parallel")
        ),
    ],
)
def test_it_draws_the_loss_of_both_runs(tmp_path, demo, plugin):
    code, out, err = demo("--plugin", plugin, "--steps", "4")
    assert code == 0, out + err
    assert "from step 0 to 2 under" in out
    assert "from step 2 to 4 under" in out
    assert out.rstrip().endswith("1  4  steps")
    assert not any(path.name.startswith("booster-demo") for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_fails_gives_its_exit_code(demo):
    code, _, err = demo("--plugin", "no_such_plugin", "--steps", "2")
    assert code != 0
    assert "no_such_plugin" in err


def test_a_chart_of_falling_values():
    lines = chart([4.0, 3.0, 2.0, 1.0], height=4)
    assert lines[:4] == ["  4.000 |*", "  3.000 | *", "  2.000 |  *", "  1.000 |   *"]
    assert chart([1.0])[0].endswith("|*")
    assert max(map(len, chart([float(i) for i in range(1000)]))) <= 80


def test_arguments_that_can_not_work(capsys):
    assert main(["demo", "--steps", "1"]) == 2
    assert "give at least 1 and 2" in capsys.readouterr().err
