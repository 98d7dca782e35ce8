"""Choice of a strategy before training: the plugin and its settings that are fastest here, or need least memory."""

from .auto_plugin import AutoPlugin
from .autoparallelize import autoparallelize
from .plan import ParallelPlan

__all__ = ["AutoPlugin", "ParallelPlan", "autoparallelize"]
