"""Tensor, sequence, pipeline and data parallelism with ZeRO, from plans."""

from .activation_checkpointing import GradientCheckpointConfig
from .mesh import parallel_groups
from .pipeline_parallel.schedules import (
    Action,
    ActionKind,
    Costs,
    PipelineSchedule,
    Timeline,
    register_schedule,
    simulate,
)
from .plugin import HybridParallelPlugin
from .tensor_parallel.shard_spec import Block
from .tensor_parallel.vocab_parallel_logits import VocabParallelLogits
from .tp_plan.plan import Style

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
    "parallel_groups",
    "register_schedule",
    "simulate",
]
