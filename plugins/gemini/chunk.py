"""Chunks: flat buffers of parameters, sharded over the ranks and all-gathered for use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import AllGather, ReduceScatter, start_all_gather, start_reduce_scatter, sum_dtype
from booster.plugins.sharding.buffer_pool import Buffer

from .chunk_layout import ChunkLayout, ParamRegion
from .tiers import ChunkShard, Tier, Transfer, finish_transfer


class TensorState(Enum):
    """State of a parameter in its chunk.

    FREE: sharded, this rank holds its shard only. HOLD: gathered and idle. COMPUTE: gathered, and a module that uses
    the weights is running. HOLD_AFTER_BWD: the gradient has arrived in `.grad`, and this backward no longer needs the
    weights. READY_FOR_REDUCE: the gradient is in the chunk's gradient buffer.
    """

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_BWD = "hold_after_backward"
    READY_FOR_REDUCE = "ready_for_reduce"

    __hash__ = object.__hash__  # members are compared by identity, and Enum's own takes a call of Python


# A gradient may arrive while the weights are sharded: an embedding's backward does not read them. Weights whose
# gradient is complete may be read again, by a retained graph or by a second use behind a detach().
_LEGAL: dict[TensorState, frozenset[TensorState]] = {
    TensorState.FREE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD: frozenset({TensorState.COMPUTE, TensorState.FREE, TensorState.HOLD_AFTER_BWD}),
    TensorState.COMPUTE: frozenset({TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD_AFTER_BWD: frozenset({TensorState.READY_FOR_REDUCE}),
    TensorState.READY_FOR_REDUCE: frozenset({TensorState.HOLD_AFTER_BWD, TensorState.HOLD, TensorState.FREE}),
}


def checked_transition(name: str, before: TensorState, after: TensorState) -> TensorState:
    """Return `after` if the transition is legal.

    Args:
        name: Name of the parameter.
        before: Current state.
        after: Next state. An unchanged state is always legal.

    Raises:
        RuntimeError: The transition is illegal, which is a bug of this package.
    """
    if after is not before and after not in _LEGAL[before]:
        raise RuntimeError(f"parameter {name!r} can't go from {before.name} to {after.name}")
    return after


# Note [Chunk lifetime]
# Between two steps a rank holds its shard of a chunk's weights, in memory or in the offload tier. The parameters are
# bound to a placeholder: a nan that is expanded to their shape. `start_gather` all-gathers the shards into a buffer of
# the pool (`gathered`), and `finish_gather` binds the parameters to views of it. `release` unbinds them without a
# write-back, as weights change in `step` only. While no module and no backward runs, parameters are hidden unless their
# chunk is kept gathered: see Note [Weights outside of modules]. A chunk that is kept gathered (`is_kept_gathered`) has
# its shard inside `gathered`. In backward every gradient moves from `.grad` into a flat buffer. That buffer is
# `gathered` itself if the parameter's weights are no longer needed and no other tensor views them, else a second
# buffer. The other parameters' weights stay valid. Reading weights that a gradient has overwritten gathers the chunk
# again into another buffer.
# `start_reduce` starts the reduce-scatter, and `finish_reduce` adds this rank's gradient shard to `grad_shard`.


@dataclass(slots=True, eq=False)
class ChunkParam:
    """One parameter of a chunk.

    Attributes:
        name: Name in the user's model.
        parameter: The model's parameter.
        region: Region of the parameter in the chunk.
        chunk: The chunk.
        state: Current state.
        num_pins: Number of running modules that use the parameter.
        num_saved: Number of operators in live graphs whose backward will read the weights.
        is_expected: True if the chunk is incomplete without this gradient, as it arrived in an earlier backward.
        is_used: True if a gradient arrived in this accumulation.
        has_gradient: True if the gradient is in the chunk's gradient buffer.
        has_grad_hook: True if a hook takes the gradients as they arrive.
        is_overwritten: True if the gradient has overwritten the weights in the gathered buffer.
        version: Version of the parameter after the last change of the weights by an update or in `gathered()`.
        shown_class: Class of the parameter.
        hidden_class: Class of the parameter while it is hidden.
    """

    name: str
    parameter: nn.Parameter
    region: ParamRegion
    chunk: Chunk
    state: TensorState = TensorState.FREE
    num_pins: int = 0
    num_saved: int = 0
    is_expected: bool = True
    is_used: bool = False
    has_gradient: bool = False
    has_grad_hook: bool = False
    is_overwritten: bool = False
    version: int = 0
    shown_class: type = field(init=False)
    hidden_class: type = field(init=False)

    def __post_init__(self) -> None:
        self.shown_class = self.hidden_class = type(self.parameter)

    def set_state(self, state: TensorState) -> None:
        """Change the state; raise `RuntimeError` if the transition is illegal."""
        self.state = checked_transition(self.name, self.state, state)

    @property
    def is_modified(self) -> bool:
        """Whether the parameter was written in place since."""
        return self.parameter._version != self.version

    @property
    def is_elsewhere(self) -> bool:
        """Whether the parameter is bound to other memory than that which its chunk was gathered in."""
        memory = self.chunk.gathered
        if memory is None or self.chunk.is_gathering or self.region.start == self.region.stop:
            return False
        return self.parameter.data_ptr() != memory.data_ptr() + self.region.start * memory.itemsize

    def record_version(self) -> None:
        """Take the weights for unmodified."""
        self.version = self.parameter._version

    def unbind(self) -> None:
        """Bind the parameter to the placeholder."""
        self.show()
        self.parameter.data = self.chunk.placeholder.expand(self.region.shape)
        self.hide()

    def show(self) -> None:
        """Let operators use the memory that the parameter is bound to."""
        self.parameter.__class__ = self.shown_class  # type: ignore[assignment]

    def hide(self) -> None:
        """Let operators gather the weights of the parameter before they use it."""
        self.parameter.__class__ = self.hidden_class  # type: ignore[assignment]

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's region of a flat buffer as a view in its shape."""
        return flat[self.region.start : self.region.stop].view(self.region.shape)


def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the 0-dim placeholder of sharded parameters: nan, or 0 for integer dtypes."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


class Chunk:
    """Chunk of parameters, sharded over a group. Note [Chunk lifetime] describes its states.

    Args:
        index: Index of the chunk.
        layout: Layout of the parameters in the chunk.
        named: Names and parameters, in the layout's order.
        rank: Rank of this process in the shard group.
        group: Shard group. None is the world group.
        device: Device of the gathered weights and of the gradient shard.
    """

    def __init__(
        self,
        index: int,
        layout: ChunkLayout,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.index = index
        self.layout = layout
        self.rank = rank
        self._group = group
        self.params = [ChunkParam(*pair, place, self) for pair, place in zip(named, layout.regions, strict=True)]
        self._padding = layout.padding
        self.starts = [param.region.start for param in self.params]
        self.weights = ChunkShard(layout.shard_numel, layout.dtype, device)
        self.master = self.weights
        self.placeholder = placeholder(layout.dtype, device)
        self.grad_shard = ChunkShard(layout.shard_numel, sum_dtype(layout.dtype), device)
        self.has_grad_shard = False
        self.gathered: torch.Tensor | None = None
        self.is_kept_gathered = False
        self.is_hidden = True
        self.num_pins = 0
        self.version = 0
        self.was_replaced = False
        self._buffer: Buffer | None = None
        self._gather: AllGather | None = None
        self._load: Transfer | None = None
        self._gradient: torch.Tensor | None = None
        self._gradient_buffer: Buffer | None = None
        self._recv_buffer: Buffer | None = None
        self._grad_shard_buffer: Buffer | None = None
        self._reduction: ReduceScatter | None = None
        self._num_arrived = 0
        self._num_expected = len(self.params)

    # Weights.

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are bound to weights, except those that gradients have overwritten."""
        return self.gathered is not None and self._gather is None

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather is in flight."""
        return self._gather is not None

    @property
    def has_all_weights(self) -> bool:
        """Whether the chunk is gathered and no gradient has overwritten weights."""
        return self.is_gathered and not self.was_replaced

    @property
    def can_be_released(self) -> bool:
        """Whether the chunk is gathered, unused, and free of gradients."""
        is_idle = self.is_gathered and not self.is_kept_gathered and self.num_pins == 0
        return is_idle and not self.holds_gradients_in_weights

    def keep_gathered(self, weights: torch.Tensor) -> None:
        """Keep the full weights on this rank; its shard becomes a view of them.

        Args:
            weights: Full flat weights including padding. The chunk takes over the memory if the dtype is the same.
        """
        self.is_kept_gathered = True
        self.gathered = weights.to(self.layout.dtype)
        self.weights.tensor = self.gathered[self.layout.shard_range(self.rank)]
        self.bind_params()

    def migrate_weights(self, tier: Tier | None) -> None:
        """Move the weight shard to `tier` or, if that is None, to memory. Must not run during a backward."""
        if tier is None and self.weights.is_offloaded:
            self.weights.fetch()
            if self.layout.num_shards == 1 and self.weights.tensor is not None:
                self.keep_gathered(self.weights.tensor)
        elif tier is not None and not self.weights.is_offloaded:
            if self.is_kept_gathered:  # free the full weights, of which the shard is a view
                assert self.weights.tensor is not None, "a kept chunk is in memory"
                self.weights.tensor = self.weights.tensor.clone()
                self.is_kept_gathered = False
                self._unbind_params()
                self.gathered = None
            self.weights.offload(tier)

    def start_gather(self, buffer: Buffer | None, take_buffer: Callable[[int], Buffer]) -> Buffer | None:
        """Start the all-gather of the weights. Collective over the shard group.

        Args:
            buffer: Output buffer, which the chunk holds until `release`. None reuses the gathered buffer, for a chunk
                that is kept gathered or that only other ranks need.
            take_buffer: Function that returns another buffer of the given bytes.

        Returns:
            A buffer that the chunk no longer needs, if any.
        """
        unused: Buffer | None = None
        if buffer is not None:
            if self.holds_gradients_in_weights:
                self._detach_gradients(take_buffer)
            unused = self._drop_gathered()
            self._buffer = buffer
            self.gathered = buffer.view(self.layout.numel, self.layout.dtype)
        assert self.gathered is not None, "a chunk that is not gathered needs a buffer"
        if self.is_kept_gathered:
            self._gather = start_all_gather(self.gathered, self._group)
            return unused
        with self.weights.stream("load"):  # beside computation
            self._load = self.weights.load(self.gathered[self.layout.shard_range(self.rank)])
            self._gather = start_all_gather(self.gathered, self._group)
        return unused

    def finish_gather(self) -> None:
        """Wait for the weights and bind the parameters to them."""
        assert self._gather is not None, "nothing was started"
        self._gather.wait()
        finish_transfer(self._load)  # one rank gathers nothing
        self._gather = self._load = None
        self.bind_params()

    def bind_params(self) -> None:
        """Bind the parameters to views of the gathered weights."""
        assert self.gathered is not None, "there are no weights"
        self.is_hidden = False
        for param in self.params:
            param.show()
            param.parameter.data = param.view_in(self.gathered)
            if param.state is TensorState.FREE:
                param.set_state(TensorState.HOLD)

    def show(self) -> None:
        """Show gathered parameters, if they are hidden."""
        if self.is_hidden:
            self.is_hidden = False
            for param in self.params:
                param.show()

    def hide(self) -> None:
        """Hide the parameters, unless they are kept gathered or in use."""
        if not self.is_hidden and not self.is_kept_gathered and self.num_pins == 0:
            self.is_hidden = True
            for param in self.params:
                param.hide()

    def release(self) -> Buffer | None:
        """Unbind the parameters and return the buffer, which has no views left in this class."""
        assert self.can_be_released, "the chunk is kept gathered, in flight, or in use"
        self._unbind_params()
        return self._drop_gathered()

    def _unbind_params(self) -> None:
        self.is_hidden = True
        for param in self.params:
            param.unbind()
            if param.state in (TensorState.HOLD, TensorState.COMPUTE):
                param.set_state(TensorState.FREE)

    def _drop_gathered(self) -> Buffer | None:
        buffer, self._buffer, self.gathered = self._buffer, None, None
        self.was_replaced = False
        for param in self.params:
            param.is_overwritten = False
        return buffer

    def pin(self, params: Iterable[ChunkParam]) -> None:
        """Mark these parameters as used by a running module."""
        self.num_pins += 1
        for param in params:
            param.num_pins += 1
            if param.state is TensorState.HOLD:
                param.set_state(TensorState.COMPUTE)

    def unpin(self, params: Iterable[ChunkParam]) -> None:
        """Undo `pin` when the module has finished."""
        self.num_pins -= 1
        for param in params:
            param.num_pins -= 1
            if param.num_pins == 0 and param.state is TensorState.COMPUTE:
                param.set_state(TensorState.HOLD)

    def clear(self) -> None:
        """Drop the parameters, which are frozen and not in use, with all memory."""
        for param in self.params:
            param.show()
        self.weights.drop()
        self.layout = replace(self.layout, numel=0, regions=())
        self.master = self.weights = ChunkShard(0, self.layout.dtype, self.weights.device)
        self.weights.allocate(None)
        self.params, self.starts, self.gathered, self.is_kept_gathered = [], [], None, False

    # Gradients.

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of this backward are not reduced yet."""
        return self._gradient is not None

    @property
    def is_complete(self) -> bool:
        """Whether all expected gradients have arrived, and at least one."""
        return self._gradient is not None and self._num_arrived >= self._num_expected

    def update_expected(self) -> None:
        """Recount the expected gradients. Call between backwards."""
        self._num_expected = sum(param.is_expected for param in self.params)

    @torch.no_grad()
    def on_grad_ready(self, param: ChunkParam, take_buffer: Callable[[int], Buffer]) -> None:
        """Move a gradient from `.grad` into the gradient buffer, which `take_buffer` returns for a number of bytes."""
        gradient = param.parameter.grad
        assert gradient is not None, "the gradient has arrived"
        if param.state is not TensorState.HOLD_AFTER_BWD:
            param.set_state(TensorState.HOLD_AFTER_BWD)
        if self._gradient is None and self.gathered is not None and self._may_overwrite(param):
            self._gradient = self.gathered
        elif self._gradient is None:
            self._gradient_buffer = take_buffer(self.layout.num_bytes)
            self._gradient = self._gradient_buffer.view(self.layout.numel, self.layout.dtype)
        elif self._gradient is self.gathered and not param.has_gradient and not self._may_overwrite(param):
            self._move_gradients(take_buffer)
        place = param.view_in(self._gradient)
        if param.has_gradient:
            place.add_(gradient)  # a nested backward produced an earlier gradient
        elif gradient.is_sparse:
            place.zero_().add_(gradient)
        else:
            place.copy_(gradient)
        if self._gradient is self.gathered:
            param.is_overwritten = self.was_replaced = True
        param.parameter.grad = None
        self._num_arrived += param.is_expected and not param.has_gradient
        param.is_used = param.has_gradient = True
        param.set_state(TensorState.READY_FOR_REDUCE)

    def _may_overwrite(self, param: ChunkParam) -> bool:
        """Whether no module, graph or view needs the weights in the gathered buffer."""
        if self._buffer is None or self.num_pins > 0 or param.num_saved > 0 or self._gather is not None:
            return False
        # One view per parameter, and the flat one.
        return self._buffer.num_views == len(self.params) + 1

    def _move_gradients(self, take_buffer: Callable[[int], Buffer]) -> None:
        """Move gradients out of the gathered buffer into a dedicated one, as weights beside them are still in use."""
        buffer = take_buffer(self.layout.num_bytes)
        moved = buffer.view(self.layout.numel, self.layout.dtype)
        assert self.gathered is not None
        for param in self.params:
            if param.has_gradient:
                param.view_in(moved).copy_(param.view_in(self.gathered))
        self._gradient, self._gradient_buffer = moved, buffer

    @property
    def holds_gradients_in_weights(self) -> bool:
        """Whether the gathered buffer holds gradients, so that it must not be freed before their reduction."""
        return self._gradient is not None and self._gradient is self.gathered

    def _detach_gradients(self, take_buffer: Callable[[int], Buffer]) -> None:
        """Turn the gathered buffer into the gradient buffer, or move the gradients if weights in it are in use."""
        assert self._buffer is not None
        if self.num_pins > 0 or self._buffer.num_views != len(self.params) + 1:
            self._move_gradients(take_buffer)
            return
        self._unbind_params()
        self._gradient_buffer = self._buffer
        self._buffer = None
        self._drop_gathered()

    @torch.no_grad()
    def start_reduce(self, take_buffer: Callable[[int], Buffer]) -> None:
        """Start the reduce-scatter, with zeros for missing gradients. Collective over the shard group."""
        if self._gradient is None:
            self._gradient_buffer = take_buffer(self.layout.num_bytes)
            self._gradient = self._gradient_buffer.view(self.layout.numel, self.layout.dtype)
        elif self.holds_gradients_in_weights:
            self._detach_gradients(take_buffer)
        for param in self.params:
            if not param.has_gradient:
                param.view_in(self._gradient).zero_()
        for padding in self._padding:
            self._gradient[padding].zero_()
        sums = self._grad_shard_in_memory(take_buffer)
        self._reduction = start_reduce_scatter(self._gradient, self._group, partial(self._recv_view, take_buffer))
        self._reduction.set_output(sums, accumulate=self.has_grad_shard)

    def _grad_shard_in_memory(self, take_buffer: Callable[[int], Buffer]) -> torch.Tensor:
        """Return the gradient shard, or a copy in memory if it is offloaded."""
        if self.grad_shard.tensor is not None:
            return self.grad_shard.tensor
        self._grad_shard_buffer = take_buffer(self.grad_shard.num_bytes)
        sums = self._grad_shard_buffer.view(self.grad_shard.numel, self.grad_shard.dtype)
        if self.has_grad_shard:
            finish_transfer(self.grad_shard.load(sums))
        return sums

    def _recv_view(self, take_buffer: Callable[[int], Buffer]) -> torch.Tensor:
        """Return the receive buffer of a reduce-scatter by point-to-point messages."""
        numel = self.layout.numel - self.layout.shard_numel
        self._recv_buffer = take_buffer(numel * self.layout.dtype.itemsize)
        return self._recv_buffer.view(numel, self.layout.dtype)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduce-scatter is in flight."""
        return self._reduction is not None

    @torch.no_grad()
    def finish_reduce(self) -> tuple[Sequence[Buffer | None], Transfer | None]:
        """Wait for the reduce-scatter, and accumulate this rank's shard in `grad_shard`.

        Returns:
            The buffers used, and the transfer that must be waited for before they are reused, if there is one.
        """
        assert self._reduction is not None
        transfer: Transfer | None = None
        if self._grad_shard_buffer is None:
            assert self.grad_shard.tensor is not None
            self._reduction.wait(self.grad_shard.tensor, accumulate=self.has_grad_shard)
        else:
            sums = self._grad_shard_buffer.view(self.grad_shard.numel, self.grad_shard.dtype)
            with self.grad_shard.stream("store"):  # beside backward
                self._reduction.wait(sums, accumulate=self.has_grad_shard)
                transfer = self.grad_shard.store(sums)
        self.has_grad_shard = True
        used = (self._gradient_buffer, self._recv_buffer, self._grad_shard_buffer)
        self._reduction = self._gradient = None
        self._gradient_buffer = self._recv_buffer = self._grad_shard_buffer = None
        self._num_arrived = 0
        for param in self.params:
            param.has_gradient = False
            if param.state is TensorState.READY_FOR_REDUCE:
                param.set_state(TensorState.HOLD if self.is_gathered else TensorState.FREE)
        return used, transfer

    def drop_gradients(self) -> Buffer | None:
        """Drop all gradients of the accumulation; return the buffer of unreduced ones, if any."""
        if self.holds_gradients_in_weights:
            self._unbind_params()
            self._gradient_buffer = self._drop_gathered()
        buffer, self._gradient, self._gradient_buffer = self._gradient_buffer, None, None
        self.grad_shard.drop()
        self.has_grad_shard = False
        self._num_arrived = 0
        for param in self.params:
            with torch._C.DisableTorchFunctionSubclass():  # of hidden parameters
                param.parameter.grad = None
            param.has_gradient = False
            if param.state in (TensorState.READY_FOR_REDUCE, TensorState.HOLD_AFTER_BWD):
                param.state = TensorState.HOLD if self.is_gathered else TensorState.FREE
        return buffer

    def local_gradient(self, param: ChunkParam) -> torch.Tensor | None:
        """Return this rank's unreduced gradient of a parameter, in its shape, or None."""
        if param.has_gradient and self._gradient is not None:
            return param.view_in(self._gradient)
        return param.parameter.grad

    @property
    def bytes_in_memory(self) -> int:
        """Bytes in the compute tier, without buffers of the pool."""
        own = self.layout.num_bytes if self.is_kept_gathered else self.weights.bytes_in_memory
        return own + self.grad_shard.bytes_in_memory

    def adam_state_bytes(self) -> int:
        """Estimate the bytes of Adam states and master weights on this rank."""
        bytes_per_element = 8 if self.layout.dtype.itemsize == 4 else 12
        return self.layout.shard_numel * bytes_per_element if self.layout.trains else 0
