"""The strategy: torch's own fully sharded data parallelism (FSDP2)."""

from .plugin import TorchFSDPPlugin

__all__ = ["TorchFSDPPlugin"]
