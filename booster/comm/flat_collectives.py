"""Asynchronous reduce-scatter and all-gather of flat buffers, without copies, several in flight at a time.

On the CPU they use shared memory if the group's ranks share a host, see `booster.comm.shared_memory`, and else
point-to-point messages: gloo's reduce-scatter is an all-reduce whose slice is kept, which sends twice the bytes and
rounds more often, and its all-gather copies through internal buffers. On other devices they are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from booster.comm.collectives import group_rank, group_size
from booster.comm.imagined import are_others_imagined
from booster.comm.operation import Operation, begin
from booster.comm.shared_memory import GroupMemory
from booster.comm.started import Started
from booster.kernels.shared_memory import can_reduce

__all__ = ["AllGather", "ReduceScatter", "start_all_gather", "start_reduce_scatter"]

# Note [Pieces]
# A flat buffer over P ranks is P equal shards; rank r of the group owns shard r. Rank r sends its copy of shard j to
# rank j, and receives P - 1 copies of its shard: (P-1)/P of the buffer each way, the theoretical minimum. The copies
# are summed here, 16-bit ones in fp32, in an order that depends on the rank alone: its own first, then those of rank r
# + 1, r + 2, ... (mod P). Equal numbers give equal bits, whatever the order of arrival, and through shared memory.
# Every operation has its own tags, counted alike on all ranks, so that no message matches another operation: gloo
# aborts the process if a message is longer than its buffer.

# Elements summed at a time: values converted to fp32 stay in the cache. Fewer cost more calls than they save misses.
_BLOCK_NUMEL = 2**18
_LOW_PRECISION = (torch.float16, torch.bfloat16)

# torch 2.13 renamed both and warns at each call of the old names.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ReduceScatter:
    """Reduce-scatter in flight, started by `start_reduce_scatter`."""

    def __init__(
        self,
        own: torch.Tensor,
        finish: Callable[[torch.Tensor, bool], None],
        aim: Callable[[torch.Tensor, bool], None] | None = None,
    ) -> None:
        self._own = own
        self._finish = finish
        self._aim = aim

    def aim(self, output: torch.Tensor, *, accumulate: bool) -> None:
        """Set the arguments of the later `finish`, so that a sum that is ready before it needs no buffer.

        Args:
            output: Output of `finish`, not the local shard of the payload. Undefined until `finish` returns.
            accumulate: If True, add to `output`.
        """
        _require_room(output, self._own)
        if self._aim is not None:
            self._aim(output.detach(), accumulate)

    def finish(self, output: torch.Tensor, *, accumulate: bool) -> None:
        """Wait, then set `output` to the sum over the ranks of the local shard, or add that sum to it. Called once.

        Args:
            output: Tensor of a shard's size, of the payload's dtype or fp32; may be the local shard of the payload.
            accumulate: If True, add to `output`.

        Raises:
            RankFailedError: A rank is lost or too late; the message names it.
        """
        _require_room(output, self._own)
        self._finish(output.detach(), accumulate)


class AllGather:
    """All-gather in flight, started by `start_all_gather`."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until all shards are in the buffer, and the local one may be changed.

        Raises:
            RankFailedError: A rank is lost or too late; the message names it.
        """
        self._wait()


class Messages:
    """Messages in flight of an operation; none in a group of one rank."""

    def __init__(self, operation: Operation | None = None, works: Sequence[dist.Work] = ()) -> None:
        self._operation = operation
        self._works = works

    def wait(self) -> None:
        if self._operation is not None:
            for work in self._works:
                self._operation.wait(work)
        self._works = ()


def start_reduce_scatter(
    payload: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    received: torch.Tensor | Callable[[], torch.Tensor] | None = None,
) -> ReduceScatter:
    """Start the reduce-scatter of a flat buffer; see Note [Pieces].

    Args:
        payload: 1-D contiguous tensor of one equal shard per rank. It must not be changed until `finish` returns; on
            other devices than the CPU the local shard is overwritten.
        group: Process group, optional; defaults to the world.
        received: Receive buffer of P-1 shards of the payload's dtype, or a function that returns it, called only if
            messages are sent; optional, allocated by default.

    Collective: every rank of the group must call it, with equally many elements of the same dtype.
    """
    size, rank = group_size(group), group_rank(group)
    pieces = _pieces(payload, size)
    own = pieces[rank]
    if size == 1:
        return ReduceScatter(own, partial(_sum_received, Messages(), own, ()))
    if isinstance(received, torch.Tensor):
        _require_scratch(received, own, size - 1)
    volume = (size - 1) * own.nbytes
    operation = begin("reduce_scatter", group, sent=volume, received=volume)
    if not _goes_by_messages(payload):
        with operation.failures_named():
            work = _reduce_scatter_single(own, payload.detach(), group=group, async_op=True)
        return ReduceScatter(own, partial(_sum_received, Messages(operation, (work,)), own, ()))
    home = operation.memory_for(payload) if can_reduce(payload.dtype) else None
    if home is not None:
        shared = SharedSum(home, operation, payload.detach(), own)
        return ReduceScatter(own, shared.finish, shared.aim)
    copies = _room(received, own, size - 1)
    messages = _exchange(operation, pieces, dict(zip(_others(rank, size), copies, strict=True)))
    return ReduceScatter(own, partial(_sum_received, messages, own, copies))


def start_all_gather(buffer: torch.Tensor, group: dist.ProcessGroup | None = None) -> AllGather:
    """Start the all-gather of a flat buffer; see Note [Pieces].

    Args:
        buffer: 1-D contiguous tensor of one equal shard per rank, whose local shard is filled. The others are
            overwritten. It must not be accessed until `wait` returns.
        group: Process group, optional; defaults to the world.

    Collective: every rank of the group must call it, with equally many elements of the same dtype.
    """
    size, rank = group_size(group), group_rank(group)
    pieces = _pieces(buffer, size)
    own = pieces[rank]
    if size == 1:
        return AllGather(Messages().wait)
    volume = (size - 1) * own.nbytes
    operation = begin("all_gather", group, sent=volume, received=volume)
    if not _goes_by_messages(buffer):
        with operation.failures_named():
            work = _all_gather_single(buffer.detach(), own, group=group, async_op=True)
        return AllGather(Messages(operation, (work,)).wait)
    home = operation.memory_for(buffer)
    if home is not None:
        gather = partial(home.memory.all_gather, buffer.detach(), own, operation.number)
        return AllGather(Started(home, operation, gather).finish)
    incoming = {other: pieces[other] for other in _others(rank, size)}
    return AllGather(_exchange(operation, [own] * size, incoming).wait)


class SharedSum:
    """Reduce-scatter through shared memory, directly into its output, unless it runs before that is known."""

    def __init__(self, home: GroupMemory, operation: Operation, payload: torch.Tensor, own: torch.Tensor) -> None:
        self._memory, self._number = home.memory, operation.number
        self._payload, self._own = payload, own
        self._output: torch.Tensor | None = None
        self._accumulates = False
        self._early_sum: torch.Tensor | None = None
        self._started = Started(home, operation, self._perform)

    def finish(self, output: torch.Tensor, accumulates: bool) -> None:
        """See `ReduceScatter.finish`."""
        self.aim(output, accumulates)
        self._started.finish()
        if self._early_sum is not None:
            _sum_into(output, self._early_sum, (), accumulates)

    def aim(self, output: torch.Tensor, accumulates: bool) -> None:
        """See `ReduceScatter.aim`."""
        with self._started.lock:
            if not self._started.is_performed:
                self._output, self._accumulates = output, accumulates

    def _perform(self) -> None:
        output = self._output
        if output is None:
            output = self._early_sum = torch.empty_like(self._own, dtype=_sum_dtype(self._own))
        self._memory.reduce_scatter(self._payload, output, self._number, accumulate=self._accumulates)
        del self._payload, self._own


def _goes_by_messages(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" or are_others_imagined()


def _pieces(buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
    numel, rest = divmod(buffer.numel(), size)
    if buffer.dim() != 1 or rest or not buffer.is_contiguous():
        raise AssertionError(
            f"a buffer of shape {tuple(buffer.shape)} and stride {buffer.stride()} is not {size} equal flat shards"
        )
    return [buffer.detach()[index * numel : (index + 1) * numel] for index in range(size)]


def _room(
    received: torch.Tensor | Callable[[], torch.Tensor] | None, own: torch.Tensor, num_copies: int
) -> list[torch.Tensor]:
    if received is None:
        received = own.new_empty(num_copies * own.numel())
    elif not isinstance(received, torch.Tensor):
        received = received()
    _require_scratch(received, own, num_copies)
    return _pieces(received, num_copies)


def _require_scratch(received: torch.Tensor, own: torch.Tensor, num_copies: int) -> None:
    if received.numel() != num_copies * own.numel() or received.dtype != own.dtype:
        raise AssertionError(
            f"{received.numel()} {received.dtype} cannot hold {num_copies} copies of {own.numel()} {own.dtype}"
        )


def _others(rank: int, size: int) -> list[int]:
    return [(rank + distance) % size for distance in range(1, size)]


def _exchange(operation: Operation, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Messages:
    """Start a message to and from each other rank; receives are waited for first."""
    receives = [operation.receive_from(piece, other, operation.tag) for other, piece in incoming.items()]
    # In reverse order of the receives: rank r sends first to r - 1, which waits for r first.
    sends = [operation.send_to(outgoing[other], other, operation.tag) for other in reversed(list(incoming))]
    return Messages(operation, receives + sends)


def _require_room(output: torch.Tensor, own: torch.Tensor) -> None:
    if output.numel() != own.numel() or output.dtype not in (own.dtype, torch.float32):
        raise AssertionError(f"a sum of {own.numel()} {own.dtype} can't go into {output.numel()} {output.dtype}")


def _sum_dtype(own: torch.Tensor) -> torch.dtype:
    return torch.float32 if own.dtype in _LOW_PRECISION else own.dtype


def _sum_received(
    messages: Messages, own: torch.Tensor, received: Sequence[torch.Tensor], output: torch.Tensor, accumulate: bool
) -> None:
    messages.wait()
    _sum_into(output, own, received, accumulate)


def _sum_into(output: torch.Tensor, own: torch.Tensor, received: Sequence[torch.Tensor], accumulate: bool) -> None:
    if own.device.type != "cpu":  # the backend has summed into `own`
        _ = output.add_(own) if accumulate else output.copy_(own)
        return
    blocks = zip(output.split(_BLOCK_NUMEL), _terms(own, received), strict=True)
    if own.dtype == output.dtype and own.dtype not in _LOW_PRECISION and not accumulate:
        for target, terms in blocks:
            _sum_directly(target, terms)
        return
    total, term = own.new_empty((2, min(own.numel(), _BLOCK_NUMEL)), dtype=_sum_dtype(own))
    for target, terms in blocks:
        all_terms = (*terms, target) if accumulate else terms
        target.copy_(_sum_widened(all_terms, total[: target.numel()], term[: target.numel()]))


def _terms(own: torch.Tensor, received: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(part.split(_BLOCK_NUMEL) for part in (own, *received)), strict=True)


def _sum_directly(target: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    first, *rest = terms
    if not rest:
        target.copy_(first)
        return
    torch.add(first, rest[0], out=target)
    for term in rest[1:]:
        target.add_(term)


def _sum_widened(terms: Sequence[torch.Tensor], total: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return the sum in `total`. Converting by copy_ is fast; torch's add of two dtypes allocates."""
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term if term.dtype == total.dtype else scratch.copy_(term))
    return total
