"""Keeps DDP from crashing where TORCH_DISTRIBUTED_DEBUG=DETAIL wraps gloo groups.

While DDP is constructed, torch's C++ logger casts the group to ProcessGroupGloo without asking and reads its number of
threads. With DETAIL on, the group is a ProcessGroupWrapper, and the process dies of SIGSEGV (seen in torch 2.13). What
is left out here is only statistics about the construction.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class LoggerWithoutConstruction(dist.Logger):  # type: ignore[name-defined]
    """DDP's logger without the call that crashes."""

    def set_construction_data_and_log(self, *data: Any) -> None:
        """Does nothing."""


def install() -> None:
    """Has every DDP of this process use the logger that doesn't crash."""
    dist.Logger = LoggerWithoutConstruction  # type: ignore[attr-defined]
