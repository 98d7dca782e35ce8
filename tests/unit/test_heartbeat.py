"""Heartbeats: content, reading, and when a wait is aborted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from booster.comm import new_group
from booster.fault_tolerance import failure_diagnosis, heartbeat
from booster.fault_tolerance.failure_diagnosis import SAVES, TRAINING, describe_last_heartbeats, format_phase
from booster.fault_tolerance.heartbeat import (
    Heartbeat,
    ended_processes,
    heartbeat_interval_text,
    progress_from_json,
)
from booster.fault_tolerance.progress import CollectiveInfo, Phase, Progress, current_progress
from booster.fault_tolerance.timeouts import Timeouts

OPERATION = CollectiveInfo(name="all_reduce", number=7, ranks=(0, 1))
PLACE = Progress(num_steps=3, phases=("save", "commit"), seconds=0.5, operation=OPERATION, last_operation=None)


def _heartbeat(process, **others):
    fields = {
        "sequence": 1,
        "time": 0.0,
        "progress": PLACE,
        "state": "running",
        "host": "here",
        "host_id": heartbeat.host_id(),
    }
    return Heartbeat(**{**fields, "process_id": process.pid, "started_at": process.create_time(), **others})


@pytest.mark.parametrize("place", [PLACE, Progress(), replace(PLACE, operation=None, last_operation=OPERATION)])
def test_a_place_survives_json(place):
    assert progress_from_json(asdict(place)) == place


def test_a_process_that_lives_has_not_ended():
    assert ended_processes({4: _heartbeat(psutil.Process())}) == []


def test_a_process_that_is_gone_has_ended_on_this_machine_alone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = _heartbeat(psutil.Process(child.pid))
    assert ended_processes({0: one}) == []
    child.communicate(b"\n", timeout=60)
    assert ended_processes({0: one, 1: replace(one, host_id="another")}) == [0]


def test_a_process_without_a_wait_has_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    one = _heartbeat(psutil.Process(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    try:
        assert ended_processes({0: one}) == [0]
    finally:
        child.wait(timeout=60)


def test_another_process_with_the_same_number_is_not_it():
    assert ended_processes({2: _heartbeat(psutil.Process(), started_at=1.0)}) == [2]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Progress(), ""),
        (Progress(num_steps=2), " (outside of all phases, after 2 steps)"),
        (replace(PLACE, phases=("save", "commit", "communication")), " (in commit in save, after 3 steps)"),
    ],
)
def test_surroundings_are_phases_and_step(place, text):
    assert format_phase(place) == text


@pytest.mark.parametrize(("world_size", "words"), [(2, "once a second"), (1024, "every 4.0 s")])
def test_how_often_a_rank_speaks(world_size, words):
    assert heartbeat_interval_text(world_size) == words


class _Missing:
    """Rank 1 is missing from what this process, rank 0, waits in."""

    def __init__(self, monkeypatch, state=None, beats=(1, 1), **fields):
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(failure_diagnosis.time, "time", lambda: 4.0)
        known = {"process": psutil.Process(), "time": 3.0, "progress": Progress(num_steps=3), "host": "vm"}
        before, now = (_heartbeat(**{**known, "sequence": beat, **fields}) for beat in beats)
        ends = {} if state is None else {1: (state, "ValueError: mine")}
        self.before = {1: before}
        monkeypatch.setattr(failure_diagnosis, "read_heartbeats", lambda ranks: {1: now})
        monkeypatch.setattr(failure_diagnosis, "exit_statuses", lambda: ends)
        monkeypatch.setattr(failure_diagnosis, "reported_failures", list)

    def known(self, is_before_known=True):
        return failure_diagnosis._explain_ranks([1], self.before if is_before_known else {})[0][0]


ONCE = "1.0 s ago (heartbeats come once a second"
SAID = f"{ONCE}, so it may have continued since), reported: after 3 steps, outside of all phases"


@pytest.mark.parametrize(
    ("facts", "is_before_known", "text"),
    [
        ({"state": "ended"}, True, "rank 1's program ended after 3 steps, while others continue"),
        ({"state": "failed"}, True, "rank 1's program failed after 3 steps: ValueError: mine"),
        (
            {"started_at": 1.0},
            True,
            f"rank 1's process {os.getpid()} on host vm has ended without a report (was it killed?); its last"
            f" heartbeat, {SAID}",
        ),
        ({}, False, f"on host vm, rank 1's last heartbeat, {SAID}"),
        (
            {"beats": (1, 2)},
            True,
            "rank 1's process is alive, after 3 steps, outside of all phases: it is busy, hangs, or makes other calls",
        ),
        (
            {},
            True,
            f"rank 1's last heartbeat, {ONCE}), reported: after 3 steps, outside of all phases; none has come since: it"
            " is stopped or killed, or host vm is lost",
        ),
    ],
    ids=["ended", "failed", "killed", "unknown", "busy", "stopped"],
)
def test_what_is_known_of_a_missing_rank(monkeypatch, facts, is_before_known, text):
    assert _Missing(monkeypatch, **facts).known(is_before_known) == text


def test_a_hint_follows_as_a_sentence_of_its_own_where_a_program_ended(monkeypatch):
    _Missing(monkeypatch, "ended")
    ended = "rank 1's program ended after 3 steps, while others continue"
    for phase, words in (("save", SAVES), ("backward", TRAINING)):
        with Phase(phase):
            assert describe_last_heartbeats([1]) == f"{ended}. {words}"
    with Phase("boost"):
        assert describe_last_heartbeats([1]) == ended
    monkeypatch.setattr(failure_diagnosis, "reported_failures", lambda: ["rank 2 had failed: KeyError"])
    with Phase("save"):
        assert describe_last_heartbeats([1]) == ended


def test_no_hint_follows_where_a_rank_was_killed(monkeypatch):
    _Missing(monkeypatch, started_at=1.0)
    with Phase("save"):
        assert describe_last_heartbeats([1]).endswith("reported: after 3 steps, outside of all phases")


class _World:
    """Two ranks of this process in a store of its own, as far as a speaker looks."""

    def __init__(self, monkeypatch, backend="gloo"):
        self.store = dist.HashStore()
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        self.broken_off = []
        self.lost = []  # the texts about lost ranks for which the process would have ended
        self.speaker = self.new_thread()
        self.place = Progress(phases=("backward",))
        monkeypatch.setattr(self.speaker, "_progress", lambda: self.place)
        self.speaker._write(heartbeat.RUNNING)
        self.ends = heartbeat._heartbeat_store(self.store)

    def new_thread(self):
        return heartbeat._HeartbeatThread(self.store, self.broken_off.append, lambda text, thread: None)

    def other_ends(self):
        self.ends.append(heartbeat._EXITS_KEY, '[1, "ended", ""]\n')

    def other_is_killed(self, monkeypatch):
        other = self.new_thread()
        monkeypatch.setattr(other, "_rank", 1)
        monkeypatch.setattr(other, "_identity", {**other._identity, "started_at": 1.0})  # another one's number now
        other._write(heartbeat.RUNNING)

    def stand(self, seconds):
        for _ in range(seconds):
            if text := self.speaker._check_stall(1.0):
                self.lost.append(text)
                return


def test_a_wait_is_broken_off_some_seconds_after_a_rank_has_ended(monkeypatch):
    world = _World(monkeypatch)
    world.stand(20)
    world.other_ends()
    world.stand(4)
    assert world.broken_off == []
    world.stand(1)
    assert world.broken_off == [{1}]


def test_who_moves_on_is_not_disturbed(monkeypatch):
    world = _World(monkeypatch)
    world.other_ends()
    for step in range(20):
        world.place = replace(world.place, num_steps=step // 3)
        world.stand(1)
    assert world.broken_off == []


def test_who_is_outside_of_all_phases_is_not_disturbed(monkeypatch):
    world = _World(monkeypatch)
    world.place = Progress()
    world.other_ends()
    world.stand(20)
    assert world.broken_off == []


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_before_a_backend_ends_the_process_it_is_said_where_all_ranks_are(monkeypatch, capsys, backend):
    world = _World(monkeypatch, backend)
    monkeypatch.setattr(heartbeat, "timeouts", lambda: Timeouts(training=10.0))
    other = world.new_thread()
    monkeypatch.setattr(other, "_rank", 1)
    monkeypatch.setattr(other, "_progress", lambda: replace(PLACE, num_steps=2))
    other._write(heartbeat.RUNNING)
    world.stand(8)
    assert capsys.readouterr().err == ""
    world.stand(5)
    text = capsys.readouterr().err
    if backend == "gloo":  # which raises an error by itself
        assert text == ""
        return
    assert text.count("no progress for 9 s, and nccl aborts a process that waits for 10 s") == 1
    assert "  rank 0: after 0 steps, in backward for 0.0 s\n" in text
    assert "  rank 1: after 2 steps, in commit in save for 0.5 s, in all_reduce number 7 of ranks 0, 1\n" in text


@pytest.mark.parametrize("way", ["killed", "failed"])
@pytest.mark.parametrize("place", ["in backward", "reads a loss"])
def test_a_process_that_waits_for_a_lost_rank_ends_long_before_its_backend_ends_it(monkeypatch, capsys, way, place):
    world = _World(monkeypatch, "nccl")
    if place == "reads a loss":
        world.place = Progress()
        monkeypatch.setattr(heartbeat, "is_idle", lambda device: False)
    world.other_is_killed(monkeypatch)
    if way == "failed":
        world.ends.append(heartbeat._EXITS_KEY, '[1, "failed", "KeyError: 3"]\n')
    world.stand(20)
    (text,) = world.lost
    why = r"process \d+ has ended without a report" if way == "killed" else "program failed: KeyError: 3"
    where = "in backward for 0.0 s" if place == "in backward" else "outside of all phases"
    assert re.match(f"rank 0 could not continue: rank 1's {why}", text)
    assert f"No progress for 5 s, after 0 steps, {where}; nccl would abort the process after 600 s" in text
    assert capsys.readouterr().err == ""


def test_a_process_that_computes_outlives_a_lost_rank(monkeypatch):
    world = _World(monkeypatch, "nccl")
    world.place = Progress()  # outside of all phases, and nothing is left to do on its device
    world.other_is_killed(monkeypatch)
    world.stand(700)
    assert world.lost == []


def test_the_device_is_not_asked_while_no_rank_is_lost(monkeypatch):
    world = _World(monkeypatch, "nccl")
    world.place = Progress()
    monkeypatch.setattr(heartbeat, "is_idle", lambda device: pytest.fail("a capture of a CUDA graph would break"))
    other = world.new_thread()
    monkeypatch.setattr(other, "_rank", 1)
    other._write(heartbeat.RUNNING)
    world.stand(30)
    assert world.lost == []


def test_a_rank_without_heartbeats_counts_as_lost_shortly_before_the_backend_ends_the_process(monkeypatch):
    world = _World(monkeypatch, "nccl")
    other = world.new_thread()
    monkeypatch.setattr(other, "_rank", 1)
    monkeypatch.setattr(other, "_identity", {**other._identity, "host": "far", "host_id": "far"})
    now = time.time()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: now))
    other._write(heartbeat.RUNNING)
    now += 500
    world.speaker._write(heartbeat.RUNNING)
    world.stand(540)
    assert world.lost == []
    world.stand(1)
    assert re.match("rank 0 could not continue: rank 1 on host far has sent no heartbeat for 500 s", world.lost[0])


def test_a_lost_rank_is_not_named_where_this_one_moves_on(monkeypatch, capsys):
    world = _World(monkeypatch, "nccl")
    world.other_is_killed(monkeypatch)
    for step in range(20):
        world.place = replace(world.place, num_steps=step // 3)
        world.stand(1)
    assert world.lost == []
    assert capsys.readouterr().err == ""


def test_the_place_is_known_after_the_group_of_the_last_communication_was_destroyed():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = new_group([0])
        with Phase("communication", SimpleNamespace(name="all_reduce", group=group, number=1, peer=None)):
            pass
        assert current_progress().last_operation.ranks == (0,)
        dist.destroy_process_group(group)
        place = current_progress().last_operation
        assert place.ranks == ()
        assert str(place).endswith("of a group that is gone")
    finally:
        dist.destroy_process_group()
    assert current_progress().last_operation.ranks == ()


# A thread ends the process of a main thread that waits.
ENDING = """\
import threading, time
from booster.fault_tolerance.shutdown import exit_for_lost_ranks

def wait_for_a_result():
    time.sleep(60)

threading.Timer(0.1, exit_for_lost_ranks, ("rank 0 could not continue", threading.get_ident())).start()
wait_for_a_result()
"""


def test_the_error_of_a_process_that_waits_shows_where_and_reaches_the_launcher(tmp_path):
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    ended = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert "in wait_for_a_result\n" in ended.stderr
    assert "booster.errors.RankFailedError: rank 0 could not continue\n" in ended.stderr
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "RankFailedError: rank 0 could not continue"
    assert "in wait_for_a_result" in message["extraInfo"]["py_callstack"]
