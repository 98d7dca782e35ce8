"""torch-booster: one training loop, any parallel strategy."""

from pathlib import Path

if __name__ != "booster":  # reached by another path: refuse a second copy of every class
    raise ImportError(f"import this package as 'booster', not as {__name__!r}")

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "checkpoint_io" / "__init__.py").is_file() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))  # source checkout: plugins/, kernels/, checkpoint_io/ lie beside this folder

__version__ = "0.1.0"

from booster.checkpoint_io import CheckpointIO, GeneralCheckpointIO
from booster.cluster import DistCoordinator
from booster.config import Config
from booster.errors import BoosterError, CheckpointError, ConfigError, DesyncError, NonfiniteError, RankFailedError
from booster.estimate import MemoryEstimate, estimate_memory
from booster.facade import Booster
from booster.interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin, TensorSlice
from booster.launch import (
    get_config,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from booster.lazy_init import LazyInitContext
from booster.logger import get_dist_logger
from booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from booster.monitor import Monitor
from booster.random_state import set_seed

__all__ = [
    "BF16MixedPrecision",
    "Booster",
    "BoosterError",
    "CheckpointError",
    "CheckpointIO",
    "Config",
    "ConfigError",
    "DesyncError",
    "DistCoordinator",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "GeneralCheckpointIO",
    "LazyInitContext",
    "MemoryEstimate",
    "MixedPrecision",
    "ModelWrapper",
    "Monitor",
    "NonfiniteError",
    "OptimizerWrapper",
    "Plugin",
    "RankFailedError",
    "TensorSlice",
    "estimate_memory",
    "get_config",
    "get_default_parser",
    "get_dist_logger",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "set_seed",
]
