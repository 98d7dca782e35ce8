"""Optimizer states on a disk that fails, and steps that are interrupted."""

from __future__ import annotations

import copy
import os
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from offload_cases import (
    assert_alike,
    files_in,
    give_gradients,
    groups_of,
    parameters,
    params_of,
    train,
    twins,
)

from booster import CheckpointError, ConfigError
from booster.kernels.disk_io import DiskQueue
from booster.optim import CPUAdam
from booster.optim.nvme_offload import pipeline, state_file
from booster.optim.nvme_offload.pipeline import defer_sigint


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """4 pages: 4096 fp32 numbers."""
    monkeypatch.setattr(state_file, "CHUNK_BYTES", 4 * 4096)


# Disks that fail.


class FailingQueue(DiskQueue):
    """Fails requests by their number, counted over all queues."""

    reads: set[int] = set()
    writes: set[int] = set()
    counts = {"read": 0, "write": 0}

    def read(self, descriptor, tensor, offset):
        return self._maybe("read", self.reads, super().read(descriptor, tensor, offset))

    def write(self, descriptor, tensor, offset):
        return self._maybe("write", self.writes, super().write(descriptor, tensor, offset))

    def _maybe(self, kind, failing, ticket):
        self.counts[kind] += 1
        return FailedTicket(ticket) if self.counts[kind] - 1 in failing else ticket


class FailedTicket:
    def __init__(self, ticket) -> None:
        self.ticket = ticket

    def done(self):
        return self.ticket.done()

    def wait(self):
        self.ticket.wait()
        raise OSError(5, "made up for the test", "/the/file")


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(pipeline, "DiskQueue", FailingQueue)

    def fail(reads=(), writes=()):
        FailingQueue.reads, FailingQueue.writes = set(reads), set(writes)
        FailingQueue.counts = {"read": 0, "write": 0}

    fail()
    return fail


@pytest.mark.parametrize("kind", ["reads", "writes"])
@pytest.mark.parametrize(
    ("fraction", "number"),
    [*((1.0, number) for number in (0, 1, 2, 5, 6, 7, 11)), *((0.6, number) for number in range(6))],
)
def test_a_failed_step_is_finished_by_the_next_call(tmp_path, failing, kind, number, fraction):
    offloaded, plain = twins(tmp_path, fraction=fraction)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
    failing(**{kind: [number]})
    with pytest.raises(OSError, match="made up for the test: /the/file, which holds optimizer states, failed") as error:
        train(offloaded, [2])
    assert error.value.errno == 5
    train(offloaded, [2])  # the same gradients again
    train(plain, [2])
    assert_alike(offloaded, plain)
    failing()
    for optimizer in (offloaded, plain):
        train(optimizer, range(3, 6))
    assert_alike(offloaded, plain)


@pytest.mark.parametrize(("kind", "number"), [("reads", 6), ("writes", 0)])  # noticed before all is computed
def test_after_a_failure_parameters_and_states_belong_together(tmp_path, failing, kind, number):
    offloaded, before = twins(tmp_path)
    for optimizer in (offloaded, before):
        train(optimizer, range(2))
    after = copy.deepcopy(before)
    train(after, [2])
    failing(**{kind: [number]})
    with pytest.raises(OSError, match=r"Call step\(\) again"):
        train(offloaded, [2])
    places = []
    for p, old, new in zip(params_of(offloaded), params_of(before), params_of(after), strict=True):
        states = [
            (optimizer.state[q]["exp_avg"], optimizer.state[q]["exp_avg_sq"])
            for optimizer, q in ((offloaded, p), (before, old), (after, new))
        ]
        is_old, is_new = (p == old), (p == new)
        for mine, olds, news in zip(*states, strict=True):
            is_old = is_old & (mine == olds)
            is_new = is_new & (mine == news)
        assert bool((is_old | is_new).all())
        places.append((bool(is_old.all()), bool(is_new.all())))
        expected = 3.0 if is_new.all() and p.numel() > 0 else 2.0
        if p.numel() > 0:
            assert float(offloaded.state[p]["step"]) == expected
    assert any(is_new for _, is_new in places)
    assert any(is_old for is_old, _ in places)


def test_other_gradients_after_a_failure_are_refused(tmp_path, failing):
    offloaded, _ = twins(tmp_path)
    train(offloaded, range(2))
    failing(reads=[6])
    with pytest.raises(OSError, match=r"one of these, of shape .* is updated but for its last"):
        train(offloaded, [2])
    values = [parameter.detach().clone() for parameter in params_of(offloaded)]
    with pytest.raises(ConfigError, match="did not finish"):
        train(offloaded, [3])
    with pytest.raises(CheckpointError, match="left a parameter partially updated"):
        offloaded.state_dict()
    for parameter, value in zip(params_of(offloaded), values, strict=True):
        assert torch.equal(parameter, value)
    state = torch.optim.Adam(groups_of(parameters())).state_dict()
    offloaded.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    train(offloaded, [3])  # what was loaded replaces it


def test_a_step_that_changed_nothing_need_not_be_finished(tmp_path, failing):
    shapes = [(5000,), (64,)]
    offloaded = CPUAdam(parameters(shapes=shapes), nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    plain = CPUAdam(parameters(shapes=shapes))
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
    failing(reads=[0])
    with pytest.raises(OSError, match="0 of 2 parameters were updated"):
        train(offloaded, [2])
    for p, q in zip(params_of(offloaded), params_of(plain), strict=True):
        assert torch.equal(p, q)
    failing()
    for optimizer in (offloaded, plain):
        train(optimizer, [3])
    assert_alike(offloaded, plain)


def test_states_that_could_not_be_written_are_saved_all_the_same(tmp_path, failing):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
    last = 2 * len(offloaded._disk.files[0].layout.chunks) - 1
    failing(writes=[last])
    with pytest.raises(OSError, match="All 8 parameters were updated"):
        train(offloaded, [2])
    train(plain, [2])
    assert_alike(offloaded, plain)
    offloaded.state_dict()
    for optimizer in (offloaded, plain):
        train(optimizer, [3])
    assert_alike(offloaded, plain)


def test_a_file_that_was_cut(tmp_path):
    offloaded, _ = twins(tmp_path)
    train(offloaded, range(2))
    state = copy.deepcopy(offloaded.state_dict())
    (path,) = files_in(tmp_path)
    os.truncate(path, 4096)
    with pytest.raises(OSError, match=f"{path}.*shorter than it should be|shorter than it should be.*{path}"):
        train(offloaded, [2])
    with pytest.raises(CheckpointError, match="load them from a checkpoint"):
        offloaded.state_dict()
    offloaded.load_state_dict(state)  # into a new file
    offloaded.state_dict()
    train(offloaded, [2])


def test_a_file_that_was_deleted_continues(tmp_path):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
    (path,) = files_in(tmp_path)
    path.unlink()
    for optimizer in (offloaded, plain):
        train(optimizer, range(2, 4))
    assert_alike(offloaded, plain)


@contextmanager
def largest_file(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("way", ["step", "load_state_dict", "disk usage"])
def test_no_space(tmp_path, monkeypatch, way):
    offloaded, plain = twins(tmp_path)
    train(plain, [0])
    before = copy.deepcopy(offloaded.state_dict())
    values = [parameter.detach().clone() for parameter in params_of(offloaded)]
    give_gradients(params_of(offloaded))
    if way == "disk usage":
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with largest_file(8192), pytest.raises(ConfigError, match=r"need \d+ bytes.*\d+ bytes are free"):
        offloaded.load_state_dict(plain.state_dict()) if way == "load_state_dict" else offloaded.step()
    assert offloaded.state_dict() == before
    assert files_in(tmp_path) == []
    for parameter, value in zip(params_of(offloaded), values, strict=True):
        assert torch.equal(parameter, value)
    monkeypatch.undo()
    offloaded.step()


def test_directories_that_can_not_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be created"):
        CPUAdam(parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path / "file" / "below")
    offloaded, _ = twins(tmp_path / "disk")
    (tmp_path / "disk").rmdir()
    with pytest.raises(ConfigError, match="can't be created"):
        train(offloaded, [0])
    assert not offloaded.state


# Ctrl-C.


def test_interrupts_come_after_the_part_that_belongs_together():
    done = []

    def work():
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupted_step_is_finished_by_the_next_call(tmp_path, monkeypatch):
    offloaded, plain = twins(tmp_path)
    for optimizer in (offloaded, plain):
        train(optimizer, range(2))
    waits = []
    wait = pipeline._Transfer.wait

    def interrupted(self):
        waits.append(True)
        if len(waits) == 4:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(pipeline._Transfer, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(offloaded, [2])
    for optimizer in (offloaded, plain):
        train(optimizer, range(2, 4))
    assert_alike(offloaded, plain)
