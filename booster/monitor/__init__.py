"""Seeing what a training loop does: progress, logs, and who is missing when it hangs."""

from .monitor import Monitor

__all__ = ["Monitor"]
