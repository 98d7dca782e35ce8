"""A rank that dies, hangs, raises or comes late is named on all the others, within seconds, by either transport."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks

from booster.comm import (
    Fault,
    InjectedFault,
    all_gather_equal,
    all_reduce_numbers,
    all_reduce_sum,
    barrier,
    broadcast,
    inject_faults,
    receive,
    receive_tensor,
    send_tensor,
    shared_memory,
    start_all_gather,
    start_reduce_scatter,
    transport,
    use_shared_memory,
)
from booster.errors import RankFailedError
from booster.fault_tolerance import collective_errors, failure_diagnosis, heartbeat
from booster.fault_tolerance.progress import Progress
from booster.kernels.shared_memory import SharedMemoryError, is_available

GROUP_SECONDS = 2
SOON_SECONDS = 20  # all of it on a busy machine: the group's timeout, the wait for reports, and slack


MEMORY, GLOO = "shared memory", "gloo"
WITNESSES = {MEMORY: "shared memory", GLOO: "gloo"}


@pytest.fixture(scope="module", autouse=True)
def _kernel():
    assert is_available()  # built before groups with short timeouts ask for it


def _impatient_group(wanted=MEMORY):
    collective_errors.REPORT_SECONDS = 2.0  # these processes are the test's own and end with it
    use_shared_memory(wanted == MEMORY)
    # As in a user's run. With DETAIL a barrier of torch's own goes ahead of every collective, and waits by other rules.
    dist.set_debug_level(dist.DebugLevel.OFF)
    return dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=GROUP_SECONDS))


def _reduce_scatter(group):
    numel = 100 * dist.get_world_size()
    start_reduce_scatter(torch.ones(numel), group).wait(torch.empty(100), accumulate=False)


CALLS = {
    "reduce_scatter": _reduce_scatter,
    "all_gather": lambda group: start_all_gather(torch.ones(600), group).wait(),
    "all_gather_equal": lambda group: all_gather_equal(torch.ones(3), group),
    "all_reduce": lambda group: all_reduce_numbers([1.0], group),
    "broadcast": lambda group: broadcast([torch.ones(2**22)], group, source=2),
    "barrier": barrier,
}


SLOW_CASES = [
    pytest.param(call, way, marks=pytest.mark.slow)
    for call in ("all_gather", "all_gather_equal", "all_reduce", "broadcast")
    for way in WITNESSES
]
SLOW_CASES.append(pytest.param("reduce_scatter", GLOO, marks=pytest.mark.slow))
# By default ranks die that share memory, and raise that send messages.
FAST_CASES = [("reduce_scatter", MEMORY), ("barrier", MEMORY)]
OPERATIONS = {"all_gather_equal": "all_gather", "barrier": "all_reduce"}  # of the others the name is the operation's


def _call_twice(call, way, *faults):
    """Returns this rank's error at the second call, and how long that took."""
    group = _impatient_group(way)
    CALLS[call](group)
    assert transport(group) == way
    start = time.monotonic()
    try:
        with inject_faults(*faults):
            CALLS[call](group)
    except (RankFailedError, InjectedFault) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def _expect_named(results, call, way):
    operation = OPERATIONS.get(call, call)
    for rank, (text, seconds) in results.items():
        assert text.startswith(f"RankFailedError: rank {rank} could not finish {operation} number 2: rank 2 is missing")
        assert text.count(" reports: ") == 1
        assert re.search(rf" \({WITNESSES[way]} reports: [^()]*\)$", text)
        assert ".;" not in text
        assert "GLHF" not in text
        assert seconds < SOON_SECONDS


@pytest.mark.parametrize(("call", "way"), [*FAST_CASES, *SLOW_CASES])
def test_a_rank_that_died_is_named(call, way):
    """By four ranks: in a ring rank 0 does not neighbour rank 2, and learns of its end from the others."""
    fault = Fault.exit(rank=2, at=OPERATIONS.get(call, call))
    with pytest.raises(RanksFailed, match="rank 2 of 4 died: left with exit code 86") as caught:
        run_ranks(_call_twice, 4, call, way, fault, fresh=True)
    assert caught.value.results.keys() == {0, 1, 3}
    _expect_named(caught.value.results, call, way)
    if way == MEMORY:  # no rank waits for the timeout, nor for a report of a process that is known to have ended
        assert all(seconds < GROUP_SECONDS for _, seconds in caught.value.results.values())


@pytest.mark.slow
@pytest.mark.parametrize("way", WITNESSES)
@pytest.mark.parametrize("call", ["reduce_scatter", "all_gather", "all_reduce", "broadcast"])
def test_a_rank_that_hangs_is_named_and_learns_it(call, way):
    delay = GROUP_SECONDS + 4.0
    fault = Fault.delay(rank=2, at=call, seconds=delay)
    results = run_ranks(_call_twice, 3, call, way, fault, fresh=True)
    _expect_named(dict(enumerate(results[:2])), call, way)
    late, _ = results[2]
    assert late.startswith(
        f"RankFailedError: rank 2 could not finish {call} number 2: the other ranks had counted this rank as missing"
    )
    assert f"rank 0 is at {call} number 2" in late


@pytest.mark.parametrize("way", [pytest.param(MEMORY, marks=pytest.mark.slow), GLOO])
def test_a_rank_that_raises_is_named(way):
    fault = Fault.throw(rank=2, at="reduce_scatter")
    results = run_ranks(_call_twice, 3, "reduce_scatter", way, fault, fresh=True)
    _expect_named(dict(enumerate(results[:2])), "reduce_scatter", way)
    assert results[2][0].startswith("InjectedFault: throw on rank 2 at reduce_scatter: ")


GLOO_FILE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError(
                f"{GLOO_FILE}Connection closed by peer [127.0.0.1]:29. This is typically caused by a remote worker"
                " crashing. Check the logs of the remote worker before reporting an error. GLHF! \N{SNOWMAN}"
            ),
            " (gloo reports: Connection closed by peer [127.0.0.1]:29)",
        ),
        (
            RuntimeError("Application timeout caused pair closure"),
            " (gloo reports: Application timeout caused pair closure)",
        ),
        (RuntimeError("NCCL timed out\nand more"), " (torch reports: NCCL timed out)"),
        (SharedMemoryError("rank 1 of the group timed out"), " (shared memory reports: rank 1 of the group timed out)"),
        (SharedMemoryError("aborted by this rank itself", is_own_abort=True), ""),
    ],
    ids=["gloo's advice", "gloo", "nccl", "shared memory", "own abort"],
)
def test_what_a_transport_says_is_short(monkeypatch, error, text):
    monkeypatch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
    assert collective_errors._backend_message(error, None) == text


class _UndecidedGroup:
    """What no memory was chosen for yet."""


def test_what_fails_in_the_choice_of_a_transport_has_no_other_error_behind_it(monkeypatch):
    def fail(group):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(shared_memory, "_choose", fail)
    with pytest.raises(RuntimeError, match="connection closed") as caught:
        shared_memory.memory_of(_UndecidedGroup(), torch.empty(0))
    assert caught.value.__context__ is None


def _make_different_calls(way):
    group = _impatient_group(way)
    call = _reduce_scatter if dist.get_rank() == 0 else CALLS["all_gather"]
    with pytest.raises(RankFailedError) as caught:
        call(group)
    return str(caught.value)


@pytest.mark.parametrize("way", [MEMORY, pytest.param(GLOO, marks=pytest.mark.slow)])
def test_ranks_in_different_operations_learn_where_each_is(way):
    """Without tags the messages would match, and the wrong numbers would be taken for the right ones."""
    for text in run_ranks(_make_different_calls, 2, way, fresh=True):
        assert (
            "no rank is missing; rank 0 is at reduce_scatter number 1, rank 1 is at all_gather number 1: all must make"
            " the same calls in the same order"
        ) in text


def _wait_for_a_message(uses_header):
    group = _impatient_group()
    rank = dist.get_rank()
    if rank == 2:  # takes no part: it must not be named
        return "nothing"
    if rank == 1:
        return "silent"
    with pytest.raises(RankFailedError) as caught:
        receive_tensor(1, group) if uses_header else receive(torch.empty(3), 1, group)
    return str(caught.value)


@pytest.mark.parametrize("uses_header", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_message_that_never_comes_names_its_sender(uses_header):
    text = run_ranks(_wait_for_a_message, 3, uses_header, fresh=True)[0]
    assert text.startswith("rank 0 could not finish receive number 1 from rank 1: rank 1 is missing")


def _wait_with_rare_heartbeats(seconds_between):
    group = _impatient_group()
    collective_errors.REPORT_SECONDS = 3.0
    failure_diagnosis.heartbeat_interval = lambda world_size: seconds_between
    failure_diagnosis.read_heartbeats = lambda ranks: dict.fromkeys(ranks, _HEARTBEAT)
    if dist.get_rank() == 1:
        return "silent"
    with pytest.raises(RankFailedError) as caught:
        receive(torch.empty(3), 1, group)
    return str(caught.value)


_HEARTBEAT = heartbeat.Heartbeat(  # on another host, whose processes can't be seen
    sequence=1, time=0.0, progress=Progress(), state="running", host="a", process_id=1, host_id="a", started_at=0.0
)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds_between", "is_known"), [(1.0, True), (4.0, False)])
def test_a_rank_is_not_called_stopped_before_its_next_heartbeat(seconds_between, is_known):
    text = run_ranks(_wait_with_rare_heartbeats, 2, seconds_between, fresh=True)[0]
    assert "rank 1 is missing" in text
    assert ("it is stopped or killed" in text) == is_known


def _wait_in_a_subgroup():
    collective_errors.REPORT_SECONDS = 2.0
    group = dist.new_group([1, 3], timeout=timedelta(seconds=GROUP_SECONDS))
    if dist.get_rank() != 3:
        return "not in it"
    with pytest.raises(RankFailedError) as caught:
        send_tensor(torch.ones(3), 0, group)
    with pytest.raises(RankFailedError) as again:
        start_all_gather(torch.ones(4), group).wait()
    return str(caught.value), str(again.value)


@pytest.mark.slow
def test_ranks_of_a_subgroup_are_named_as_in_the_world():
    first, second = run_ranks(_wait_in_a_subgroup, 4, fresh=True)[3]
    assert first.startswith("rank 3 could not finish send number 1 to rank 1: rank 1 is missing")
    assert second.startswith("rank 3 could not finish all_gather number 1: rank 1 is missing")


@distributed(2)
def test_an_error_about_the_call_itself_stays_what_it_is():
    with pytest.raises(RuntimeError) as caught:
        all_reduce_sum(torch.ones(3).to(torch.float8_e5m2))
    assert not isinstance(caught.value, RankFailedError)


SERVED_BY_RANK_0 = """\
import os, sys
from booster.comm import barrier
from booster.errors import RankFailedError
from booster.fault_tolerance import collective_errors, failure_diagnosis, heartbeat
from booster.fault_tolerance.progress import Progress
from booster.launch import launch_from_torch

collective_errors.REPORT_SECONDS = 1.0
launch_from_torch(verbose=False, timeout_seconds=5)
barrier()
if os.environ["RANK"] == "0":
    os._exit(3)
try:
    barrier()
except RankFailedError as error:
    print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_lost_store_is_said_to_be_lost(tmp_path):
    """Rank 0 serves it where no elastic launcher does."""
    (tmp_path / "script.py").write_text(SERVED_BY_RANK_0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        text, _ = processes[1].communicate(timeout=60)
        processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
    assert "rank 1 could not finish all_reduce number 2, and the store of torch.distributed is gone too" in text
    assert [process.returncode for process in processes] == [3, 0]
