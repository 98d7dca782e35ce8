"""Construction of a model's chunks, one after another, without a full copy of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import broadcast, sum_dtype
from booster.lazy_init import is_lazy, materialize_tensor

from .chunk import Chunk, ChunkShard, finish_transfer
from .chunk_layout import ChunkLayout, ChunkPlan, ParamInfo, default_step, plan_chunks, search_chunk_numel
from .config import GeminiSettings
from .tiers import Tier


def describe_params(
    model: nn.Module, trained: Collection[int], dtype: torch.dtype | None
) -> tuple[list[tuple[str, nn.Parameter]], list[ParamInfo], list[int]]:
    """Return a model's named parameters, their layout information, and the index of each one's module.

    Args:
        model: The user's model.
        trained: The `id`s of parameters that an optimizer updates.
        dtype: Dtype that floating-point weights are cast to; None keeps the model's.
    """
    named = list(model.named_parameters())
    module_of = {
        id(parameter): number
        for number, module in reversed(list(enumerate(model.modules())))
        for parameter in module.parameters(recurse=False)
    }
    infos = [
        ParamInfo(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype,
            trains=id(parameter) in trained and parameter.requires_grad,
        )
        for name, parameter in named
    ]
    return named, infos, [module_of[id(parameter)] for _, parameter in named]


def plan_model(
    infos: Sequence[ParamInfo], module_of: Sequence[int], settings: GeminiSettings, num_shards: int
) -> ChunkPlan:
    """Return the layout of all parameters, equal on all ranks. No communication."""
    chunks = settings.config.chunks
    if chunks.numel is not None:
        return plan_chunks(infos, num_shards=num_shards, chunk_numel=chunks.numel, module_of=module_of)
    found = search_chunk_numel(
        infos,
        num_shards=num_shards,
        search_range_numel=chunks.search_range_numel,
        min_chunk_numel=chunks.min_numel,
        step_numel=default_step(infos) if chunks.step_numel is None else chunks.step_numel,
        module_of=module_of,
    )
    return plan_chunks(
        infos,
        num_shards=num_shards,
        chunk_numel=found.chunk_numel,
        module_of=module_of,
        outlier_numel=found.outlier_numel,
    )


def make_chunk(
    index: int, layout: ChunkLayout, named: Sequence[tuple[str, nn.Parameter]], settings: GeminiSettings
) -> Chunk:
    """Return a chunk without allocated memory.

    Args:
        index: Index of the chunk.
        layout: Layout of the chunk.
        named: All parameters of the layout with their names.
        settings: Sharding settings.
    """
    return Chunk(
        index,
        layout,
        [named[region.index] for region in layout.regions],
        rank=settings.rank,
        group=settings.shard_group,
        device=settings.device,
        sum_dtype=sum_dtype(layout.dtype),
        sum_device=settings.device,
    )


@torch.no_grad()
def fill_chunk(
    chunk: Chunk,
    settings: GeminiSettings,
    *,
    keeps_gathered: bool,
    weights_tier: Tier | None,
    states_tier: Tier | None,
    source: dist.ProcessGroup | None = None,
    values: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Move the first rank's parameter values into a chunk. Collective over the data-parallel ranks.

    Args:
        chunk: Chunk without allocated memory.
        settings: Sharding settings.
        keeps_gathered: If True, keep the chunk gathered.
        weights_tier: Tier of the weight shard, or None for memory.
        states_tier: Tier of the master weights, or None for memory.
        source: Group whose first rank provides the values; optional, defaults to the world group.
        values: Values by parameter `id`, for parameters that are already bound to a placeholder.
    """
    values = {} if values is None else values
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
    broadcast([full], source)
    shard = full[chunk.layout.shard_range(settings.rank)]
    if keeps_gathered:
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
