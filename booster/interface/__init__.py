"""What authors of plugins, mixed precisions and optimizers implement or derive from.

This folder holds the contracts alone: `Plugin`, `PluginChoice`, `MixedPrecision` and `CheckpointIO` (in
`checkpoint_io.py`). The other names are re-exported from `booster.core`, which holds the code that all plugins share:

- `ModelWrapper` and `OptimizerWrapper` are the results of `Plugin.configure`. A plugin derives from them and overrides
  the methods under "Overridden by plugins".
- `TensorSlice`, `OptimizerState` and `AccumulatedGradients` describe to a checkpoint what a rank holds.
- `ShardSpec` and its functions describe which elements of a parameter a rank holds.
- `ShardAware`, `FusedUpdate` and `StateAllocator` are protocols of optimizers that know about shards (`Shards`),
  unscale gradients in their step, or allocate their states.
- `LossScaler` and `Fp32MasterWeights` are what a `MixedPrecision` gives to an `OptimizerWrapper`.

A plugin over several ranks derives from `booster.plugins.base.DistributedPlugin`. One that shards the optimizer has a
`booster.plugins.sharding.optimizer.ShardedOptimizer`.
"""

from booster.core.accumulated_gradients import AccumulatedGradients, AccumulationCounters, ReducedShards
from booster.core.model_wrapper import ModelWrapper
from booster.core.optimizer_state import OptimizerState, TensorSpec, own_key
from booster.core.optimizer_wrapper import OptimizerWrapper
from booster.core.precision import Fp32MasterWeights, LossScaler
from booster.core.shard_aware import FusedUpdate, Shard, ShardAware, Shards, StateAllocator
from booster.core.shard_spec import ShardRegion, ShardSpec, TensorSlice, set_shard_spec, shard_spec_of

from .mixed_precision import MixedPrecision
from .plugin import Boosted, Plugin
from .plugin_choice import PluginChoice, PluginPlan

__all__ = [
    "AccumulatedGradients",
    "AccumulationCounters",
    "Boosted",
    "Fp32MasterWeights",
    "FusedUpdate",
    "LossScaler",
    "MixedPrecision",
    "ModelWrapper",
    "OptimizerState",
    "OptimizerWrapper",
    "Plugin",
    "PluginChoice",
    "PluginPlan",
    "ReducedShards",
    "Shard",
    "ShardAware",
    "ShardRegion",
    "ShardSpec",
    "Shards",
    "StateAllocator",
    "TensorSlice",
    "TensorSpec",
    "own_key",
    "set_shard_spec",
    "shard_spec_of",
]
