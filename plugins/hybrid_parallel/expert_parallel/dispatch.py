"""Dispatch of tokens to the ranks of their experts and back, with gradients.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", ICLR 2021
(arXiv:2006.16668); without drops as Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts",
MLSys 2023 (arXiv:2211.15841).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from booster.comm import (
    AllToAll,
    all_gather_equal,
    all_reduce_max,
    group_rank,
    group_size,
    host_value,
    is_fake_world,
    start_all_to_all,
)
from booster.moe.routers import expert_capacity

# Note [Dispatch]
# A *row* is one of the k experts of a token. A rank sends the rows of every expert to the rank that holds it, in the
# order of the experts and of the tokens of each, so that the rows from one rank arrive by expert. The numbers of rows
# are exchanged before: every rank gets the numbers of all. An expert index outside of the experts, which routers give
# to tokens that are dropped, sends no row; its part of the output is zero.
# With a capacity every rank sends equally many rows to every expert, so that no numbers are exchanged and the host does
# not wait: the first ones of an expert with more, and empty rows with the weight zero for one with fewer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Number of rows that a rank sends to each expert (Lepikhin et al., 2021).

    Attributes:
        factor: Multiple of the rows that each expert had if all had equally many.
        minimum: Smallest number of rows.
        drops: If True, further rows are dropped; if False, the number is that of the expert and rank with the most.
    """

    factor: float
    minimum: int
    drops: bool

    def rows(self, num_rows: int, num_experts: int) -> int:
        """Return the capacity for a number of rows."""
        return expert_capacity(num_rows, num_experts, self.factor, self.minimum)


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Where the rows of a batch go; see Note [Dispatch].

    Attributes:
        group: Ranks that share the experts.
        num_tokens: Number of this rank's tokens.
        top_k: Number of experts per token.
        order: This rank's rows that are sent, in the order in which they are sent; the number of its rows for an empty
            one.
        counts: Number of rows by source rank and expert, on the host.
        bounds: First expert of each rank, and their number at the end.
        own_counts: Number of this rank's rows that have each expert, also of those that are dropped; of shape
            (experts,), on the device.
        is_padded: Whether some rows may be empty.
    """

    group: dist.ProcessGroup | None
    num_tokens: int
    top_k: int
    order: torch.Tensor
    counts: Sequence[Sequence[int]]
    bounds: Sequence[int]
    own_counts: torch.Tensor
    is_padded: bool = False

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows."""
        return self.num_tokens * self.top_k

    @property
    def sent(self) -> list[int]:
        """Number of rows to each rank."""
        return self._between[group_rank(self.group)]

    @property
    def received(self) -> list[int]:
        """Number of rows from each rank."""
        rank = group_rank(self.group)
        return [row[rank] for row in self._between]

    @property
    def largest(self) -> int:
        """Largest number of rows between any two ranks."""
        return max(map(max, self._between))

    @property
    def is_even(self) -> bool:
        """Whether equally many rows go from every rank to every other."""
        counts = set(itertools.chain.from_iterable(self._between))
        return len(counts) == 1 and counts != {0}

    @property
    def kept_counts(self) -> torch.Tensor:
        """Number of this rank's rows that are sent to each expert, of shape (experts,), on the device."""
        return self.own_counts.clamp(max=self.counts[0][0]) if self.is_padded else self.own_counts

    def local_index(self, device: torch.device) -> torch.Tensor:
        """Return the index among this rank's experts of each row that it receives, of shape (rows,)."""
        own = self._own_counts
        experts = torch.arange(len(own[0]), device=device).repeat(len(own))
        repeats = torch.tensor([count for counts in own for count in counts], device=device)
        return experts.repeat_interleave(repeats, output_size=sum(self.received))

    @property
    def received_by_expert(self) -> list[int]:
        """Number of rows that this rank receives, by its experts."""
        return [sum(counts) for counts in zip(*self._own_counts, strict=True)]

    @property
    def _own_counts(self) -> list[Sequence[int]]:
        """Number of rows by source rank and expert of this rank."""
        rank = group_rank(self.group)
        return [counts[self.bounds[rank] : self.bounds[rank + 1]] for counts in self.counts]

    @functools.cached_property
    def _between(self) -> list[list[int]]:
        """Number of rows by source and target rank."""
        return [[sum(row[start:stop]) for start, stop in itertools.pairwise(self.bounds)] for row in self.counts]


@torch.no_grad()
def plan_dispatch(
    index: torch.Tensor,
    bounds: Sequence[int],
    group: dist.ProcessGroup | None,
    capacity: Capacity | None = None,
) -> Dispatch:
    """Sort a batch's rows by expert and exchange their numbers.

    Args:
        index: Experts of every token, of shape (tokens, k).
        bounds: First expert of each rank, and the number of experts at the end.
        group: Ranks that share the experts.
        capacity: Number of rows for each expert, optional; by default as many as there are.

    Collective: yes, except with a capacity that drops rows. On an accelerator the host then waits for the numbers,
    which the sizes of the messages depend on.
    """
    num_experts, num_ranks, rows = bounds[-1], group_size(group), index.reshape(-1)
    rows = torch.where((rows >= 0) & (rows < num_experts), rows, num_experts)
    order = torch.argsort(rows, stable=True)
    own = rows.new_zeros(num_experts + 1).scatter_add_(0, rows, torch.ones_like(rows))[:num_experts]
    if capacity is not None:
        length = capacity.rows(len(rows), num_experts)
        if not capacity.drops:
            largest = own.max().reshape(1)
            length = max(length, int(host_value(all_reduce_max(largest, group), fake=length)))
        order, counts = _with_capacity(order, own, length), [[length] * num_experts] * num_ranks
    elif is_fake_world():  # indices without values: as many rows for every expert
        base, rest = divmod(rows.numel(), num_experts)
        counts = [[base + (expert < rest) for expert in range(num_experts)]] * num_ranks
    else:
        counts = all_gather_equal(own.contiguous(), group).view(-1, num_experts).tolist()
        order = order[: sum(counts[group_rank(group)])]
    return Dispatch(
        group=group,
        num_tokens=index.shape[0],
        top_k=index.shape[1],
        order=order,
        counts=counts,
        bounds=bounds,
        own_counts=own,
        is_padded=capacity is not None,
    )


def _with_capacity(order: torch.Tensor, counts: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` rows of each expert, and the number of rows where it has fewer."""
    num_rows, places = len(order), torch.arange(length, device=order.device)
    starts = counts.cumsum(0) - counts
    sources = (starts[:, None] + places).clamp(max=max(num_rows - 1, 0))
    found = order[sources] if num_rows else sources
    return torch.where(places < counts[:, None], found, num_rows).view(-1)


@dataclass(slots=True, eq=False)
class _Transfer:
    """Messages of one dispatch in one direction that are in flight, and those of their gradients in backward."""

    dispatch: Dispatch
    messages: Sequence[AllToAll] = ()

    def wait(self) -> list[torch.Tensor]:
        messages, self.messages = self.messages, ()
        return [message.wait() for message in messages]


def start_send_tokens(
    tokens: torch.Tensor, weights: torch.Tensor, dispatch: Dispatch
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Start to send each row to the rank of its expert, and return the function that waits for the messages.

    What is computed before the wait overlaps with them; its backward overlaps with those of the gradients.

    Args:
        tokens: This rank's tokens, of shape (tokens, features).
        weights: Weights of the experts, of shape (tokens, k).
        dispatch: Where the rows go.

    Returns:
        Function that waits, and returns the received rows and their weights, of shapes (rows, features) and (rows,).

    Collective: yes, and its backward.
    """
    transfer = _Transfer(dispatch)
    marker = _StartSend.apply(tokens, weights, transfer)  # type: ignore[no-untyped-call]
    return functools.partial(_FinishSend.apply, marker, transfer)


def start_return_tokens(rows: torch.Tensor, dispatch: Dispatch) -> Callable[[], torch.Tensor]:
    """Start to send the experts' outputs back to the ranks of their tokens; see `start_send_tokens` for the overlap.

    Args:
        rows: Outputs of the received rows in the same order, of shape (rows, features).
        dispatch: As for `start_send_tokens`.

    Returns:
        Function that waits, and returns the sum of the outputs of each token, of shape (tokens, features), in their
        dtype.

    Collective: yes, and its backward.
    """
    transfer = _Transfer(dispatch)
    marker = _StartReturn.apply(rows, transfer)  # type: ignore[no-untyped-call]
    return functools.partial(_FinishReturn.apply, marker, transfer)


# Note [Two nodes]
# Each direction has two autograd nodes: one starts the messages and one waits for them. In backward the second one
# starts the messages of the gradients, and the first one waits. Autograd runs nodes in the reverse order of their
# creation, so that what was computed between the two in forward runs between them in backward. The tensor between them
# is an empty one: autograd may read gradients, and those in flight have no values yet.


class _StartSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer, dispatch = transfer, transfer.dispatch
        own_weights = _take(weights.reshape(-1), dispatch.order, dispatch)
        transfer.messages = _to_experts(_rows_of(tokens, dispatch), dispatch), _to_experts(own_weights, dispatch)
        return tokens.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, marker: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dispatch: Dispatch = ctx.transfer.dispatch
        rows, row_weights = ctx.transfer.wait()
        weights = _placed(row_weights, dispatch).view(dispatch.num_tokens, dispatch.top_k)
        return _sum_rows(rows, dispatch), weights, None


class _FinishSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: torch.Tensor, transfer: _Transfer) -> tuple[torch.Tensor, ...]:
        ctx.transfer = transfer
        return tuple(transfer.wait())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, weight_grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dispatch: Dispatch = ctx.transfer.dispatch
        ctx.transfer.messages = _from_experts(grad, dispatch), _from_experts(weight_grad, dispatch)
        return grad.new_empty(0), None


class _StartReturn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.messages = (_from_experts(rows, transfer.dispatch),)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, marker: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.transfer.wait()[0], None


class _FinishReturn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return _sum_rows(transfer.wait()[0], transfer.dispatch)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dispatch: Dispatch = ctx.transfer.dispatch
        ctx.transfer.messages = (_to_experts(_rows_of(grad, dispatch), dispatch),)
        return grad.new_empty(0), None


def _rows_of(tokens: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Return the rows that are sent, zero for an empty one."""
    return _take(tokens, dispatch.order // dispatch.top_k, dispatch)


def _take(values: torch.Tensor, index: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    if dispatch.is_padded:
        values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    return values[index]


def _placed(rows: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Return all of this rank's rows in the order of its tokens, zero for one that was not sent."""
    is_complete = not dispatch.is_padded and len(dispatch.order) == dispatch.num_rows
    placed = (rows.new_empty if is_complete else rows.new_zeros)(
        dispatch.num_rows + dispatch.is_padded, *rows.shape[1:]
    )
    return placed.index_copy_(0, dispatch.order, rows)[: dispatch.num_rows]


def _sum_rows(rows: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Return the sum of each token's rows. Not by index_add_, whose order of sums is not fixed on an accelerator."""
    return _placed(rows, dispatch).view(dispatch.num_tokens, dispatch.top_k, *rows.shape[1:]).sum(1)


def _to_experts(rows: torch.Tensor, dispatch: Dispatch) -> AllToAll:
    return _start_exchange(rows, dispatch, dispatch.sent, dispatch.received)


def _from_experts(rows: torch.Tensor, dispatch: Dispatch) -> AllToAll:
    return _start_exchange(rows, dispatch, dispatch.received, dispatch.sent)


def _start_exchange(
    rows: torch.Tensor, dispatch: Dispatch, outgoing: Sequence[int], incoming: Sequence[int]
) -> AllToAll:
    width = rows.shape[1:].numel()
    payload = rows.contiguous()
    if payload.view(-1).stride(0) != 1:  # an expanded gradient of one element counts as contiguous
        payload = payload.clone(memory_format=torch.contiguous_format)
    output = rows.new_empty(sum(incoming), *rows.shape[1:])
    if dispatch.is_even:
        return start_all_to_all(output, payload, dispatch.group)
    return start_all_to_all(
        output,
        payload,
        dispatch.group,
        output_sizes=[width * count for count in incoming],
        payload_sizes=[width * count for count in outgoing],
        largest_size=width * dispatch.largest,
    )
