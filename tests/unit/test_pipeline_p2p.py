"""Links of a pipeline with a group of two ranks each, as on accelerators: every stage finds the other end."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from booster.comm import RecvChannel, SendChannel
from booster.comm.fake import fake_collectives
from booster.plugins.hybrid_parallel.mesh import HybridMesh, mesh_order, rank_groups
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import action_list, schedule_from_name
from booster.plugins.hybrid_parallel.pipeline_parallel.stage_partition.stage_plan import StagePartition, StagePlan
from booster.plugins.hybrid_parallel.pipeline_runner import _link_ends


def _division(schedule, num_stages, num_chunks):
    bounds = tuple(range(num_stages * num_chunks + 1))
    units = tuple(f"layers.{index}" for index in bounds[:-1])
    plan = StagePlan(layers=units, source="the test")
    return StagePartition(plan, bounds, schedule_from_name(schedule), num_stages, num_chunks)


def _links(division, stage):
    """Returns the sender and the receiver of what a stage sends and receives for a batch."""
    steps = action_list(division.schedule, stage, division.num_stages, 2 * division.num_stages, division.num_chunks)
    found = {message for step in steps for message in (step.receives, step.sends) if message is not None}
    return {(one.sender, one.receiver) for one in found if one.sender != one.receiver}


@contextmanager
def _rank_of_a_world(rank, world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with fake_collectives():
            yield
    finally:
        dist.destroy_process_group()


def _check_links(division, ends, ranks, stage):
    links = _links(division, stage)
    assert links
    for sender, receiver in links:
        group, peer = ends(sender, receiver)
        assert dist.get_global_rank(group, peer) == ranks[sender if stage == receiver else receiver]
        # Neither end refuses its peer.
        _ = SendChannel(peer, group) if stage == sender else RecvChannel(peer, group, read_header=None)


@pytest.mark.parametrize("dp_outside", [True, False])
@pytest.mark.parametrize("others", [{}, {"tp": 2}, {"dp": 2, "sp": 2}], ids=str)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_each_stage_finds_the_other_end_of_its_links(schedule, chunks, num_stages, others, dp_outside):
    sizes = {"dp": 1, "pp": num_stages, "sp": 1, "tp": 1} | others
    division = _division(schedule, num_stages, chunks)
    for ranks in rank_groups({axis: sizes[axis] for axis in mesh_order(dp_outside=dp_outside)}, ("pp",)):
        for stage, rank in enumerate(ranks):
            with _rank_of_a_world(rank, math.prod(sizes.values())):
                mesh = HybridMesh("cpu", **sizes, dp_outside=dp_outside)
                _check_links(division, _link_ends(mesh, division, is_ordered=True), ranks, stage)  # on accelerators
