"""The strategy: torch's own fully sharded data parallelism (FSDP2)."""

from booster.plugins.torch_fsdp.plugin import TorchFSDPPlugin

__all__ = ["TorchFSDPPlugin"]
