"""ZeRO stage 3: parameters, gradients and optimizer states in chunks, sharded over ranks and memory tiers."""

from .plugin import GeminiPlugin

__all__ = ["GeminiPlugin"]
