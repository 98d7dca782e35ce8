"""Optimizers: fused Adam, and optimizers with statistics of layers, matrices or the global gradient."""

from .adam import CPUAdam, FusedAdam, HybridAdam
from .factored import CAME, Adafactor
from .layerwise import FusedLAMB, Lamb, Lars
from .muon import Muon
from .sgd import FusedSGD

__all__ = ["CAME", "Adafactor", "CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb", "Lars", "Muon"]
