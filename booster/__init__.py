"""torch-booster: one training loop, any parallel strategy."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ != "booster":  # reached by another path: refuse a second copy of every class
    raise ImportError(f"import this package as 'booster', not as {__name__!r}")

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "checkpoint_io" / "__init__.py").is_file() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))  # source checkout: plugins/, kernels/, checkpoint_io/ lie beside this folder

import torch

if TYPE_CHECKING or torch.distributed.is_available():  # else `booster check` says what is missing
    from .launch.launch import (
        get_config,
        get_default_parser,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .activation_checkpointing import checkpoint_activations
    from .auto_parallel import AutoPlugin, ParallelPlan
    from .auto_parallel.autoparallelize import autoparallelize
    from .booster import Booster
    from .checkpoint_io import CheckpointIO, GeneralCheckpointIO
    from .chunked_loss import chunked_cross_entropy
    from .device import Accelerator, get_accelerator, get_current_device
    from .engine import Engine, initialize
    from .errors import BoosterError, CheckpointError, ConfigError, DesyncError, NonfiniteError, RankFailedError
    from .estimate import MemoryEstimate, estimate_memory
    from .interface import MixedPrecision, ModelWrapper, OptimizerWrapper, Plugin, TensorSlice
    from .launch.config import Config
    from .launch.coordinator import DistCoordinator
    from .lazy_init import LazyInitContext
    from .logger import disable_existing_loggers, get_dist_logger
    from .mixed_precision import (
        BF16MixedPrecision,
        FP8MixedPrecision,
        FP16ApexMixedPrecision,
        FP16NaiveMixedPrecision,
        FP16TorchMixedPrecision,
    )
    from .monitor import Monitor
    from .placements import shard
    from .rng_state import set_seed
    from .trainer import GradientHandler, Trainer, register_gradient_handler

__all__ = [
    "Accelerator",
    "AutoPlugin",
    "BF16MixedPrecision",
    "Booster",
    "BoosterError",
    "CheckpointError",
    "CheckpointIO",
    "Config",
    "ConfigError",
    "DesyncError",
    "DistCoordinator",
    "Engine",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "GeneralCheckpointIO",
    "GradientHandler",
    "LazyInitContext",
    "MemoryEstimate",
    "MixedPrecision",
    "ModelWrapper",
    "Monitor",
    "NonfiniteError",
    "OptimizerWrapper",
    "ParallelPlan",
    "Plugin",
    "RankFailedError",
    "TensorSlice",
    "Trainer",
    "autoparallelize",
    "checkpoint_activations",
    "chunked_cross_entropy",
    "disable_existing_loggers",
    "estimate_memory",
    "get_accelerator",
    "get_config",
    "get_current_device",
    "get_default_parser",
    "get_dist_logger",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "register_gradient_handler",
    "set_seed",
    "shard",
]

# Where the other names are, which are imported on first use: most need torch's compiler, whose import takes as long as
# torch's own, and `booster run` and the workers of a loader need none.
_MODULES: Mapping[str, Sequence[str]] = {
    "activation_checkpointing": ["checkpoint_activations"],
    "auto_parallel": ["AutoPlugin", "ParallelPlan", "autoparallelize"],
    "booster": ["Booster"],
    "checkpoint_io": ["CheckpointIO", "GeneralCheckpointIO"],
    "chunked_loss": ["chunked_cross_entropy"],
    "device": ["Accelerator", "get_accelerator", "get_current_device"],
    "engine": ["Engine", "initialize"],
    "errors": ["BoosterError", "CheckpointError", "ConfigError", "DesyncError", "NonfiniteError", "RankFailedError"],
    "estimate": ["MemoryEstimate", "estimate_memory"],
    "interface": ["MixedPrecision", "ModelWrapper", "OptimizerWrapper", "Plugin", "TensorSlice"],
    "launch.config": ["Config"],
    "launch.coordinator": ["DistCoordinator"],
    "lazy_init": ["LazyInitContext"],
    "logger": ["disable_existing_loggers", "get_dist_logger"],
    "mixed_precision": [
        "BF16MixedPrecision",
        "FP8MixedPrecision",
        "FP16ApexMixedPrecision",
        "FP16NaiveMixedPrecision",
        "FP16TorchMixedPrecision",
    ],
    "monitor": ["Monitor"],
    "placements": ["shard"],
    "rng_state": ["set_seed"],
    "trainer": ["GradientHandler", "Trainer", "register_gradient_handler"],
}

if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import the module of a name; for one of `Booster` or of ColossalAI, say in the error how to reach it."""
        if name in __all__ and not torch.distributed.is_available():
            raise ImportError("torch was built without torch.distributed: install one from pytorch.org that has it")
        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is not None:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        text = f"module {__name__!r} has no attribute {name!r}"
        if name == "plugin":
            text += ": plugins are in booster.plugins, and a Booster object has the attribute plugin"
        elif not name.startswith("_") and hasattr(__getattr__("Booster"), name):
            text += f", which is one of Booster objects: write Booster(...).{name}"
        raise AttributeError(text, name=name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
