"""A training loop over a Booster, its hooks, and gradient handlers."""

from .checkpoint_hook import CheckpointHook
from .ema import EMAHook
from .gradient_handlers import (
    DataParallelGradientHandler,
    GradientHandler,
    attach_gradient_handlers,
    register_gradient_handler,
)
from .hook import Hook
from .metric_hooks import AccuracyHook, EarlyStopHook, LossHook, MetricHook
from .monitoring_hooks import MemoryHook, MonitorHook, ProfilerHook, ThroughputHook, TimingHook
from .schedule_hook import LRScheduleHook
from .trainer import Trainer

__all__ = [
    "AccuracyHook",
    "CheckpointHook",
    "DataParallelGradientHandler",
    "EMAHook",
    "EarlyStopHook",
    "GradientHandler",
    "Hook",
    "LRScheduleHook",
    "LossHook",
    "MemoryHook",
    "MetricHook",
    "MonitorHook",
    "ProfilerHook",
    "ThroughputHook",
    "TimingHook",
    "Trainer",
    "attach_gradient_handlers",
    "register_gradient_handler",
]
