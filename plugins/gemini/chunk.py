"""A chunk: the weights of some parameters, of which each rank owns a piece and gathers the rest when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import AllGather, ReduceScatter, start_all_gather, start_reduce_scatter
from booster.plugins.gemini.layout import ChunkLayout, Place
from booster.plugins.gemini.pieces import Piece
from booster.plugins.gemini.tensor_states import TensorState, checked_transition
from booster.plugins.gemini.tiers import Tier
from booster.plugins.sharding.buffer_pool import Buffer

__all__ = ["Chunk", "Slot", "placeholder", "was_written_unseen"]

# Note [Chunk lifetime]
# Between two steps a rank has its *piece* of a chunk's weights, in memory or in the offload tier, and the parameters
# show a placeholder: their shape, with nan in every place. `start_gather` brings all pieces into a buffer of the pool,
# the *payload*, and `finish_gather` points the parameters into it; `release` takes them out again, and nothing need be
# written back, as weights change in the step alone. A *kept* chunk stays gathered; its piece is part of its payload.
# In backward every gradient is moved from `.grad` into a flat buffer. That is the payload itself where the parameter's
# weights are not needed any more and nobody else looks at them, else a second buffer. The weights of the others are
# still there; who asks for weights that a gradient has replaced has the chunk gathered once more, elsewhere.
# `start_reduce` sends the gradients, `finish_reduce` adds this rank's piece of their sum to `sums`.


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter of a chunk.

    Attributes:
        name: The user's name of it.
        parameter: The model's parameter.
        place: Where it lies in the chunk.
        chunk: The chunk.
        state: Where it stands.
        num_pins: Modules that are running and use it.
        num_saved: Operators of graphs that are alive which will ask for its weights in backward.
        is_expected: Its gradient arrived in some backward, so that the chunk is not complete without it.
        is_used: A gradient arrived in this window.
        has_gradient: Its gradient is in the chunk's gradient buffer.
        is_watched: Its gradients are taken when they arrive.
        is_overwritten: The gradient took the place of its weights in the payload.
    """

    name: str
    parameter: nn.Parameter
    place: Place
    chunk: Chunk
    state: TensorState = TensorState.FREE
    num_pins: int = 0
    num_saved: int = 0
    is_expected: bool = True
    is_used: bool = False
    has_gradient: bool = False
    is_watched: bool = False
    is_overwritten: bool = False

    def go(self, state: TensorState) -> None:
        """Changes the state.

        Raises:
            RuntimeError: The change is illegal.
        """
        self.state = checked_transition(self.name, self.state, state)

    def hide(self) -> None:
        """Lets the parameter show a placeholder."""
        self.parameter.data = self.chunk.blank.expand(self.place.shape)

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the parameter's place in a flat buffer, in its shape."""
        return flat[self.place.start : self.place.stop].view(self.place.shape)


def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns what parameters show in all places while their weights are not here: nan, or 0 of integers."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


def was_written_unseen(chunks: Sequence[Chunk]) -> bool:
    """Whether `Chunk.was_written_unseen` is true of any; an accelerator is waited for once."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for chunk in chunks:
        by_dtype.setdefault(chunk.layout.dtype, []).append(chunk.blank)
    for dtype, blanks in by_dtype.items():
        shown = torch.stack(blanks)
        is_number = dtype.is_floating_point or dtype.is_complex
        if bool((~shown.isnan()).any() if is_number else (shown != 0).any()):
            return True
    return False


class Chunk:
    """See Note [Chunk lifetime].

    Args:
        index: Of the chunk.
        layout: Where its parameters lie.
        named: Its parameters with their names, in the layout's order.
        rank: Of this process in the shard group.
        group: The shard group; None: the world.
        device: Where it is gathered.
        sum_dtype: The format in which gradients are summed.
        sum_device: Where the sums are.
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
        sum_dtype: torch.dtype,
        sum_device: torch.device,
    ) -> None:
        self.index = index
        self.layout = layout
        self.rank = rank
        self._group = group
        self.slots = [Slot(*pair, place, self) for pair, place in zip(named, layout.places, strict=True)]
        self.starts = [slot.place.start for slot in self.slots]
        self.weights = Piece(layout.piece_numel, layout.dtype, device)
        self.main = self.weights
        self.blank = placeholder(layout.dtype, device)
        self.sums = Piece(layout.piece_numel, sum_dtype, sum_device)
        self.has_sums = False
        self.payload: torch.Tensor | None = None
        self.is_kept = False
        self.num_pins = 0
        self.version = 0
        self.was_replaced = False
        self._buffer: Buffer | None = None
        self._gather: AllGather | None = None
        self._gradient: torch.Tensor | None = None
        self._gradient_buffer: Buffer | None = None
        self._copies_buffer: Buffer | None = None
        self._sums_buffer: Buffer | None = None
        self._reduction: ReduceScatter | None = None
        self._num_arrived = 0
        self._num_expected = len(self.slots)

    # Weights.

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters show weights, but for those that gradients have replaced."""
        return self.payload is not None and self._gather is None

    @property
    def is_on_its_way(self) -> bool:
        """Whether a gathering was started and not ended."""
        return self._gather is not None

    @property
    def has_all_weights(self) -> bool:
        """Whether it is gathered and no gradient has replaced weights."""
        return self.is_gathered and not self.was_replaced

    @property
    def can_be_released(self) -> bool:
        """Whether it is gathered, nobody needs it just now, and no gradients are in it."""
        is_idle = self.is_gathered and not self.is_kept and self.num_pins == 0
        return is_idle and not self.holds_gradients_in_payload

    def keep(self, weights: torch.Tensor) -> None:
        """Makes this rank hold all weights from now on; its piece becomes part of them.

        Args:
            weights: All of them, flat, the waste included; the chunk takes the memory over if its format is the same.
        """
        self.is_kept = True
        self.payload = weights.to(self.layout.dtype)
        self.weights.tensor = self.payload[self.layout.piece(self.rank)]
        self.show()

    def stop_keeping(self) -> None:
        """Lets this rank hold its piece alone again."""
        assert self.weights.tensor is not None, "a kept chunk is in memory"
        self.weights.tensor = self.weights.tensor.clone()
        self.is_kept = False
        self._hide()
        self.payload = None

    def make_main(self, dtype: torch.dtype, device: torch.device, tier: Tier | None) -> None:
        """Makes room for the piece that an optimizer updates, where it is not the weights themselves."""
        if dtype != self.layout.dtype or device != self.weights.device:
            self.main = Piece(self.layout.piece_numel, dtype, device)
            self.main.allocate(tier if tier is not None and tier.name == "disk" else None)

    def start_gather(self, buffer: Buffer | None, take_buffer: Callable[[int], Buffer]) -> Buffer | None:
        """Starts to bring all pieces of the weights together. Collective over the shard group.

        Args:
            buffer: Room for them, which the chunk keeps until `release`; None: where they are already, so that this
                rank takes part for the sake of others, or where the chunk is kept.
            take_buffer: Returns a further buffer of so many bytes.

        Returns:
            A buffer that the chunk has no more use for.
        """
        unused: Buffer | None = None
        if buffer is not None:
            if self.holds_gradients_in_payload:
                self._part_gradients(take_buffer)
            unused = self._drop_payload()
            self._buffer = buffer
            self.payload = buffer.view(self.layout.numel, self.layout.dtype)
        assert self.payload is not None, "a chunk that is not gathered needs a buffer"
        own = self.payload[self.layout.piece(self.rank)]
        if not self.is_kept:
            self.weights.load(own)
        self._gather = start_all_gather(self.payload, self._group)
        return unused

    def finish_gather(self) -> None:
        """Waits for the weights and lets the parameters show them."""
        assert self._gather is not None, "nothing was started"
        self._gather.wait()
        self._gather = None
        self.show()

    def was_written_unseen(self) -> bool:
        """Whether somebody wrote to a parameter while its weights were not here; what was written is lost."""
        value = self.blank.item()
        is_number = self.layout.dtype.is_floating_point or self.layout.dtype.is_complex
        was_written = value == value if is_number else value != 0
        if was_written:
            self.blank.copy_(placeholder(self.layout.dtype, self.blank.device))
        return bool(was_written)

    def show(self) -> None:
        """Points the parameters into the payload."""
        assert self.payload is not None, "there are no weights"
        for slot in self.slots:
            slot.parameter.data = slot.within(self.payload)
            if slot.state is TensorState.FREE:
                slot.go(TensorState.HOLD)

    def release(self) -> Buffer | None:
        """Takes the weights from the parameters; returns the buffer, which nobody here looks into any more."""
        assert self.can_be_released, "it is kept, on its way, or in use"
        self._hide()
        return self._drop_payload()

    def _hide(self) -> None:
        for slot in self.slots:
            slot.hide()
            if slot.state in (TensorState.HOLD, TensorState.COMPUTE):
                slot.go(TensorState.FREE)

    def _drop_payload(self) -> Buffer | None:
        buffer, self._buffer, self.payload = self._buffer, None, None
        self.was_replaced = False
        for slot in self.slots:
            slot.is_overwritten = False
        return buffer

    def pin(self, slots: Iterable[Slot]) -> None:
        """Says that a module which uses these parameters is running."""
        self.num_pins += 1
        for slot in slots:
            slot.num_pins += 1
            if slot.state is TensorState.HOLD:
                slot.go(TensorState.COMPUTE)

    def unpin(self, slots: Iterable[Slot]) -> None:
        """Says that the module has ended."""
        self.num_pins -= 1
        for slot in slots:
            slot.num_pins -= 1
            if slot.num_pins == 0 and slot.state is TensorState.COMPUTE:
                slot.go(TensorState.HOLD)

    def remove(self, slot: Slot) -> None:
        """Gives up a parameter; what it had here is waste from now on."""
        self.slots = [one for one in self.slots if one is not slot]
        self.starts = [one.place.start for one in self.slots]

    # Gradients.

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of this backward wait to be reduced."""
        return self._gradient is not None

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have arrived that are expected, and at least one."""
        return self._gradient is not None and self._num_arrived >= self._num_expected

    def expect(self) -> None:
        """Takes note that other gradients are expected than before; between backwards."""
        self._num_expected = sum(slot.is_expected for slot in self.slots)

    @torch.no_grad()
    def receive(self, slot: Slot, take_buffer: Callable[[int], Buffer]) -> None:
        """Moves a gradient that has arrived from `.grad` into the gradient buffer.

        Args:
            slot: Whose gradient.
            take_buffer: Returns a buffer of so many bytes.
        """
        gradient = slot.parameter.grad
        assert gradient is not None, "it has arrived"
        if slot.state is not TensorState.HOLD_AFTER_BWD:
            slot.go(TensorState.HOLD_AFTER_BWD)
        if self._gradient is None:
            self._gradient = self._room_for_gradients(slot, take_buffer)
        elif self._gradient is self.payload and not slot.has_gradient and not self._may_overwrite(slot):
            self._move_gradients(take_buffer)
        place = slot.within(self._gradient)
        if slot.has_gradient:
            place.add_(gradient)  # it arrived before in this backward: of an inner one
        elif gradient.is_sparse:
            place.zero_().add_(gradient)
        else:
            place.copy_(gradient)
        if self._gradient is self.payload:
            slot.is_overwritten = self.was_replaced = True
        slot.parameter.grad = None
        self._num_arrived += slot.is_expected and not slot.has_gradient
        slot.is_used = slot.has_gradient = True
        slot.go(TensorState.READY_FOR_REDUCE)

    def _room_for_gradients(self, slot: Slot, take_buffer: Callable[[int], Buffer]) -> torch.Tensor:
        if self.payload is not None and self._may_overwrite(slot):
            return self.payload
        self._gradient_buffer = take_buffer(self.layout.num_bytes)
        return self._gradient_buffer.view(self.layout.numel, self.layout.dtype)

    def _may_overwrite(self, slot: Slot) -> bool:
        """Whether a parameter's weights in the payload are of no more use to anybody."""
        if self._buffer is None or self.num_pins > 0 or slot.num_saved > 0 or self._gather is not None:
            return False
        # One view for each parameter, and the payload.
        return self._buffer.num_views == len(self.slots) + 1

    def _move_gradients(self, take_buffer: Callable[[int], Buffer]) -> None:
        """Brings gradients that are in the payload to a buffer of their own: the weights beside them are looked at."""
        buffer = take_buffer(self.layout.num_bytes)
        moved = buffer.view(self.layout.numel, self.layout.dtype)
        assert self.payload is not None
        for slot in self.slots:
            if slot.has_gradient:
                slot.within(moved).copy_(slot.within(self.payload))
        self._gradient, self._gradient_buffer = moved, buffer

    @property
    def holds_gradients_in_payload(self) -> bool:
        """Whether the payload can't be given back before the gradients in it are reduced."""
        return self._gradient is not None and self._gradient is self.payload

    def _part_gradients(self, take_buffer: Callable[[int], Buffer]) -> None:
        """Takes gradients out of the payload: it becomes their buffer, unless somebody looks at weights in it."""
        assert self._buffer is not None
        if self.num_pins > 0 or self._buffer.num_views != len(self.slots) + 1:
            self._move_gradients(take_buffer)
            return
        self._hide()
        self._gradient_buffer = self._buffer
        self._buffer = None
        self._drop_payload()

    @torch.no_grad()
    def start_reduce(self, take_buffer: Callable[[int], Buffer]) -> None:
        """Starts to sum gradients over the ranks, zeros where this rank has none. Collective over the shard group."""
        if self._gradient is None:
            self._gradient_buffer = take_buffer(self.layout.num_bytes)
            self._gradient = self._gradient_buffer.view(self.layout.numel, self.layout.dtype)
        elif self.holds_gradients_in_payload:
            self._part_gradients(take_buffer)
        for slot in self.slots:
            if not slot.has_gradient:
                slot.within(self._gradient).zero_()
        self._gradient[self.layout.used_numel :].zero_()
        sums = self._sums_at_hand(take_buffer)
        self._reduction = start_reduce_scatter(self._gradient, self._group, partial(self._room_for_copies, take_buffer))
        self._reduction.aim(sums, accumulate=self.has_sums)

    def _sums_at_hand(self, take_buffer: Callable[[int], Buffer]) -> torch.Tensor:
        """Returns the sums, as far as there are any: themselves, or a copy in memory if they are offloaded."""
        if self.sums.tensor is not None:
            return self.sums.tensor
        self._sums_buffer = take_buffer(self.sums.num_bytes)
        sums = self._sums_buffer.view(self.sums.numel, self.sums.dtype)
        if self.has_sums:
            self.sums.load(sums)
        return sums

    def _room_for_copies(self, take_buffer: Callable[[int], Buffer]) -> torch.Tensor:
        """Returns room for what messages bring of other ranks' gradients; called where gradients go by messages."""
        numel = self.layout.numel - self.layout.piece_numel
        self._copies_buffer = take_buffer(numel * self.layout.dtype.itemsize)
        return self._copies_buffer.view(numel, self.layout.dtype)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction was started and not ended."""
        return self._reduction is not None

    @torch.no_grad()
    def finish_reduce(self) -> list[Buffer]:
        """Waits, and adds this rank's piece of the sum to `sums`; returns the buffers that were used."""
        assert self._reduction is not None
        if self._sums_buffer is None:
            assert self.sums.tensor is not None
            self._reduction.finish(self.sums.tensor, accumulate=self.has_sums)
        else:
            sums = self._sums_buffer.view(self.sums.numel, self.sums.dtype)
            self._reduction.finish(sums, accumulate=self.has_sums)
            self.sums.store(sums)
        self.has_sums = True
        used = (self._gradient_buffer, self._copies_buffer, self._sums_buffer)
        self._reduction = self._gradient = None
        self._gradient_buffer = self._copies_buffer = self._sums_buffer = None
        self._num_arrived = 0
        for slot in self.slots:
            slot.has_gradient = False
            if slot.state is TensorState.READY_FOR_REDUCE:
                slot.go(TensorState.HOLD if self.is_gathered else TensorState.FREE)
        return [buffer for buffer in used if buffer is not None]

    def forget_gradients(self) -> Buffer | None:
        """Lets go of all gradients of the window; returns the buffer of those that were not reduced, if any."""
        if self.holds_gradients_in_payload:
            self._hide()
            self._gradient_buffer = self._drop_payload()
        buffer, self._gradient, self._gradient_buffer = self._gradient_buffer, None, None
        self.sums.drop()
        self.has_sums = False
        self._num_arrived = 0
        for slot in self.slots:
            slot.parameter.grad = None
            slot.has_gradient = False
            if slot.state in (TensorState.READY_FOR_REDUCE, TensorState.HOLD_AFTER_BWD):
                slot.state = TensorState.HOLD if self.is_gathered else TensorState.FREE
        return buffer

    def local_gradient(self, slot: Slot) -> torch.Tensor | None:
        """Returns this rank's gradient of a parameter that was not reduced yet, in its shape; None: there is none."""
        if slot.has_gradient and self._gradient is not None:
            return slot.within(self._gradient)
        return slot.parameter.grad

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of its own memory in the compute tier, without buffers of the pool."""
        own = self.payload.nbytes if self.is_kept and self.payload is not None else self.weights.bytes_in_memory
        return own + self.sums.bytes_in_memory
