"""Memory estimation: training memory per rank, without allocating it."""

from .estimate import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
