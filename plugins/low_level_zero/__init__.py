"""ZeRO stages 1 and 2: optimizer states, and gradients, divided among the data-parallel ranks."""

from .plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
