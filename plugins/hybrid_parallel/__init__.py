"""Tensor, sequence, pipeline and data parallelism with ZeRO, from plans."""

from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import (
    Costs,
    Kind,
    PipelineSchedule,
    Timeline,
    Work,
    register_schedule,
    simulate,
)
from booster.plugins.hybrid_parallel.plans.plan import Style
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin
from booster.plugins.hybrid_parallel.tensor_parallel.split_logits import SplitLogits
from booster.plugins.hybrid_parallel.tensor_parallel.splits import Block

__all__ = [
    "Block",
    "Costs",
    "GradientCheckpointConfig",
    "HybridParallelPlugin",
    "Kind",
    "PipelineSchedule",
    "SplitLogits",
    "Style",
    "Timeline",
    "Work",
    "register_schedule",
    "simulate",
]
