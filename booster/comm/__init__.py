"""The one room that calls collectives."""

from booster.comm.agreement import raise_on_all_ranks, require_same_on_all_ranks
from booster.comm.collectives import (
    all_gather_equal,
    all_reduce_numbers,
    all_reduce_sum,
    barrier,
    broadcast,
    collective_device,
    global_rank_of,
    group_rank,
    group_size,
    is_initialized,
)

__all__ = [
    "all_gather_equal",
    "all_reduce_numbers",
    "all_reduce_sum",
    "barrier",
    "broadcast",
    "collective_device",
    "global_rank_of",
    "group_rank",
    "group_size",
    "is_initialized",
    "raise_on_all_ranks",
    "require_same_on_all_ranks",
]
