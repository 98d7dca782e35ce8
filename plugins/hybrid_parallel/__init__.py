"""Tensor, sequence, pipeline and data parallelism with ZeRO, from plans."""

from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import (
    Action,
    ActionKind,
    Costs,
    PipelineSchedule,
    Timeline,
    register_schedule,
    simulate,
)
from booster.plugins.hybrid_parallel.plans.plan import Style
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.plugins.hybrid_parallel.tensor_parallel.split_logits import VocabParallelLogits
from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block

__all__ = [
    "Action",
    "ActionKind",
    "Block",
    "Costs",
    "GradientCheckpointConfig",
    "HybridParallelPlugin",
    "PipelineSchedule",
    "Style",
    "Timeline",
    "VocabParallelLogits",
    "register_schedule",
    "simulate",
]
