"""Communication between ranks: the only package that calls collectives."""

from booster.comm.agreement import all_gather_text, check_same_across_ranks, raise_on_all_ranks
from booster.comm.collectives import (
    all_gather_equal,
    all_reduce_max,
    all_reduce_numbers,
    all_reduce_sparse,
    all_reduce_sum,
    all_to_all_single,
    barrier,
    broadcast,
    collective_device,
    global_rank_of,
    group_rank,
    group_size,
    is_initialized,
)
from booster.comm.counter import CommunicationCount, count_communication
from booster.comm.exchange import all_gather_bytes
from booster.comm.faults import Fault, InjectedFault, inject_faults
from booster.comm.flat_collectives import AllGather, ReduceScatter, start_all_gather, start_reduce_scatter
from booster.comm.groups import mesh_of_groups, new_group, new_group_of_rows, new_mesh, timeout_scope
from booster.comm.imagined import fake_collectives, fake_world, is_fake_world
from booster.comm.links import RecvChannel, SendChannel, TensorSpec
from booster.comm.point_to_point import (
    TensorReceive,
    TensorSend,
    new_cpu_group,
    receive,
    receive_tensor,
    send,
    send_tensor,
    start_receive_tensor,
    start_send_tensor,
)
from booster.comm.release import release_groups, release_unused_groups
from booster.comm.shared_memory import transport, use_shared_memory
from booster.comm.started_reductions import AllReduce, start_all_reduce
from booster.comm.store_barrier import ErrorBarrier
from booster.comm.waiting import abort_groups, report_failure

__all__ = [
    "AllGather",
    "AllReduce",
    "CommunicationCount",
    "ErrorBarrier",
    "Fault",
    "InjectedFault",
    "RecvChannel",
    "ReduceScatter",
    "SendChannel",
    "TensorReceive",
    "TensorSend",
    "TensorSpec",
    "abort_groups",
    "all_gather_bytes",
    "all_gather_equal",
    "all_gather_text",
    "all_reduce_max",
    "all_reduce_numbers",
    "all_reduce_sparse",
    "all_reduce_sum",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "check_same_across_ranks",
    "collective_device",
    "count_communication",
    "fake_collectives",
    "fake_world",
    "global_rank_of",
    "group_rank",
    "group_size",
    "inject_faults",
    "is_fake_world",
    "is_initialized",
    "mesh_of_groups",
    "new_cpu_group",
    "new_group",
    "new_group_of_rows",
    "new_mesh",
    "raise_on_all_ranks",
    "receive",
    "receive_tensor",
    "release_groups",
    "release_unused_groups",
    "report_failure",
    "send",
    "send_tensor",
    "start_all_gather",
    "start_all_reduce",
    "start_receive_tensor",
    "start_reduce_scatter",
    "start_send_tensor",
    "timeout_scope",
    "transport",
    "use_shared_memory",
]
