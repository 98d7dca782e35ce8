"""Tensor, sequence and data parallelism with ZeRO, from plans."""

from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

__all__ = ["HybridParallelPlugin"]
