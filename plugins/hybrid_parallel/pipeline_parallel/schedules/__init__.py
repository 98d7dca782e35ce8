"""Pipeline schedules: the order of actions of each stage, without communication."""

from __future__ import annotations

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.checks import check_orders
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.communication import Message, Step, incoming, program
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.gpipe import GPipe
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.interleaved import Interleaved
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.one_forward_one_backward import OneForwardOneBackward
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.schedule import (
    PipelineSchedule,
    register_schedule,
    schedule_from_name,
    schedule_names,
)
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.simulation import Costs, Timeline, simulate
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Kind, Work
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.zero_bubble_v import ZeroBubbleV

__all__ = [
    "Costs",
    "GPipe",
    "Interleaved",
    "Kind",
    "Message",
    "OneForwardOneBackward",
    "PipelineSchedule",
    "Step",
    "Timeline",
    "Work",
    "ZeroBubbleV",
    "check_orders",
    "incoming",
    "program",
    "register_schedule",
    "schedule_from_name",
    "schedule_names",
    "simulate",
]
