"""Local SGD and DiLoCo: ranks train apart and average their weights every few steps."""

from .optimizer import LocalModel, LocalOptimizer
from .plugin import LocalSGDPlugin

__all__ = ["LocalModel", "LocalOptimizer", "LocalSGDPlugin"]
