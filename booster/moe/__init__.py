"""Mixture-of-experts layers: experts, routers with capacity, and the load-balancing loss."""

from .balance import LossFreeBalancing, global_load_balancing
from .experts import Experts, FFNExperts
from .layers import MoeLayer, MoeModule
from .loss import MoeLoss, load_balance_loss
from .routers import NormalNoiseGenerator, Router, Routing, Top1Router, Top2Router, UniformNoiseGenerator

__all__ = [
    "Experts",
    "FFNExperts",
    "LossFreeBalancing",
    "MoeLayer",
    "MoeLoss",
    "MoeModule",
    "NormalNoiseGenerator",
    "Router",
    "Routing",
    "Top1Router",
    "Top2Router",
    "UniformNoiseGenerator",
    "global_load_balancing",
    "load_balance_loss",
]
