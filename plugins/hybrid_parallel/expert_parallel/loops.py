"""Blocks whose forward loops over a plain list of experts, which compute on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from booster.comm import all_gather_numbers
from booster.core.module_state import preserved_state
from booster.errors import ConfigError
from booster.moe.discovery import DISPATCH_OBSERVERS, DispatchObservers, experts_in
from booster.plugins.hybrid_parallel.tensor_parallel.dynamic_class import mixin_forward
from booster.pytree import map_tensors

from .dispatch import Dispatch, start_return_tokens, start_send_tokens
from .experts import ExpertParallelGroup

# Note [Two passes]
# Such a block routes tokens, calls one expert after another with its tokens, and adds up the outputs. Its forward runs
# twice, so that the tokens of all experts travel at once and the block's code stays as it is. In the first pass calls
# of experts only record their tokens and return zeros. Then the tokens are dispatched, and in the second pass the calls
# return the outputs. The tokens' gradients go through the first pass, those of all else through the second one. Both
# passes take the same random numbers, and what the first one changed in the block's modules is restored: buffers,
# attributes, and lists, dicts and sets in them.

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True, eq=False)
class _Call:
    """Call of an expert: its number and tokens, of shape (..., features)."""

    expert: int
    tokens: torch.Tensor


@dataclass(slots=True, eq=False)
class _Loop:
    """State of a block; for `bounds` see `ExpertPlan.bounds`."""

    observers: DispatchObservers
    ep_group: ExpertParallelGroup
    bounds: Sequence[int]
    own: list[_LoopedExpert] = field(default_factory=list)
    calls: list[_Call] | None = None  # while the first pass runs
    outputs: list[tuple[_Call, torch.Tensor]] | None = None  # while the second pass runs, the last call first


def make_loop_expert_parallel(
    model: nn.Module, name: str, ep_group: ExpertParallelGroup, bounds: Sequence[int]
) -> None:
    """Make a block that calls the experts of a list compute with those of all ranks, in place; see Note [Two passes].

    Args:
        model: Model that contains the block. Its parameters are already sharded.
        name: Name of the list or dict of experts.
        ep_group: Ranks that share the experts.
        bounds: First expert of each rank, and the number of experts at the end.

    Collective: no; the block's forward and backward are.
    """
    observers = DispatchObservers(name, bounds[-1])
    loop = _Loop(observers=observers, ep_group=ep_group, bounds=bounds)
    for number, (_, expert) in enumerate(experts_in(model.get_submodule(name))):
        mixin_forward(expert, _LoopedExpert, (loop, number))
        if bounds[ep_group.rank] <= number < bounds[ep_group.rank + 1]:
            loop.own.append(expert)  # type: ignore[arg-type]
    block = model.get_submodule(name.rpartition(".")[0])
    mixin_forward(block, _LoopingBlock, loop)
    block.__dict__[DISPATCH_OBSERVERS] = observers


class _LoopedExpert(nn.Module):
    _split: tuple[_Loop, int]

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        (loop, number), name = self._split, self._split[0].observers.name
        if args or kwargs:
            raise ConfigError(
                f"an expert of {name!r} was called with more than its tokens, which do not travel with them: pass"
                " tokens only, or use ep_size=1"
            )
        if loop.calls is not None:
            loop.calls.append(_Call(number, tokens))
            kind = tokens.device.type
            is_cast = torch.is_autocast_enabled(kind) and tokens.is_floating_point()
            return torch.zeros_like(tokens, dtype=torch.get_autocast_dtype(kind) if is_cast else None)
        call, output = loop.outputs.pop() if loop.outputs else (None, None)
        if call is None or output is None or (call.expert, call.tokens.shape) != (number, tokens.shape):
            raise ConfigError(
                f"expert {number} of {name!r} was called with tokens of shape {tuple(tokens.shape)} outside of its"
                " block's forward, or by a forward that does not call the same experts when it runs again: call experts"
                " in the forward of the module that holds their list, or use ep_size=1"
            )
        return output

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)  # type: ignore[no-any-return]


class _LoopingBlock(nn.Module):
    _split: _Loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loop = self._split
        calls = self._record(loop, args, kwargs)
        like = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
        returned = _compute(loop, calls, like)
        lengths = [call.tokens.shape[:-1].numel() for call in calls]
        outputs = [
            (call, rows.view(*call.tokens.shape[:-1], rows.shape[-1]))
            for call, rows in zip(calls, returned.split(lengths), strict=True)
        ]
        loop.outputs = outputs[::-1]
        try:
            output = super().forward(*args, **kwargs)
        finally:
            loop.outputs = None
        if sum(lengths) == 0:  # backward communicates with the other ranks
            output = map_tensors(lambda one: one + returned.sum() if one.is_floating_point() else one, output)
        return output

    def _record(self, loop: _Loop, args: Any, kwargs: Any) -> list[_Call]:
        """Run the first pass; return its calls of experts."""
        copies = map_tensors(torch.clone, (args, kwargs))  # the block may change its input in place
        calls = loop.calls = []
        device = next((one.device for one in self.parameters()), torch.device("cpu"))
        try:
            devices = () if device.type == "cpu" else (device,)
            with torch.random.fork_rng(devices, device_type=device.type), preserved_state(self):
                super().forward(*copies[0], **copies[1])
        finally:
            loop.calls = None
        return calls


def _compute(loop: _Loop, calls: Sequence[_Call], like: torch.Tensor) -> torch.Tensor:
    """Dispatch the tokens of all calls; return the outputs in the order of the calls, of shape (tokens, features)."""
    ep_group = loop.ep_group
    width, dtype, was_called = _gather_calls(loop, calls)
    device = calls[0].tokens.device if calls else like.device
    flat = [call.tokens.reshape(-1, width) for call in calls]
    tokens = torch.cat(flat) if flat else torch.empty(0, width, dtype=dtype, device=device)
    if width == 0:  # no rank called an expert
        return tokens
    numbers = torch.tensor([call.expert for call in calls], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(one) for one in flat], dtype=torch.int64, device=device)
    index = numbers.repeat_interleave(lengths, output_size=len(tokens)).view(-1, 1)
    dispatch = ep_group.dispatch(index, loop.bounds, loop.observers)
    # Weights that require a gradient: the backward of every rank communicates, whatever its tokens require.
    weights = torch.ones(len(tokens), 1, device=device, requires_grad=torch.is_grad_enabled())
    rows, row_weights = start_send_tokens(tokens, weights, dispatch)()
    own_calls = was_called[loop.bounds[ep_group.rank] : loop.bounds[ep_group.rank + 1]]
    outputs = _run_experts(loop.own, rows, dispatch, own_calls)
    return start_return_tokens(rows[:0] + row_weights.sum() if outputs is None else outputs, dispatch)()


def _gather_calls(loop: _Loop, calls: Sequence[_Call]) -> tuple[int, torch.dtype, list[bool]]:
    """Return the features and dtype of tokens, and which experts any rank has called. Collective."""
    called = {call.expert for call in calls}
    first = calls[0].tokens if calls else None
    own = (0, 0) if first is None else (first.shape[-1], _DTYPES.index(first.dtype))
    flags = [int(number in called) for number in range(loop.bounds[-1])]
    gathered = all_gather_numbers([*own, *flags], loop.ep_group.group)
    width, dtype = max((row[0], row[1]) for row in gathered)
    return width, _DTYPES[dtype], [any(column) for column in zip(*(row[2:] for row in gathered), strict=True)]


def _run_experts(
    experts: Sequence[_LoopedExpert], rows: torch.Tensor, dispatch: Dispatch, own_calls: Sequence[bool]
) -> torch.Tensor | None:
    """Return the outputs of rows in their order, or None if no expert runs.

    An expert that was called with no tokens has a gradient of zeros, one that was not called has none.
    """
    local = dispatch.local_index(rows.device)
    order = torch.argsort(local, stable=True)
    parts = rows[order].split(dispatch.received_by_expert)
    outputs = [
        expert.compute(part)
        for expert, part, is_called in zip(experts, parts, own_calls, strict=True)
        if is_called or len(part)
    ]
    return torch.cat(outputs)[torch.argsort(order)] if outputs else None
