"""The `GeminiPlugin`: ZeRO stage 3 with chunks over tiers of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import new_cpu_group, timeout_scope
from booster.compatibility import takes_foreign
from booster.core.plain_torch import refuse_plain_training
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.lazy_init import check_materialized
from booster.plugins.base import WrappedPair, check_gradients_add_up, check_memory_is_apart, refuse_quantized_weights
from booster.plugins.sharding.elementwise import require_elementwise
from booster.plugins.sharding.plugin import ReplicatedPlugin
from booster.plugins.sync_batch_norm import convert_batch_norm

from .config import GeminiConfig, GeminiSettings
from .model import GeminiModel, build_chunks, place_buffers
from .optimizer import GeminiOptimizer


class GeminiPlugin(ReplicatedPlugin):
    """ZeRO stage 3 with chunks: weights, gradients and optimizer states are sharded over ranks and memory tiers.

    Parameters are stored in *chunks* of equal size. Every rank keeps its shard of each chunk. A chunk's weights are
    gathered for the forward and backward of modules that use them, and evicted when memory is needed. Gradients are
    reduce-scattered chunk by chunk during backward. Memory per rank of P, N parameters with Adam: fp32 4N/P weights +
    4N/P gradients + 8N/P states; fp16 and bf16 with fp32 masters 2N/P + 4N/P + 12N/P; and 2 + `max_prefetch` chunks.
    Sent and received per step: 3(P-1)/P of the weights' bytes. Gradients travel in the weights' dtype: NCCL sums in it,
    and the CPU sums fp16 and bf16 in fp32. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", SC 2020; Fang et al., "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory
    Management" (PatrickStar), TPDS 2023.

    The *compute tier* is the accelerator, or host memory without one. Shards are offloaded to host memory if there is
    an accelerator, and to files if there is none or if `offload_dir` is given.

    The user's optimizer must be elementwise, as torch's own but LBFGS, Adafactor, Muon and SparseAdam are, or declare
    how it runs on shards; see `booster.interface.ShardAware`.

    Arguments of another placement policy raise a `ConfigError`, so that no argument is silently ignored.

    Collective: every rank must create it, with equal arguments except `pin_memory`, `verbose`,
    `device_memory_budget` and `offload_dir`.

    Args:
        chunk_config_dict: {"chunk_size": number of elements}, without a key for the number of ranks; optional, defaults
            to a search for the chunk size.
        chunk_init_device: Device of gathered chunks; only this rank's device is valid. Optional.
        placement_policy: Policy of offloading. "static": fixed fractions. "auto": whatever does not fit in addition to
            the activations of the first step. "const": whatever does not fit into `device_memory_budget`. "cpu":
            everything. "cuda": nothing, on any compute tier.
        enable_gradient_accumulation: No effect: several backwards before a step are always allowed, because gradient
            shards are accumulated.
        max_prefetch: Number of chunks gathered ahead of their use, with the load of offloaded ones. Optional, defaults
            to 1 on an accelerator, where it overlaps with computation, and to 0 on the CPU.
        shard_param_frac: Fraction of the weights that are sharded, for "static"; the rest stays gathered on every rank.
        offload_optim_frac: Fraction of optimizer states and master weights that are offloaded, for "static"; to host
            memory with their gradients.
        offload_param_frac: Fraction of weights and gradients that are offloaded, for "static"; at most
            `shard_param_frac`.
        warmup_non_model_data_ratio: Fraction of the budget reserved for activations in the first step, for "auto".
        steady_cuda_cap_ratio: Fraction of the budget used after the first step, for "auto".
        precision: Dtype of weights, gradients and computation: "fp16" (with loss scaling), "bf16" or "fp32"; "fp32"
            keeps the model's dtypes. Optional, defaults to bf16 if the device computes in it; otherwise to fp32 on the
            CPU, and to fp16 on accelerators.
        master_weights: If True, keep fp32 master weights of fp16 and bf16 weights; if False, the optimizer updates the
            rounded weights.
        pin_memory: If True, pin offloaded host memory, in blocks of at most 1 GiB, so that copies to and from an
            accelerator run in streams of their own, beside computation; no effect without one.
        force_outputs_fp32: If True, cast floating-point outputs of the model to fp32.
        strict_ddp_mode: If True, keep all weights gathered on every rank, like `shard_param_frac=0`; for "static".
        search_range_m: Difference between the largest and the smallest chunk size in the search, in 2**20 elements.
        hidden_dim: Step of the search in elements; optional, defaults to the model's hidden dimension.
        min_chunk_size_m: Smallest chunk size in the search, in 2**20 elements.
        memstats: Must be None: the first step is traced as it runs.
        gpu_margin_mem_ratio: Fraction of the memory left by activations for optimizer states, for "auto"; 0 for all of
            it.
        initial_scale: Initial loss scale of fp16.
        min_scale: Minimum loss scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: Number of overflows before the scale is lowered.
        max_scale: Maximum loss scale.
        max_norm: Maximum gradient norm at every step; 0 disables clipping.
        norm_type: Order of the norm.
        tp_size: Number of tensor-parallel ranks; must be 1.
        extra_dp_size: Number of replicas: weights are sharded within groups of world size / extra_dp_size ranks.
        enable_async_reduce: If True, reduce gradients while backward continues.
        verbose: If True, log the waste of the chunks, skipped steps, and changes of the loss scale on rank 0.
        device_memory_budget: Bytes that this rank may use in the compute tier. Optional: "auto" defaults to the memory
            that is free when the plugin is created, other policies to no limit.
        offload_dir: Directory for files of offloaded shards. Optional, defaults to host memory if there is an
            accelerator, else to the system's directory for temporary files.
        sync_batch_norm: If True, batch normalization uses the statistics of all ranks' batches, as one process would.
        broadcast_buffers: If True, a step makes the buffers equal on all ranks: the first rank's, and of instance norms
            the mean of the ranks' statistics.

    Raises:
        ConfigError: `launch` was not called, or an argument is invalid; raised on all ranks.
        DesyncError: The ranks' arguments differ.
    """

    _config: GeminiConfig

    @timeout_scope("setup")
    @takes_foreign(
        "enable_all_optimization",
        "enable_flash_attention",
        "enable_fused_normalization",
        "enable_jit_fused",
        "enable_sequence_overlap",
        "enable_sequence_parallelism",
        "fp8_communication",
        "use_fp8",
        call="making a {}",
    )
    def __init__(
        self,
        chunk_config_dict: Mapping[str, Any] | None = None,
        chunk_init_device: torch.device | str | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = True,
        max_prefetch: int | None = None,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str | None = None,
        master_weights: bool = True,
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: None = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_async_reduce: bool = True,
        verbose: bool = False,
        *,
        device_memory_budget: int | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        sync_batch_norm: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        given = dict(locals())
        super().__init__()
        if max_prefetch is None:
            given["max_prefetch"] = 0 if self._device.type == "cpu" else 1
        self._set_config(GeminiConfig, given)
        self._placement = self._config.placement.make(self._device)
        self._make_groups(extra_dp_size)
        shard_group = self._shard_groups["shard_group"]
        self._order_group = shard_group if self._device.type == "cpu" else new_cpu_group(shard_group)

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [*super()._groups(), self._order_group]

    @property
    def zero_stage(self) -> int:
        return 3

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if optimizer is not None:
            require_elementwise(optimizer)
        check_materialized(model)
        check_gradients_add_up(model, self.dp_size)
        refuse_quantized_weights(model, "GeminiPlugin", "moves weights that it repacks")
        check_memory_is_apart(model, list(model.parameters()))
        scripted = [name for name, one in model.named_modules() if isinstance(one, torch.jit.ScriptModule)]
        if scripted:
            raise ConfigError(
                f"{scripted[0] or 'the model'!r} is a module of TorchScript, whose weights Gemini can't gather: use the"
                " module that it was made of, with torch.compile if it is to be faster, or LowLevelZeroPlugin"
            )

    def place(self, model: nn.Module, optimizer: Optimizer | None, checked: None = None) -> None:
        place_buffers(model, self._device)
        if self._config.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device)

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, placed: None) -> WrappedPair:
        config, settings = self._config, self._settings()
        trained = (
            set() if optimizer is None else {id(one) for group in optimizer.param_groups for one in group["params"]}
        )
        boosted = GeminiModel(model, build_chunks(model, trained, settings, self._placement), settings)
        wrapped = None if optimizer is None else GeminiOptimizer(optimizer, boosted, settings)
        config.set_precision(boosted, cast_inputs=True, outputs_fp32=config.force_outputs_fp32)
        if self.dp_size > 1:
            refuse_plain_training(boosted, untrained=model.parameters() if optimizer is None else ())
        return boosted, wrapped

    def _settings(self) -> GeminiSettings:
        return GeminiSettings(
            config=self._config,
            is_first=self.dp_rank == 0,
            device=self._device,
            order_group=self._order_group,
            **self._shard_groups,
        )

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Return a context without effect: every backward reduces, because no rank keeps unsharded gradients."""
        return nullcontext()

    def gathers_layers(self) -> bool:
        """Return True; see `Plugin.gathers_layers`."""
        return True

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        return [
            {"precision": "bf16"},
            {"precision": "bf16", "offload_optim_frac": 1.0},
            {"precision": "bf16", "placement_policy": "cpu"},
        ]
