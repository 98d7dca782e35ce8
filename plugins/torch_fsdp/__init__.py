"""Fully sharded data parallelism with torch's FSDP2."""

from .plugin import TorchFSDPPlugin

__all__ = ["TorchFSDPPlugin"]
