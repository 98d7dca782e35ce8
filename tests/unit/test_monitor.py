"""A Monitor around a loop in one process: its records are right, its logs whole, and every mistake has its error."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import time

import pytest
import torch
from torch import nn

from booster import Booster, ConfigError
from booster.monitor import Monitor
from booster.monitor.loggers import read_run
from booster.monitor.step_stats import count_tokens

PARTS = {"forward", "backward", "clip", "step", "data", "communication", "evaluate", "save", "load", "other"}


def make(**arguments):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    booster = Booster(device="cpu", **arguments)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(groups))
    return booster, model, optimizer


def train(booster, model, optimizer, num_steps, batch_size=2):
    losses = []
    for step in range(num_steps):
        loss = model(torch.full((batch_size, 3), float(step))).square().mean()
        booster.backward(loss, optimizer)
        booster.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line(tmp_path):
    booster, model, optimizer = make()
    path = tmp_path / "runs" / "a.jsonl"
    with Monitor(model, optimizer, log=path) as monitor:
        losses = train(booster, model, optimizer, 3)
        assert [record["step"] for record in lines_of(path)] == [1, 2, 3]  # there while it continues
    records = lines_of(path)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-12)
    assert {tuple(record["lr"]) for record in records} == {(0.1, 0.01)}
    assert all(record["memory"][0] > 2**20 and len(record["memory"]) == 1 for record in records)
    assert all(record["ranks"] == 1 and record["communication_bytes"] == 0 for record in records)
    for record in records:
        assert record["samples_per_second"] == pytest.approx(2 / record["seconds"], rel=1e-9)
    assert monitor.record["step"] == 3


def test_the_parts_of_a_step_add_up_to_the_wall_clock(tmp_path):
    booster, model, optimizer = make()
    path = tmp_path / "a.jsonl"
    with Monitor(model, optimizer, log=path):
        began = time.perf_counter()
        train(booster, model, optimizer, 50)
        elapsed = time.perf_counter() - began
    records = lines_of(path)
    for record in records:
        assert record["seconds_in"].keys() == PARTS
        assert sum(record["seconds_in"].values()) == pytest.approx(record["seconds"], rel=1e-6)
        assert min(record["seconds_in"].values()) >= -1e-9
        assert all(record["seconds_in"][name] > 0 for name in ("forward", "backward", "clip", "step", "other"))
    # All but what came after the last step is in some step; what came before the loop is in the first.
    total = sum(record["seconds"] for record in records)
    assert 0.5 * elapsed < total < elapsed + 0.1


def test_a_record_of_several_steps_has_their_means(tmp_path):
    booster, model, optimizer = make()
    path = tmp_path / "a.jsonl"
    with Monitor(model, optimizer, log=path, every=2):
        losses = train(booster, model, optimizer, 5)
    records = lines_of(path)
    assert [(record["step"], record["steps"]) for record in records] == [(2, 2), (4, 2)]
    assert records[1]["loss"] == pytest.approx((losses[2] + losses[3]) / 2)
    assert records[1]["samples_per_second"] == pytest.approx(4 / (2 * records[1]["seconds"]))


def test_a_loss_that_sums_over_items_is_their_mean():
    booster, model, optimizer = make()
    with Monitor(model, optimizer) as monitor, torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        with torch.enable_grad():
            for items in (1, 3):
                booster.backward(model(torch.ones(items, 3)).sum(), optimizer, num_items=items)
        optimizer.step()
    assert monitor.record["loss"] == 4.0
    assert monitor.record["step"] == 1


def test_micro_steps_are_one_step():
    booster, model, optimizer = make()
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            with booster.accumulate(model, optimizer, steps=2):
                train(booster, model, optimizer, 1, batch_size=5)
    assert monitor.record["step"] == 2
    assert monitor.record["samples_per_second"] * monitor.record["seconds"] == pytest.approx(10)


def test_a_skipped_step_is_marked_and_its_loss_is_legal_json(tmp_path):
    booster, model, optimizer = make(mixed_precision="fp16_naive")
    path = tmp_path / "a.jsonl"
    with Monitor(model, optimizer, log=path):
        booster.backward(model(torch.full((2, 3), math.inf)).square().mean(), optimizer)
        optimizer.step()
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    (record,) = lines_of(path)
    assert record["skipped"] == 1
    assert record["loss"] in ("nan", "inf")
    assert not math.isfinite(read_run(path).series("loss")[1][0])


def test_evaluation_is_no_part_of_throughput():
    booster, model, optimizer = make()
    with Monitor(model, optimizer) as monitor:
        model.eval()
        with torch.no_grad():
            for _ in range(20):
                model(torch.ones(7, 3))
        model.train()
        train(booster, model, optimizer, 1)
    record = monitor.record
    evaluating = record["seconds_in"]["evaluate"]
    assert evaluating > 0
    assert record["samples_per_second"] == pytest.approx(2 / (record["seconds"] - evaluating))


def test_other_models_and_optimizers_do_not_count():
    booster, model, optimizer = make()
    other_booster, other, other_optimizer = make()
    with Monitor(model, optimizer) as monitor:
        train(other_booster, other, other_optimizer, 3)
        assert monitor.record is None
        train(booster, model, optimizer, 1)
    assert monitor.record["step"] == 1
    assert monitor.record["samples_per_second"] * monitor.record["seconds"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    [
        ((torch.ones(4, 7),), {}, (4, "samples")),
        ((torch.ones(4, 7, dtype=torch.int64),), {}, (28, "tokens")),
        ((torch.ones(4, dtype=torch.int64),), {}, (4, "samples")),
        ((), {"attention_mask": torch.ones(2, 3), "input_ids": torch.ones(2, 3)}, (6, "tokens")),
        (({"input_ids": torch.ones(2, 5)},), {}, (10, "tokens")),
        (([torch.ones(3, 2), torch.ones(9)],), {}, (3, "samples")),
        ((torch.ones(()),), {}, (1, "samples")),
        ((5,), {"flag": True}, (0, "samples")),
    ],
)
def test_what_a_batch_counts_as(arguments, keywords, expected):
    assert count_tokens(arguments, keywords) == expected


def test_the_user_may_count_tokens():
    booster, model, optimizer = make()
    with Monitor(model, optimizer, tokens=lambda arguments, keywords: 7 * len(arguments[0])) as monitor:
        train(booster, model, optimizer, 1)
    assert monitor.record["tokens_per_second"] * monitor.record["seconds"] == pytest.approx(14)


def test_own_numbers_belong_to_the_last_step(tmp_path):
    booster, model, optimizer = make()
    path = tmp_path / "a.jsonl"
    with Monitor(model, optimizer, log=path) as monitor:
        train(booster, model, optimizer, 2)
        monitor.log(accuracy=torch.tensor(0.5), perplexity=math.inf)
        monitor.log()
    assert len(lines_of(path)) == 3
    run = read_run(path)
    assert run.series("accuracy") == ([2], [0.5])
    assert run.series("perplexity") == ([2], [math.inf])
    assert len(run.series("loss")[0]) == 2


# Going on.


def test_a_run_goes_on_in_its_log(tmp_path):
    path = tmp_path / "a.jsonl"
    booster, model, optimizer = make()
    with Monitor(model, optimizer, log=path):
        train(booster, model, optimizer, 4)
    with path.open("a") as file:
        file.write('{"step":5,"lo')  # killed
    with Monitor(model, optimizer, log=path, first_step=4):
        losses = train(booster, model, optimizer, 3)
    run = read_run(path)
    assert list(run.records) == [1, 2, 3, 4, 5, 6]
    assert run.num_invalid_lines == 1
    assert run.records[4]["loss"] == pytest.approx(losses[0])


def test_a_log_of_another_run_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    booster, model, optimizer = make()
    with Monitor(model, optimizer, log=path):
        train(booster, model, optimizer, 4)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"steps up to 4 .*first_step=5"), Monitor(model, optimizer, log=path):
        raise AssertionError("the block was entered")
    assert path.read_bytes() == before


def test_a_full_disk_does_not_end_the_training(tmp_path, capsys):
    booster, model, optimizer = make()
    with Monitor(model, optimizer, log="/dev/full") as monitor:
        train(booster, model, optimizer, 2)
    assert monitor.record["step"] == 2
    assert capsys.readouterr().err.count("cannot write to") == 1


# Other logs.


def test_tensorboard_has_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    booster, model, optimizer = make()
    with Monitor(model, optimizer, tensorboard=tmp_path / "board") as monitor:
        losses = train(booster, model, optimizer, 3)
        monitor.log(accuracy=0.5)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    loss = events.Scalars("loss")
    assert [one.step for one in loss] == [1, 2, 3]
    assert [one.value for one in loss] == pytest.approx(losses)
    assert events.Scalars("accuracy")[0].step == 3
    tags = set(events.Tags()["scalars"])
    assert {"lr/0", "lr/1", "seconds", "seconds_in/backward", "samples_per_second", "memory"} <= tags


def test_tensorboard_that_is_missing_says_how_to_get_it(tmp_path, monkeypatch):
    _, model, optimizer = make()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monitor = Monitor(model, optimizer, tensorboard=tmp_path)
    with pytest.raises(ConfigError, match=r"pip install torch-booster\[tensorboard\]"):
        monitor.__enter__()


def test_the_bar_shows_the_last_step(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    booster, model, optimizer = make()
    with Monitor(model, optimizer, progress="always", total_steps=12, first_step=11) as monitor:
        train(booster, model, optimizer, 2)
        monitor.log(accuracy=0.5)
    shown = sys.stderr.getvalue().split("\r")[-1]
    assert "12/12" in shown
    assert "accuracy 0.5" in shown
    assert f"loss {monitor.record['loss']:.4f}" in shown
    assert "samples/s" in shown
    assert "backward" in shown


def test_no_bar_where_there_is_no_terminal(capsys):
    booster, model, optimizer = make()
    with Monitor(model, optimizer):
        train(booster, model, optimizer, 2)
    assert capsys.readouterr().err == ""


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"every": True}, "every=True"),
        ({"total_steps": -1}, "total_steps=-1"),
        ({"first_step": 0}, "first_step=0"),
        ({"hang_seconds": 0}, "hang_seconds=0"),
        ({"hang_seconds": "60"}, "hang_seconds='60'"),
        ({"hang_seconds": math.inf}, "hang_seconds=inf"),
        ({"progress": "yes"}, "progress='yes'"),
        ({"tokens": 5}, "tokens=5"),
        ({"log": 5}, "log=5"),
        ({"log": ""}, "log=''"),
        ({"log": "/"}, "log='/'"),
        ({"tensorboard": True}, "tensorboard=True"),
    ],
)
def test_settings_that_cannot_be(arguments, message):
    _, model, optimizer = make()
    with pytest.raises(ConfigError, match=message):
        Monitor(model, optimizer, **arguments)


def test_only_what_was_boosted_together():
    _, model, optimizer = make()
    _, _, other_optimizer = make()
    with pytest.raises(ConfigError, match="another model"):
        Monitor(model, other_optimizer)
    with pytest.raises(ConfigError, match="boost"):
        Monitor(model.unwrap(), optimizer)
    with pytest.raises(ConfigError, match="boost"):
        Monitor(model, optimizer.unwrap())
    with pytest.raises(ConfigError, match="boost"):
        Monitor(optimizer, model)


def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    _, model, optimizer = make()
    with pytest.raises(ConfigError, match="is not writable"), Monitor(model, optimizer, log=tmp_path / "file" / "a"):
        pass


def test_own_numbers_that_are_none():
    _, model, optimizer = make()
    with Monitor(model, optimizer) as monitor:
        for numbers, message in (
            ({"loss": 1.0}, "choose another name"),
            ({"accuracy": "high"}, "not a number"),
            ({"accuracy": torch.ones(2)}, "not a number"),
            ({"accuracy": None}, "not a number"),
        ):
            with pytest.raises(ConfigError, match=message):
                monitor.log(**numbers)
    with pytest.raises(ConfigError, match="outside"):
        monitor.log(accuracy=1.0)


def test_a_block_is_entered_once_at_a_time():
    _, model, optimizer = make()
    with Monitor(model, optimizer) as monitor, pytest.raises(ConfigError, match="already entered"):
        monitor.__enter__()


def test_an_error_in_the_loop_is_the_users_and_closes_the_logs(tmp_path):
    booster, model, optimizer = make()
    path = tmp_path / "a.jsonl"
    with contextlib.suppress(KeyError), Monitor(model, optimizer, log=path, hang_seconds=60):
        train(booster, model, optimizer, 1)
        raise KeyError
    train(booster, model, optimizer, 1)
    assert len(lines_of(path)) == 1
