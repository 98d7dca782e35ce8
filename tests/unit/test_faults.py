"""Faults are checked when they are made, and nothing strikes outside of their block."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from harness import RanksFailed, distributed, run_ranks

from booster.comm import Fault, InjectedFault, all_reduce_numbers, barrier, inject_faults, start_all_gather
from booster.comm.faults import EXIT_CODE, OPERATIONS
from booster.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operation": "reduce_scater"}, r"operation='reduce_scater' never happens: choose one of all_gather, "),
        ({"action": "explode"}, "action='explode' is unknown: choose one of raise, delay, exit"),
        ({"call": 0}, "calls from 1"),
        ({"rank": -1}, "ranks count from 0"),
        ({"action": "delay"}, "a delay needs seconds above 0"),
        ({"seconds": 1.0}, "only a delay"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Fault(**({"rank": 0, "operation": "all_reduce"} | fields))


def test_a_fault_reads_as_what_it_does():
    fault = Fault(rank=1, operation="send", call=2, action="delay", seconds=0.5)
    assert repr(fault) == "Fault(rank=1, operation='send', call=2, action='delay', seconds=0.5)"
    assert all(Fault(rank=0, operation=operation).call == 1 for operation in OPERATIONS)


def test_one_rank_alone_communicates_nothing():
    with inject_faults(Fault(rank=0, operation="all_reduce")):
        assert all_reduce_numbers([1.0]) == [1.0]


@distributed(2)
def test_a_fault_strikes_on_its_rank_alone():
    rank = dist.get_rank()
    faults = [Fault(rank=other, operation="all_reduce", call=2) for other in range(2)]  # on both, so that nobody waits
    with inject_faults(*faults, Fault(rank=2, operation="all_reduce", call=1)):
        barrier()
        with pytest.raises(InjectedFault, match=rf"Fault\(rank={rank}, operation='all_reduce', call=2"):
            barrier()
        barrier()


@distributed(2)
def test_calls_are_counted_within_the_block_and_by_operation():
    fault = Fault(rank=dist.get_rank(), operation="all_reduce", call=2)
    barrier()
    with inject_faults(fault):
        barrier()
        with pytest.raises(InjectedFault, match="call=2"):
            barrier()
        barrier()
    barrier()


@distributed(2)
def test_a_delay_goes_on():
    start = time.monotonic()
    with inject_faults(Fault(rank=1, operation="all_reduce", action="delay", seconds=0.3)):
        barrier()
    assert time.monotonic() - start >= 0.25  # the other rank waited for it


def _end_at_the_second():
    import torch

    with inject_faults(Fault(rank=0, operation="all_gather", call=2, action="exit")):
        start_all_gather(torch.ones(2)).wait()
        if dist.get_rank() == 0:
            start_all_gather(torch.ones(2)).wait()


def test_an_exit_ends_the_process():
    with pytest.raises(RanksFailed, match=f"rank 0 of 2 died: left with exit code {EXIT_CODE}"):
        run_ranks(_end_at_the_second, 2, fresh=True)
