"""Contracts between the facade, the plugins, mixed precision and the checkpoints."""

from booster.interface.fused_update import FusedUpdate
from booster.interface.mixed_precision import LossScaler, MasterWeights, MixedPrecision
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.optimizer_state import OptimizerState, TensorSpec
from booster.interface.parameter_layout import LayoutPiece, ParameterLayout, layout_of, set_layout
from booster.interface.pending_gradients import PendingGradients, ReducedGradients, WindowCounts
from booster.interface.plugin import Boosted, Plugin
from booster.interface.rank_memory import ActivationProfile, MemoryParts, MemoryQuestion, RankMemory
from booster.interface.shards import Shard, ShardAware, Shards
from booster.interface.state_allocation import AllocatesStates
from booster.interface.tensor_slice import TensorSlice

__all__ = [
    "ActivationProfile",
    "AllocatesStates",
    "Boosted",
    "FusedUpdate",
    "LayoutPiece",
    "LossScaler",
    "MasterWeights",
    "MemoryParts",
    "MemoryQuestion",
    "MixedPrecision",
    "ModelWrapper",
    "OptimizerState",
    "OptimizerWrapper",
    "ParameterLayout",
    "PendingGradients",
    "Plugin",
    "RankMemory",
    "ReducedGradients",
    "Shard",
    "ShardAware",
    "Shards",
    "TensorSlice",
    "TensorSpec",
    "WindowCounts",
    "layout_of",
    "set_layout",
]
