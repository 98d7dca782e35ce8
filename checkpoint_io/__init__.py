"""Checkpoint engine of all plugins."""

from booster.interface.checkpoint_io import CheckpointIO

from .checkpoint_io import GeneralCheckpointIO

__all__ = ["CheckpointIO", "GeneralCheckpointIO"]
