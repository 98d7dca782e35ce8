"""What `booster benchmark` says: the table, the notes, JSON, the picture, and arguments that can't work."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from booster.cli import main
from booster.cli.benchmark.config import SERIAL, BenchmarkSettings, Configuration, Skipped
from booster.cli.benchmark.measure import LiveMemory, Metrics, max_over_ranks
from booster.cli.benchmark.report import (
    BenchmarkResult,
    _compare_losses,
    check_can_draw,
    describe,
    draw,
    format_notes,
    format_table,
    to_json,
)
from booster.cli.benchmark.workers import _exit_text, _root_cause_text
from booster.errors import ConfigError

FIGURES = Metrics(
    forward_seconds=0.001,
    backward_seconds=0.0025,
    step_seconds=0.0005,
    whole_seconds=0.0041,
    peak_bytes=3 * 2**20,
    sent_bytes=2**19,
    received_bytes=2**9,
    communications=4,
    losses=[1.5, 1.25, 1.0],
)
ONE = Configuration("1d", {"tp": 2, "dp": 1})
OUTCOMES = [
    BenchmarkResult(
        configuration=Configuration(SERIAL), metrics=replace(FIGURES, peak_bytes=2**23), loss_difference=0.0
    ),
    BenchmarkResult(configuration=ONE, metrics=FIGURES, loss_difference=1e-7),
    BenchmarkResult(configuration=Configuration("dp", {"dp": 2}), error="rank 1 of 2 failed: ValueError: no"),
]
LEFT_OUT = [Skipped("2d", "-g 2 makes none")]


def test_the_table():
    assert format_table(OUTCOMES).splitlines() == [
        "configuration  forward  backward  step  total  memory    sent  received    loss",
        "                    ms        ms    ms     ms     MiB     KiB       KiB",
        "serial            1.00      2.50  0.50   4.10    8.00  512.00      0.50   equal",
        "1d tp=2 dp=1      1.00      2.50  0.50   4.10    3.00  512.00      0.50   equal",
        "dp=2                                                                     failed",
    ]


def test_a_table_without_figures():
    assert format_table(OUTCOMES[2:]).splitlines()[-1].split() == ["dp=2", "failed"]


def test_the_notes_name_what_is_missing_and_what_failed():
    assert format_notes(OUTCOMES, LEFT_OUT).splitlines() == [
        "not measured: 2d: -g 2 makes none",
        "failed: dp=2: rank 1 of 2 failed: ValueError: no",
    ]
    assert not format_notes(OUTCOMES[:2], [])


def test_one_of_a_kind_is_no_plural():
    text = describe(BenchmarkSettings(num_ranks=1, layers=1, sequence=1, profile_steps=1), "cpu")
    assert text == (
        "MLP of 1 layer 256 -> 1024 -> 256, batch 8 x 1 token, fp32, AdamW, on cpu; 1 rank, median of 1 step, largest"
        " of the ranks"
    )


def test_json_is_strict_and_has_everything():
    wrong = BenchmarkResult(configuration=ONE, metrics=FIGURES, loss_difference=math.nan, error="its losses are wrong")
    text = json.dumps(to_json(BenchmarkSettings(num_ranks=2), "cpu", [*OUTCOMES, wrong], LEFT_OUT), allow_nan=False)
    read = json.loads(text)
    assert read["settings"]["num_ranks"] == 2
    assert [one["name"] for one in read["configurations"]] == ["serial", "1d tp=2 dp=1", "dp=2", "1d tp=2 dp=1"]
    assert read["configurations"][1]["figures"]["peak_bytes"] == 3 * 2**20
    assert read["configurations"][1]["sizes"] == {"tp": 2, "dp": 1}
    assert read["configurations"][2]["figures"] is None
    assert read["left_out"] == [{"name": "2d", "reason": "-g 2 makes none"}]


def test_the_largest_of_every_figure():
    other = replace(FIGURES, forward_seconds=0.002, peak_bytes=1, sent_bytes=2**20)
    assert max_over_ranks([FIGURES, other]) == replace(FIGURES, forward_seconds=0.002, sent_bytes=2**20)


@pytest.mark.parametrize("losses", [[1.5, 1.25, 1.0001], [1.5, math.nan, 1.0], [math.nan, 1.25, 1.0]])
def test_wrong_losses_are_an_error(losses):
    outcome = _compare_losses(ONE, replace(FIGURES, losses=losses), FIGURES.losses)
    assert outcome.error.startswith(f"its losses are {losses}, but one process has [1.5, 1.25, 1.0]")
    assert format_table([outcome]).endswith("WRONG")


def test_losses_that_differ_by_rounding_are_equal():
    outcome = _compare_losses(ONE, replace(FIGURES, losses=[1.5, 1.25, 1.00001]), FIGURES.losses)
    assert outcome.error is None
    assert outcome.loss_difference == pytest.approx(1e-5)


def test_losses_that_nothing_can_be_compared_with_are_an_error():
    outcome = _compare_losses(ONE, FIGURES, None)
    assert "the single process failed" in outcome.error
    assert format_table([outcome]).endswith("not compared")


def test_the_cause_is_not_who_only_followed():
    answers = {
        1: {"error": "RankFailedError: rank 0 is lost", "traceback": "far"},
        0: {"error": "ValueError: mine", "traceback": "Traceback\nValueError: mine\n"},
        2: {"figures": {}},
    }
    assert _root_cause_text(answers, 3) == "rank 0 of 3 failed: ValueError: mine\nTraceback\nValueError: mine"
    del answers[0]
    assert _root_cause_text(answers, 3).startswith("rank 1 of 3 failed: RankFailedError")


def test_how_a_process_ended():
    assert _exit_text(3) == "the process exited with code 3 without a result"
    assert _exit_text(-9) == "the process was killed by SIGKILL, as the system does when memory runs out"
    assert _exit_text(-11) == "the process was killed by SIGSEGV"


def test_live_memory_counts_what_lives_in_the_steps():
    with LiveMemory() as memory:
        first = torch.empty(2**20)
        del first
        kept = torch.empty(2**10)
        memory.begin_steps()
        for _ in range(3):
            twice = kept.repeat(2)
            del twice
    beyond = memory.peak_bytes - 4 * (2**10 + 2**11)
    assert 0 <= beyond < 2**10  # an operator's few bytes of scratch


def test_a_failure_while_memory_is_counted_comes_through():
    with pytest.raises(ValueError, match="mine"), LiveMemory() as memory:
        raise ValueError("mine")
    assert memory.peak_bytes == 0


@pytest.mark.parametrize("ending", ["png", "svg", "PDF"])
def test_the_picture(tmp_path, ending):
    path = tmp_path / f"out.{ending}"
    check_can_draw(path)
    draw(path, "a title", OUTCOMES)
    assert path.stat().st_size > 1000


def test_a_picture_of_nothing(tmp_path):
    draw(tmp_path / "out.png", "a title", OUTCOMES[2:])
    assert (tmp_path / "out.png").is_file()


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install torch-booster\[plot\]"):
        check_can_draw(tmp_path / "out.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-g", "0"], "-g/--nproc=0"),
        (["-m", "4d"], "'4d' is not a mode"),
        (["-g", "4", "-m", "3d"], "leaves nothing to measure. 3d: not possible with -g 4"),
        (["--plot", "/nowhere/a.png"], "there is no directory /nowhere"),
        (["--plot", "a"], "a has no suffix of an image format"),
        (["--plot", "a.doc"], "such as a.png"),
        (["--json", "."], "is a directory"),
    ],
)
def test_arguments_that_cannot_work(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("booster.device.device_type", lambda: "cpu")
    assert main(["benchmark", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("booster benchmark: ")
    assert not captured.out


def test_more_ranks_than_accelerators_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("booster.device.device_type", lambda: "cuda")
    monkeypatch.setattr("booster.device.num_devices", lambda: 2)
    assert main(["benchmark", "-g", "4"]) == 2
    assert "-g 4 is more than the 2 cuda device(s) of this machine" in capsys.readouterr().err
