"""HybridParallelPlugin: tensor, sequence, pipeline and data parallelism over the axes of one device mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from booster.comm import check_same_across_ranks, group_size, timeout_scope
from booster.compatibility import takes_foreign
from booster.core.plain_torch import refuse_plain_training
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.interface.plugin import StageManager
from booster.logger import log_rank_zero
from booster.moe.balance import balance_globally
from booster.plugins.base import (
    WrappedPair,
    check_gradients_add_up,
    check_memory_is_apart,
    check_weights_stay_equal,
    refuse_quantized_weights,
)
from booster.plugins.low_level_zero.optimizer import ZeroOptimizer
from booster.plugins.sharding.config import ShardGroups
from booster.plugins.sharding.elementwise import require_elementwise
from booster.plugins.sharding.plugin import ShardedPlugin
from booster.plugins.sync_batch_norm import convert_batch_norm
from booster.validation import error_of

from .activation_checkpointing import GradientCheckpointConfig
from .config import HybridConfig, arguments_from_config
from .mesh import HybridMesh
from .model import HybridModel
from .optimizer import StagePart
from .partition import ModelPartitioner, PartitionPlan
from .pipeline_parallel.placeholders import cast_absent_tensors
from .pipeline_parallel.schedules import Costs, PipelineSchedule, simulate
from .pipeline_parallel.stage_module import StageModel
from .pipeline_runner import PipelineRuntime
from .tp_plan.plan import UserPlan

_MAX_TENSOR_RANKS = 8  # of the candidates of `booster estimate`: those of one host


class HybridParallelPlugin(ShardedPlugin):
    """Tensor, sequence and pipeline parallelism, together with data parallelism or ZeRO.

    The ranks form a mesh of (dp, pp, sp, tp). The ranks of a tp group hold shards of the same layers (Shoeybi et al.,
    "Megatron-LM", 2019). The ranks of an sp group hold different tokens of the same batch. The ranks of a pp group are
    the pipeline stages and hold different layers. The remaining factor is dp, whose ranks read different data. The
    style of each layer comes from, in this order: `plan`, the model's own plan (transformers models have one), built-in
    tables, or the module graph; `explain(model)` prints it. Modules keep their classes and names.

    Memory per rank of N parameters with Adam in fp32, if all are sharded over tp: 16N/tp; with ZeRO 1
    8N/tp + 8N/(tp*dp*sp); with ZeRO 2 4N/tp + 12N/(tp*dp*sp). In fp16 and bf16 as `LowLevelZeroPlugin`; without ZeRO
    18N/tp. Communication per layer of column and row parallel pairs: one all-reduce of the hidden states in forward
    and one in backward, for attention and for the MLP each.

    With pp stages N is the number of parameters of a stage, about N/pp. Per microbatch and boundary between model
    chunks a stage sends the hidden states forward and their gradients backward. Of m microbatches, "1f1b" keeps the
    activations of at most pp in memory, "gpipe" of all m. Both have a bubble of (pp-1)/(m+pp-1); "interleaved" divides
    it by num_model_chunks for as many times the messages; "zbv" fills it with weight gradients, in the memory of
    "1f1b".

    Args:
        tp_size: Number of tensor-parallel ranks.
        pp_size: Number of pipeline stages; train with `booster.execute_pipeline`.
        sp_size: Number of sequence-parallel ranks in the modes "all_to_all" and "ring_attn".
        precision: "fp16" (with loss scaling), "bf16" or "fp32": dtype of weights, gradients and computation; fp32
            leaves the weights' dtype unchanged. Optional, with the default of `LowLevelZeroPlugin`.
        zero_stage: ZeRO stage over the dp and sp ranks: 0 shards nothing, 1 optimizer states, 2 also gradients (not
            with pipeline stages), as `LowLevelZeroPlugin`.
        enable_sequence_parallelism: If True, shard the tokens of a sequence.
        sequence_parallelism_mode: "split_gather": over the tp ranks, between the layers' parallel regions (Korthikanti
            et al., 2022); "ring": the same, with communication in chunks overlapped with computation; "all_to_all":
            over sp ranks, which exchange tokens for heads around attention (Jacobs et al., "DeepSpeed Ulysses", 2023);
            "ring_attn": over sp ranks, which pass keys and values in a ring (Liu et al., "Ring Attention", 2023).
        parallel_output: If True, logits stay sharded over the vocabulary (tp) and over the tokens (sp) and behave like
            full ones: cross-entropy is computed on shards, any other use needs them all on each rank. If False, the
            head computes all of them.
        plan: Patterns of module names and styles, such as {"layers.*.mlp.up_proj": "colwise"}.
        custom_policy: Alias of `plan`.
        make_vocab_size_divisible_by: Multiple to which a sharded vocabulary is padded; outputs and checkpoints are
            unpadded.
        dp_outside: If True, the dp axis is the outermost, otherwise inside of pp.
        max_norm: Maximum gradient norm of every step; 0 disables clipping.
        norm_type: Order of that norm.
        initial_scale: Initial loss scale of fp16.
        min_scale: Minimum of the loss scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale on overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows before the scale is lowered.
        max_scale: Maximum of the loss scale.
        broadcast_buffers: If True, a step makes the buffers equal on all ranks: the first rank's, and of instance norms
            the mean of the ranks' statistics.
        ddp_bucket_cap_mb: Size of gradient buckets in MiB with zero_stage=0.
        find_unused_parameters: For compatibility with DistributedDataParallel; unused parameters are always found.
        check_reduction: For compatibility; no effect.
        gradient_as_bucket_view: For compatibility; gradients are always views of the buckets.
        static_graph: For compatibility; no effect.
        zero_bucket_size_in_m: Size in 2**20 elements of the buffers for buckets in flight, with ZeRO.
        cpu_offload: If True, keep masters and optimizer states in host memory. No effect on the CPU.
        communication_dtype: Dtype in which gradients travel between dp ranks; optional, defaults to the gradients'. The
            CPU sums fp16 and bf16 in fp32, NCCL in this dtype.
        overlap_communication: If True, overlap gradient reduction with backward; with stages, with the end of the last
            microbatches'.
        overlap_allgather: If True, overlap the all-gather of updated weights with the next forward.
        master_weights: If True, keep fp32 masters of fp16 and bf16 weights.
        cast_inputs: If True, cast floating-point inputs of the model to its dtype.
        gradient_checkpoint_config: Layers to recompute in backward; see `GradientCheckpointConfig`.
        num_microbatches: Number of microbatches into which a rank's batch is split.
        microbatch_size: Examples per microbatch, instead of their number.
        pp_style: Pipeline schedule: "1f1b" (Narayanan et al., "PipeDream", 2019); "interleaved" (Narayanan et al.,
            2021); "zbv" (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024); "gpipe" (Huang et al.,
            2019); the name of a schedule registered with `register_schedule`, or a schedule object.
        num_model_chunks: Model chunks per stage: 2 or more with "interleaved", 2 with "zbv", otherwise 1.
        verbose: If True, log the plan, skipped steps and changes of the loss scale on rank 0.
        sync_batch_norm: If True, batch normalization uses the statistics of all ranks' batches.
        num_layers_per_stage: Number of layers of each stage, instead of balancing by cost; with num_model_chunks above
            1 of each model chunk, in execution order.
        broadcast_loss: If True, all stages get the loss, otherwise only the stage that computes it.
        enable_metadata_cache: If True, stages send tensor shapes once per microbatch shape. If False, with every
            message, for models whose shapes depend on the data.
        split: Names of the first modules of all model chunks but the first, such as ["layers.4"] for two stages.
        execution_sequence: Names of modules and functions that replace the model's forward; each gets the output of
            the previous one, and stages partition the list.
        ep_size: Number of data-parallel ranks that share the experts of mixture-of-experts layers, a divisor of their
            number; ranks with the same experts form the edp axis. Tokens travel to their experts' ranks and back
            (Lepikhin et al., "GShard", 2021). Everything else is as over all data-parallel ranks.
        capacity_factor: Tokens that a rank sends to each expert, as a multiple of those that it had if all had equally
            many: messages of a fixed size. Optional; by default all tokens are sent, in messages of their number.
        min_capacity: Smallest number of tokens with a capacity_factor.
        drop_tokens: If True, an expert drops further tokens of a rank; if False, the capacity grows to the largest
            number of any rank and expert.
        overlap_shared_experts: If True, shared experts, which all tokens pass, compute while tokens travel.
        tp_mode: Arrangement of the tensor-parallel ranks: "1d"; "2d": q * q ranks (Xu et al., "An Efficient 2D Method
            for Training Super-Large Deep Learning Models", 2021); "2.5d": tp_depth * q * q (Wang et al., "Tesseract",
            2021); "3d": q * q * q (Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural
            Networks", 2021). In the last three activations inside of layers are divided by examples and features.
        tp_depth: Number of squares of ranks in the mode "2.5d".
        extra_axes: Sizes of axes of your own, such as {"replica": 2}, outside of all others; their groups are those of
            `mesh`. Their ranks hold the same and get the same batches, and the plugin communicates nothing along them
            but the first weights. Layers, gradient hooks and pipeline schedules of your own do.

    Raises:
        ConfigError: `launch` was not called, or arguments are invalid alone or together; on all ranks if on any.
        DesyncError: Arguments differ between ranks.

    Collective: yes, with the same arguments on all ranks but for `verbose`.
    """

    _config: HybridConfig

    @timeout_scope("setup")
    @takes_foreign(
        "enable_all_optimization",
        "enable_flash_attention",
        "enable_fused_normalization",
        "enable_jit_fused",
        "enable_sequence_overlap",
        "fp8_communication",
        "use_fp8",
        "overlap_p2p",
        "scheduler_nodes",
        "inner_ring_size",
        call="making a {}",
    )
    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        precision: str | None = None,
        zero_stage: int = 0,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        parallel_output: bool = True,
        plan: UserPlan | None = None,
        custom_policy: UserPlan | None = None,
        make_vocab_size_divisible_by: int = 64,
        dp_outside: bool = True,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: float = 12,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        master_weights: bool = True,
        cast_inputs: bool = True,
        gradient_checkpoint_config: GradientCheckpointConfig | Mapping[str, Any] | bool | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        pp_style: str | PipelineSchedule = "1f1b",
        num_model_chunks: int = 1,
        verbose: bool = False,
        *,
        sync_batch_norm: bool = True,
        num_layers_per_stage: Sequence[int] | None = None,
        broadcast_loss: bool = True,
        enable_metadata_cache: bool = True,
        split: Sequence[str] | None = None,
        execution_sequence: Sequence[str | Callable[..., Any]] | None = None,
        ep_size: int = 1,
        capacity_factor: float | None = None,
        min_capacity: int = 4,
        drop_tokens: bool = True,
        overlap_shared_experts: bool = True,
        tp_mode: str = "1d",
        tp_depth: int | None = None,
        extra_axes: Mapping[str, int] | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__()
        self._set_config(HybridConfig, given)
        sizes = self._config.axis_sizes(group_size())
        grid = self._config.tensor_grid
        self._mesh = HybridMesh(
            self._device.type,
            dp_outside=dp_outside,
            ep=ep_size,
            tp_axes=None if grid is None else grid.axes,
            extra_axes=extra_axes,
            **sizes,
        )
        self._mesh.group("dp")  # creation is collective; later calls may come from some ranks only
        self._partitioner = ModelPartitioner(self._config, self._mesh, self._device, verbose=verbose)
        for line in self._config.remarks():
            log_rank_zero(line)
        if cpu_offload and self._device.type == "cpu":
            log_rank_zero("cpu_offload=True has no effect: weights and states are already in host memory")

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return self._mesh.groups()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> HybridParallelPlugin:
        """Return the plugin of a `parallel` dict of a configuration file.

        Args:
            config: Axis sizes as integers or dicts with a `size`, such as
                dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=2, mode="1d")). The `pipeline` dict
                may contain the plugin's other arguments of pipelines.
            **arguments: Further arguments of the plugin.

        Raises:
            ConfigError: An unknown key, a tensor size above 1 without a mode, an unknown mode, or sizes that do not
                divide the world size.
        """
        read: dict[str, Any] = {}
        error = error_of(lambda: read.update(arguments_from_config(config, arguments)))
        if error is not None:
            check_same_across_ranks(f"making a {cls.__name__}", [], error=error)
        return cls(**read)

    @property
    def dp_size(self) -> int:
        return self._mesh.size("dp")

    @property
    def dp_rank(self) -> int:
        return self._mesh.rank("dp")

    @property
    def _num_shards(self) -> int:
        return 1 if self._config.zero_stage == 0 else self._mesh.size("dp", "sp")

    @property
    def has_outputs(self) -> bool:
        """Whether `execute_pipeline` returns outputs on this rank, which holds the model's last layer.

        True on the last pipeline stage, with pp_style="zbv" on the first, and on every rank without a pipeline.
        """
        pipeline = self._config.pipeline
        if pipeline is None:
            return True
        end = pipeline.schedule.place(pipeline.num_positions - 1, pipeline.pp_size)
        return end[0] == self._mesh.rank("pp")

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self._mesh.group("dp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Ranks that hold shards of this rank's layers."""
        return self._mesh.group("tp")

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Pipeline stages of this rank's model, in order."""
        return self._mesh.group("pp")

    @property
    def sp_group(self) -> dist.ProcessGroup:
        """Ranks that hold other tokens of this rank's batch, in the modes with a separate axis."""
        return self._mesh.group("sp")

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Ranks that share the experts."""
        return self._mesh.group("ep")

    @property
    def stage_manager(self) -> StageManager:
        return StageManager(
            stage=self._mesh.rank("pp"), num_stages=self._mesh.size("pp"), has_last_layer=self.has_outputs
        )

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh.device_mesh

    @property
    def zero_stage(self) -> int:
        return self._config.zero_stage

    def axis_sizes(self) -> dict[str, int]:
        return self._mesh.axis_sizes()

    def explain(self, model: nn.Module, batch_size: int | None = None) -> str:
        """Return a table of a model's plan: module, style, local shape, bytes, and the reasons for unsharded modules.

        Args:
            model: Unboosted model, possibly on the meta device. It is not changed.
            batch_size: Number of examples of a batch, optional: with it, also the shapes (examples, features) of the
                activations between linear layers on each rank.

        Raises:
            ConfigError: There is no plan for the model, or it is not applicable.

        Collective: no.
        """
        return self._partitioner.explain(model, batch_size)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> PartitionPlan:
        for name, size in (("tp_size", self._config.tp_size), ("pp_size", self._config.pp_size)):
            if size > 1:
                refuse_quantized_weights(model, f"{name}={size}", "can't divide their packed blocks among ranks")
        check_weights_stay_equal(model, self.dp_size)
        check_gradients_add_up(model, self.dp_size)
        plan = self._partitioner.check(model)
        if optimizer is not None:
            require_elementwise(optimizer)
            trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
            check_memory_is_apart(model, trained)
        return plan

    def place(
        self, model: nn.Module, optimizer: Optimizer | None, checked: PartitionPlan | None = None
    ) -> StageModel | None:
        if self._config.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device, self._mesh.group("dp"))
        if self._config.ep_size > 1:
            balance_globally(model, self._mesh.group("dp"))
        return self._partitioner.apply(model, optimizer, checked or self._partitioner.check(model))

    def _wrap(self, model: nn.Module, optimizer: Optimizer | None, stage_model: StageModel | None) -> WrappedPair:
        config, mesh = self._config, self._mesh
        tied_groups = mesh.subgroups("pp", () if stage_model is None else stage_model.holders.values())
        boosted = HybridModel(
            model,
            mesh,
            tp_group=self._partitioner.tp_group,
            sp_group=self._partitioner.sp_group,
            ep_group=self._partitioner.ep_group,
            stage_model=stage_model,
            broadcasts_buffers=config.broadcast_buffers and mesh.size("dp", "sp", "tp") > 1,
        )
        wrapped = None
        if optimizer is not None:
            part = None
            if stage_model is not None:
                stage, stage_group = mesh.rank("pp"), mesh.group("pp")
                part = StagePart(stage_model, stage=stage, stage_group=stage_group, tied_groups=tied_groups)
            wrapped = ZeroOptimizer(
                optimizer,
                boosted,
                config.zero(),
                self._shard_groups("dp"),
                expert_groups=self._shard_groups("edp") if config.ep_size > 1 else None,
                part=part,
            )
        if stage_model is not None and config.pipeline is not None:
            weight_gradients = self._partitioner.weight_gradients
            runtime = PipelineRuntime(boosted, stage_model, config.pipeline, mesh, self._device, weight_gradients)
            boosted.run_batch = runtime.run
            cast_absent_tensors(model, config.dtype)
        config.set_precision(boosted, cast_inputs=config.cast_inputs)
        if optimizer is not None or mesh.size("dp", "sp") > 1:
            refuse_plain_training(boosted, untrained=model.parameters() if optimizer is None else ())
        return boosted, wrapped

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: ModelWrapper,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        *,
        num_items: float | None = None,
    ) -> dict[str, Any]:
        run_batch = model.run_batch if isinstance(model, HybridModel) else None
        if run_batch is None:
            return super().execute_pipeline(
                data_iter, model, criterion, optimizer, return_loss, return_outputs, num_items=num_items
            )
        if optimizer is not None and (not isinstance(optimizer, ZeroOptimizer) or optimizer.model is not model):
            raise ConfigError(
                f"execute_pipeline() got a {type(optimizer).__name__} that was not boosted together with this model and"
                " would not receive its gradients: pass the optimizer that boost() returned with the model"
            )
        return run_batch(
            data_iter, criterion, optimizer, return_loss=return_loss, return_outputs=return_outputs, num_items=num_items
        )

    def _shard_groups(self, axis: str) -> ShardGroups:
        """Return the groups of parameters that are replicated, or sharded by ZeRO, along an axis and sp."""
        mesh, shards_states = self._mesh, self._config.zero_stage > 0
        replicas, shards = ((), (axis, "sp")) if shards_states else ((axis, "sp"), ())
        norm_axes = ("dp", "sp", "pp", "tp") if shards_states else ("ep", "pp", "tp")
        return ShardGroups(
            num_shards=mesh.size(*shards),
            rank=mesh.rank(*shards),
            is_primary=mesh.rank(*replicas, *mesh.extra_axes) == 0,
            data_parallel_group=mesh.group("dp", "sp"),
            control_group=mesh.control_group("dp", "sp"),
            shard_group=mesh.group(*shards),
            replica_group=mesh.group(*replicas) if mesh.size(*replicas) > 1 else None,
            grad_norm_group=mesh.group(*norm_axes),
            first_rank=None if shards_states else mesh.rank_at(pp=0, tp=0),
            has_extra_axes=mesh.size(*mesh.extra_axes) > 1,
            data_ranks=None if axis == "dp" else mesh.ranks_along("ep", "dp", "sp"),
        )

    def leave_reduction(self, model: ModelWrapper, axis: str, handler: str) -> None:
        if axis not in self._mesh.extra_axes:  # the plugin reduces over none of these
            super().leave_reduction(model, axis, handler)

    def representative_ranks(self) -> list[int]:
        num_stages = self._config.pp_size
        stages = list(range(num_stages))
        if self._config.stages.num_layers_per_stage is None and self._config.stages.split is None:
            # Stages in the middle hold as many layers as the second one, and activations of no more microbatches.
            stages = sorted({0, min(1, num_stages - 1), num_stages - 1})
        return [self._mesh.rank_at(dp=0, pp=stage, sp=0, tp=0) for stage in stages]

    def pipeline_seconds(self, model: ModelWrapper, forward: float, backward: float, message: float) -> float:
        arguments = self._config.pipeline
        run = model.last_pipeline_run if isinstance(model, HybridModel) else None
        if arguments is None or run is None:
            return super().pipeline_seconds(model, forward, backward, message)
        number = run.num_microbatches
        gradients = backward / number / 2  # those of the inputs cost as much as those of the weights
        costs = Costs(forward=forward / number, backward_input=gradients, weight=gradients, message=message)
        return simulate(arguments.schedule, arguments.pp_size, number, arguments.num_model_chunks, costs).length

    def layer_divisor(self) -> int:
        return 1 if self._config.pipeline is None else self._config.pipeline.num_positions

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        """Return combinations of tp_size and pp_size, with ZeRO 1 over the other ranks."""
        divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
        found: list[dict[str, Any]] = []
        for tp_size in (size for size in divisors if size <= _MAX_TENSOR_RANKS):
            for pp_size in (size for size in divisors if (num_ranks // tp_size) % size == 0 and tp_size * size > 1):
                settings = {"tp_size": tp_size, "pp_size": pp_size, "zero_stage": 1, "precision": "bf16"}
                found.append(settings | ({"num_microbatches": 2 * pp_size} if pp_size > 1 else {}))
        return found
