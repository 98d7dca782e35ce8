"""Built-in strategies, each imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gemini import GeminiPlugin
    from .hybrid_parallel import HybridParallelPlugin
    from .local_sgd import LocalSGDPlugin
    from .low_level_zero import LowLevelZeroPlugin
    from .torch_ddp.plugin import TorchDDPPlugin
    from .torch_fsdp import TorchFSDPPlugin

__all__ = [
    "BUILT_IN",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LocalSGDPlugin",
    "LowLevelZeroPlugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]

# The name for Booster(plugin="..."), the module, the class.
BUILT_IN: dict[str, tuple[str, str]] = {
    "gemini": ("booster.plugins.gemini", "GeminiPlugin"),
    "hybrid_parallel": ("booster.plugins.hybrid_parallel", "HybridParallelPlugin"),
    "local_sgd": ("booster.plugins.local_sgd", "LocalSGDPlugin"),
    "low_level_zero": ("booster.plugins.low_level_zero", "LowLevelZeroPlugin"),
    "torch_ddp": ("booster.plugins.torch_ddp.plugin", "TorchDDPPlugin"),
    "torch_fsdp": ("booster.plugins.torch_fsdp", "TorchFSDPPlugin"),
}


def __getattr__(name: str) -> Any:
    for module, cls in BUILT_IN.values():
        if cls == name:
            return getattr(importlib.import_module(module), cls)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
