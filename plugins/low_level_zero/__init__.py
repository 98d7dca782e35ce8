"""ZeRO stages 1 and 2: optimizer states and gradients sharded over the data-parallel ranks."""

from .plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
