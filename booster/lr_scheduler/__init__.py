"""Learning rate schedulers; all take the total number of steps."""

from booster.lr_scheduler.cosine import CosineAnnealingLR, CosineAnnealingWarmupLR
from booster.lr_scheduler.decay import ExponentialLR, StepLR
from booster.lr_scheduler.flat import FlatAnnealingLR, FlatAnnealingWarmupLR
from booster.lr_scheduler.functions import LambdaLR, MultiplicativeLR
from booster.lr_scheduler.linear import LinearWarmupLR
from booster.lr_scheduler.multi_step import MultiStepLR, MultiStepWarmupLR
from booster.lr_scheduler.one_cycle import OneCycleLR
from booster.lr_scheduler.polynomial import PolynomialLR, PolynomialWarmupLR

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]
