"""Optimizers: Adam in one pass over memory, and those that look at whole layers, matrices or the whole gradient."""

from .adam import CPUAdam, FusedAdam, HybridAdam
from .factored import CAME, Adafactor
from .layerwise import FusedLAMB, Lamb, Lars
from .sgd import FusedSGD

__all__ = ["CAME", "Adafactor", "CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb", "Lars"]
