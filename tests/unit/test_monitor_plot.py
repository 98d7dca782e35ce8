"""`booster plot`: logs become a picture, and other files are errors."""

from __future__ import annotations

import json
import sys

import pytest

from booster.cli import main
from booster.errors import ConfigError
from booster.monitor.loggers import read_run


def record(step, **others):
    return {
        "step": step,
        "seconds": 0.1,
        "loss": 1.0 / step,
        "samples_per_second": 5.0,
        "memory": [2**20, 2**21],
        **others,
    }


def write(path, records, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records) + tail)
    return str(path)


def test_runs_become_one_picture(tmp_path, capsys):
    first = write(tmp_path / "a" / "log.jsonl", [record(step) for step in range(1, 6)])
    second = write(tmp_path / "b" / "log.jsonl", [record(1), record(2, loss="nan"), record(3)])
    output = tmp_path / "figures" / "loss.png"
    assert main(["plot", first, second, "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "a/log (5 steps), b/log (3 steps)" in printed.out
    assert printed.err == ""


def test_the_lines_have_the_numbers(tmp_path):
    path = write(tmp_path / "a.jsonl", [record(1), record(2, loss="nan"), record(3, loss=None)])
    run = read_run(path)
    steps, losses = run.series("loss")
    assert steps == [1, 2]
    assert losses[0] == 1.0
    assert losses[1] != losses[1]
    assert run.series("memory") == ([1, 2, 3], [2.0**21] * 3)
    assert run.series("nothing") == ([], [])


def test_a_picture_of_lines_that_can_be_read(tmp_path):
    path = write(tmp_path / "a.jsonl", [record(1), record(2)])
    output = tmp_path / "loss.svg"
    assert main(["plot", path, "-o", str(output)]) == 0
    assert output.read_text().lstrip().startswith("<?xml")


def test_a_line_that_broke_off_is_left_out_and_said(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [record(1), record(2)], tail='{"step":3,"lo')
    assert main(["plot", path, "-o", str(tmp_path / "x.png")]) == 0
    assert "skipped 1 line" in capsys.readouterr().err


def test_steps_that_were_done_again_count_once(tmp_path):
    records = [record(1), record(2), record(3), {"step": 3, "accuracy": 0.1}, record(2, loss=9.0)]
    run = read_run(write(tmp_path / "a.jsonl", records))
    assert list(run.records) == [1, 2]
    assert run.series("loss") == ([1, 2], [1.0, 9.0])
    assert run.series("accuracy") == ([], [])


@pytest.mark.parametrize(
    "content", ["", "\n\n", "hello\nworld\n", "[1]\n", '{"loss": 1}\n', '{"step": "x"}\n', "\x00\xff"]
)
def test_what_is_no_log_is_an_error(tmp_path, capsys, content):
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="latin-1")
    assert main(["plot", str(path), "-o", str(tmp_path / "x.png")]) == 2
    assert "Monitor(log=...)" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_a_log_that_is_not_there(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "x.png")]) == 2
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err.count("is not readable") == 2


def test_outputs_that_cannot_be(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [record(1)])
    (tmp_path / "file").write_text("")
    for output, message in (
        (path, "would overwrite it"),
        ("loss", "no supported image suffix"),
        ("loss.docx", "no supported image suffix"),
    ):
        assert main(["plot", path, "-o", str(tmp_path / output)]) == 2
        assert message in capsys.readouterr().err
    assert main(["plot", path, "-o", str(tmp_path / "file" / "x.png")]) == 2
    assert "is not writable" in capsys.readouterr().err
    assert read_run(path).records


def test_matplotlib_that_is_missing_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.jsonl", [record(1)])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", path, "-o", str(tmp_path / "x.png")]) == 2
    assert "pip install torch-booster[plot]" in capsys.readouterr().err


def test_a_run_can_be_read_from_python(tmp_path):
    with pytest.raises(ConfigError):
        read_run(tmp_path / "nothing.jsonl")
    assert read_run(write(tmp_path / "a.jsonl", [record(1)]), name="mine").name == "mine"
