"""Construction of a model's chunks, one after another, without a full copy of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from booster.comm import broadcast, raise_on_all_ranks
from booster.lazy_init import is_lazy, materialize_tensor
from booster.logger import log_rank_zero
from booster.validation import error_of

from .chunk import Chunk, ChunkShard, finish_transfer
from .chunk_layout import ChunkPlan, ParamInfo, default_step, plan_chunks, search_chunk_numel
from .chunk_manager import ChunkManager
from .config import GeminiSettings
from .placement import Placement


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
) -> list[Chunk]:
    """Move parameters of other chunks into new ones and return these. Collective over the data-parallel ranks.

    Args:
        manager: Manager that the chunks are added to.
        settings: Sharding settings.
        named: Names and parameters, which are bound to placeholders.
        values: Values of the parameters by `id`.
        trained: The `id`s of those that train.
    """
    infos = [ParamInfo(shape=tuple(one.shape), dtype=one.dtype, trains=id(one) in trained) for _, one in named]
    smallest = settings.config.chunk_numel or settings.config.min_chunk_numel
    chunk_numel = max(smallest, *(info.numel for info in infos))
    plan = plan_chunks(infos, num_shards=settings.num_shards, chunk_numel=chunk_numel)
    chunks = _make_chunks(plan, named, settings, first_index=len(manager.chunks))
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
