"""ZeRO stage 3: parameters, gradients and optimizer states in chunks, divided among ranks, over tiers of memory."""

from .plugin import GeminiPlugin

__all__ = ["GeminiPlugin"]
