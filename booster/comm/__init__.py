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
from booster.comm.exchange import gather_distinct
from booster.comm.point_to_point import new_cpu_group, receive, send
from booster.comm.store_barrier import ErrorBarrier

__all__ = [
    "ErrorBarrier",
    "all_gather_equal",
    "all_reduce_numbers",
    "all_reduce_sum",
    "barrier",
    "broadcast",
    "collective_device",
    "gather_distinct",
    "global_rank_of",
    "group_rank",
    "group_size",
    "is_initialized",
    "new_cpu_group",
    "raise_on_all_ranks",
    "receive",
    "require_same_on_all_ranks",
    "send",
]
