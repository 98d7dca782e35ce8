"""Choice of a strategy before training: the plugin and its settings that are fastest here, or need least memory.

`placements` chooses how each layer is divided between tensor-parallel ranks, and converts layouts of tensors.
"""

from .auto_plugin import AutoPlugin
from .autoparallelize import autoparallelize
from .plan import ParallelPlan

__all__ = ["AutoPlugin", "ParallelPlan", "autoparallelize"]
