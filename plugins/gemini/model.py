"""Model wrapper of Gemini, whose weights are gathered on use, and construction of its chunks, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.comm import (
    all_gather_equal,
    broadcast,
    group_size,
    raise_on_all_ranks,
    start_all_gather,
)
from booster.core.plain_torch import refuse_tracing, refuse_transforms
from booster.errors import ConfigError
from booster.interface import TensorSlice
from booster.kernels.checksum import crc32
from booster.lazy_init import is_lazy, materialize_tensor
from booster.logger import log_rank_zero
from booster.plugins.base import DistributedModel, refuse_conversion
from booster.validation import error_of

from .chunk import Chunk, ChunkParam
from .chunk_layout import ChunkPlan, ParamInfo, default_step, plan_chunks, search_chunk_numel
from .chunk_manager import ChunkManager
from .config import GeminiSettings
from .module_hooks import ModuleHook, ModuleHooks
from .placement import Placement
from .tiers import ChunkShard, finish_transfer


class GeminiModel(DistributedModel):
    """Boosted model; every rank holds its shards of the weights, and full weights only while they are used.

    Between forwards a parameter has its full shape, and operators on it gather its weights: they are collective, and
    may not write to it. `state_dict()` returns full weights, and `with model.gathered():` makes the parameters hold
    them. Both are collective.

    Args:
        module: The user's model.
        manager: Manager of the chunks, which hold all parameters.
        settings: Sharding settings.
    """

    def __init__(self, module: nn.Module, manager: ChunkManager, settings: GeminiSettings) -> None:
        group = settings.data_parallel_group
        broadcasts_buffers = settings.config.broadcast_buffers and group_size(group) > 1
        super().__init__(module, group, is_primary=settings.is_first, broadcasts_buffers=broadcasts_buffers)
        self.manager = manager
        self._settings = settings
        self.hooks = ModuleHooks(module, manager, self._chunk_params())
        module.register_state_dict_pre_hook(ModuleHook(partial(_refuse_hidden, manager)))

    def _chunk_params(self) -> dict[int, ChunkParam]:
        return {id(param.parameter): param for param in self._all_params()}

    def _all_params(self) -> Iterator[ChunkParam]:
        return (param for chunk in self.manager.chunks for param in chunk.params)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward; arguments and result are those of the user's model.

        Collective over the shard group, because weights are gathered.
        """
        self._begin_run(args, kwargs)
        return super().forward(*args, **kwargs)

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.manager.is_whole:
            refuse_tracing()
            refuse_transforms()
        self.check_weights()
        self._begin_training_forward()

    # Weights.

    def weights_changed(self) -> None:
        """All-gather chunks that are kept gathered, and invalidate graphs of older weights. Collective."""
        kept = [chunk for chunk in self.manager.chunks if chunk.is_kept_gathered]
        flights = [
            start_all_gather(one.gathered, self._settings.shard_group) for one in kept if one.gathered is not None
        ]
        self._outdate_graphs()
        for flight in flights:
            flight.wait()

    def _outdate_graphs(self) -> None:
        self.manager.release_all()  # a forward without a backward leaves outdated weights gathered
        for chunk in self.manager.chunks:
            chunk.version += 1
        torch.autograd.graph.increment_version(list(self.module.parameters()))
        with torch._C.DisableTorchFunctionSubclass():  # of hidden parameters
            for param in self._all_params():
                param.record_version()

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Gather all weights into the parameters of the user's model, and yield it; changes in the block are kept.

        Forwards in the block need no communication, so a single rank may run the model, for example to generate.
        Needs memory for the full model. Collective at its start and end.

        Raises:
            ConfigError: The ranks made different changes; none is kept.
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
        """Check that the gathered weights are equal on all ranks."""
        digest = 0
        for chunk in chunks:
            if chunk.gathered is not None:
                weights = chunk.gathered.cpu()
                for region in chunk.layout.regions:
                    digest = crc32(weights[region.start : region.stop].view(torch.uint8).numpy().data, digest)
        group = self._settings.control_group or self._settings.data_parallel_group
        digests = all_gather_equal(torch.tensor([digest]), group).tolist()
        if len(set(digests)) == 1:
            return
        for chunk in chunks:
            if chunk.is_kept_gathered and chunk.gathered is not None:
                broadcast([chunk.gathered], self._settings.data_parallel_group)
        self.notify_loaded()
        raise ConfigError(
            "the weights were changed inside of `with model.gathered():`, and on ranks"
            f" {[rank for rank, one in enumerate(digests) if one != digests[0]]} differently from rank 0: make the"
            " same changes on every rank. No change was kept (of weights that stay gathered, rank 0's were)"
        )

    @contextmanager
    def _summoned(self) -> Iterator[list[Chunk]]:
        """Gather all weights in the block; changes are lost, except in chunks kept gathered.

        Collective at its start.
        """
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
        """Copy weights that were replaced through `.data =` into the chunks."""
        for chunk in chunks:
            for param in chunk.params if chunk.gathered is not None else ():
                assert chunk.gathered is not None
                shown, place = param.parameter.detach(), param.view_in(chunk.gathered)
                if shown.data_ptr() != place.data_ptr():
                    place.copy_(shown)
                    param.parameter.data = place

    @torch.no_grad()
    def _release_summoned(self, chunks: list[Chunk]) -> None:
        self._finish_reads(chunks)
        for chunk in chunks:
            if chunk.gathered is not None and not chunk.is_kept_gathered:
                finish_transfer(chunk.weights.store(chunk.gathered[chunk.layout.shard_range(chunk.rank)]))

    def notify_loaded(self) -> None:
        # No communication, so a rank with a failed load need not take part: external changes of chunks kept gathered
        # are made on every rank.
        super().notify_loaded()
        self._outdate_graphs()

    def check_weights(self) -> None:
        """Check that the parameters' data are in their chunks, or sharded, and that no weight was modified in vain.

        Raises:
            ConfigError: The memory of a parameter was replaced, or a view of a sharded one was written.
        """
        with torch._C.DisableTorchFunctionSubclass():
            self.hooks.refuse_modified(one for one in self._all_params() if not one.chunk.is_kept_gathered)
            self._check_memory()

    def _check_memory(self) -> None:
        for param in self._all_params():
            chunk, parameter = param.chunk, param.parameter
            if chunk.gathered is None:
                is_elsewhere = parameter.numel() > 0 and parameter.data_ptr() != chunk.placeholder.data_ptr()
            else:
                is_elsewhere = chunk.is_kept_gathered and param.is_elsewhere  # others are gathered for their use
            if is_elsewhere:
                raise ConfigError(
                    f"the memory of {param.name!r} was replaced after boost(), by model.to(), .half(), .data = or the"
                    " like, which does not reach the optimizer and the other ranks: do it before boost(), or change"
                    " weights inside of `with model.gathered():`"
                )

    def regroup(self, parameters: list[nn.Parameter]) -> list[Chunk]:
        """Move unfrozen parameters, and those in the same chunks, into new chunks and return these. Collective."""
        trained = {id(parameter) for parameter in parameters}
        before = [one for one in self.manager.chunks if any(id(param.parameter) in trained for param in one.params)]
        moved = [param for chunk in before for param in chunk.params]
        values: dict[int, torch.Tensor] = {}
        with self.manager.aside():
            for param in moved:
                self.manager.need((param,))
                values[id(param.parameter)] = param.parameter.detach().clone()
        is_kept = all(chunk.is_kept_gathered for chunk in before)
        for chunk in before:
            chunk.clear()
        named = [(param.name, param.parameter) for param in moved]
        chunks = add_chunks(self.manager, self._settings, named, values, trained, is_kept=is_kept)
        self.hooks.watch(self.module, self._chunk_params())
        return chunks

    # State dicts, by the user's names.

    @torch.no_grad()
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the unsharded `state_dict` of the user's model, as a copy on every rank. Collective."""
        self.require_complete()
        self.check_weights()
        kwargs["keep_vars"] = True
        state = self.module.state_dict(*args, **kwargs)
        copies = self._copies(state)
        for name, value in list(state.items()):
            state[name] = copies.get(id(value), value)  # tied ones stay tied
        return state

    def _copies(self, state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Return copies of a state dict's tensors by `id`, gathered chunk by chunk. Collective."""
        params = self._chunk_params()
        copies: dict[int, torch.Tensor] = {}
        by_chunk: dict[int, list[ChunkParam]] = {}
        for value in state.values():
            param = params.get(id(value))
            if param is not None:
                by_chunk.setdefault(param.chunk.index, []).append(param)
            elif isinstance(value, torch.Tensor):
                copies.setdefault(id(value), value.detach().clone())
        with self.manager.aside():
            for index in sorted(by_chunk):
                self.manager.need(by_chunk[index])
                for param in by_chunk[index]:
                    copies.setdefault(id(param.parameter), param.parameter.detach().clone())
        return copies

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the user's model and its fp32 master weights.

        Needs memory for the full model. If it fails on any rank, nothing is loaded on all ranks.

        Collective: all ranks must pass equal state dicts.

        Raises:
            ConfigError: `assign` is True, which would replace parameters that the optimizer updates.
            RuntimeError: Names or shapes do not match, as in torch.
            RankFailedError: It failed on another rank.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) replaces a boosted model's parameters, and the optimizer would update"
                " the old ones: leave assign out, or load before boost()"
            )
        # torch copies matching tensors before it raises. This rank's shards are enough to undo that.
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
                for chunk, shard in kept.items():
                    chunk.weights.store(shard)
                for buffer, before in buffers:
                    buffer.copy_(before)
                self.weights_changed()
                raise
            self._release_summoned(chunks)
        self.notify_loaded()
        return result

    def _copy_module(self, memo: dict[int, Any]) -> nn.Module:
        with self.gathered():
            copied = copy.deepcopy(self.module, memo)
        for module in copied.modules():
            _forget_hooks(module)
        return copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GeminiModel:
        refuse_conversion(self.module, fn, "chunks have it")
        return self

    # Interface of CheckpointIO.

    def tensor_slices(self) -> list[TensorSlice]:
        self.check_weights()
        params, buffers = self._chunk_params(), {id(buffer) for buffer in self.module.buffers()}
        slices: list[TensorSlice] = []
        for names, value in self._named_state(params):
            param = params.get(id(value))
            if param is None:
                is_computed = id(value) not in buffers
                slices.append(
                    TensorSlice.full(
                        names[0], value.detach(), primary=self._is_primary, shared=False, is_computed=is_computed
                    )
                )
            else:
                slices += self._slices_of(names[0], param)
        return slices

    def _slices_of(self, name: str, param: ChunkParam) -> Iterator[TensorSlice]:
        chunk = param.chunk
        if chunk.is_kept_gathered or param.region.start == param.region.stop:
            yield TensorSlice.full(name, param.parameter.detach(), primary=self._is_primary)
            return
        for part in chunk.layout.parts(chunk.rank):
            if chunk.layout.regions[part.region_index] is param.region:
                yield TensorSlice(
                    name=name,
                    dtype=chunk.layout.dtype,
                    global_shape=param.region.shape,
                    box=tuple((0, size) for size in param.region.shape),
                    span=part.span,
                    tensor=chunk.weights.as_tensor()[part.in_shard],
                    primary=self._settings.is_primary,
                )

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        return {names[0]: tuple(names[1:]) for names, _ in self._named_state(self._chunk_params()) if len(names) > 1}


def _refuse_hidden(manager: ChunkManager, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise in `state_dict` of the user's module, which would gather all weights at once."""
    # keep_vars returns the parameter objects, not values
    if not keep_vars and any(chunk.is_hidden and chunk.params for chunk in manager.chunks):
        raise ConfigError(
            f"state_dict() of the {type(module).__name__} passed to boost() has no weights, because they are"
            " sharded over the ranks: call it on the model that boost() returned, use booster.save_model(), or"
            " call it inside of `with model.gathered():`"
        )


def _forget_hooks(module: nn.Module) -> None:
    """Remove this package's hooks from a copied module, where they have no effect."""
    for hooks in (module._state_dict_pre_hooks, module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, ModuleHook):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to a device and broadcast the first rank's; parameters are not moved.

    Collective: all ranks' models must have equal buffers.
    """
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the old ones alive, so that ids stay unique
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in placed:
                    real = materialize_tensor(buffer) if is_lazy(buffer) else buffer
                    placed[id(buffer)] = buffer, real.to(device)
                module._buffers[name] = placed[id(buffer)][1]  # tied ones stay tied
    broadcast([buffer for _, buffer in model.named_buffers()])


def build_chunks(
    model: nn.Module, trained: Collection[int], settings: GeminiSettings, placement: Placement
) -> ChunkManager:
    """Move a model's parameters into chunks and return their manager. Collective over the data-parallel ranks.

    Args:
        model: The user's model.
        trained: The `id`s of parameters that an optimizer updates.
        settings: Sharding settings.
        placement: Placement policy.
    """
    named, dtype = list(model.named_parameters()), settings.config.dtype
    module_of = {
        id(parameter): number
        for number, module in reversed(list(enumerate(model.modules())))
        for parameter in module.parameters(recurse=False)
    }
    infos = [
        ParamInfo(
            shape=tuple(parameter.shape),
            dtype=dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype,
            trains=id(parameter) in trained and parameter.requires_grad,
        )
        for _, parameter in named
    ]
    plan = _plan_model(infos, [module_of[id(parameter)] for _, parameter in named], settings)
    if settings.config.verbose:
        log_rank_zero(f"GeminiPlugin: {plan.describe()}")
    manager = ChunkManager(_make_chunks(plan, named, settings), settings, placement)
    manager.locations = manager.choose_locations()
    is_offloaded = manager.locations.weights or manager.locations.states
    raise_on_all_ranks(error_of(manager.needed_tier) if is_offloaded else None)  # before any weight is moved
    for chunk in manager.chunks:
        _fill_chunk(chunk, manager, settings, {})
    manager.note_addresses(manager.chunks)
    return manager


def add_chunks(
    manager: ChunkManager,
    settings: GeminiSettings,
    named: Sequence[tuple[str, nn.Parameter]],
    values: Mapping[int, torch.Tensor],
    trained: Collection[int],
    *,
    is_kept: bool,
) -> list[Chunk]:
    """Move parameters of other chunks into new ones and return these. Collective over the data-parallel ranks.

    Args:
        manager: Manager that the chunks are added to.
        settings: Sharding settings.
        named: Names and parameters, which are bound to placeholders.
        values: Values of the parameters by `id`.
        trained: The `id`s of those that train.
        is_kept: If True, the chunks are kept gathered.
    """
    infos = [ParamInfo(shape=tuple(one.shape), dtype=one.dtype, trains=id(one) in trained) for _, one in named]
    smallest = settings.config.chunk_numel or settings.config.min_chunk_numel
    chunk_numel = max(smallest, *(info.numel for info in infos))
    plan = plan_chunks(infos, num_shards=settings.num_shards, chunk_numel=chunk_numel)
    chunks = _make_chunks(plan, named, settings, first_index=len(manager.chunks))
    if is_kept:
        kept = manager.locations.kept_gathered.union(chunk.index for chunk in chunks)
        manager.locations = replace(manager.locations, kept_gathered=kept)
    for chunk in chunks:
        _fill_chunk(chunk, manager, settings, values)
    manager.add(chunks)
    return chunks


def _plan_model(infos: Sequence[ParamInfo], module_of: Sequence[int], settings: GeminiSettings) -> ChunkPlan:
    """Return the layout of all parameters, equal on all ranks. No communication."""
    config, num_shards = settings.config, settings.num_shards
    chunk_numel, outlier_numel = config.chunk_numel, None
    if chunk_numel is None:
        found = search_chunk_numel(
            infos,
            num_shards=num_shards,
            search_range_numel=config.search_range_numel,
            min_chunk_numel=config.min_chunk_numel,
            step_numel=default_step(infos) if config.hidden_dim is None else config.hidden_dim,
            module_of=module_of,
        )
        chunk_numel, outlier_numel = found.chunk_numel, found.outlier_numel
    return plan_chunks(
        infos, num_shards=num_shards, chunk_numel=chunk_numel, module_of=module_of, outlier_numel=outlier_numel
    )


def _make_chunks(
    plan: ChunkPlan, named: Sequence[tuple[str, nn.Parameter]], settings: GeminiSettings, first_index: int = 0
) -> list[Chunk]:
    """Return chunks without allocated memory."""
    return [
        Chunk(
            index,
            layout,
            [named[region.index] for region in layout.regions],
            rank=settings.rank,
            group=settings.shard_group,
            device=settings.device,
        )
        for index, layout in enumerate(plan.chunks, first_index)
    ]


@torch.no_grad()
def _fill_chunk(
    chunk: Chunk, manager: ChunkManager, settings: GeminiSettings, values: Mapping[int, torch.Tensor]
) -> None:
    """Move the first rank's parameter values into a chunk. Collective over the data-parallel ranks.

    Args:
        chunk: Chunk without allocated memory.
        manager: Manager with the locations of the shards.
        settings: Sharding settings.
        values: Values by parameter `id`, for parameters that are already bound to a placeholder.
    """
    locations = manager.locations
    weights_tier = manager.needed_tier() if chunk.index in locations.weights else None
    states_tier = manager.needed_tier() if chunk.index in locations.states else None
    exact_dtype = chunk.layout.dtype  # promoted to a dtype that represents the values of all parameters exactly
    for param in chunk.params:
        exact_dtype = torch.promote_types(exact_dtype, param.parameter.dtype)
    full = torch.zeros(chunk.layout.numel, dtype=exact_dtype, device=settings.device)
    for param in chunk.params:
        parameter = param.parameter
        if id(parameter) in values:
            param.view_in(full).copy_(values[id(parameter)])
        elif settings.is_first or not is_lazy(parameter):
            param.view_in(full).copy_(materialize_tensor(parameter) if is_lazy(parameter) else parameter.detach())
        parameter.grad = None
        param.unbind()
    broadcast([full])
    shard = full[chunk.layout.shard_range(settings.rank)]
    if chunk.index in locations.kept_gathered or (settings.num_shards == 1 and weights_tier is None):
        chunk.keep_gathered(full)
    else:
        chunk.weights.allocate(weights_tier)
        weights = shard.to(chunk.layout.dtype)
        finish_transfer(chunk.weights.store(weights))
    dtype, device = settings.master_dtype(chunk.layout), settings.master_device(states_tier)
    if dtype != chunk.layout.dtype or device != chunk.weights.device:  # else the optimizer updates the weights
        chunk.master = ChunkShard(chunk.layout.shard_numel, dtype, device)
        chunk.master.allocate(states_tier)
        master = shard.to(dtype)
        finish_transfer(chunk.master.store(master))
