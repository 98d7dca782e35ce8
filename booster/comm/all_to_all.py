"""All-to-all of equal or uneven blocks, blocking or asynchronous.

On the CPU it uses shared memory if the group's ranks share a host, see `booster.comm.shared_memory`, else the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from booster.kernels.shared_memory import SharedMemory

from .collective_op import start_op
from .collectives import group_rank, group_size
from .shared_memory import PendingWork

# Shared memory exchanges blocks of equal length. Uneven ones are exchanged in rounds: each moves the next elements of
# every block through a small buffer of equal blocks, where shorter ones leave a gap. The number of rounds must be equal
# on all ranks, so each has to be given the size of the largest block between any two ranks.
_ROUND_BUFFER_BYTES = 2**21  # of each of the two buffers: both and shared memory's buffers fit a processor's caches


class AllToAll:
    """All-to-all in flight, started by `start_all_to_all`."""

    def __init__(self, output: torch.Tensor, wait: Callable[[], object] | None = None) -> None:
        self._output = output
        self._wait = wait

    def wait(self) -> torch.Tensor:
        """Wait until the output is filled, and return it. The payload may be changed then."""
        if self._wait is not None:
            self._wait()
            self._wait = None  # frees the payload
        return self._output


def start_all_to_all(
    output: torch.Tensor,
    payload: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    output_sizes: Sequence[int] | None = None,
    payload_sizes: Sequence[int] | None = None,
    largest_size: int | None = None,
) -> AllToAll:
    """Start to send block r of the payload to rank r, and to receive block r of the output from it.

    The P blocks are equal, or have the sizes of the last three arguments, which are given together or omitted, alike on
    all ranks.

    Args:
        output: Contiguous tensor of the payload's dtype on the backend's device, not overlapping with it, and of the
            payload's shape for equal blocks. It must not be accessed until `wait` returns.
        payload: Contiguous tensor, not to be changed until `wait` returns. For equal blocks dim 0 is divisible by the
            number of ranks.
        group: Process group, optional; defaults to the world.
        output_sizes: Number of elements from each rank.
        payload_sizes: Number of elements to each rank.
        largest_size: Size of the largest block between any two ranks; equal on all ranks.

    Collective: every rank of the group must call it, with matching sizes and one dtype.
    """
    size, rank = group_size(group), group_rank(group)
    sizes: tuple[list[int], list[int], int] | None = None
    if output_sizes is not None and payload_sizes is not None and largest_size is not None:
        _check_uneven_blocks(output, output_sizes, largest_size, size, payload.dtype)
        _check_uneven_blocks(payload, payload_sizes, largest_size, size, payload.dtype)
        sizes = list(output_sizes), list(payload_sizes), largest_size
    elif output_sizes is None and payload_sizes is None and largest_size is None:
        _check_equal_blocks(output, payload, size)
    else:
        raise AssertionError("output_sizes, payload_sizes and largest_size go together")
    if size == 1:
        output.detach().copy_(payload.detach())
        return AllToAll(output)
    target, source = output.detach(), payload.detach()
    if sizes is None:
        sent = received = (size - 1) * payload.nbytes // size
    else:
        target, source = target.view(-1), source.view(-1)
        received, sent = ((sum(blocks) - blocks[rank]) * payload.itemsize for blocks in sizes[:2])
    operation = start_op("all_to_all", group, sent=sent, received=received)
    group_memory = operation.memory_for(payload)
    if group_memory is not None:
        exchange = partial(_all_to_all_in_memory, group_memory.memory, target, source, sizes, operation.number)
        publish = None
        if sizes is None:
            publish = partial(group_memory.memory.all_to_all, target, source, operation.number, only_publishes=True)
        return AllToAll(output, PendingWork(group_memory, operation.ending, exchange, publish).wait)
    with operation.translate_errors():
        output_splits, payload_splits, _ = sizes or (None, None, 0)
        work = dist.all_to_all_single(target, source, output_splits, payload_splits, group=group, async_op=True)
    return AllToAll(output, partial(operation.wait, work))


def all_to_all_single(
    output: torch.Tensor,
    payload: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    output_sizes: Sequence[int] | None = None,
    payload_sizes: Sequence[int] | None = None,
    largest_size: int | None = None,
) -> None:
    """Do what `start_all_to_all` does, with the same arguments, and wait. Collective."""
    started = start_all_to_all(
        output,
        payload,
        group,
        output_sizes=output_sizes,
        payload_sizes=payload_sizes,
        largest_size=largest_size,
    )
    started.wait()


def _all_to_all_in_memory(
    memory: SharedMemory,
    output: torch.Tensor,
    payload: torch.Tensor,
    sizes: tuple[list[int], list[int], int] | None,
    number: int,
) -> None:
    if sizes is None:
        memory.all_to_all(output, payload, number)
        return
    output_sizes, payload_sizes, largest_size = sizes
    _all_to_all_in_rounds(memory, output.split(output_sizes), payload.split(payload_sizes), largest_size, number)


def _all_to_all_in_rounds(
    memory: SharedMemory,
    incoming: Sequence[torch.Tensor],
    outgoing: Sequence[torch.Tensor],
    largest_size: int,
    number: int,
) -> None:
    size, like = len(outgoing), outgoing[0]
    stride = min(largest_size, max(_ROUND_BUFFER_BYTES // (size * like.itemsize), 1))
    send_buffer, recv_buffer = like.new_zeros(size * stride), like.new_empty(size * stride)
    for start in range(0, largest_size, max(stride, 1)):
        length = min(stride, largest_size - start)
        sources, targets = (buffer[: size * length].view(size, length) for buffer in (send_buffer, recv_buffer))
        for source, block in zip(sources, outgoing, strict=True):
            elements = block[start : start + length]
            source[: elements.numel()].copy_(elements)
        memory.all_to_all(targets, sources, number)
        for target, block in zip(targets, incoming, strict=True):
            elements = block[start : start + length]
            elements.copy_(target[: elements.numel()])


def _check_equal_blocks(output: torch.Tensor, payload: torch.Tensor, size: int) -> None:
    is_divisible = payload.dim() > 0 and payload.shape[0] % size == 0
    is_alike = output.shape == payload.shape and output.dtype == payload.dtype and output.device == payload.device
    if not (is_divisible and is_alike and output.is_contiguous() and payload.is_contiguous()):
        raise AssertionError(
            f"{payload.dtype} of shape {tuple(payload.shape)} and stride {payload.stride()} is not {size} equal shards"
            f" for {output.dtype} of shape {tuple(output.shape)} and stride {output.stride()}"
        )


def _check_uneven_blocks(
    tensor: torch.Tensor, sizes: Sequence[int], largest_size: int, num_ranks: int, dtype: torch.dtype
) -> None:
    is_alike = tensor.is_contiguous() and tensor.numel() == sum(sizes) and tensor.dtype == dtype
    if not is_alike or len(sizes) != num_ranks or not 0 <= min(sizes) <= max(sizes) <= largest_size:
        raise AssertionError(
            f"{tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not {num_ranks} flat shards"
            f" of {dtype} of sizes {list(sizes)}, of which none is larger than {largest_size}"
        )
