"""Modules of experts that compute with this rank's experts for the tokens of all ranks that share them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import group_rank, group_size
from booster.core.opaque_operator import bind_handle, opaque_method
from booster.moe.discovery import DISPATCH_OBSERVERS, DispatchObservers, experts_in
from booster.plugins.hybrid_parallel.tensor_parallel.dynamic_class import mixin_forward

from .dispatch import Capacity, Dispatch, plan_dispatch, start_return_tokens, start_send_tokens
from .shared_experts import SharedExperts


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParallelGroup:
    """Ranks that share the experts.

    Attributes:
        group: The process group.
        size: Number of ranks.
        rank: This rank in the group.
        capacity: Number of rows for each expert, or None for as many as there are.
        loads: Rows of this rank's tokens that had each expert in the last forward, of shape (experts,), by name of the
            module.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int
    capacity: Capacity | None = None
    loads: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, capacity: Capacity | None = None) -> ExpertParallelGroup:
        """Return the description of a process group."""
        return cls(group, group_size(group), group_rank(group), capacity)

    def dispatch(
        self, index: torch.Tensor, bounds: Sequence[int], observed: DispatchObservers, *, has_unrouted: bool = False
    ) -> Dispatch:
        """Plan the dispatch of a module's rows, and record their number.

        Args:
            index: Experts of every token, of shape (tokens, k).
            bounds: First expert of each rank, and the number of experts at the end.
            observed: Observers of the module of experts.
            has_unrouted: Whether rows without an expert are no choice of a router, so that they are not dropped.

        Collective: as `plan_dispatch`.
        """
        dispatch = plan_dispatch(index, bounds, self.group, self.capacity)
        self.loads[observed.name] = dispatch.own_counts
        if observed.observers:
            kept = dispatch.kept_counts
            num_rows = dispatch.own_counts.sum() if has_unrouted else dispatch.num_rows
            for observer in observed.observers:
                observer(kept, num_rows - kept.sum())
        return dispatch

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallelGroup:
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Experts:
    """What the forward of a module of experts needs; see `make_expert_parallel`.

    If `is_stacked`, this rank has its own experts only; otherwise they are submodules, which keep their places.
    """

    observers: DispatchObservers
    ep_group: ExpertParallelGroup
    bounds: Sequence[int]
    is_stacked: bool
    arguments: Sequence[str]  # of the forward
    shared: SharedExperts | None

    def ordered(self, args: Sequence[torch.Tensor], named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the arguments of a call of the forward in the order of its parameters."""
        given = dict(zip(self.arguments, args, strict=False)) | named
        return [given[name] for name in self.arguments]

    def plan(self, index: torch.Tensor, *, has_unrouted: bool = False) -> Dispatch:
        return self.ep_group.dispatch(index, self.bounds, self.observers, has_unrouted=has_unrouted)

    def send(
        self, tokens: torch.Tensor, weights: torch.Tensor, dispatch: Dispatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows to their experts; shared experts that were called compute meanwhile."""
        wait = start_send_tokens(tokens, weights, dispatch)
        if self.shared is not None:
            self.shared.compute_deferred()
        return wait()


def make_expert_parallel(
    module: nn.Module,
    name: str,
    ep_group: ExpertParallelGroup,
    bounds: Sequence[int],
    *,
    is_stacked: bool,
    shared: SharedExperts | None = None,
) -> None:
    """Make a module of experts compute with this rank's experts, in place. Its parameters are already sharded.

    The module's own forward computes them, as it is: it gets the rows of this rank's experts, and their index among
    these if the parameters are stacked.

    Args:
        module: Module whose forward takes tokens, the experts of each token, and their weights, or only tokens that are
            sorted by expert and scaled.
        name: Its name in the model.
        ep_group: Ranks that share the experts.
        bounds: First expert of each rank, and the number of experts at the end.
        is_stacked: Whether the experts are rows of the module's parameters, otherwise submodules.
        shared: Shared experts that overlap with the messages, optional.

    Collective: no; the module's forward and backward are.
    """
    if is_stacked:
        for attribute in ("num_experts", "num_local_experts"):
            if getattr(module, attribute, None) == bounds[-1]:
                setattr(module, attribute, bounds[ep_group.rank + 1] - bounds[ep_group.rank])
    else:
        rank = ep_group.rank
        for number, (_, expert) in enumerate(experts_in(module)):
            if not bounds[rank] <= number < bounds[rank + 1]:
                mixin_forward(expert, _AbsentExpert, None)
    arguments = list(inspect.signature(module.forward).parameters)
    observers = DispatchObservers(name, bounds[-1])
    experts = _Experts(
        observers=observers, ep_group=ep_group, bounds=bounds, is_stacked=is_stacked, arguments=arguments, shared=shared
    )
    mixin_forward(module, _ExpertParallel, experts)
    bind_handle(module)
    module.__dict__[DISPATCH_OBSERVERS] = observers


class _AbsentExpert(nn.Module):
    """An expert of another rank, which some modules call with no tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 0:
            raise AssertionError(f"{len(tokens)} tokens came to an expert that is on another rank")
        return tokens


class _ExpertParallel(nn.Module):
    _split: _Experts

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        experts = self._split
        tokens, *routing = experts.ordered(args, named)
        wait_for_outputs = self._start(tokens, *routing)

        def wait() -> torch.Tensor:
            return wait_for_outputs().view(tokens.shape)

        return wait() if experts.shared is None else experts.shared.defer_outputs(wait, tokens)

    def traced_forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Return the outputs, in a graph of torch.compile, in which shared experts are computed before or after."""
        output: torch.Tensor = self._exchange(*self._split.ordered(args, named))
        return output

    def _start(self, tokens: torch.Tensor, *routing: torch.Tensor) -> Callable[[], torch.Tensor]:
        run = _run_routed if routing else _run_scaled
        return run(super().forward, self._split, tokens.flatten(0, -2), *routing)

    def _run_and_wait(self, tokens: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return self._start(tokens, *routing)().view(tokens.shape).to(tokens.dtype)

    _exchange = opaque_method(_run_and_wait, lambda tokens, *routing: tokens.new_empty(tokens.shape))


def _run_routed(
    forward: Any, experts: _Experts, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Callable[[], torch.Tensor]:
    is_one_hot = index.dim() == 3  # (tokens, 1, experts), as in Switch Transformers; a row of zeros drops a token
    if is_one_hot:
        flat = torch.where(index.any(-1), index.argmax(-1), experts.bounds[-1])
    else:
        flat = index.flatten(0, -2)
    dispatch = experts.plan(flat)
    rows, row_weights = experts.send(tokens, weights.view(flat.shape), dispatch)
    is_empty = len(rows) == 0
    local = dispatch.local_index(rows.device).view(-1, 1)
    connection = rows.sum() + row_weights.sum() if is_empty else None
    if is_empty and experts.is_stacked:
        # Stacked parameters have a gradient if any token has an expert, on whatever rank: a row without weight.
        rows, row_weights, local = rows.new_zeros(1, rows.shape[1]), row_weights.new_zeros(1), local.new_zeros(1, 1)
    if not experts.is_stacked:
        local = local + experts.bounds[experts.ep_group.rank]
    if is_one_hot:
        local = nn.functional.one_hot(local, index.shape[-1]).to(index.dtype)
    outputs = forward(rows, local, row_weights.view(-1, 1))
    if connection is not None:  # backward communicates with the other ranks
        outputs = outputs[:0] + outputs.sum() + connection
    return start_return_tokens(outputs, dispatch)


def _run_scaled(forward: Any, experts: _Experts, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Run experts whose input has a block of all tokens for each expert, scaled by its score, as in Llama 4.

    Only rows that are not zero are sent, which are k for a token: such experts, without biases, give zero for zero.
    """
    num_blocks = experts.bounds[-1]
    index = torch.arange(num_blocks, device=tokens.device).repeat_interleave(len(tokens) // num_blocks)
    index = torch.where((tokens != 0).any(-1), index, num_blocks).view(-1, 1)
    dispatch = experts.plan(index, has_unrouted=True)
    rows, weights = experts.send(tokens, tokens.new_ones(len(tokens), 1), dispatch)
    if len(rows) == 0:
        return start_return_tokens(rows + weights.sum(), dispatch)
    # The forward needs equally many rows for each expert: blocks are padded with zeros.
    local = dispatch.local_index(rows.device)
    received = dispatch.received_by_expert
    order, length = torch.argsort(local, stable=True), max(received)
    starts = torch.tensor([0, *received], device=local.device).cumsum(0)[:-1]
    in_block = torch.arange(len(local), device=local.device) - starts[local[order]]
    place = torch.empty_like(order).index_copy_(0, order, local[order] * length + in_block)
    blocks = rows.new_zeros(len(received) * length, *rows.shape[1:]).index_copy(0, place, rows)
    return start_return_tokens(forward(blocks)[place], dispatch)
