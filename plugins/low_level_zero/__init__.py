"""ZeRO stages 1 and 2: optimizer states, and gradients, divided among the data-parallel ranks."""

from booster.plugins.low_level_zero.plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
