"""Faults are plain data, checked when they are made; and strike nowhere outside of their block."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks

from booster import Booster
from booster.comm import Fault, InjectedFault, all_reduce_numbers, barrier, inject_faults, start_all_gather
from booster.errors import CheckpointError, ConfigError
from booster.fault_tolerance.fault_injection import ACTIONS, EXIT_CODE, OPERATIONS
from booster.fault_tolerance.progress import PHASES, Phase, current_progress, in_phase


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"at": "reduce_scater"},
            r"at='reduce_scater' is unknown: .* \(all_gather, .* a phase \(boost, ",
        ),
        ({"action": "explode"}, "action='explode' is unknown: choose one of kill, stop, throw, leave, exit, delay"),
        ({"call": 0}, "calls from 1"),
        ({"rank": -1}, "ranks count from 0"),
        ({"action": "delay"}, "a delay needs seconds above 0"),
        ({"seconds": 1.0}, "only a delay"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Fault(**({"rank": 0, "at": "all_reduce"} | fields))


@pytest.mark.parametrize(
    ("fault", "text", "written"),
    [
        (Fault.kill(rank=1, at="commit"), "kill rank 1 at commit", "Fault.kill(rank=1, at='commit')"),
        (Fault.stop(rank=0, at="save write"), "stop rank 0 at save write", "Fault.stop(rank=0, at='save write')"),
        (
            Fault.throw(rank=1, at="send", call=2),
            "throw on rank 1 at send number 2",
            "Fault.throw(rank=1, at='send', call=2)",
        ),
        (Fault.leave(rank=1, at="step"), "leave on rank 1 at step", "Fault.leave(rank=1, at='step')"),
        (Fault.exit(rank=1, at="load"), "exit on rank 1 at load", "Fault.exit(rank=1, at='load')"),
        (
            Fault.delay(rank=1, at="clip", seconds=0.5),
            "delay rank 1 at clip by 0.5 s",
            "Fault.delay(rank=1, at='clip', seconds=0.5)",
        ),
    ],
)
def test_a_fault_reads_as_what_it_does(fault, text, written):
    assert str(fault) == text
    assert repr(fault) == written
    assert eval(written) == fault
    assert Fault(**json.loads(json.dumps(asdict(fault)))) == fault


def test_every_action_can_happen_at_every_place():
    for action in ACTIONS:
        for at in (*OPERATIONS, *PHASES):
            seconds = {"seconds": 1.0} if action == "delay" else {}
            assert getattr(Fault, action)(rank=0, at=at, **seconds).call == 1


def test_one_rank_alone_communicates_nothing():
    with inject_faults(Fault(rank=0, at="all_reduce")):
        assert all_reduce_numbers([1.0]) == [1.0]


@distributed(2)
def test_a_fault_strikes_on_its_rank_alone():
    rank = dist.get_rank()
    faults = [Fault(rank=other, at="all_reduce", call=2) for other in range(2)]  # on both, so that no rank waits
    with inject_faults(*faults, Fault(rank=2, at="all_reduce", call=1)):
        barrier()
        with pytest.raises(InjectedFault, match=rf"throw on rank {rank} at all_reduce number 2"):
            barrier()
        barrier()


@distributed(2)
def test_calls_are_counted_within_the_block_and_by_operation():
    fault = Fault(rank=dist.get_rank(), at="all_reduce", call=2)
    barrier()
    with inject_faults(fault):
        barrier()
        with pytest.raises(InjectedFault, match="number 2"):
            barrier()
        barrier()
    barrier()


@distributed(2)
def test_a_delay_continues():
    start = time.monotonic()
    with inject_faults(Fault.delay(rank=1, at="all_reduce", seconds=0.3)):
        barrier()
    assert time.monotonic() - start >= 0.25  # the other rank waited for it


# Phases.


@in_phase("step")
def _step():
    return current_progress().phases


@in_phase("step")
def _step_of_a_subclass():
    return _step()


def test_a_fault_strikes_where_a_phase_is_entered():
    with inject_faults(Fault.throw(rank=0, at="step", call=2)):
        assert _step() == ("step",)
        with pytest.raises(InjectedFault, match="throw on rank 0 at step number 2"):
            _step()
        assert current_progress().phases == ()
        assert _step() == ("step",)
    assert _step() == ("step",)


def test_a_phase_within_itself_is_not_entered_again():
    with inject_faults(Fault.throw(rank=0, at="step", call=2)):
        _step_of_a_subclass()
        with pytest.raises(InjectedFault):
            _step_of_a_subclass()


def test_a_fault_in_an_inner_phase_leaves_the_outer_one_as_it_was():
    with inject_faults(Fault.throw(rank=0, at="commit")), Phase("save"):
        with pytest.raises(InjectedFault), Phase("commit"):
            pytest.fail("the phase was entered all the same")
        assert current_progress().phases == ("save",)


def test_while_it_strikes_the_rank_is_in_the_phase(monkeypatch):
    seen = []
    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append((seconds, current_progress().phases)))
    with inject_faults(Fault.delay(rank=0, at="commit", seconds=7.0)), Phase("save"), Phase("commit"):
        pass
    assert seen == [(7.0, ("save", "commit"))]


def test_phases_of_other_threads_count():
    caught = []

    def work():
        with pytest.raises(InjectedFault) as error, Phase("commit"):
            pass
        caught.append(str(error.value))

    with inject_faults(Fault.throw(rank=0, at="commit", call=2)):
        with Phase("commit"):
            pass
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert caught == ["throw on rank 0 at commit number 2: injected"]


def test_blocks_are_nested():
    with inject_faults(Fault.throw(rank=0, at="step", call=2)):
        with inject_faults(Fault.throw(rank=0, at="clip")):
            _step()
        with Phase("clip"):  # the inner block's fault is gone, the outer one continues to count
            pass
        with pytest.raises(InjectedFault):
            _step()


def test_a_program_that_leaves_ends_without_an_error():
    with pytest.raises(SystemExit) as left, inject_faults(Fault.leave(rank=0, at="step")):
        _step()
    assert left.value.code == 0


@pytest.mark.parametrize("phase", ["save write", "commit"])
@pytest.mark.parametrize("action", ["throw", "leave"])
def test_a_fault_in_the_background_is_raised_in_the_foreground(tmp_path, phase, action):
    model = torch.nn.Linear(2, 1)
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with inject_faults(Fault(rank=0, at=phase, action=action)):
        booster.save(tmp_path / "a", model, optimizer, use_async=True)
        with pytest.raises(CheckpointError, match="a save in the background failed"):
            booster.wait_for_checkpoints()
        booster.save(tmp_path / "a", model, optimizer, use_async=True)
        booster.wait_for_checkpoints()
    booster.load(tmp_path / "a", model, optimizer)


# Ends of processes.


def _end_at_the_second():
    with inject_faults(Fault.exit(rank=0, at="all_gather", call=2)):
        start_all_gather(torch.ones(2)).wait()
        if dist.get_rank() == 0:
            start_all_gather(torch.ones(2)).wait()


def test_an_exit_ends_the_process():
    with pytest.raises(RanksFailed, match=f"rank 0 of 2 died: left with exit code {EXIT_CODE}"):
        run_ranks(_end_at_the_second, 2, fresh=True)


def _die_in_a_step():
    with inject_faults(Fault.kill(rank=1, at="step")):
        _step()


def test_a_kill_ends_the_process_by_a_signal():
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 died: .*SIGKILL") as failed:
        run_ranks(_die_in_a_step, 2, fresh=True)
    assert failed.value.results == {0: None}


def test_a_stop_is_a_signal_to_this_process(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    with inject_faults(Fault.stop(rank=0, at="step")):
        _step()
    assert sent == [(os.getpid(), signal.SIGSTOP)]
