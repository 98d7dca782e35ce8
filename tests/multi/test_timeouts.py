"""A wait ends at the limit of what the ranks are doing: training, set-up or a checkpoint; by either transport."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from booster.comm import (
    Fault,
    all_reduce_numbers,
    barrier,
    inject_faults,
    new_cpu_group,
    new_group,
    new_mesh,
    receive,
    send,
    timeout_scope,
    transport,
    use_shared_memory,
)
from booster.errors import RankFailedError
from booster.fault_tolerance import collective_errors
from booster.fault_tolerance.timeouts import Timeouts, set_timeouts
from booster.kernels.shared_memory import is_available

SHORT_SECONDS, LATE_SECONDS, LONG_SECONDS = 0.8, 2.5, 120.0
SLACK_SECONDS = 30.0  # for a busy machine; far from the long limit
MEMORY, GLOO = "shared memory", "gloo"
KINDS = ("setup", "checkpoint")
DEFAULT_CASES = (("setup", MEMORY), ("checkpoint", GLOO))
CASES = [
    pytest.param(kind, way, marks=() if (kind, way) in DEFAULT_CASES else pytest.mark.slow, id=f"{kind}, {way}")
    for kind in KINDS
    for way in (MEMORY, GLOO)
]


@pytest.fixture(scope="module", autouse=True)
def _kernel():
    assert is_available()  # built before groups with short timeouts ask for it


def _prepare(way, **limits):
    collective_errors.REPORT_SECONDS = 2.0  # these processes are the test's own and end with it
    use_shared_memory(way == MEMORY)
    # As in a user's run. With DETAIL a barrier of torch's own goes ahead of every collective, and waits by other rules.
    dist.set_debug_level(dist.DebugLevel.OFF)
    set_timeouts(Timeouts(**limits))


def _sum_with_a_late_rank(group, at="all_reduce"):
    with inject_faults(Fault.delay(rank=1, at=at, seconds=LATE_SECONDS)):
        return all_reduce_numbers([1.0], group)


def _fails_soon(call):
    """Returns the seconds that a call took to fail."""
    began = time.monotonic()
    with pytest.raises(RankFailedError):
        call()
    seconds = time.monotonic() - began
    assert seconds < SHORT_SECONDS + collective_errors.REPORT_SECONDS + SLACK_SECONDS
    return seconds


def _end(results):
    set_timeouts(None)
    use_shared_memory(None)
    return results


def wait_long_in_a_timeout_scope(kind, way):
    _prepare(way, training=SHORT_SECONDS, **{kind: LONG_SECONDS})
    group = new_group([0, 1])
    assert transport(group) == way
    with timeout_scope(kind):
        assert _sum_with_a_late_rank(group) == [2.0]
    barrier()
    seconds = _fails_soon(lambda: _sum_with_a_late_rank(group))
    barrier()
    return _end(seconds)


def wait_long_in_training(kind, way):
    _prepare(way, training=LONG_SECONDS, **{kind: SHORT_SECONDS})
    group = new_mesh("cpu", (1, 2), ("replica", "shard")).get_group("shard")
    assert group is dist.group.WORLD, "an axis with all ranks is the world"
    group = new_cpu_group()
    assert transport(group) == way
    assert _sum_with_a_late_rank(group) == [2.0]
    barrier()
    with timeout_scope(kind):
        seconds = _fails_soon(lambda: _sum_with_a_late_rank(group))
    barrier()
    return _end(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("job", [wait_long_in_a_timeout_scope, wait_long_in_training])
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_each_kind_of_wait_has_its_own_limit(job, kind, way):
    punctual_seconds = run_ranks(job, 2, kind, way)[0]
    assert punctual_seconds >= SHORT_SECONDS


def exchange_late_messages():
    _prepare(GLOO, training=SHORT_SECONDS, setup=LONG_SECONDS)
    group = new_group([0, 1])
    tensor = torch.ones(3)

    def pass_on():
        if dist.get_rank() == 0:
            receive(tensor, 1, group)
            return
        with inject_faults(Fault.delay(rank=1, at="send", seconds=LATE_SECONDS)):
            send(tensor, 0, group)

    with timeout_scope("setup"):
        pass_on()
    barrier()
    is_receiver = dist.get_rank() == 0
    seconds = 0.0
    if is_receiver:
        seconds = _fails_soon(pass_on)
    else:
        with pytest.raises(RankFailedError):
            pass_on()
    barrier()
    return _end(seconds)


@pytest.mark.slow
def test_messages_have_the_limits_too():
    assert run_ranks(exchange_late_messages, 2)[0] >= SHORT_SECONDS


def decide_in_a_timeout_scope():
    """The transport of a group is chosen at its first collective, which may be in a timeout scope."""
    _prepare(MEMORY, training=SHORT_SECONDS, setup=LONG_SECONDS)
    with timeout_scope("setup"):
        group = new_group([0, 1])
        assert transport(group) == MEMORY
    seconds = _fails_soon(lambda: _sum_with_a_late_rank(group))
    barrier()
    return _end(seconds)


@pytest.mark.slow
def test_shared_memory_that_was_made_in_a_timeout_scope_waits_no_longer_afterwards():
    assert run_ranks(decide_in_a_timeout_scope, 2)[0] >= SHORT_SECONDS


def make_a_group_alone(in_block):
    _prepare(GLOO, training=LONG_SECONDS, setup=SHORT_SECONDS)
    text = ""
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(RankFailedError) as caught, timeout_scope("setup") if in_block else nullcontext():
            new_cpu_group()
        assert SHORT_SECONDS <= time.monotonic() - began < SHORT_SECONDS + SLACK_SECONDS
        text = str(caught.value)
    barrier()
    return _end(text)


@pytest.mark.parametrize("in_block", [True, False])
def test_a_group_that_a_rank_does_not_come_to_is_given_up_at_the_limit_of_setup(in_block):
    text = run_ranks(make_a_group_alone, 2, in_block)[0]
    # The ranks may have stepped before, for other tests.
    where = r"\((in set-up, outside of all phases|outside of all phases, after [0-9]+ steps)\)"
    assert re.match(rf"rank 0 could not make a group of ranks 0, 1 within 0\.8 s {where}: rank 1 did not arrive", text)
    assert "setup_timeout_seconds" in text


TRAINING = """\
import sys, time, torch, torch.distributed as dist
from booster import Booster, launch_from_torch
from booster.comm import Fault, barrier, inject_faults
from booster.plugins import LowLevelZeroPlugin

launch_from_torch(verbose=False, timeout_seconds=2, setup_timeout_seconds=90, checkpoint_timeout_seconds=91)
LATE = [Fault.delay(rank=1, at=at, seconds=3) for at in ("boost", "save plan", "load")]
with inject_faults(*LATE, Fault.delay(rank=1, at="backward", call=2, seconds=60)):
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    model = torch.nn.Linear(4, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters()))
    for step in range(2):
        print(f"step {step}", flush=True) if dist.get_rank() == 0 else None
        loss = model(torch.ones(2, 4)).square().mean()
        began = time.monotonic()
        try:
            booster.backward(loss, optimizer)
            optimizer.step()  # stage 1 may wait here for what backward has started
        except Exception as error:
            if dist.get_rank() == 0:
                print(f"after {time.monotonic() - began:.2f} s", type(error).__name__, error, flush=True)
            raise
        optimizer.zero_grad()
        if step == 0:
            booster.save("checkpoint", model, optimizer)
            booster.load("checkpoint", model, optimizer)
"""


@pytest.mark.parametrize("way", ["on", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_users_run_waits_for_a_late_rank_in_boost_save_and_load_but_not_in_training(tmp_path, way):
    (tmp_path / "script.py").write_text(TRAINING)
    command = "import sys; from booster.cli import main; sys.exit(main())"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.run(
        [sys.executable, "-c", command, "run", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1", "BOOSTER_SHARED_MEMORY": way},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert process.returncode != 0
    lines = [line for line in process.stdout.splitlines() if line.startswith(("step", "after"))]
    assert len(lines) == 3, process.stdout + process.stderr
    assert lines[:2] == ["step 0", "step 1"]
    _, seconds, _, kind, *text = lines[2].split()
    assert kind == "RankFailedError"
    assert 2 <= float(seconds) < 2 + SLACK_SECONDS, "it gave up long before the rank came"
    assert "rank 1" in " ".join(text)
