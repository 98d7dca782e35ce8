"""Blocking collectives for every torch version and backend; without a launch the world has one rank.

Collectives of CPU tensors use shared memory if the group's ranks share a host, see `booster.comm.shared_memory`.

Small collectives over gloo as tagged point-to-point messages, which another call's messages never match.

Note [Small collectives]
Gloo matches collectives by their number, whatever they are: ranks at different calls exchange each other's bytes, or
abort the process where a message is longer than expected. Small collectives carry the values that ranks compare, and
are at stake just when ranks are at different calls: a rank that ran out of batches saves while others train. So they
are messages with a tag of their kind, number and length, as those of flat buffers (see Note [Shards]): a rank at a call
that the others don't make times out, with an error. Such messages are short: their number counts. Up to 8 ranks each
rank sends to all others at once. Among more, an all-gather takes log2(ranks) steps, in each of which a rank passes on
all that it has (Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems", 1997), and a broadcast goes down a binomial tree. A reduction is an all-gather whose rows each rank reduces in
rank order, so that all have equal bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from booster.device import current_device
from booster.kernels.shared_memory import can_reduce

from .collective_op import CollectiveOp, start_op
from .fake import is_fake_world
from .process_groups import keep_with_world, new_group
from .shared_memory import all_gather_single

LOW_PRECISION = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements are summed and updated: fp32 for fp16 and bf16, else their own."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


_MAX_DIRECT = 8  # ranks that send to each other at once


def p2p_all_gather(operation: CollectiveOp, joined: torch.Tensor, source: torch.Tensor) -> None:
    """Fill `joined` with the ranks' tensors of one shape, concatenated along dim 0. Both are contiguous."""
    size, rank = dist.get_world_size(operation.group), dist.get_rank(operation.group)
    rows = joined.view(size, -1)
    mine = source.view(-1)
    rows[rank].copy_(mine)
    if mine.numel() == 0:
        return
    tag = operation.small_tag(mine.nbytes)
    if size > _MAX_DIRECT:
        _tree_all_gather(operation, rows, rank, tag)
        return
    others = [other for other in range(size) if other != rank]
    wait_all(
        operation,
        [operation.receive_from(rows[other], other, tag) for other in others]
        + [operation.send_to(mine, other, tag) for other in others],
    )


def _tree_all_gather(operation: CollectiveOp, rows: torch.Tensor, rank: int, tag: int) -> None:
    """Fill the rows of the other ranks in log2(ranks) steps; see Note [Small collectives]."""
    size, known = len(rows), 1
    gathered = torch.empty_like(rows)  # in the order of ranks from this one upwards, cyclically
    gathered[0].copy_(rows[rank])
    while known < size:
        count = min(known, size - known)
        received = operation.receive_from(gathered[known : known + count], (rank + known) % size, tag)
        sent = operation.send_to(gathered[:count], (rank - known) % size, tag)
        wait_all(operation, [received, sent])
        known += count
    rows.copy_(gathered.roll(rank, 0))


def p2p_all_reduce(operation: CollectiveOp, tensor: torch.Tensor, operator: Literal["sum", "max"]) -> None:
    """Reduce a contiguous tensor in place, in rank order, to equal bits on every rank; 16-bit dtypes in fp32."""
    rows = tensor.new_empty((dist.get_world_size(operation.group), tensor.numel()))
    p2p_all_gather(operation, rows, tensor)
    total = rows[0].to(sum_dtype(tensor.dtype))
    for row in rows[1:]:
        if operator == "sum":
            total += row
        else:
            torch.maximum(total, row.to(total.dtype), out=total)
    tensor.view(-1).copy_(total)


def p2p_broadcast(operation: CollectiveOp, buffer: torch.Tensor, source: int) -> None:
    """Overwrite a contiguous tensor with that of rank `source` of the group."""
    size, rank = dist.get_world_size(operation.group), dist.get_rank(operation.group)
    flat, tag = buffer.view(-1), operation.small_tag(buffer.nbytes)
    sender, receivers = _broadcast_tree((rank - source) % size, size)
    if sender is not None:
        wait_all(operation, [operation.receive_from(flat, (sender + source) % size, tag)])
    wait_all(operation, [operation.send_to(flat, (one + source) % size, tag) for one in receivers])


def _broadcast_tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Return whom the rank at a place receives from, None for the first, and sends to; see Note [Small collectives]."""
    if size <= _MAX_DIRECT:
        return (None, list(range(1, size))) if place == 0 else (0, [])
    distance, receivers = 1, []
    while distance < size and not place & distance:  # up to the lowest bit of its place
        receivers.append(place + distance)
        distance *= 2
    sender = place - distance if place else None
    return sender, [one for one in reversed(receivers) if one < size]  # the largest subtree first


def wait_all(operation: CollectiveOp, works: Sequence[dist.Work]) -> None:
    """Wait for messages of an operation, in order; see `CollectiveOp.wait`."""
    for work in works:
        operation.wait(work)


# A length that no other sum has: a rank at another call does not match it.
_BARRIER_NUMBERS = (0.0,) * 5


def is_initialized() -> bool:
    """Return whether the default process group exists. No communication."""
    return dist.is_available() and dist.is_initialized()


def group_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks of the group, by default the world; 1 without a launch. No communication."""
    return dist.get_world_size(group) if is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in the group, by default the world; 0 without a launch. No communication."""
    return dist.get_rank(group) if is_initialized() else 0


def global_rank_of(rank_in_group: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the global rank of a rank of the group. No communication."""
    if group is None or not is_initialized():
        return rank_in_group
    return dist.get_global_rank(group, rank_in_group)


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of the tensors that the group's backend sends: the accelerator for nccl, else the CPU."""
    if not is_initialized():
        return torch.device("cpu")
    backend = str(dist.get_backend(group))
    if "gloo" not in backend:
        return current_device()
    if ":" in backend:  # one per device type, such as "cpu:gloo,cuda:nccl"
        device, kinds = current_device(), dict(one.split(":", 1) for one in backend.split(","))
        return device if kinds.get(device.type, "gloo") != "gloo" else torch.device("cpu")
    return torch.device("cpu")


# Note [Host groups]
# A number of the host that travels over an accelerator waits for all work that is queued there, twice: in the copy to
# the device and in that back. So numbers, flags and texts travel over a gloo group of the same ranks, which leaves the
# device alone, and whose errors name lost ranks. The world's is made by `launch`, or else at its first use; plugins
# register those of other groups. It is not made at the first use of such a group: torch names a group by how many
# groups a rank is in, which may differ between the ranks by then.
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_groups_of_hosts: WeakSet[dist.ProcessGroup] = WeakSet()  # those that send the tensors of hosts themselves


def new_cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, for a thread beside the collectives of training.

    Collective: every rank of the group must call it.
    """
    if is_fake_world() and group is not None:
        return group
    ranks = [global_rank_of(rank, group) for rank in range(group_size(group))]
    made = new_group(ranks, "gloo", use_local_synchronization=group is not None)
    if made is None:
        raise AssertionError(f"rank {dist.get_rank()} is not among its own group's ranks {ranks}")
    return made


def register_host_group(group: dist.ProcessGroup, cpu_group: dist.ProcessGroup) -> None:
    """Use a CPU group for the host's numbers of a group with the same ranks; see Note [Host groups]."""
    _host_groups[group] = cpu_group


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the group for the host's numbers of a group; see Note [Host groups].

    Collective over the world at the first call for the world, or for a group of all ranks.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen is None or chosen in _groups_of_hosts or is_fake_world() or group_size(group) == 1:
        return group
    # With gloo alone, or beside the accelerator's backend.
    if collective_device(group).type == "cpu" or "gloo" in str(dist.get_backend(chosen)):
        _groups_of_hosts.add(chosen)
        return group
    known = _host_groups.get(chosen)
    if known is None and group_size(group) == group_size():
        world = dist.group.WORLD
        assert world is not None
        known = _host_groups.get(world)
        if known is None:
            known = _host_groups[world] = new_cpu_group()
            keep_with_world(known)
        _host_groups[chosen] = known
    return group if known is None else known


def all_reduce_numbers(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the sums of a few numbers over the group, in fp64, equal on every rank.

    Collective: every rank of the group must call it, with equally many numbers.
    """
    if group_size(group) == 1:
        return [float(number) for number in numbers]
    if is_fake_world():
        return [float(number) * group_size(group) for number in numbers]
    group = host_group(group)
    packed = torch.tensor(numbers, dtype=torch.float64, device=collective_device(group))
    _all_reduce(packed, "sum", group)
    return [float(number) for number in packed.tolist()]


def any_rank(flags: Sequence[bool], group: dist.ProcessGroup | None = None) -> list[bool]:
    """Return the logical or of each flag over the ranks of the group.

    Collective: every rank of the group must call it, with equally many flags.
    """
    return [bool(flag) for flag in _max_of_numbers(flags, torch.uint8, group)]


def any_rank_or_different(
    flags: Sequence[bool], numbers: Sequence[int], group: dist.ProcessGroup | None = None
) -> tuple[list[bool], list[bool]]:
    """Return the logical or of each flag, and for each number whether it differs, over the ranks of the group.

    Args:
        flags: Flags as in `any_rank`.
        numbers: Numbers from 0 to 255.
        group: Ranks that compare; optional, defaults to the world group.

    Collective: every rank of the group must call it, with equally many flags and numbers. One small all-reduce.
    """
    largest = _max_of_numbers([*flags, *numbers, *(255 - number for number in numbers)], torch.uint8, group)
    num_flags, num_both = len(flags), len(flags) + len(numbers)
    pairs = zip(largest[num_flags:num_both], largest[num_both:], strict=True)
    return [bool(flag) for flag in largest[:num_flags]], [one + complement != 255 for one, complement in pairs]


def max_of_numbers(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the maximum of each number over the ranks of the group; see `any_rank`. Collective."""
    return _max_of_numbers(numbers, torch.int64, group)


def _max_of_numbers(numbers: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup | None) -> list[int]:
    if group_size(group) == 1 or not numbers or is_fake_world():
        return list(numbers)
    group = host_group(group)
    packed = torch.tensor(numbers, dtype=dtype, device=collective_device(group))
    return all_reduce_max(packed, group).tolist()  # type: ignore[no-any-return]


def all_gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the numbers of each rank of the group, in rank order.

    Collective: every rank of the group must call it, with equally many numbers.
    """
    if group_size(group) == 1 or is_fake_world():
        return [list(numbers)] * group_size(group)
    group = host_group(group)
    packed = torch.tensor([numbers], dtype=torch.int64, device=collective_device(group))
    return all_gather_equal(packed, group).tolist()  # type: ignore[no-any-return]


def all_gather_equal(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the ranks' tensors concatenated along dim 0 in rank order; a scalar counts as one element.

    Collective: every rank of the group must call it with a tensor of the same shape and dtype.
    """
    tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
    size = group_size(group)
    if size == 1:
        return tensor
    if tensor.device.type == "cpu":
        group = host_group(group)
    device, source = tensor.device, tensor.detach().to(collective_device(group)).contiguous()
    joined = source.new_empty((size * source.shape[0], *source.shape[1:]))
    volume = joined.nbytes - source.nbytes
    operation = start_op("all_gather", group, sent=volume, received=volume)
    operation.run(
        source,
        in_memory=lambda memory: memory.all_gather(joined, source, operation.number),
        by_messages=lambda: p2p_all_gather(operation, joined, source),
        by_backend=lambda: all_gather_single(joined, source, group=group),
    )
    return joined.to(device)


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum a tensor over the group in place and return it; it is on the backend's device. Collective."""
    if group_size(group) > 1:
        _all_reduce(tensor, "sum", group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Set each element to the maximum over the group in place and return the tensor; see `all_reduce_sum`."""
    if group_size(group) > 1:
        _all_reduce(tensor, "max", group)
    return tensor


def all_reduce_sparse(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum over the group of sparse COO tensors, whose indices may differ.

    Collective: every rank of the group must call it with a tensor of the same shape and dtype.
    """
    if group_size(group) == 1:
        return tensor
    total = tensor.detach().coalesce().clone()
    volume = total.indices().nbytes + total.values().nbytes
    operation = start_op("all_reduce", group, sent=volume, received=volume)
    with operation.waiting():
        dist.all_reduce(total, group=group)
    return total.coalesce()


def _all_reduce(tensor: torch.Tensor, operator: Literal["sum", "max"], group: dist.ProcessGroup | None) -> None:
    size = group_size(group)
    volume = 2 * (size - 1) * tensor.nbytes // size
    operation = start_op("all_reduce", group, sent=volume, received=volume)
    reduce_op = dist.ReduceOp.SUM if operator == "sum" else dist.ReduceOp.MAX
    if can_reduce(tensor.dtype) and tensor.is_contiguous():
        operation.run(
            tensor,
            in_memory=lambda memory: memory.all_reduce(tensor, operator, operation.number),
            by_messages=lambda: p2p_all_reduce(operation, tensor, operator),
            by_backend=lambda: dist.all_reduce(tensor, reduce_op, group=group),
        )
    elif not is_fake_world():  # left to the backend, which raises if it cannot reduce it either
        with operation.waiting():
            dist.all_reduce(tensor, reduce_op, group=group)


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Overwrite tensors with those of rank `source` of the group, in place.

    Collective: every rank of the group must call it with tensors of the same shapes and dtypes in the same order.
    """
    if group_size(group) == 1:
        return
    device = collective_device(group)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        tensor = _without_repeats(tensor)
        is_source = group_rank(group) == source
        sent, received = (tensor.nbytes, 0) if is_source else (0, tensor.nbytes)
        if is_fake_world():
            with start_op("broadcast", group, sent=sent, received=received).ending():
                continue
        buffer = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)  # backends lack some dtypes
        _broadcast(start_op("broadcast", group, sent=sent, received=received), buffer, source)
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast the first rank's tensors in place, with one message per dtype. Collective over the group."""
    tensors = [_without_repeats(tensor) for tensor in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor for tensor in tensors if tensor.dtype == dtype]
        joined = torch.cat([tensor.reshape(-1) for tensor in members])
        broadcast([joined], group)
        for tensor, part in zip(members, joined.split([tensor.numel() for tensor in members]), strict=True):
            # Through `.data`: a graph that saved the buffer must not detect a change. If a forward modified it, that
            # forward already increased its version.
            tensor.data.copy_(part.view(tensor.shape))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with each element in memory once, of a tensor that `expand` may have made."""
    if 0 not in tensor.stride():
        return tensor
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(shape, [stride or 1 for stride in tensor.stride()])


def broadcast_numbers(numbers: Sequence[int], group: dist.ProcessGroup | None = None, source: int = 0) -> list[int]:
    """Return the numbers of rank `source` of the group. Collective, with equally many numbers on every rank."""
    if group_size(group) == 1 or is_fake_world():
        return list(numbers)
    group = host_group(group)
    packed = torch.tensor(numbers, dtype=torch.int64, device=collective_device(group))
    broadcast([packed], group, source)
    return packed.tolist()  # type: ignore[no-any-return]


def _broadcast(operation: CollectiveOp, buffer: torch.Tensor, source: int) -> None:
    sender = global_rank_of(source, operation.group)
    operation.run(
        buffer,
        in_memory=lambda memory: memory.broadcast(buffer, source, operation.number),
        by_messages=lambda: p2p_broadcast(operation, buffer, source),
        by_backend=lambda: dist.broadcast(buffer, src=sender, group=operation.group),
    )


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of the group, at most for the group's timeout. Collective."""
    if group_size(group) > 1:
        all_reduce_numbers(_BARRIER_NUMBERS, group)


_MAX_BROADCASTS = 8  # beyond it, one padded all-gather costs less than that many messages


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> tuple[list[bytes], list[int]]:
    """Return the different payloads of all ranks, and for every rank the index of its payload.

    Equal payloads are sent once: a replicated model's description travels once for any number of ranks.

    Args:
        payload: This rank's bytes, of any length.
        group: Process group, optional; defaults to the world.

    Collective: every rank of the group must call it.
    """
    size = group_size(group)
    if size == 1 or is_fake_world():
        return [payload], [0] * size
    group = host_group(group)
    digest = hashlib.sha256(payload).digest() + len(payload).to_bytes(8, "little")
    gathered = all_gather_equal(tensor_of_bytes(digest), group).view(size, len(digest))
    digests = [bytes(row.numpy()) for row in gathered]
    senders: dict[bytes, int] = {}
    for rank, other in enumerate(digests):
        senders.setdefault(other, rank)
    lengths = [int.from_bytes(other[-8:], "little") for other in senders]
    sender_of_ours = senders[digest]
    if len(senders) == 1:
        return [payload], [0] * size
    if len(senders) <= _MAX_BROADCASTS:
        payloads = []
        for sender, length in zip(senders.values(), lengths, strict=True):
            raw = payload if sender == sender_of_ours else bytes(length)
            buffer = tensor_of_bytes(raw).to(collective_device(group))
            broadcast([buffer], group, source=sender)
            payloads.append(bytes(buffer.cpu().numpy()))
    else:
        padded = tensor_of_bytes(payload + bytes(max(lengths) - len(payload)))
        rows = all_gather_equal(padded, group).view(size, -1)
        payloads = [
            bytes(rows[sender, :length].numpy()) for sender, length in zip(senders.values(), lengths, strict=True)
        ]
    order = {other: index for index, other in enumerate(senders)}
    return payloads, [order[other] for other in digests]


def tensor_of_bytes(content: bytes) -> torch.Tensor:
    """Return the bytes as a new tensor of dtype uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
