"""Which rank of a failed run was the cause, who ended the others, and their last heartbeats."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

import booster.cli
import booster.plugins
from booster.cli.run import elastic_agent
from booster.cli.run.elastic_agent import ExitRecords, describe_last_heartbeats
from booster.cli.run.exit_report import (
    HostExit,
    RankFailure,
    exit_code_of,
    has_error_report,
    has_root_cause,
    report,
    restart_line,
    summarize,
    without_own_frames,
)
from booster.cli.run.launcher_protocol import read_failures, read_message, send_failures
from booster.fault_tolerance.progress import Progress

MINE = "Traceback\nValueError: mine"
PEER = "Traceback\nbooster.errors.RankFailedError: rank 0 could not finish all_reduce number 7: rank 1's program ended"


def failed(exitcode=1, stack="", time_ns=0, **facts):
    extra = {"py_callstack": stack, "time_ns": time_ns}
    data = {"message": {"message": "", "extraInfo": extra}} if stack else {"message": "<NONE>"}
    return RankFailure(**({"host": "", "local_rank": 0, "pid": 9} | facts), exitcode=exitcode, error_file_data=data)


def test_the_report_leaves_out_frames_of_this_library_but_the_last():
    own = booster.plugins.__path__[0]
    stack = "\n".join(
        (
            "Traceback (most recent call last):",
            '  File "train.py", line 6, in <module>',
            "    booster.boost(",
            "        model)",
            f'  File "{booster.cli.__path__[0]}/x.py", line 1, in within',
            "    return function()",
            "           ^^^^^^^^^^",
            '  File "/lib/python3/contextlib.py", line 81, in inner',
            "    return func()",
            '  File "model.py", line 7, in forward',
            "    return check()",
            f'  File "{own}/base.py", line 2, in outer',
            "    return inner()",
            f'  File "{own}/base.py", line 3, in inner',
            "    raise ConfigError(",
            "booster.errors.ConfigError: a flag",
            "    of two lines",
        )
    )
    lines = without_own_frames(stack).splitlines()
    assert lines == [*stack.splitlines()[:4], *stack.splitlines()[9:11], *stack.splitlines()[13:]]
    assert without_own_frames(MINE) == MINE
    assert without_own_frames("") == ""


def last_line_of(failures):
    return re.findall("booster run: .*", report(failures, 4))[-1]


@pytest.mark.parametrize(
    ("failures", "cause", "code"),
    [
        pytest.param({0: failed(), 1: failed(stack=PEER, time_ns=5)}, 1, 1, id="one that left early left no report"),
        pytest.param({0: failed(stack=PEER), 1: failed(-9)}, 1, 137, id="one that was killed"),
        pytest.param({0: failed(stack=PEER), 1: failed(7)}, 1, 7, id="one that left by os._exit"),
        pytest.param({0: failed(stack=PEER), 1: failed(-9, by_launcher=True)}, 0, 1, id="the launcher's SIGKILL"),
        pytest.param({0: failed(), 1: failed(-9, by_launcher=True)}, 0, 1, id="no report and the launcher's SIGKILL"),
        pytest.param({0: failed(stack=PEER), 1: failed(-15, by_launcher=False)}, 1, 143, id="another's SIGTERM"),
        pytest.param({0: failed(stack=PEER), 1: failed(-15, by_launcher=True)}, 0, 1, id="the launcher's SIGTERM"),
        pytest.param({0: failed(stack=PEER), 1: failed(-15)}, 0, 1, id="a SIGTERM of unknown origin"),
        pytest.param({0: failed(-9), 1: failed(3, MINE, 1, by_launcher=True)}, 0, 137, id="said as it was ended"),
        pytest.param({0: failed(-9), 1: failed(3, MINE, 1, by_launcher=False)}, 1, 3, id="said before"),
    ],
)
def test_the_cause_is_who_failed_without_anothers_doing(failures, cause, code):
    assert last_line_of(failures).startswith(f"booster run: rank {cause} of 4")
    assert exit_code_of(failures) == code


def test_only_a_reason_of_its_own_is_a_cause():
    assert has_root_cause({0: failed(stack=PEER), 1: failed(-9)})
    assert has_root_cause({0: failed()})
    assert not has_root_cause({0: failed(stack=PEER), 1: failed()})
    assert not has_root_cause({0: failed(-9, by_launcher=True)})
    assert has_error_report({0: failed(stack=PEER), 1: failed()})
    assert not has_error_report({0: failed(stack=PEER), 1: failed(-9)})


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (failed(-9, by_launcher=True), r"was terminated by the launcher \(SIGKILL\)$"),
        (failed(-15, by_launcher=True), "was terminated by the launcher$"),
        (failed(-15, by_launcher=True, was_stopped=True), "was stopped, and was terminated by the launcher$"),
        (failed(3, MINE, by_launcher=True), "was terminated by the launcher, with exit code 3, first of all:$"),
        (failed(-15, by_launcher=False), "was terminated by SIGTERM, which the launcher did not send$"),
        (failed(-15, MINE, by_launcher=False), "was terminated by SIGTERM, first of all:$"),
        (failed(-15), "was terminated by SIGTERM$"),
        (failed(-9, by_launcher=False), "was killed by SIGKILL, as the system does when memory runs out$"),
        (failed(-9, host="b"), r"rank 0 of 4 on b \(local rank 0, pid 9\) was killed"),
    ],
)
def test_who_ended_a_rank_is_said(failure, words):
    assert re.search(words, last_line_of({0: failure}))


def test_a_new_start_is_said_in_one_line():
    failures = {0: failed(stack=PEER), 1: failed(-11, local_rank=1)}
    assert restart_line(failures, 2, 1, 3) == (
        "booster run: rank 1 of 2 (local rank 1, pid 9) was killed by SIGSEGV; restarting all ranks, restart 1 of 3"
    )


def test_who_was_gone_before_was_not_ended_by_the_launcher():
    notes = ExitRecords(host="a", exited=frozenset({1}), stopped=frozenset({2}), checked_ns=100)
    failures = notes.with_exit_causes(
        {
            0: failed(1, pid=1),
            1: failed(-15, pid=2),
            2: failed(-15, MINE, 99, pid=3),  # it had reported why, and was exiting
            3: failed(5, MINE, 101, pid=4),
        }
    )
    assert [failure.by_launcher for failure in failures.values()] == [False, True, False, True]
    assert [failure.was_stopped for failure in failures.values()] == [False, True, False, False]
    assert failures[0].host == "a"
    assert ExitRecords().with_exit_causes({0: failed(-15)})[0].by_launcher is None


def test_other_hosts_are_told_who_ended_a_rank(capfdbinary):
    send_failures({1: failed(-9, by_launcher=True, was_stopped=True)}, 2)
    told = read_failures(read_message(capfdbinary.readouterr().err), "b")
    own = HostExit(host="a", code=1, has_started=True, failures={0: failed(stack=PEER, host="a")}, world_size=2)
    verdict = summarize([own, HostExit(host="b", code=137, has_started=True, failures=told, world_size=2)], [])
    assert verdict.code == 1
    assert "rank 1 of 2 on b (local rank 0, pid 9) was stopped, and was terminated by the launcher" in verdict.text
    assert verdict.text.endswith(PEER + "\n")


class TestLastSigns:
    @pytest.fixture
    def server(self):
        return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)

    def asked(self, server, world_size, attempt=0):
        return describe_last_heartbeats("127.0.0.1", server.port, world_size, attempt, reference_time=100.0)

    def tell(self, server, rank, *, attempt=0, launch=1, state="running", heartbeat=True):
        store = PrefixStore(f"booster/attempt_{attempt}/launch_{launch}", server)
        store.set(f"card/{rank}", "")
        place = Progress(num_steps=10 * attempt + launch, phases=("backward",), seconds=2.0)
        note = {"time": 99.5, "state": state, "progress": asdict(place)}
        if heartbeat:
            PrefixStore("booster.heartbeats", PrefixStore("0/", store)).set(str(rank), json.dumps(note))

    def test_each_rank_of_the_last_launch_has_its_place(self, server):
        for launch in (1, 2):
            self.tell(server, 0, launch=launch)
        self.tell(server, 1, launch=2, state="failed")
        self.tell(server, 2, launch=2, heartbeat=False)
        self.tell(server, 0, attempt=1)
        assert self.asked(server, 3) == (
            "booster run: last heartbeats of the ranks (sent once a second, so a rank may have continued "
            "after its last one): rank 0, 0.5 s before the end: after 2 steps, in backward for 2.0 s; rank 1, 0.5 s "
            "before the end: after 2 steps, in backward for 2.0 s, its script had failed; "
            "rank 2: no heartbeat"
        )
        assert "after 11 steps" in self.asked(server, 1, attempt=1)

    def test_of_many_ranks_some_are_listed(self, server):
        for rank in range(20):
            self.tell(server, rank)
        text = self.asked(server, 20)
        assert text.count(" before the end: ") == 16
        assert text.endswith("; and 4 more ranks")

    def test_ranks_that_did_not_launch_are_not_told_of(self, server):
        assert self.asked(server, 2) == ""
        self.tell(server, 0, heartbeat=False)
        assert self.asked(server, 2) == ""

    def test_what_is_no_sign_is_not_told_of(self, server):
        self.tell(server, 0)
        key = "booster/attempt_0/launch_1/0//booster.heartbeats/0"
        assert server.check([key])
        server.set(key, "[]")
        assert self.asked(server, 1) == ""

    def test_the_server_is_gone(self):
        with listening() as listener:
            port = listener.getsockname()[1]
        assert describe_last_heartbeats("127.0.0.1", port, 2, 0, reference_time=0.0) == ""

    def test_a_server_that_does_not_answer_is_not_waited_for(self, monkeypatch):
        monkeypatch.setattr(elastic_agent, "_READ_TIMEOUT_SECONDS", 0.1)
        with listening() as listener:
            assert describe_last_heartbeats("127.0.0.1", listener.getsockname()[1], 2, 0, reference_time=0.0) == ""
        for thread in threading.enumerate():
            if thread.name == "booster-last-heartbeats":  # it ends as well, without a store
                thread.join(60)
                assert not thread.is_alive()


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
