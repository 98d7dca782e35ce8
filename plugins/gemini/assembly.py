"""Puts chunks, tiers and manager together around a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping

import torch
from torch import nn

from booster.comm import broadcast
from booster.device import memory_allocated
from booster.lazy_init import is_lazy, materialize_tensor
from booster.mixed_precision.fp16_naive import log_on_master
from booster.plugins.gemini.building import describe_params, fill_chunk, make_chunk, plan_model
from booster.plugins.gemini.chunk import Chunk
from booster.plugins.gemini.chunk_manager import ChunkManager
from booster.plugins.gemini.disk_tier import DiskTier
from booster.plugins.gemini.layout import ParamInfo
from booster.plugins.gemini.meeting import OrderNegotiation
from booster.plugins.gemini.model import GeminiModel
from booster.plugins.gemini.placement import ChunkLocations, Placement
from booster.plugins.gemini.search import plan_chunks
from booster.plugins.gemini.settings import GeminiSettings
from booster.plugins.gemini.tiers import HostTier, Tier

__all__ = ["GeminiModelBuilder", "place_buffers"]


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves buffers to a device and gives all ranks the first rank's; parameters stay where they are.

    Collective: the ranks' models have the same buffers.
    """
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the old ones, whose ids are nobody else's then
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
        settings: How they are sharded.
        placement: What may be in the compute tier.
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
        """Returns the boosted model, whose parameters' values have gone into chunks. Collective.

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
            log_on_master(f"GeminiPlugin: {plan.waste.describe()}")
        chunks = [make_chunk(index, layout, named, settings) for index, layout in enumerate(plan.chunks)]
        manager = ChunkManager(
            chunks,
            meeting=OrderNegotiation(settings.order_group, 2 + settings.max_prefetch),
            device=settings.device,
            placement=self._placement,
            agreement_group=settings.control_group or settings.data_parallel_group,
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
        """Returns what is in the compute tier beside chunks: on the CPU, where nobody counts, what autograd keeps."""
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
        """Returns chunks, in memory, of parameters that train from now on."""
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
