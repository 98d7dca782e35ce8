"""Optimizers: Adam in one pass over memory, and those that look at whole layers, matrices or the whole gradient."""

from booster.optim.adafactor import Adafactor
from booster.optim.came import CAME
from booster.optim.cpu_adam import CPUAdam
from booster.optim.fused_adam import FusedAdam
from booster.optim.fused_lamb import FusedLAMB
from booster.optim.fused_sgd import FusedSGD
from booster.optim.hybrid_adam import HybridAdam
from booster.optim.lamb import Lamb
from booster.optim.lars import Lars

__all__ = ["CAME", "Adafactor", "CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb", "Lars"]
