"""How much memory a rank will need, found without allocating it."""

from booster.estimate.estimation import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
