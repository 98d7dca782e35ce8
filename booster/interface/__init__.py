"""Contracts between the facade, the plugins, mixed precision and the checkpoints."""

from booster.interface.fused_update import FusedUpdate
from booster.interface.mixed_precision import LossScaler, MasterWeights, MixedPrecision
from booster.interface.model import ModelWrapper
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.optimizer_state import OptimizerState, TensorSpec
from booster.interface.parameter_layout import ShardRegion, ShardSpec, set_shard_spec, shard_spec_of
from booster.interface.pending_gradients import AccumulatedGradients, AccumulationCounters, ReducedShards
from booster.interface.plugin import Boosted, Plugin
from booster.interface.rank_memory import ActivationProfile, MemoryParts, MemoryRequest, RankMemory
from booster.interface.shards import Shard, ShardAware, Shards
from booster.interface.state_allocation import StateAllocator
from booster.interface.tensor_slice import TensorSlice

__all__ = [
    "AccumulatedGradients",
    "AccumulationCounters",
    "ActivationProfile",
    "Boosted",
    "FusedUpdate",
    "LossScaler",
    "MasterWeights",
    "MemoryParts",
    "MemoryRequest",
    "MixedPrecision",
    "ModelWrapper",
    "OptimizerState",
    "OptimizerWrapper",
    "Plugin",
    "RankMemory",
    "ReducedShards",
    "Shard",
    "ShardAware",
    "ShardRegion",
    "ShardSpec",
    "Shards",
    "StateAllocator",
    "TensorSlice",
    "TensorSpec",
    "set_shard_spec",
    "shard_spec_of",
]
