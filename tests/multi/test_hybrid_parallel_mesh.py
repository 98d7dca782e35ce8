"""The mesh of the axes dp, pp, sp and tp: every rank's place, and the groups along one axis or several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from booster.comm import all_gather_equal, global_rank_of, group_rank, group_size, receive_tensor, send_tensor
from booster.errors import ConfigError, DesyncError
from booster.plugins.hybrid_parallel.mesh import AXES, HybridMesh, mesh_order, rank_groups
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import schedule_from_name
from booster.plugins.hybrid_parallel.pipeline_runner import _link_ends

pytestmark = pytest.mark.on_device

ALONG = [(), ("tp",), ("sp",), ("dp",), ("pp",), ("dp", "sp"), ("sp", "dp"), ("dp", "sp", "tp"), AXES]


def _members(sizes, dp_outside):
    """Returns per group what the mesh says, and what a collective over it finds."""
    mesh = HybridMesh("cpu", **sizes, dp_outside=dp_outside)
    assert mesh.axis_sizes() == sizes
    found = {}
    for axes in ALONG:
        group = mesh.group(*axes)
        assert group is mesh.group(*axes)
        assert mesh.size(*axes) == group_size(group)
        assert mesh.rank(*axes) == group_rank(group)
        assert mesh.control_group(*axes) is mesh.group(*axes)
        found[axes] = all_gather_equal(torch.tensor([dist.get_rank()]), group).tolist()
    assert mesh.group("dp", "sp") is mesh.group("sp", "dp")
    return found


@pytest.mark.parametrize("dp_outside", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 2, "pp": 1, "sp": 1, "tp": 2},
        {"dp": 1, "pp": 1, "sp": 2, "tp": 2},
        {"dp": 2, "pp": 2, "sp": 1, "tp": 1},
        {"dp": 1, "pp": 1, "sp": 1, "tp": 4},
        {"dp": 2, "pp": 1, "sp": 2, "tp": 1},
    ],
)
def test_groups_of_four_ranks(sizes, dp_outside):
    in_order = {axis: sizes[axis] for axis in mesh_order(dp_outside=dp_outside)}
    for rank, found in enumerate(run_ranks(_members, 4, sizes, dp_outside)):
        for axes, ranks in found.items():
            (mine,) = [group for group in rank_groups(in_order, axes) if rank in group]
            assert ranks == mine


def _is_reused(sizes):
    mesh = HybridMesh("cpu", **sizes)
    assert mesh.group("tp") is mesh.group("tp", "sp", "pp")
    assert mesh.group("dp", "tp") is mesh.group(*AXES) is dist.group.WORLD
    assert mesh.group("dp") is not mesh.group("tp")
    assert mesh.group() is mesh.group("sp") is mesh.group("pp")


def test_axes_that_add_no_ranks_need_no_group():
    run_ranks(_is_reused, 4, {"dp": 2, "pp": 1, "sp": 1, "tp": 2})


def _shares_experts():
    mesh, rank = HybridMesh("cpu", dp=4, pp=1, sp=1, tp=1, ep=2), dist.get_rank()
    assert mesh.axis_sizes() == {"dp": 4, "pp": 1, "sp": 1, "tp": 1}
    assert (mesh.size("dp"), mesh.size("edp"), mesh.size("ep", "tp")) == (4, 2, 2)
    assert (mesh.rank("dp"), mesh.rank("edp"), mesh.rank("ep")) == (rank, rank // 2, rank % 2)
    assert mesh.group("dp") is mesh.group("edp", "ep") is dist.group.WORLD
    assert mesh.device_mesh.mesh_dim_names == ("edp", "ep", "pp", "sp", "tp")
    assert mesh.rank_at(edp=0, ep=1, pp=0, sp=0, tp=0) == 1
    assert mesh.rank_at(ep=0) == rank - rank % 2
    assert mesh.rank_at(dp=0) == 0
    assert mesh.ranks_along("ep", "dp", "sp") == [rank - rank % 2, rank - rank % 2 + 1]
    assert mesh.ranks_along("edp", "dp", "sp") == [rank % 2, rank % 2 + 2]
    return dist.get_process_group_ranks(mesh.group("ep")), dist.get_process_group_ranks(mesh.group("edp", "sp"))


def test_ranks_that_share_experts_are_neighbours():
    found = run_ranks(_shares_experts, 4)
    assert found == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def _has_no_expert_axis():
    mesh = HybridMesh("cpu", dp=2, pp=1, sp=1, tp=1)
    assert (mesh.size("ep"), mesh.rank("ep")) == (1, 0)
    assert mesh.group("edp") is mesh.group("dp")


def test_without_expert_parallelism_edp_is_dp():
    run_ranks(_has_no_expert_axis, 2)


def _is_refused():
    with pytest.raises(ConfigError, match="a mesh of dp 2 x pp 1 x sp 1 x tp 2 has 4 ranks, but the world size is 2"):
        HybridMesh("cpu", dp=2, pp=1, sp=1, tp=2)


def test_other_sizes_than_there_are_ranks():
    run_ranks(_is_refused, 2)


def _is_another():
    with pytest.raises(DesyncError, match="the sizes of the mesh's axes"):
        HybridMesh("cpu", dp=1, pp=1, sp=1 + dist.get_rank(), tp=2 - dist.get_rank())


def test_other_sizes_on_another_rank():
    run_ranks(_is_another, 2)


def _link_peers():
    """Returns, for both directions of a link, this rank's peer in its group, after messages have gone through."""
    mesh = HybridMesh("cpu", dp=1, pp=3, sp=1, tp=1)
    partition = SimpleNamespace(schedule=schedule_from_name("gpipe"), num_stages=3, num_chunks=1)
    ends = _link_ends(mesh, partition, is_ordered=True)
    stage, found = mesh.rank("pp"), {}
    for sender, receiver in ((0, 1), (1, 0), (1, 2), (2, 1)):
        if stage not in (sender, receiver):
            continue
        group, peer = ends(sender, receiver)
        found[sender, receiver] = global_rank_of(peer, group)
        if stage == sender:
            send_tensor(torch.tensor([10 * sender + receiver]), peer, group)
        else:
            assert receive_tensor(peer, group).tolist() == [10 * sender + receiver]
    return found


def test_links_of_accelerators_lead_to_the_other_stage_in_both_directions():
    first, middle, last = run_ranks(_link_peers, 3)
    assert first == {(0, 1): 1, (1, 0): 1}
    assert middle == {(0, 1): 0, (1, 0): 0, (1, 2): 2, (2, 1): 2}
    assert last == {(1, 2): 1, (2, 1): 1}
