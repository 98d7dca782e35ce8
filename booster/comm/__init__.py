"""Communication between ranks: the only package that calls collectives."""

from booster.comm.agreement import agree, raise_on_all_ranks, share_facts
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
from booster.comm.exchange import gather_distinct
from booster.comm.faults import Fault, InjectedFault, inject_faults
from booster.comm.flat_collectives import AllGather, ReduceScatter, start_all_gather, start_reduce_scatter
from booster.comm.groups import mesh_of_groups, new_group, new_group_of_rows, new_mesh, patience
from booster.comm.imagined import are_others_imagined, imagine_others, imagined_world
from booster.comm.links import IncomingLink, OutgoingLink, TensorSpec
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
from booster.comm.waiting import hang_up, note_failure

__all__ = [
    "AllGather",
    "AllReduce",
    "CommunicationCount",
    "ErrorBarrier",
    "Fault",
    "IncomingLink",
    "InjectedFault",
    "OutgoingLink",
    "ReduceScatter",
    "TensorReceive",
    "TensorSend",
    "TensorSpec",
    "agree",
    "all_gather_equal",
    "all_reduce_max",
    "all_reduce_numbers",
    "all_reduce_sparse",
    "all_reduce_sum",
    "all_to_all_single",
    "are_others_imagined",
    "barrier",
    "broadcast",
    "collective_device",
    "count_communication",
    "gather_distinct",
    "global_rank_of",
    "group_rank",
    "group_size",
    "hang_up",
    "imagine_others",
    "imagined_world",
    "inject_faults",
    "is_initialized",
    "mesh_of_groups",
    "new_cpu_group",
    "new_group",
    "new_group_of_rows",
    "new_mesh",
    "note_failure",
    "patience",
    "raise_on_all_ranks",
    "receive",
    "receive_tensor",
    "release_groups",
    "release_unused_groups",
    "send",
    "send_tensor",
    "share_facts",
    "start_all_gather",
    "start_all_reduce",
    "start_receive_tensor",
    "start_reduce_scatter",
    "start_send_tensor",
    "transport",
    "use_shared_memory",
]
