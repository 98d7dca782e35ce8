"""Workload of one configuration: the parallelized network and this rank's shard of the batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.benchmark.configurations import SERIAL, Configuration
from booster.benchmark.network import PerceptronLayer, make_network
from booster.benchmark.settings import BenchmarkSettings
from booster.benchmark.tensor_grids import (
    LINEAR_3D_ACTIVATIONS,
    SUMMA_ACTIVATIONS,
    BlockLayout,
    RankMesh,
    linear_3d_mesh,
    shard_mlp,
    summa_mesh,
)
from booster.comm import group_size
from booster.device import current_device
from booster.facade import Booster
from booster.interface import Plugin

__all__ = ["Batch", "Workload", "make_workload"]

_LEARNING_RATE = 1e-3
_PLAN = {"*.up": "colwise", "*.down": "rowwise"}
_MEBI = 2**20

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Workload:
    """Phases of a training step to measure. Every function is collective over the world.

    Attributes:
        forward: Computes the loss.
        backward: Computes and reduces the gradients.
        step: Updates the weights and zeroes the gradients.
        loss_share: Returns this rank's contribution to the loss of the global batch, a sum over ranks.
        close: Frees resources such as process groups.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]
    loss_contribution: Callable[[torch.Tensor], float]
    close: Callable[[], None] = lambda: None


def make_workload(configuration: Configuration, settings: BenchmarkSettings, batch: Batch) -> Workload:
    """Build the network under the configuration. Collective over the world.

    Args:
        configuration: Parallel configuration.
        settings: Sizes of the network.
        batch: Global batch (inputs, targets); this rank's shard is copied to its device.
    """
    mode, sizes = configuration.mode, configuration.sizes
    if mode in ("2d", "2.5d"):
        return _mesh_workload(summa_mesh(sizes["q"], sizes.get("depth", 1)), SUMMA_ACTIVATIONS, settings, batch)
    if mode == "3d":
        return _mesh_workload(linear_3d_mesh(sizes["q"]), LINEAR_3D_ACTIVATIONS, settings, batch)
    return _boosted_workload(configuration, settings, batch)


def _plugin_of(configuration: Configuration, settings: BenchmarkSettings) -> Plugin:
    plugins = importlib.import_module("booster.plugins")  # by name: modules below the facade do not import strategies
    # One chunk or bucket per layer: the default sizes are for models larger by orders of magnitude.
    layer_size_m = sum(parameter.numel() for parameter in PerceptronLayer(settings.hidden).parameters()) / _MEBI
    if configuration.mode == "1d":
        plugin = plugins.HybridParallelPlugin(tp_size=configuration.sizes["tp"], precision="fp32", plan=_PLAN)
    elif configuration.mode == "dp":
        plugin = plugins.TorchDDPPlugin()
    elif configuration.mode == "gemini":
        plugin = plugins.GeminiPlugin(precision="fp32", min_chunk_size_m=layer_size_m, search_range_m=0)
    else:
        stage = int(configuration.mode[-1])
        plugin = plugins.LowLevelZeroPlugin(stage=stage, precision="fp32", reduce_bucket_size_in_m=layer_size_m)
    found: Plugin = plugin
    return found


def _boosted_workload(configuration: Configuration, settings: BenchmarkSettings, batch: Batch) -> Workload:
    plugin = None if configuration.mode == SERIAL else _plugin_of(configuration, settings)
    num_shards, shard_index = (1, 0) if plugin is None else (plugin.dp_size, plugin.dp_rank)
    inputs, targets = (full.chunk(num_shards)[shard_index].clone().to(current_device()) for full in batch)
    network = make_network(settings)
    num_ranks = group_size()
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, _, _ = booster.boost(network, _optimizer(network), nn.MSELoss())

    def forward() -> torch.Tensor:
        loss: torch.Tensor = criterion(model(inputs), targets)
        return loss

    return Workload(
        forward=forward,
        backward=lambda loss: booster.backward(loss, optimizer),
        step=lambda: _step(optimizer),
        loss_contribution=lambda loss: float(loss.detach()) / num_ranks,  # equal shards, each replicated equally often
    )


def _mesh_workload(mesh: RankMesh, layout: BlockLayout, settings: BenchmarkSettings, batch: Batch) -> Workload:
    inputs, targets = (mesh.block(full, layout, "the batch").to(current_device()) for full in batch)
    network = make_network(settings)
    for layer in network:
        shard_mlp(layer, mesh)
    network.to(current_device())
    optimizer = _optimizer(network)
    numel = settings.rows * settings.hidden

    def forward() -> torch.Tensor:
        # This rank's term of the mean over all blocks, so that gradients are those of the mean.
        return nn.functional.mse_loss(network(inputs), targets, reduction="sum") / numel

    return Workload(
        forward=forward,
        backward=torch.Tensor.backward,
        step=lambda: _step(optimizer),
        loss_contribution=lambda loss: float(loss.detach()),
        close=mesh.close,
    )


def _optimizer(network: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, fused=True)


def _step(optimizer: Optimizer | Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
