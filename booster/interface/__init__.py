"""Contracts between the facade, the plugins, mixed precision and the checkpoints."""

from booster.core.accumulated_gradients import AccumulatedGradients, AccumulationCounters, ReducedShards
from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_state import OptimizerState, TensorSpec
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.core.precision import LossScaler, MasterWeights
from booster.core.shard_aware import FusedUpdate, Shard, ShardAware, Shards, StateAllocator
from booster.core.shard_spec import ShardRegion, ShardSpec, set_shard_spec, shard_spec_of
from booster.core.tensor_slice import TensorSlice

from .memory import ActivationProfile, MemoryParts, MemoryRequest, RankMemory
from .mixed_precision import MixedPrecision
from .plugin import Boosted, Plugin

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
