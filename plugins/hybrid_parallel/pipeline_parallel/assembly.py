"""Construction of the pipeline runtime of a stage: process groups, point-to-point links and batch checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster.comm import all_reduce_sum, group_rank
from booster.plugins.hybrid_parallel.mesh import AXES, HybridMesh
from booster.plugins.hybrid_parallel.pipeline_parallel.agreement import BatchAgreement
from booster.plugins.hybrid_parallel.pipeline_parallel.runtime import PipelineRuntime
from booster.plugins.hybrid_parallel.pipeline_parallel.settings import PipelineArguments
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.carving import CarvedModel
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import StageDivision
from booster.plugins.hybrid_parallel.pipeline_parallel.transport import Ends, Transport
from booster.plugins.hybrid_parallel.pipeline_parallel.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from booster.plugins.hybrid_parallel.model import HybridModel

__all__ = ["make_runtime", "sharing_groups"]


def sharing_groups(mesh: HybridMesh, carved: CarvedModel | None) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the process groups of tied parameters, by their stages. Collective over the world."""
    found = {}
    for stages in dict.fromkeys(() if carved is None else carved.holders.values()):
        group = mesh.subgroup("pp", stages)
        if group is not None:
            found[stages] = group
    return found


def make_runtime(
    model: HybridModel,
    carved: CarvedModel,
    arguments: PipelineArguments,
    mesh: HybridMesh,
    device: torch.device,
    weight_gradients: WeightGradients | None,
) -> PipelineRuntime:
    """Return the runtime of this rank's stage. Collective over the world.

    Args:
        model: The boosted model.
        carved: Stage model.
        arguments: Pipeline arguments of the plugin.
        mesh: Mesh of the ranks.
        device: Compute device of the stage.
        weight_gradients: Deferred weight gradients, or None.
    """
    stage = mesh.rank("pp")
    ends = _link_ends(mesh, carved.division, device)
    return PipelineRuntime(
        model,
        arguments,
        Transport(carved.division, stage, ends, device, caches_forms=arguments.caches_metadata),
        BatchAgreement(mesh.cpu_group(*AXES), mesh.rank("dp")),
        weight_gradients,
        stage=stage,
        stage_group=mesh.group("pp"),
        device=device,
        groups=mesh.groups,
    )


def _link_ends(mesh: HybridMesh, division: StageDivision, device: torch.device) -> Ends:
    """Return the groups of links. Links need dedicated groups, as torch counts the operations of a group."""
    if device.type != "cpu":
        return _link_groups(mesh, division, device)
    stage = mesh.rank("pp")
    group = mesh.subgroup("pp", range(division.num_stages))
    return lambda sender, receiver: (group, sender if stage == receiver else receiver)


def _link_groups(mesh: HybridMesh, division: StageDivision, device: torch.device) -> Ends:
    """Create a group of two ranks per pair of stages and direction, for accelerators.

    Their messages are ordered within a group, so a pending one would block those of the other direction.
    """
    groups: dict[tuple[int, int], dist.ProcessGroup | None] = {}
    for one, other in division.neighbours():
        for ends in ((one, other), (other, one)):
            groups[ends] = group = mesh.subgroup("pp", ends)
            if group is not None:  # connects in a common order; otherwise a first send would block on its receiver
                all_reduce_sum(torch.zeros(1, device=device), group)
    # torch sorts the ranks of a group, so the sender may have either group rank.
    return lambda sender, receiver: (groups[sender, receiver], 1 - group_rank(groups[sender, receiver]))
