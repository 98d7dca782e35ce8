"""Checkpoint engine of all plugins."""

from booster.checkpoint_io.general import GeneralCheckpointIO
from booster.checkpoint_io.interface import CheckpointIO

__all__ = ["CheckpointIO", "GeneralCheckpointIO"]
