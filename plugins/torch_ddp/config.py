"""Options of the DDP plugin, validated before anything is allocated."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from booster.errors import ConfigError
from booster.plugins.base import PluginConfig
from booster.validation import check_flag, is_non_nan_number


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPConfig(PluginConfig):
    """Options of `TorchDDPPlugin`, which documents them."""

    broadcast_buffers: bool
    bucket_cap_mb: float
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    sync_batch_norm: bool

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket."""
        return int(min(self.bucket_cap_mb * 2**20, sys.maxsize))

    def check(self, world_size: int) -> None:
        if not is_non_nan_number(self.bucket_cap_mb) or not self.bucket_cap_mb > 0:
            raise ConfigError(
                f"bucket_cap_mb={self.bucket_cap_mb!r} holds no gradient: give a size in MiB above 0, such as 25"
            )
        for name in (field.name for field in fields(self)):
            if name != "bucket_cap_mb":
                check_flag(name, getattr(self, name))
