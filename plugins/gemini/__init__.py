"""ZeRO stage 3: parameters, gradients and optimizer states in chunks, divided among ranks, over tiers of memory."""

from booster.plugins.gemini.plugin import GeminiPlugin

__all__ = ["GeminiPlugin"]
