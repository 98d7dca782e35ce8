"""Pipeline schedules: the order of actions of each stage, without communication."""

from __future__ import annotations

from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.checks import check_orders
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.communication import (
    Message,
    StageAction,
    action_list,
    incoming_messages,
)
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
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.work import Action, ActionKind
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules.zero_bubble_v import ZeroBubbleV

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "GPipe",
    "Interleaved",
    "Message",
    "OneForwardOneBackward",
    "PipelineSchedule",
    "StageAction",
    "Timeline",
    "ZeroBubbleV",
    "action_list",
    "check_orders",
    "incoming_messages",
    "register_schedule",
    "schedule_from_name",
    "schedule_names",
    "simulate",
]
