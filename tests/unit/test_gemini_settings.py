"""What GeminiPlugin's arguments mean: sizes of chunks, formats and places of what an optimizer updates, the budget."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

from booster.device import free_memory
from booster.errors import ConfigError
from booster.plugins import GeminiPlugin
from booster.plugins.base import arguments_of
from booster.plugins.gemini.chunk_layout import ChunkLayout
from booster.plugins.gemini.config import GeminiConfig, GeminiSettings, PlacementConfig
from booster.plugins.gemini.nvme_tier import DiskTier
from booster.plugins.gemini.placement import AutoPlacement, ConstPlacement, StaticPlacement
from booster.plugins.gemini.tiers import HostTier

CPU = torch.device("cpu")


def placement(budget=None, max_prefetch=0, **arguments):
    return PlacementConfig(max_prefetch=max_prefetch, device_memory_budget=budget, **arguments).make(CPU)


def settings(device=CPU, keeps_masters=True):
    given = {name: parameter.default for name, parameter in inspect.signature(GeminiPlugin).parameters.items()}
    return GeminiSettings(
        config=arguments_of(GeminiConfig, given | {"precision": "fp16", "master_weights": keeps_masters}),
        rank=0,
        num_shards=1,
        is_first=True,
        is_primary=True,
        device=device,
    )


def test_the_defaults_are_the_plugin_s():
    plugin = inspect.signature(GeminiPlugin).parameters
    named = [field for field in fields(PlacementConfig) if field.name != "max_prefetch"]
    assert all(field.default == plugin[field.name].default for field in named)


def test_strict_mode_keeps_all_weights():
    assert placement(strict_ddp_mode=True, offload_optim_frac=0.5) == StaticPlacement(
        shard_param_frac=0.0, offload_optim_frac=0.5
    )


def test_policies_get_their_own_numbers():
    fractions = {"shard_param_frac": 0.75, "offload_optim_frac": 0.5, "offload_param_frac": 0.25}
    assert placement(7, 2, **fractions) == StaticPlacement(budget=7, max_prefetch=2, **fractions)
    assert placement(9, 1, placement_policy="const") == ConstPlacement(budget=9, max_prefetch=1)
    auto = placement(9, placement_policy="auto", steady_cuda_cap_ratio=0.5, gpu_margin_mem_ratio=0.1)
    assert auto == AutoPlacement(budget=9, steady_ratio=0.5, warmup_ratio=0.8, gpu_margin_mem_ratio=0.1)


def test_auto_alone_takes_what_is_free():
    free = free_memory(CPU)
    assert free / 4 < placement(placement_policy="auto").budget < 4 * free
    assert all(placement(placement_policy=policy).budget is None for policy in ("static", "cpu", "cuda"))


def test_const_alone_is_refused():
    with pytest.raises(ConfigError, match="device_memory_budget"):
        placement(placement_policy="const")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("keeps_masters", [True, False])
def test_low_precision_has_fp32_masters_unless_told_otherwise(dtype, keeps_masters):
    layout = ChunkLayout(dtype=dtype, trains=True, numel=64, num_shards=1, regions=())
    is_master = keeps_masters and dtype.itemsize == 2
    assert settings(keeps_masters=keeps_masters).master_dtype(layout) is (torch.float32 if is_master else dtype)


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_states_that_are_offloaded_are_updated_by_the_host(device, tmp_path):
    disk = DiskTier(str(tmp_path))
    assert settings(device).master_device(None) == device
    assert settings(device).master_device(HostTier(False)) == CPU
    assert settings(device).master_device(disk) == CPU
    disk.close()
