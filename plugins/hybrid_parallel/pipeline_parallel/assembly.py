"""Construction of the pipeline runtime of a stage: process groups, point-to-point links and batch checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster.comm import all_reduce_sum, group_rank
from booster.plugins.hybrid_parallel.mesh import AXES, HybridMesh
from booster.plugins.hybrid_parallel.pipeline_parallel.agreement import BatchConsistency
from booster.plugins.hybrid_parallel.pipeline_parallel.runtime import PipelineRuntime
from booster.plugins.hybrid_parallel.pipeline_parallel.settings import PipelineArguments
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.carving import StageModel
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import StagePartition
from booster.plugins.hybrid_parallel.pipeline_parallel.transport import LinkPeer, StageP2P
from booster.plugins.hybrid_parallel.pipeline_parallel.weight_gradients import DeferredWeightGrads

if TYPE_CHECKING:
    from booster.plugins.hybrid_parallel.model import HybridModel

__all__ = ["build_runtime", "tied_param_groups"]


def tied_param_groups(mesh: HybridMesh, stage_model: StageModel | None) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the process groups of tied parameters, by their stages. Collective over the world."""
    found = {}
    for stages in dict.fromkeys(() if stage_model is None else stage_model.holders.values()):
        group = mesh.subgroup("pp", stages)
        if group is not None:
            found[stages] = group
    return found


def build_runtime(
    model: HybridModel,
    stage_model: StageModel,
    arguments: PipelineArguments,
    mesh: HybridMesh,
    device: torch.device,
    weight_gradients: DeferredWeightGrads | None,
) -> PipelineRuntime:
    """Return the runtime of this rank's stage. Collective over the world.

    Args:
        model: The boosted model.
        stage_model: Stage model.
        arguments: Pipeline arguments of the plugin.
        mesh: Mesh of the ranks.
        device: Compute device of the stage.
        weight_gradients: Deferred weight gradients, or None.
    """
    stage = mesh.rank("pp")
    ends = _link_ends(mesh, stage_model.partition, device)
    return PipelineRuntime(
        model,
        arguments,
        StageP2P(stage_model.partition, stage, ends, device, caches_specs=arguments.caches_metadata),
        BatchConsistency(mesh.cpu_group(*AXES), mesh.rank("dp")),
        weight_gradients,
        stage=stage,
        stage_group=mesh.group("pp"),
        device=device,
        groups=mesh.groups,
    )


def _link_ends(mesh: HybridMesh, division: StagePartition, device: torch.device) -> LinkPeer:
    """Return the groups of links. Links need dedicated groups, as torch counts the operations of a group."""
    if device.type != "cpu":
        return _link_groups(mesh, division, device)
    stage = mesh.rank("pp")
    group = mesh.subgroup("pp", range(division.num_stages))
    return lambda sender, receiver: (group, sender if stage == receiver else receiver)


def _link_groups(mesh: HybridMesh, division: StagePartition, device: torch.device) -> LinkPeer:
    """Create a group of two ranks per pair of stages and direction, for accelerators.

    Their messages are ordered within a group, so a pending one would block those of the other direction.
    """
    groups: dict[tuple[int, int], dist.ProcessGroup | None] = {}
    for one, other in division.linked_stages():
        for ends in ((one, other), (other, one)):
            groups[ends] = group = mesh.subgroup("pp", ends)
            if group is not None:  # connects in a common order; otherwise a first send would block on its receiver
                all_reduce_sum(torch.zeros(1, device=device), group)
    # torch sorts the ranks of a group, so the sender may have either group rank.
    return lambda sender, receiver: (groups[sender, receiver], 1 - group_rank(groups[sender, receiver]))
