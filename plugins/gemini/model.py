"""The model side: weights come when they are used, and the user's own names and tensors are whole to those who ask."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from booster.comm import all_gather_equal, broadcast, collective_device, raise_on_all_ranks, start_all_gather
from booster.device import memory_allocated
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, TensorSlice
from booster.kernels.checksum import crc32
from booster.lazy_init import is_lazy, materialize_tensor
from booster.mixed_precision.fp16 import log_rank_zero
from booster.plugins.sharding.buffer_pool import broadcast_joined

from .chunk import Chunk, ChunkParam, any_modified_while_sharded
from .chunk_init import describe_params, fill_chunk, make_chunk, plan_model
from .chunk_layout import ParamInfo
from .chunk_manager import ChunkManager
from .chunk_search import plan_chunks
from .collective_order import OrderNegotiation
from .config import GeminiSettings
from .module_hooks import ModuleHooks
from .nvme_tier import DiskTier
from .placement import ChunkLocations, Placement
from .tiers import HostTier, Tier


class GeminiModel(ModelWrapper):
    """The boosted model; every rank holds its pieces of the weights, and the rest only while it is used.

    Between forwards a parameter shows its shape, and nan in every place: `state_dict()` gives whole weights, and
    `with model.gathered():` shows them in the parameters. Both are collective.

    Args:
        module: The user's model.
        manager: Of its chunks, which hold all parameters.
        settings: Sharding settings.
        make_chunks: Makes chunks of parameters with known values; see `regroup`.
        is_primary: True on the rank that writes what all ranks hold alike.
        broadcasts_buffers: Give all ranks the first rank's buffers before each forward in training.
    """

    def __init__(
        self,
        module: nn.Module,
        manager: ChunkManager,
        settings: GeminiSettings,
        make_chunks: Callable[[Mapping[str, nn.Parameter], Mapping[int, torch.Tensor], int], list[Chunk]],
        *,
        is_primary: bool,
        broadcasts_buffers: bool,
    ) -> None:
        super().__init__(module, is_primary=is_primary)
        self.manager = manager
        self._settings = settings
        self._make_chunks = make_chunks
        self._broadcasts_buffers = broadcasts_buffers
        self._clear_gradients: Callable[[bool], None] | None = None
        self.hooks = ModuleHooks(module, manager, self._slots())
        module.register_state_dict_pre_hook(_RefuseHidden(manager))

    def _slots(self) -> dict[int, ChunkParam]:
        return {id(slot.parameter): slot for chunk in self.manager.chunks for slot in chunk.params}

    def connect(self, clear_gradients: Callable[[bool], None]) -> None:
        """Return what clears the gradients."""
        self._clear_gradients = clear_gradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward; arguments and result are those of the user's model.

        Collective: weights are gathered.
        """
        self._begin_run(args, kwargs)
        return super().forward(*args, **kwargs)

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._require_unmoved()
        if self._broadcasts_buffers and self.training and torch.is_grad_enabled():
            broadcast_joined(list(self.module.buffers()), self._settings.data_parallel_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and of its optimizer."""
        super().zero_grad(set_to_none)
        if self._clear_gradients is not None:
            self._clear_gradients(set_to_none)

    # Weights.

    def weights_changed(self) -> None:
        """Distribute this rank's pieces of kept chunks; graphs from before know that they are too old. Collective."""
        kept = [chunk for chunk in self.manager.chunks if chunk.is_kept_gathered]
        flights = [
            start_all_gather(one.gathered, self._settings.shard_group) for one in kept if one.gathered is not None
        ]
        self._outdate_graphs()
        for flight in flights:
            flight.wait()

    def _outdate_graphs(self) -> None:
        self.manager.release_all()  # a forward without a backward leaves weights gathered, which don't follow
        for chunk in self.manager.chunks:
            chunk.version += 1
        torch.autograd.graph.increment_version(list(self.module.parameters()))

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Show all weights in the parameters of the user's model, which it gives; changes made inside are kept.

        Inside, a forward needs nothing of the other ranks, so one of them alone may run the model, to generate say.
        Needs memory for the whole model. Collective at its begin and at its end.

        Raises:
            ConfigError: The ranks have made different changes: nothing is kept of them.
        """
        with self._summoned() as chunks:
            self.manager.is_whole = True
            try:
                yield self.module
            finally:
                self.manager.is_whole = False
                self._finish_reads(chunks)
                self._require_same(chunks)
                self._release_summoned(chunks)
                self.notify_loaded()

    def _require_same(self, chunks: list[Chunk]) -> None:
        """Raise if the ranks show different weights."""
        digest = 0
        for chunk in chunks:
            if chunk.gathered is not None:
                used = chunk.gathered[: chunk.layout.used_numel].cpu()
                digest = crc32(used.view(torch.uint8).numpy().data, digest)
        group = self._settings.control_group or self._settings.data_parallel_group
        digests = all_gather_equal(torch.tensor([digest], device=collective_device(group)), group).tolist()
        if len(set(digests)) == 1:
            return
        for chunk in chunks:
            if chunk.is_kept_gathered and chunk.gathered is not None:
                broadcast([chunk.gathered], self._settings.data_parallel_group)
        raise ConfigError(
            "the weights were changed inside of `with model.gathered():`, and on the ranks"
            f" {[rank for rank, one in enumerate(digests) if one != digests[0]]} otherwise than on rank 0: make the"
            " same changes on every rank. Nothing was taken over (of weights that are kept whole, rank 0's are)"
        )

    @contextmanager
    def _summoned(self) -> Iterator[list[Chunk]]:
        """Show all weights; changes of chunks that are not kept are lost. Collective at its begin alone."""
        chunks = [chunk for chunk in self.manager.chunks if chunk.params]
        with self.manager.aside():
            for chunk in chunks:
                self.manager.need(chunk.params)
                chunk.pin(chunk.params)
        try:
            yield chunks
        finally:
            for chunk in chunks:
                chunk.unpin(chunk.params)
            self.manager.release_all()

    @torch.no_grad()
    def _finish_reads(self, chunks: list[Chunk]) -> None:
        """Move what `.data =` has put in the place of weights into the chunks."""
        for chunk in chunks:
            for slot in chunk.params if chunk.gathered is not None else ():
                assert chunk.gathered is not None
                shown, place = slot.parameter.detach(), slot.view_in(chunk.gathered)
                if shown.data_ptr() != place.data_ptr():
                    place.copy_(shown)
                    slot.parameter.data = place

    @torch.no_grad()
    def _release_summoned(self, chunks: list[Chunk]) -> None:
        self._finish_reads(chunks)
        for chunk in chunks:
            if chunk.gathered is not None and not chunk.is_kept_gathered:
                chunk.weights.store(chunk.gathered[chunk.layout.shard_range(chunk.rank)])

    def notify_loaded(self) -> None:
        # Nothing is spread: who changes weights from outside changes kept ones on every rank. So a rank whose load
        # failed need not take part.
        super().notify_loaded()
        self._outdate_graphs()

    def check_weights(self) -> None:
        """Raise if somebody changed weights where that has no effect.

        Raises:
            ConfigError: The memory of a parameter was replaced, or it was written to while its weights were elsewhere.
        """
        self._require_unmoved()
        chunks = [chunk for chunk in self.manager.chunks if chunk.params and not chunk.is_kept_gathered]
        written = chunks if chunks and any_modified_while_sharded(chunks) else []
        for chunk in written:
            if not chunk.was_modified_while_sharded():
                continue
            names = [repr(slot.name) for slot in chunk.params]
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ConfigError(
                f"a parameter was written to while its weights were divided among the ranks, where the change is lost:"
                f" one of {listed}. Change weights inside of `with model.gathered():`"
            )

    def _require_unmoved(self) -> None:
        name = self.moved_parameter()
        if name is not None:
            raise ConfigError(
                f"the memory of {name!r} was replaced after boost(), by model.to(), .half(), .data = or the like, which"
                " the optimizer and the other ranks do not see: do it before boost(), or change weights inside of"
                " `with model.gathered():`"
            )

    def moved_parameter(self) -> str | None:
        """Return the name of a parameter that shows other memory than its chunk's, or None."""
        for chunk in self.manager.chunks:
            for slot in chunk.params:
                parameter, kept = slot.parameter, chunk.gathered if chunk.is_kept_gathered else None
                if kept is not None and parameter.numel() > 0 and parameter.data_ptr() != slot.view_in(kept).data_ptr():
                    return slot.name
                is_hidden = not chunk.is_kept_gathered and chunk.gathered is None and parameter.numel() > 0
                if is_hidden and parameter.data_ptr() != chunk.placeholder.data_ptr():
                    return slot.name
        return None

    def regroup(self, parameters: list[nn.Parameter]) -> list[Chunk]:
        """Move parameters, which train from now on, into new chunks; returns these. Collective."""
        slots = self._slots()
        moved = [slots[id(parameter)] for parameter in parameters]
        values: dict[int, torch.Tensor] = {}
        with self.manager.aside():
            for slot in moved:
                self.manager.need((slot,))
                values[id(slot.parameter)] = slot.parameter.detach().clone()
        for slot in moved:
            slot.chunk.remove(slot)
        names = {slot.name: slot.parameter for slot in moved}
        chunks = self._make_chunks(names, values, len(self.manager.chunks))
        self.manager.add(chunks)
        self.hooks.remove()
        self.hooks = ModuleHooks(self.module, self.manager, self._slots())
        return chunks

    # The user's own names.

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the user's model's `state_dict`, whole, in memory of its own on every rank. Collective."""
        kwargs["keep_vars"] = True
        state = self.module.state_dict(*args, **kwargs)
        if any(True for _ in self._derived(state)):
            with self._summoned():
                state = self.module.state_dict(*args, **kwargs)
                copies = {id(one): one.detach().clone() for one in state.values() if isinstance(one, torch.Tensor)}
        else:
            copies = self._copies(state)
        for name, value in list(state.items()):
            state[name] = copies.get(id(value), value)  # tied ones stay tied
        return state

    def _derived(self, state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what hooks or get_extra_state() computed, which may be of weights that are not here."""
        own = self._slots().keys() | {id(buffer) for buffer in self.module.buffers()}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and id(value) not in own:
                yield name, value

    def _copies(self, state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Return copies of a state's tensors by the tensors' `id`, gathered chunk by chunk. Collective."""
        slots = self._slots()
        copies: dict[int, torch.Tensor] = {}
        by_chunk: dict[int, list[ChunkParam]] = {}
        for value in state.values():
            slot = slots.get(id(value))
            if slot is not None:
                by_chunk.setdefault(slot.chunk.index, []).append(slot)
            elif isinstance(value, torch.Tensor):
                copies.setdefault(id(value), value.detach().clone())
        with self.manager.aside():
            for index in sorted(by_chunk):
                self.manager.need(by_chunk[index])
                for slot in by_chunk[index]:
                    copies.setdefault(id(slot.parameter), slot.parameter.detach().clone())
        return copies

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the user's model; fp32 master weights follow.

        Needs memory for the whole model. If anything is wrong on any rank, nothing is loaded on all of them.

        Collective: every rank loads the same.

        Raises:
            ConfigError: assign=True, which would take the parameters away from the optimizer.
            RuntimeError: What torch finds wrong with names or shapes.
            RankFailedError: Another rank found something wrong.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) gives a boosted model new parameters, and the optimizer would go on with"
                " the old ones: leave assign out, or load before boost()"
            )
        # torch copies what fits before it raises. The pieces are enough to undo that: each rank's own.
        kept = {chunk: chunk.weights.as_tensor().clone() for chunk in self.manager.chunks if chunk.is_kept_gathered}
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        error: Exception | None = None
        result = None
        with self._summoned() as chunks:
            try:
                result = self.module.load_state_dict(state_dict, strict=strict)
            except Exception as caught:  # raised on all ranks below
                error = caught
            try:
                raise_on_all_ranks(error)
            except BaseException:
                self._undo(kept, buffers)
                raise
            self._release_summoned(chunks)
        self.notify_loaded()
        return result

    def _undo(self, kept: Mapping[Chunk, torch.Tensor], buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for chunk, piece in kept.items():
            chunk.weights.store(piece)
        for buffer, before in buffers:
            buffer.copy_(before)
        self.weights_changed()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy of the model alone, whole, as averages of weights want it: it has no optimizer. Collective."""
        with self.gathered():
            copied = ModelWrapper(copy.deepcopy(self.module, memo), is_primary=self._is_primary)
        for module in copied.module.modules():
            _forget_hooks(module)
        copied.precision = self.precision
        return copied.train(self.training)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GeminiModel:
        for parameter in self.module.parameters():
            probe = fn(torch.zeros((), dtype=parameter.dtype, device=parameter.device))
            if probe.dtype != parameter.dtype or probe.device != parameter.device:
                raise ConfigError(
                    f"the boosted model was to become {probe.dtype} on {probe.device}, by .to(), .half() or the like,"
                    f" and is {parameter.dtype} on {parameter.device}, where its chunks have it: do it before boost()"
                )
        return self

    # What a CheckpointIO reads and fills.

    def tensor_slices(self) -> list[TensorSlice]:
        slots = self._slots()
        slices: list[TensorSlice] = []
        for names, value in self._named_state():
            slot = slots.get(id(value))
            if slot is None:
                slices.append(TensorSlice.whole(names[0], value.detach(), primary=self._is_primary, shared=False))
            else:
                slices += self._slices_of(names[0], slot)
        return slices

    def _slices_of(self, name: str, slot: ChunkParam) -> Iterator[TensorSlice]:
        chunk = slot.chunk
        if chunk.is_kept_gathered or slot.region.start == slot.region.stop:
            yield TensorSlice.whole(name, slot.parameter.detach(), primary=self._is_primary)
            return
        for part in chunk.layout.parts(chunk.rank):
            if chunk.layout.regions[part.region_index] is slot.region:
                yield TensorSlice(
                    name=name,
                    dtype=chunk.layout.dtype,
                    global_shape=slot.region.shape,
                    box=tuple((0, size) for size in slot.region.shape),
                    span=part.span,
                    tensor=chunk.weights.as_tensor()[part.in_shard],
                    primary=self._settings.is_primary,
                )

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        return {names[0]: tuple(names[1:]) for names, _ in self._named_state() if len(names) > 1}

    def _named_state(self) -> list[tuple[list[str], torch.Tensor]]:
        """Return the tensors of the model's state, each with all of its names."""
        state, slots = self.module.state_dict(keep_vars=True), self._slots()
        for name, value in self._derived(state):
            if value.is_floating_point() and value.numel() > 0 and bool(value.isnan().all()):
                raise CheckpointError(
                    f"{name!r} of the model's state is computed by a hook or get_extra_state() of weights that are not"
                    " gathered now: save inside of `with model.gathered():`"
                )
        parameters = {name: value for name, value in state.items() if id(value) in slots}
        others = {name: value for name, value in state.items() if id(value) not in slots}
        groups: dict[int, list[str]] = {}
        for name, value in parameters.items():
            groups.setdefault(id(value), []).append(name)
        found = {names[0]: (names, state[names[0]]) for names in [*groups.values(), *self._tied(others)]}
        return [found[name] for name in state if name in found]


class _RefuseHidden:
    """Keeps the user's own module from giving a state of nan."""

    def __init__(self, manager: ChunkManager | None) -> None:
        self._manager = manager

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._manager is None or keep_vars:  # who wants the parameters themselves knows what they are
            return
        if any(chunk.gathered is None and chunk.params for chunk in self._manager.chunks):
            raise ConfigError(
                f"state_dict() of the {type(module).__name__} that went into boost() has no weights to give, as they"
                " are divided among the ranks: call it on the model that boost() returned, use booster.save_model(), or"
                " call it inside of `with model.gathered():`"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseHidden:
        return _RefuseHidden(None)


def _forget_hooks(module: nn.Module) -> None:
    """Take hooks of this package, which do nothing in a copy, off a module."""
    for key, hook in list(module._state_dict_pre_hooks.items()):
        if isinstance(hook, _RefuseHidden):
            del module._state_dict_pre_hooks[key]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if type(hook).__module__ == ModuleHooks.__module__:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to a device and give all ranks the first rank's; parameters stay where they are.

    Collective: the ranks' models have the same buffers.
    """
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the old ones, so that their ids stay unique
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in placed:
                    real = materialize_tensor(buffer) if is_lazy(buffer) else buffer
                    placed[id(buffer)] = buffer, real.to(device)
                module._buffers[name] = placed[id(buffer)][1]  # tied ones stay tied
    broadcast([buffer for _, buffer in model.named_buffers()])


class GeminiModelBuilder:
    """Makes boosted models.

    Args:
        settings: Sharding settings.
        placement: Placement policy.
        offload_dir: Where files of offloaded pieces go; None: see `GeminiPlugin`.
        pins: Whether offloaded memory is page-locked.
    """

    def __init__(
        self,
        settings: GeminiSettings,
        placement: Placement,
        *,
        offload_dir: str | os.PathLike[str] | None,
        pins: bool,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._offload_dir = None if offload_dir is None else os.fspath(offload_dir)
        self._pins = pins
        self._tier: Tier | None = None
        self._locations = ChunkLocations(weights=frozenset(), states=frozenset(), kept_gathered=frozenset())

    def build(
        self, model: nn.Module, trained: Collection[int], *, is_primary: bool, broadcasts_buffers: bool, verbose: bool
    ) -> GeminiModel:
        """Return the boosted model, whose parameters' values have gone into chunks. Collective.

        Args:
            model: The user's model.
            trained: The `id`s of parameters that an optimizer updates.
            is_primary: True on the rank that writes what all ranks hold alike.
            broadcasts_buffers: Give all ranks the first rank's buffers before each forward in training.
            verbose: Log how the chunks are filled.
        """
        settings = self._settings
        named, facts, module_of = describe_params(model, trained, settings.dtype)
        plan = plan_model(facts, module_of, settings, settings.num_shards)
        if verbose:
            log_rank_zero(f"GeminiPlugin: {plan.waste.describe()}")
        chunks = [make_chunk(index, layout, named, settings) for index, layout in enumerate(plan.chunks)]
        manager = ChunkManager(
            chunks,
            negotiation=OrderNegotiation(settings.order_group, 2 + settings.max_prefetch),
            device=settings.device,
            placement=self._placement,
            control_group=settings.control_group or settings.data_parallel_group,
            make_tier=self._make_tier,
            max_prefetch=settings.max_prefetch,
            reduces_asynchronously=settings.reduces_asynchronously,
            other_bytes=lambda: 0,
        )
        self._locations = manager.locations = manager.choose_locations()
        if self._locations.weights or self._locations.states:
            self._tier = manager.needed_tier()
        for chunk in chunks:
            self._fill_chunk(chunk, None)
        manager.note_filled()
        boosted = GeminiModel(
            model,
            manager,
            settings,
            self._add_chunks,
            is_primary=is_primary,
            broadcasts_buffers=broadcasts_buffers,
        )
        manager.other_bytes = functools.partial(self._other_bytes, boosted)
        return boosted

    def _make_tier(self) -> Tier:
        if self._settings.device.type != "cpu" and self._offload_dir is None:
            return HostTier(self._pins)
        return DiskTier(self._offload_dir)

    def _other_bytes(self, boosted: GeminiModel) -> int:
        """Return what is in the compute tier beside chunks: on the CPU, without a counter, what autograd keeps."""
        if self._settings.device.type == "cpu":
            return boosted.hooks.saved_bytes
        return max(0, memory_allocated() - boosted.manager.bytes_in_memory)

    def _fill_chunk(self, chunk: Chunk, values: Mapping[int, torch.Tensor] | None) -> None:
        is_offloaded = chunk.index in self._locations.weights
        is_alone = self._settings.num_shards == 1 and not is_offloaded
        fill_chunk(
            chunk,
            self._settings,
            keeps_gathered=chunk.index in self._locations.kept_gathered or is_alone,
            weights_tier=self._tier if is_offloaded else None,
            states_tier=self._tier if chunk.index in self._locations.states else None,
            values=values,
        )

    def _add_chunks(
        self, named: Mapping[str, nn.Parameter], values: Mapping[int, torch.Tensor], first_index: int
    ) -> list[Chunk]:
        """Return chunks, in memory, of parameters that train from now on."""
        members = list(named.items())
        facts = [ParamInfo(name=name, shape=tuple(one.shape), dtype=one.dtype, trains=True) for name, one in members]
        largest = max(fact.numel for fact in facts)
        plan = plan_chunks(
            facts,
            num_shards=self._settings.num_shards,
            chunk_numel=max(largest, self._settings.chunks.numel or self._settings.chunks.min_numel),
        )
        chunks = [
            make_chunk(first_index + index, layout, members, self._settings) for index, layout in enumerate(plan.chunks)
        ]
        for chunk in chunks:
            self._fill_chunk(chunk, values)
        return chunks
