"""What is written to disk and read back, by every plugin."""

from booster.checkpoint_io.general import GeneralCheckpointIO
from booster.checkpoint_io.interface import CheckpointIO

__all__ = ["CheckpointIO", "GeneralCheckpointIO"]
