"""A Monitor over several ranks: the same records everywhere, and a hang that names who is missing."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, preload, run_ranks
from torch import nn

from booster import Booster
from booster.comm import all_reduce_sum, use_shared_memory
from booster.device import current_device
from booster.errors import DesyncError
from booster.monitor import Monitor
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin

preload("booster", "booster.plugins", "booster.monitor")

pytestmark = pytest.mark.on_device

WIDTH, BATCH = 8, 4
PARAMETER_BYTES = 4 * 2 * (WIDTH * WIDTH + WIDTH)


def make(kind):
    plugins = {
        "ddp": lambda: TorchDDPPlugin(),
        "zero": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
        "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.001, search_range_m=0.001),
        "tensor": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
        "pipeline": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32"),
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    booster = Booster(plugin=plugins[kind]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def step(kind, booster, model, optimizer, value):
    batch = torch.full((BATCH, WIDTH), value, device=current_device())
    if kind == "pipeline":
        result = booster.execute_pipeline(iter([batch]), model, lambda out, _: out.square().mean(), optimizer)
        loss = float(result["loss"])
    else:
        loss = model(batch).square().mean()
        booster.backward(loss, optimizer)
        loss = float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("kind", ["ddp", "zero", "gemini", "tensor", "pipeline"])
@distributed(2)
def test_records_are_of_all_ranks(kind, tmp_path):
    booster, model, optimizer = make(kind)
    is_data_parallel = kind in ("ddp", "zero", "gemini")
    path = tmp_path / "a.jsonl"
    records, losses = [], []
    with Monitor(model, optimizer, log=path) as monitor:
        for number in range(3):
            value = 1.0 + number + dist.get_rank() * is_data_parallel
            losses.append(step(kind, booster, model, optimizer, value))
            records.append(monitor.record)
    everyone = [None, None]
    dist.all_gather_object(everyone, (losses, records))
    assert len(path.read_text().splitlines()) == 3
    for number in range(3):
        ours, theirs = (one[1][number] for one in everyone)
        assert {**ours, "time": 0} == {**theirs, "time": 0}
        mean = sum(one[0][number] for one in everyone) / 2
        assert ours["loss"] == pytest.approx(mean, rel=1e-6)
        assert ours["step"] == number + 1
        assert ours["ranks"] == len(ours["memory"]) == 2
        assert sum(ours["seconds_in"].values()) == pytest.approx(ours["seconds"], rel=1e-6)
        # Ranks that compute a batch together count it once.
        samples = BATCH * (2 if is_data_parallel else 1)
        assert ours["samples_per_second"] * ours["seconds"] == pytest.approx(samples, rel=1e-6)
        assert ours["seconds_in"]["communication"] > 0
        assert ours["seconds_in"]["forward"] > 0
        assert ours["seconds_in"]["backward"] > 0
        if kind in ("ddp", "zero"):  # an all-reduce of the gradients, or what is worth one
            assert PARAMETER_BYTES <= ours["communication_bytes"] < PARAMETER_BYTES + 200


@distributed(2)
def test_of_this_rank_alone_nothing_is_communicated():
    booster, model, optimizer = make("zero")
    calls = []
    for across_ranks in (True, False):
        with Monitor(model, optimizer, across_ranks=across_ranks) as monitor:
            step("zero", booster, model, optimizer, 1.0)
            calls.append(monitor._count.calls["all_gather"])
    assert calls[0] == calls[1] + 1
    assert monitor.record["ranks"] == 1


@distributed(2)
def test_settings_that_differ_are_an_error_on_all_ranks():
    _, model, optimizer = make("ddp")
    every = 1 + dist.get_rank()
    with pytest.raises(DesyncError, match=r"every=1.*every=2 on rank 1"), Monitor(model, optimizer, every=every):
        pass


@distributed(2)
def test_a_log_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    if dist.get_rank() == 0:
        (tmp_path / "file").write_text("")
    _, model, optimizer = make("ddp")
    with pytest.raises(ValueError, match="is not writable"), Monitor(model, optimizer, log=tmp_path / "file" / "a"):
        pass


@distributed(2)
def test_ranks_at_different_steps_are_an_error_on_all_ranks():
    booster, model, optimizer = make("ddp")
    with Monitor(model, optimizer, every=2) as monitor:
        if dist.get_rank() == 1:
            monitor._step = 2
        step("ddp", booster, model, optimizer, 1.0)
        with pytest.raises(DesyncError, match="rank 0 finished step 2, rank 1 step 4"):
            step("ddp", booster, model, optimizer, 1.0)


# Hangs. The rank that does not come continues when the other's watchdog has spoken.


class Watched(io.StringIO):
    """Takes what a watchdog says, and tells all ranks when it has named who is missing."""

    def __init__(self, directory):
        super().__init__()
        self.has_reported = threading.Event()
        self._directory = directory

    def write(self, text):
        written = super().write(text)
        if "Status of the ranks" in text:
            self.has_reported.set()
            (self._directory / f"rank{dist.get_rank()}").touch()
        return written

    def wait_for_all(self):
        """Returns when the watchdogs of all ranks have spoken."""
        deadline = time.monotonic() + 20
        while not all((self._directory / f"rank{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)


@pytest.mark.parametrize("kind", ["ddp", "zero"])
@pytest.mark.parametrize("in_memory", [True, False])
@distributed(2)
def test_a_hang_names_who_is_missing(kind, in_memory, tmp_path):
    use_shared_memory(in_memory)
    stderr = Watched(tmp_path)
    booster, model, optimizer = make(kind)
    try:
        with contextlib.redirect_stderr(stderr), Monitor(model, optimizer, progress=False, hang_seconds=0.5):
            step(kind, booster, model, optimizer, 1.0)
            if dist.get_rank() == 1:
                stderr.wait_for_all()
            step(kind, booster, model, optimizer, 1.0)
    finally:
        use_shared_memory(None)
    text = stderr.getvalue()
    assert "no step finished for" in text
    assert "rank 1 finished step 1 and is outside of all phases" in text
    assert "rank 0 finished step 1 and is in " in text
    assert "missing: rank 1" in text
    assert "rank 0 finished step 1 and is in communication in " in text
    assert "test_monitor_ranks.py" in text
    assert "thread MainThread" in text
    assert "rank 0 waits in " in text
    if dist.get_rank() == 0:
        assert "in step" in text  # the stack
    assert text.count("Status of the ranks") == 1  # once a hang


@distributed(2)
def test_a_rank_that_left_says_so(tmp_path):
    stderr = Watched(tmp_path)
    booster, model, optimizer = make("ddp")
    with contextlib.redirect_stderr(stderr), Monitor(model, optimizer, progress=False, hang_seconds=0.4):
        step("ddp", booster, model, optimizer, 1.0)
        if dist.get_rank() == 0:
            assert stderr.has_reported.wait(20)
    if dist.get_rank() == 0:
        assert "rank 1 left the Monitor's block after step 1" in stderr.getvalue()


@distributed(2)
def test_a_hang_that_is_over_is_not_reported_again(tmp_path):
    stderr = Watched(tmp_path)
    booster, model, optimizer = make("ddp")
    with contextlib.redirect_stderr(stderr), Monitor(model, optimizer, progress=False, hang_seconds=0.4):
        for _ in range(2):
            step("ddp", booster, model, optimizer, 1.0)
            assert stderr.has_reported.wait(20)
            stderr.has_reported.clear()
            all_reduce_sum(torch.ones(1, device=current_device()))
    assert stderr.getvalue().count("Status of the ranks") == 2
    assert "finished step 2" in stderr.getvalue()
    assert not [one for one in threading.enumerate() if one.name == "booster-watchdog"]


def _only_on_rank_0():
    from booster.monitor import monitor as module

    _, model, optimizer = make("ddp")
    module._ENTRY_TIMEOUT_SECONDS = 0.5
    if dist.get_rank() == 0:
        with Monitor(model, optimizer):
            pass


def test_a_monitor_on_one_rank_alone_is_an_error_there():
    with pytest.raises(RanksFailed, match=r"rank 1 did not complete \"entering Monitor's block\""):
        run_ranks(_only_on_rank_0, 2, fresh=True)


@distributed(world_size=2)
def test_a_tracker_that_does_not_start_is_an_error_on_all_ranks(monkeypatch):
    def refuse(**_):
        raise ValueError("no API key")

    wandb = types.ModuleType("wandb")
    wandb.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    model = nn.Linear(2, 1)
    model, optimizer, *_ = Booster(plugin=TorchDDPPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    started = time.monotonic()
    with pytest.raises(Exception, match="no API key"), Monitor(model, optimizer, wandb="runs", progress=False):
        pass
    assert time.monotonic() - started < 30  # other ranks wait for 120 seconds
