"""Runs test code on several ranks: a pool of live processes, gloo, no ports, and reports that name the failing rank."""

from __future__ import annotations

from harness.distributed import distributed, run_ranks
from harness.failures import RankFailure, RanksFailed
from harness.forkserver import preload

__all__ = ["RankFailure", "RanksFailed", "distributed", "preload", "run_ranks"]
