"""Estimation before training: memory and step time per rank, without allocating or running anything."""

from .activation_plan import plan_activations
from .estimate import MemoryEstimate, TrainingRecipe, estimate_memory
from .machine_profile import MachineProfile, find_profile, load_profile
from .step_time import StepTime

__all__ = [
    "MachineProfile",
    "MemoryEstimate",
    "StepTime",
    "TrainingRecipe",
    "estimate_memory",
    "find_profile",
    "load_profile",
    "plan_activations",
]
