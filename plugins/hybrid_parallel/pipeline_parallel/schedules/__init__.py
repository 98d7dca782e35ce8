"""Pipeline schedules: the order of actions of each stage, without communication."""

from __future__ import annotations

from .communication import Message, StageAction, action_list, incoming_messages
from .gpipe import GPipe
from .one_forward_one_backward import Interleaved, OneForwardOneBackward
from .schedule import Action, ActionKind, PipelineSchedule, register_schedule, schedule_from_name, schedule_names
from .simulation import Costs, Timeline, check_orders, message_order, simulate
from .zero_bubble_v import ZeroBubbleV

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
    "message_order",
    "register_schedule",
    "schedule_from_name",
    "schedule_names",
    "simulate",
]
