"""Runs test code on several ranks: a pool of live processes, gloo, no ports, and reports that name the failing rank."""

from __future__ import annotations

from booster.plugins.torch_fsdp import wrap
from harness.distributed import distributed, run_ranks
from harness.failures import RankFailure, RanksFailed
from harness.forkserver import preload

wrap.SINGLE_GROUP_BYTES = 0  # the models of tests are small, and are to be sharded as large ones are

__all__ = ["RankFailure", "RanksFailed", "distributed", "preload", "run_ranks"]
