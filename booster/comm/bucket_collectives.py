"""Asynchronous reduce-scatter and all-gather of flat buffers, without copies, several in flight at a time.

On the CPU they use shared memory if the group's ranks share a host, see `booster.comm.shared_memory`, and else
point-to-point messages: gloo's reduce-scatter is an all-reduce whose slice is kept, which sends twice the bytes and
rounds more often, and its all-gather copies through internal buffers. On other devices they are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from booster.kernels.shared_memory import can_reduce

from .collective_op import CollectiveOp, start_op
from .collectives import LOW_PRECISION, group_rank, group_size, sum_dtype, wait_all
from .fake import is_fake_world
from .shared_memory import GroupMemory, PendingWork, all_gather_single

# Note [Shards]
# A flat buffer over P ranks is P equal shards; rank r of the group owns shard r. Rank r sends its copy of shard j to
# rank j, and receives P - 1 copies of its shard: (P-1)/P of the buffer each way, the theoretical minimum. The copies
# are summed here, 16-bit ones in fp32, in an order that depends on the rank alone: its own first, then those of rank r
# + 1, r + 2, ... (mod P). Equal numbers give equal bits, whatever the order of arrival, and through shared memory.
# Every operation has its own tags, counted alike on all ranks, so that no message matches another operation: gloo
# aborts the process if a message is longer than its buffer.

# Elements summed at a time: values converted to fp32 stay in the cache. Fewer cost more calls than they save misses.
_BLOCK_NUMEL = 2**18

# torch 2.13 renamed it and warns at each call of the old name.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ReduceScatter:
    """Reduce-scatter in flight, started by `start_reduce_scatter`."""

    def __init__(
        self,
        local_shard: torch.Tensor,
        wait: Callable[[torch.Tensor, bool], None],
        set_output: Callable[[torch.Tensor, bool], None] | None = None,
    ) -> None:
        self._local_shard = local_shard
        self._wait = wait
        self._set_output = set_output

    def set_output(self, output: torch.Tensor, *, accumulate: bool) -> None:
        """Set the arguments of the later `wait`, so that a sum that is ready before it needs no buffer.

        Args:
            output: Output of `wait`, not the local shard of the payload. Undefined until `wait` returns.
            accumulate: If True, add to `output`.
        """
        _check_output(output, self._local_shard)
        if self._set_output is not None:
            self._set_output(output.detach(), accumulate)

    def wait(self, output: torch.Tensor, *, accumulate: bool) -> None:
        """Wait, then set `output` to the sum over the ranks of the local shard, or add that sum to it. Called once.

        Args:
            output: Tensor of a shard's size, of the payload's dtype or fp32; may be the local shard of the payload.
            accumulate: If True, add to `output`.
        """
        _check_output(output, self._local_shard)
        self._wait(output.detach(), accumulate)


class _InFlight:
    """Collective in flight."""

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until the result is in the tensor, which may be changed then."""
        if self._wait is not None:
            self._wait()
            self._wait = None  # frees the messages


class AllGather(_InFlight):
    """All-gather in flight, started by `start_all_gather`."""


class AllReduce(_InFlight):
    """All-reduce in flight, started by `start_all_reduce`."""


def start_reduce_scatter(
    payload: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    received: torch.Tensor | Callable[[], torch.Tensor] | None = None,
) -> ReduceScatter:
    """Start the reduce-scatter of a flat buffer; see Note [Shards].

    Args:
        payload: 1-D contiguous tensor of one equal shard per rank. It must not be changed until `wait` returns; on
            other devices than the CPU the local shard is overwritten.
        group: Process group, optional; defaults to the world.
        received: Receive buffer of P-1 shards of the payload's dtype, or a function that returns it, called only if
            messages are sent; optional, allocated by default.

    Collective: every rank of the group must call it, with equally many elements of the same dtype.
    """
    size, rank = group_size(group), group_rank(group)
    shards = _shards(payload, size)
    local_shard = shards[rank]
    if size == 1:
        return ReduceScatter(local_shard, partial(_sum_into, local_shard, ()))
    if isinstance(received, torch.Tensor):
        _check_recv_buffer(received, local_shard, size - 1)
    volume = (size - 1) * local_shard.nbytes
    operation = start_op("reduce_scatter", group, sent=volume, received=volume)
    if not _use_p2p(payload):
        with operation.translate_errors():
            work = _reduce_scatter_single(local_shard, payload.detach(), group=group, async_op=True)
        return ReduceScatter(local_shard, partial(_sum_received, operation, [work], local_shard, ()))
    group_memory = operation.memory_for(payload) if can_reduce(payload.dtype) else None
    if group_memory is not None:
        shared = SharedMemoryReduceScatter(group_memory, operation, payload.detach(), local_shard)
        return ReduceScatter(local_shard, shared.wait, shared.set_output)
    copies = _recv_buffers(received, local_shard, size - 1)
    works = _exchange(operation, shards, copies, rank)
    return ReduceScatter(local_shard, partial(_sum_received, operation, works, local_shard, copies))


def start_all_gather(buffer: torch.Tensor, group: dist.ProcessGroup | None = None) -> AllGather:
    """Start the all-gather of a flat buffer; see Note [Shards].

    Args:
        buffer: 1-D contiguous tensor of one equal shard per rank, whose local shard is filled. The others are
            overwritten. It must not be accessed until `wait` returns.
        group: Process group, optional; defaults to the world.

    Collective: every rank of the group must call it, with equally many elements of the same dtype.
    """
    size, rank = group_size(group), group_rank(group)
    shards = _shards(buffer, size)
    local_shard = shards[rank]
    if size == 1:
        return AllGather()
    volume = (size - 1) * local_shard.nbytes
    operation = start_op("all_gather", group, sent=volume, received=volume)
    if not _use_p2p(buffer):
        with operation.translate_errors():
            work = all_gather_single(buffer.detach(), local_shard, group=group, async_op=True)
        return AllGather(partial(operation.wait, work))
    group_memory = operation.memory_for(buffer)
    if group_memory is not None:
        gather = partial(group_memory.memory.all_gather, buffer.detach(), local_shard, operation.number)
        publish = partial(gather, only_publishes=True)
        return AllGather(PendingWork(group_memory, operation.ending, gather, publish).wait)
    incoming = [*shards[rank + 1 :], *shards[:rank]]
    works = _exchange(operation, [local_shard] * size, incoming, rank)
    return AllGather(partial(wait_all, operation, works))


class SharedMemoryReduceScatter:
    """Reduce-scatter through shared memory, directly into its output, unless it runs before that is known."""

    def __init__(
        self, group_memory: GroupMemory, operation: CollectiveOp, payload: torch.Tensor, local_shard: torch.Tensor
    ) -> None:
        self._memory, self._number = group_memory.memory, operation.number
        self._payload, self._local_shard = payload, local_shard
        self._output: torch.Tensor | None = None
        self._accumulates = False
        self._early_sum: torch.Tensor | None = None
        self._work = PendingWork(group_memory, operation.ending, self._run, self._publish)

    def wait(self, output: torch.Tensor, accumulate: bool) -> None:
        self.set_output(output, accumulate)
        self._work.wait()
        if self._early_sum is not None:
            _sum_into(self._early_sum, (), output, accumulate)

    def set_output(self, output: torch.Tensor, accumulate: bool) -> None:
        with self._work.lock:
            if not self._work.is_done:
                self._output, self._accumulates = output, accumulate

    def _publish(self) -> None:
        self._memory.reduce_scatter(self._payload, self._local_shard, self._number, only_publishes=True)

    def _run(self) -> None:
        output = self._output
        if output is None:
            dtype = sum_dtype(self._local_shard.dtype)
            output = self._early_sum = torch.empty_like(self._local_shard, dtype=dtype)
        self._memory.reduce_scatter(self._payload, output, self._number, accumulate=self._accumulates)
        del self._payload, self._local_shard


def _use_p2p(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" or is_fake_world()


def _shards(buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
    numel, rest = divmod(buffer.numel(), size)
    if buffer.dim() != 1 or rest or not buffer.is_contiguous():
        raise AssertionError(
            f"a buffer of shape {tuple(buffer.shape)} and stride {buffer.stride()} is not {size} equal flat shards"
        )
    flat = buffer.detach()
    return list(flat.split(numel)) if numel else [flat] * size


def _recv_buffers(
    received: torch.Tensor | Callable[[], torch.Tensor] | None, local_shard: torch.Tensor, num_copies: int
) -> list[torch.Tensor]:
    if received is None:
        received = local_shard.new_empty(num_copies * local_shard.numel())
    elif not isinstance(received, torch.Tensor):
        received = received()
    _check_recv_buffer(received, local_shard, num_copies)
    return _shards(received, num_copies)


def _check_recv_buffer(received: torch.Tensor, local_shard: torch.Tensor, num_copies: int) -> None:
    if received.numel() != num_copies * local_shard.numel() or received.dtype != local_shard.dtype:
        raise AssertionError(
            f"{received.numel()} {received.dtype} cannot hold {num_copies} copies of {local_shard.numel()}"
            f" {local_shard.dtype}"
        )


def _exchange(
    operation: CollectiveOp, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], rank: int
) -> list[dist.Work]:
    """Start a message to and from each other rank; receives are waited for first.

    Args:
        operation: Operation of the messages.
        outgoing: Tensor for each rank of the group.
        incoming: Buffers for the messages of the following ranks r + 1, r + 2, ... (mod P), in this order.
        rank: Rank r of this process in the group.
    """
    size = len(outgoing)
    others = [(rank + distance) % size for distance in range(1, size)]
    receives = [
        operation.receive_from(shard, other, operation.tag) for shard, other in zip(incoming, others, strict=True)
    ]
    # In reverse order of the receives: rank r sends first to r - 1, which waits for r first.
    sends = [operation.send_to(outgoing[other], other, operation.tag) for other in reversed(others)]
    return receives + sends


def _check_output(output: torch.Tensor, local_shard: torch.Tensor) -> None:
    if output.numel() != local_shard.numel() or output.dtype not in (local_shard.dtype, torch.float32):
        raise AssertionError(
            f"a sum of {local_shard.numel()} {local_shard.dtype} can't go into {output.numel()} {output.dtype}"
        )


def _sum_received(
    operation: CollectiveOp,
    works: Sequence[dist.Work],
    local_shard: torch.Tensor,
    received: Sequence[torch.Tensor],
    output: torch.Tensor,
    accumulate: bool,
) -> None:
    wait_all(operation, works)
    _sum_into(local_shard, received, output, accumulate)


def _sum_into(
    local_shard: torch.Tensor, received: Sequence[torch.Tensor], output: torch.Tensor, accumulate: bool
) -> None:
    if local_shard.device.type != "cpu":  # the backend has summed into `local_shard`
        _ = output.add_(local_shard) if accumulate else output.copy_(local_shard)
        return
    parts: Sequence[torch.Tensor] = (output, local_shard, *received)
    if is_fake_world():  # all blocks take the same memory: one is enough
        parts = [part[:_BLOCK_NUMEL] for part in parts]
    targets, *terms_of_ranks = (part.split(_BLOCK_NUMEL) for part in parts)
    blocks = zip(targets, zip(*terms_of_ranks, strict=True), strict=True)
    if local_shard.dtype == output.dtype and local_shard.dtype not in LOW_PRECISION and not accumulate:
        for target, terms in blocks:
            _sum_directly(target, terms)
        return
    dtype = sum_dtype(local_shard.dtype)
    total, scratch = local_shard.new_empty((2, min(local_shard.numel(), _BLOCK_NUMEL)), dtype=dtype)
    for target, (first, *rest) in blocks:
        block_total, converted = total[: target.numel()], scratch[: target.numel()]
        block_total.copy_(first)
        for term in (*rest, target) if accumulate else rest:
            # Converting by copy_ is fast; torch's add of two dtypes allocates.
            block_total.add_(term if term.dtype == block_total.dtype else converted.copy_(term))
        target.copy_(block_total)


def _sum_directly(target: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    first, *rest = terms
    if not rest:
        target.copy_(first)
        return
    torch.add(first, rest[0], out=target)
    for term in rest[1:]:
        target.add_(term)


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> AllReduce:
    """Start the all-reduce of a tensor in place; 16-bit dtypes are summed in fp32 on the CPU.

    Args:
        tensor: Contiguous tensor on the backend's device. It must not be accessed until `wait` returns.
        group: Process group, optional; defaults to the world.

    Collective: every rank of the group must call it, with equally many elements of the same dtype.
    """
    size = group_size(group)
    if size == 1:
        return AllReduce()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not contiguous")
    volume = 2 * (size - 1) * tensor.nbytes // size
    operation = start_op("all_reduce", group, sent=volume, received=volume)
    group_memory = operation.memory_for(tensor) if can_reduce(tensor.dtype) else None
    if group_memory is not None:
        reduce = partial(group_memory.memory.all_reduce, tensor, "sum", operation.number)
        publish = partial(reduce, only_publishes=True)
        return AllReduce(PendingWork(group_memory, operation.ending, reduce, publish).wait)
    # gloo rounds a sum of 16-bit numbers after every addition
    is_widened = tensor.dtype in LOW_PRECISION and tensor.device.type == "cpu"
    total = tensor.float() if is_widened else tensor
    with operation.translate_errors():
        work = dist.all_reduce(total, dist.ReduceOp.SUM, group=group, async_op=True)

    def wait() -> None:
        operation.wait(work)
        if is_widened:
            tensor.copy_(total)

    return AllReduce(wait)
