"""Monitoring: progress, logs, and diagnosis of hangs."""

from .monitor import Monitor

__all__ = ["Monitor"]
