"""Options of the plugin with their checks, and the process groups of the chunks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import is_fake_world, sum_dtype
from booster.device import current_device, free_memory
from booster.errors import ConfigError
from booster.plugins.base import PluginConfig
from booster.plugins.sharding.config import ShardedConfig, ShardGroups
from booster.validation import check_flag, check_replicas, is_count, is_non_nan_number

from .chunk_layout import ChunkLayout
from .nvme_tier import DiskTier
from .placement import AutoPlacement, ConstPlacement, Placement, StaticPlacement
from .tiers import HostTier, Tier

_MEBI = 2**20
# Arguments of a single policy.
_POLICY_OF = {
    "shard_param_frac": "static",
    "offload_optim_frac": "static",
    "offload_param_frac": "static",
    "warmup_non_model_data_ratio": "auto",
    "steady_cuda_cap_ratio": "auto",
    "gpu_margin_mem_ratio": "auto",
}
_FLAGS = ("enable_gradient_accumulation", "pin_memory", "force_outputs_fp32", "enable_async_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig(PluginConfig):
    """Options of `GeminiPlugin` that determine the placement of chunks, with its defaults."""

    per_rank = frozenset({"device_memory_budget"})

    placement_policy: str = "static"
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    gpu_margin_mem_ratio: float = 0.0
    strict_ddp_mode: bool = False
    max_prefetch: int
    device_memory_budget: int | None = None

    def check(self, world_size: int) -> None:
        self.make(current_device())

    def make(self, device: torch.device) -> Placement:
        """Create the placement policy of a rank whose compute tier is on `device`.

        Raises:
            ConfigError: The policy is unknown, an argument is invalid or belongs to another policy, or two arguments
                contradict each other.
        """
        policy, budget, max_prefetch = self.placement_policy, self.device_memory_budget, self.max_prefetch
        check_flag("strict_ddp_mode", self.strict_ddp_mode)
        if self.strict_ddp_mode:
            self._check_strict()
        if policy not in ("static", "cuda", "cpu", "const", "auto"):
            raise ConfigError(
                f"placement_policy={policy!r} is unknown: choose one of 'static', 'cuda', 'cpu', 'const', 'auto'"
            )
        self._refuse_unused()
        if policy == "auto":
            return AutoPlacement(
                budget=free_memory(device) if budget is None else budget,
                steady_ratio=self.steady_cuda_cap_ratio,
                warmup_ratio=self.warmup_non_model_data_ratio,
                gpu_margin_mem_ratio=self.gpu_margin_mem_ratio,
                max_prefetch=max_prefetch,
            )
        if policy == "const":
            placement = ConstPlacement(budget=budget, max_prefetch=max_prefetch)
            if budget is None:
                raise ConfigError(
                    "placement_policy='const' keeps model data within device_memory_budget bytes, and none are given:"
                    " give device_memory_budget, or choose 'static' or 'auto'"
                )
            return placement
        is_cpu = policy == "cpu"
        return StaticPlacement(
            shard_param_frac=0.0 if self.strict_ddp_mode else self.shard_param_frac,
            offload_optim_frac=1.0 if is_cpu else self.offload_optim_frac,
            offload_param_frac=1.0 if is_cpu else self.offload_param_frac,
            max_prefetch=max_prefetch,
            budget=budget,
        )

    def _refuse_unused(self) -> None:
        """Refuse non-default values of arguments that belong to another policy."""
        defaults = {field.name: field.default for field in fields(self)}
        for name, owner in _POLICY_OF.items():
            value = getattr(self, name)
            if owner != self.placement_policy and value != defaults[name]:
                raise ConfigError(
                    f"{name}={value!r} is for placement_policy={owner!r}, and has no effect for"
                    f" {self.placement_policy!r}: leave it out, or choose {owner!r}"
                )

    def _check_strict(self) -> None:
        """Check that all weights can stay unsharded."""
        if self.placement_policy != "static":
            raise ConfigError(
                f"strict_ddp_mode=True keeps all weights unsharded, and placement_policy="
                f"{self.placement_policy!r} decides that itself: choose 'static', or leave strict_ddp_mode out"
            )
        if self.shard_param_frac not in (0, 1):  # 1 is the default
            raise ConfigError(
                f"shard_param_frac={self.shard_param_frac!r} shards weights, and strict_ddp_mode=True keeps all of"
                " them unsharded: give one of the two"
            )
        if self.offload_param_frac != 0:
            raise ConfigError(
                f"offload_param_frac={self.offload_param_frac!r} offloads weights, and strict_ddp_mode=True keeps all"
                " of them unsharded: give one of the two"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiConfig(ShardedConfig):
    """Options of `GeminiPlugin` by their names there, where they are documented."""

    # They do not affect collectives.
    per_rank = frozenset({"offload_dir", "pin_memory", "verbose"})

    chunk_config_dict: Mapping[str, Any] | None
    chunk_init_device: torch.device | str | None
    memstats: Any
    enable_gradient_accumulation: bool
    pin_memory: bool
    force_outputs_fp32: bool
    search_range_m: float
    hidden_dim: int | None
    min_chunk_size_m: float
    tp_size: int
    extra_dp_size: int
    enable_async_reduce: bool
    offload_dir: str | os.PathLike[str] | None
    placement: PlacementConfig

    @property
    def chunk_numel(self) -> int | None:
        """Number of elements of a chunk; None for a search."""
        return None if self.chunk_config_dict is None else self.chunk_config_dict["chunk_size"]

    @property
    def min_chunk_numel(self) -> int:
        """Number of elements of the smallest chunk of the search."""
        return max(1, int(self.min_chunk_size_m * _MEBI))

    @property
    def search_range_numel(self) -> int:
        """Difference between the largest and the smallest chunk of the search."""
        return int(self.search_range_m * _MEBI)

    def check(self, world_size: int) -> None:
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._check_shared()
        self._check_sizes()
        self._check_ranks(world_size)
        self._check_places()
        if self.memstats is not None:
            raise ConfigError(
                f"memstats={self.memstats!r} is not supported: the first step is traced as it runs. Leave it out"
            )
        self.placement.check(world_size)

    def _check_places(self) -> None:
        if self.chunk_init_device is not None:
            here, given = current_device(), None
            with suppress(RuntimeError, TypeError):  # not a device
                given = torch.device(self.chunk_init_device)
            if given is None or given.type != here.type or given.index not in (None, here.index):
                raise ConfigError(
                    f"chunk_init_device={self.chunk_init_device!r} is not {here}, where this rank's chunks are"
                    " gathered; the placement policy decides where each shard is stored: leave it out"
                )
        directory = self.offload_dir
        if directory is None:
            return
        if not isinstance(directory, (str, os.PathLike)) or not isinstance(os.fspath(directory), str):
            raise ConfigError(
                f"offload_dir={directory!r} is not a path: give the path of a directory, or leave it out for the"
                " system's directory for temporary files"
            )
        if not os.path.isdir(directory):
            raise ConfigError(
                f"offload_dir={os.fspath(directory)!r} is not a directory: create it first, or leave it out for the"
                " system's directory for temporary files"
            )

    def _check_sizes(self) -> None:
        if not is_non_nan_number(self.min_chunk_size_m) or not 0 < self.min_chunk_size_m < float("inf"):
            raise ConfigError(
                f"min_chunk_size_m={self.min_chunk_size_m!r} holds no parameter: give a number of 2**20 elements above"
                " 0, such as 32"
            )
        if not is_non_nan_number(self.search_range_m) or not 0 <= self.search_range_m < float("inf"):
            raise ConfigError(
                f"search_range_m={self.search_range_m!r} is not a range of chunk sizes: give a number of 2**20"
                " elements, such as 32, or 0 for chunks of min_chunk_size_m"
            )
        if self.hidden_dim is not None and not is_count(self.hidden_dim):
            raise ConfigError(
                f"hidden_dim={self.hidden_dim!r} is not a step between chunk sizes: give the model's hidden size,"
                " or None"
            )
        config: Any = self.chunk_config_dict
        is_valid = config is None or (
            isinstance(config, Mapping) and set(config) == {"chunk_size"} and is_count(config["chunk_size"])
        )
        if not is_valid:
            raise ConfigError(
                f"chunk_config_dict={config!r} is not valid: give {{'chunk_size': number of elements}}, or leave"
                " it out to have the size searched for"
            )

    def _check_ranks(self, world_size: int) -> None:
        if not is_count(self.tp_size):
            raise ConfigError(f"tp_size={self.tp_size!r} is not a number of ranks: give an integer from 1")
        if self.tp_size > 1:
            raise ConfigError(
                f"tp_size={self.tp_size} asks for tensor parallel layers, which this version does not have yet: leave"
                " it out"
            )
        check_replicas(self.extra_dp_size, world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeminiSettings(ShardGroups):
    """Options of the plugin, and where the shards of the chunks are.

    Attributes:
        config: Options of the plugin.
        is_first: If True, this is the first of all ranks, whose weights are broadcast.
        device: Device of the compute tier.
        order_group: CPU group of the ranks of `shard_group`.
    """

    config: GeminiConfig
    is_first: bool
    device: torch.device
    order_group: dist.ProcessGroup | None = None

    def new_tier(self) -> Tier:
        """Return an offload tier: host memory if there is an accelerator, unless a directory is given, else a disk."""
        directory = self.config.offload_dir
        if self.device.type != "cpu" and directory is None:
            return HostTier(self.config.pin_memory)
        if is_fake_world():
            return HostTier(False, name="disk")
        return DiskTier(None if directory is None else os.fspath(directory))

    def master_dtype(self, layout: ChunkLayout) -> torch.dtype:
        """Return the dtype of the shard that the optimizer updates; the weights' dtype for a frozen chunk."""
        return sum_dtype(layout.dtype) if self.config.master_weights and layout.trains else layout.dtype

    def master_device(self, states_tier: Tier | None) -> torch.device:
        """Return the device of the update of a chunk with states in a tier, or in memory if that is None."""
        return self.device if states_tier is None else torch.device("cpu")  # disk states are mapped into host memory
