"""Optimizers whose step is one pass over memory, with states that may live on a disk."""

from booster.optim.cpu_adam import CPUAdam
from booster.optim.fused_adam import FusedAdam
from booster.optim.hybrid_adam import HybridAdam

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam"]
