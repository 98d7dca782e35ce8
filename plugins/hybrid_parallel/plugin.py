"""The strategy: layers, sequences and data divided over the axes of one mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from booster.comm import agree, group_size, patience
from booster.data import shard_dataloader
from booster.errors import ConfigError
from booster.interface import Boosted, MemoryQuestion, ModelWrapper, OptimizerWrapper, RankMemory
from booster.interface.plain_torch import refuse_plain_training
from booster.mixed_precision.fp16_naive import log_on_master
from booster.mixed_precision.loss_scale_arguments import LossScaleArguments
from booster.plugins.distributed_plugin import DistributedPlugin, arguments_of
from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig
from booster.plugins.hybrid_parallel.from_config import arguments_from_config
from booster.plugins.hybrid_parallel.memory import hybrid_memory, hybrid_settings
from booster.plugins.hybrid_parallel.mesh import HybridMesh
from booster.plugins.hybrid_parallel.model import HybridModel
from booster.plugins.hybrid_parallel.optimizer import HybridOptimizer
from booster.plugins.hybrid_parallel.pipeline_parallel.assembly import make_runtime, sharing_groups
from booster.plugins.hybrid_parallel.pipeline_parallel.runtime import PipelineRuntime
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import PipelineSchedule
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.stand_ins import cast_absent_tensors
from booster.plugins.hybrid_parallel.placement import ModelSplit
from booster.plugins.hybrid_parallel.plans.plan import UserPlan
from booster.plugins.hybrid_parallel.settings import HybridArguments
from booster.plugins.low_level_zero.settings import ZeroSettings
from booster.plugins.low_level_zero.weights import Sharding
from booster.plugins.sharding.checks import check_flag, check_memory_is_apart, error_of
from booster.plugins.sharding.elementwise import require_elementwise
from booster.plugins.sharding.loss_scale import new_loss_scaler
from booster.plugins.sharding.precision import DTYPES, WeightPrecision
from booster.plugins.sync_batch_norm import convert_batch_norm

__all__ = ["HybridParallelPlugin"]


class HybridParallelPlugin(DistributedPlugin):
    """Tensor, sequence and pipeline parallelism, together with data parallelism or ZeRO.

    The ranks form a mesh of (dp, pp, sp, tp). The ranks of a tp group hold parts of the same layers (Shoeybi et al.,
    "Megatron-LM", 2019); those of an sp group other tokens of the same batch; those of a pp group, the stages, other
    layers, through which micro-batches go one after the other; dp has what is left, and reads different data. Which
    layer is split how comes from `plan`, from the model's own plan as transformers models have them, from tables for
    those that lack one, or is derived from the module graph, in this order; `explain(model)` shows it.
    Models stay as they are: their layers compute with parts, under the same names.

    Memory per rank of N parameters with Adam in fp32, of which the planned ones are divided by tp: 16N/tp, with ZeRO 1
    8N/tp + 8N/(tp*dp*sp), with ZeRO 2 4N/tp + 12N/(tp*dp*sp); in fp16 and bf16 as `LowLevelZeroPlugin`, without ZeRO
    18N/tp. Sent per rank and layer of column and row parallel pairs: one all-reduce of the hidden states forward and
    one backward for attention, and for the MLP.

    With pp stages N is what a stage holds, about N/pp. It sends, per micro-batch and boundary between pieces of the
    model, the hidden states forward and their gradients backward. Of m micro-batches, "1f1b" keeps the activations of
    at most pp, "gpipe" of all m; both leave (pp-1)/(m+pp-1) of the time idle, "interleaved" a num_model_chunks-th of
    that for as many times the messages; "zbv" fills it with gradients of weights, in the memory of "1f1b".

    Collective: every rank must make it, with the same arguments but for `verbose`.

    Args:
        tp_size: Ranks that share each layer.
        pp_size: Pipeline stages, among which the model's layers are divided; train with `booster.execute_pipeline`.
        sp_size: Ranks that share each sequence in the modes "all_to_all" and "ring_attn".
        precision: "fp16" (with loss scaling), "bf16" or "fp32": format of weights, gradients and computation; fp32
            leaves the weights as they are.
        zero_stage: 0: every rank of a dp group updates the same weights. 1: optimizer states are divided among them, 2:
            gradients too, as by `LowLevelZeroPlugin`, but not with pipeline stages.
        enable_sequence_parallelism: Divide the tokens of a sequence over ranks.
        sequence_parallelism_mode: "split_gather": over the tp ranks, between the layers' parallel regions (Korthikanti
            et al., 2022); "ring": the same, in chunks that travel while others are computed; "all_to_all": over sp
            ranks, which exchange tokens for heads around attention (Jacobs et al., "DeepSpeed Ulysses", 2023);
            "ring_attn": over sp ranks, which pass keys and values round (Liu et al., "Ring Attention", 2023).
        parallel_output: Logits stay split over the vocabulary. They behave as whole ones; a cross-entropy of them is
            computed in parts, anything else gathers them. False: the head gathers them.
        plan: Patterns of module names and styles, such as {"layers.*.mlp.up_proj": "colwise"}.
        custom_policy: Another name of `plan`.
        make_vocab_size_divisible_by: A split vocabulary is padded to a multiple; never visible from outside.
        dp_outside: The dp axis is the outermost; False: within pp.
        max_norm: Clip gradients to this norm at every step; 0: don't.
        norm_type: Order of that norm.
        initial_scale: fp16's loss scale to begin with.
        min_scale: The scale never falls below.
        growth_factor: Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor: Multiplies the scale when overflows lower it.
        growth_interval: Steps without overflow before the scale grows.
        hysteresis: How many overflows it takes before the scale is lowered.
        max_scale: The scale never grows above.
        broadcast_buffers: Give all ranks the first rank's buffers before each forward in training.
        ddp_bucket_cap_mb: With zero_stage=0, gradients are summed in buckets of this many MiB.
        find_unused_parameters: For callers of torch's DistributedDataParallel: unused ones are always found.
        check_reduction: Likewise; has no effect there either.
        gradient_as_bucket_view: Likewise; gradients always lie in the buckets.
        static_graph: Likewise; nothing needs it.
        zero_bucket_size_in_m: With ZeRO, 2**20 elements of buffers for buckets under way.
        cpu_offload: Keep masters and optimizer states in host memory. On the CPU there is nothing to move.
        communication_dtype: Format in which gradients travel between dp ranks; None: their own.
        overlap_communication: Reduce gradients while backward goes on.
        overlap_allgather: Let updated weights travel while the next forward goes on.
        master_weights: Keep fp32 masters of fp16 and bf16 weights.
        cast_inputs: Cast floating inputs of the model to its format.
        gradient_checkpoint_config: Which share of the layers is computed again in backward instead of being kept.
        num_microbatches: Into how many parts, worked on by several stages at a time, a rank's batch is divided.
        microbatch_size: Examples of such a part, instead of their number.
        pp_style: Schedule of the stages' work: "1f1b" (Narayanan et al., "PipeDream", 2019); "interleaved" (Narayanan
            et al., 2021); "zbv" (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024); "gpipe" (Huang et
            al., 2019); the name of one that was registered with `register_schedule`, or an object of one.
        num_model_chunks: Pieces of the model that each stage holds: 2 or more with "interleaved", 2 with "zbv", else 1.
        verbose: Log the plan, skipped steps and changes of the loss scale on rank 0.
        sync_batch_norm: Batch normalisation uses the statistics of all ranks' batches, as one process would.
        num_layers_per_stage: Layers of each stage, instead of a division by costs; with num_model_chunks above 1 of
            each piece, in the order in which the model runs them.
        broadcast_loss: All stages are given the loss; False: only the one that computes it has it.
        enable_metadata_cache: Shapes of what stages send are sent once for each shape of a micro-batch; False: with
            every message, for models whose layers give shapes that depend on the data.
        split: Names of the modules with which the pieces after the first begin, such as ["layers.4"] for two stages.
        execution_sequence: Names of modules and functions that run one after the other instead of the model's forward,
            each with what the one before gave; stages divide it.

    Raises:
        ConfigError: Before `launch`, or arguments that can't be, alone or together; on all ranks if on any.
        DesyncError: The ranks' arguments differ.
    """

    @patience("setup")
    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int | None = None,
        precision: str = "fp16",
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
    ) -> None:
        given = dict(locals())
        super().__init__()
        self._arguments = arguments_of(HybridArguments, given)
        self._loss_scale = arguments_of(LossScaleArguments, given)
        self._new_loss_scaler = functools.partial(new_loss_scaler, self._loss_scale, verbose=verbose)
        self._agree(lambda: self._check_arguments(verbose))
        sizes = self._arguments.axis_sizes(group_size())
        self._mesh = HybridMesh(self._device.type, dp_outside=dp_outside, **sizes)
        self._mesh.group("dp")  # made by all ranks here, as whoever asks later may be some of them
        self._split = ModelSplit(self._arguments, self._mesh, self._device, verbose=verbose)
        self._runtimes: WeakKeyDictionary[ModelWrapper, PipelineRuntime] = WeakKeyDictionary()
        for line in self._arguments.remarks():
            log_on_master(line)
        if cpu_offload and self._device.type == "cpu":
            log_on_master("cpu_offload=True changes nothing: weights and states are in host memory already")

    def _check_arguments(self, verbose: bool) -> None:
        self._arguments.check(group_size())
        check_flag("verbose", verbose)
        self._loss_scale.check()

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return self._mesh.groups()

    def agreement_facts(self) -> list[str]:
        facts = [f"{name}={getattr(self._arguments, name)!r}" for name in HybridArguments.__slots__]
        return [*facts, *self._loss_scale.facts]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> HybridParallelPlugin:
        """Returns the plugin for sizes in the style of configuration files.

        Args:
            config: Such as dict(pipeline=dict(size=2, num_microbatches=4), tensor=dict(size=2, mode="1d")): numbers, or
                dicts with a `size`; that of `pipeline` may hold its other arguments.
            **arguments: Further ones of the plugin.

        Raises:
            ConfigError: An unknown key, a tensor size above 1 without a mode, an unknown mode, or sizes that don't
                divide the world.
        """
        read: dict[str, Any] = {}
        error = error_of(lambda: read.update(arguments_from_config(config, arguments)))
        if error is not None:
            agree(f"making a {cls.__name__}", [], error=error)
        return cls(**read)

    def supported_precisions(self) -> list[str]:
        return list(DTYPES)

    def control_precision(self) -> bool:
        return True

    @property
    def dp_size(self) -> int:
        return self._mesh.size("dp")

    @property
    def dp_rank(self) -> int:
        return self._mesh.rank("dp")

    @property
    def has_outputs(self) -> bool:
        """Whether this rank holds the end of the model: `execute_pipeline` gives the outputs there.

        That is the last pipeline stage; with pp_style="zbv" the first. Without stages every rank.
        """
        pipeline = self._arguments.pipeline
        if pipeline is None:
            return True
        end = pipeline.schedule.place(pipeline.num_positions - 1, pipeline.num_stages)
        return end[0] == self._mesh.rank("pp")

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self._mesh.group("dp")

    def axis_sizes(self) -> dict[str, int]:
        return self._mesh.axis_sizes()

    def reduction_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        if self._device.type == "cpu" and parameter_dtype.itemsize < 4:
            return torch.float32
        return self._arguments.communication_dtype or parameter_dtype

    def explain(self, model: nn.Module) -> str:
        """Returns a table of what would be done with a model: module, style, local shape, bytes; and why not more.

        Args:
            model: As it would be given to `boost`; possibly on the meta device. It is not changed.

        Call it on any rank; no communication.

        Raises:
            ConfigError: There is no plan for it, or it can't be carried out.
        """
        return self._split.explain(model)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._split.check(model)
        if optimizer is None:
            return
        require_elementwise(optimizer)
        trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        check_memory_is_apart(model, trained)

    def place(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if self._arguments.sync_batch_norm and self.dp_size > 1:
            convert_batch_norm(model, self._device, self._mesh.group("dp"))
        self._split.apply(model, optimizer)

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Boosted:
        arguments, mesh = self._arguments, self._mesh
        carved = self._split.carved(model)
        sharing = sharing_groups(mesh, carved)
        boosted = HybridModel(
            model,
            tensor_ranks=self._split.tensor_ranks,
            sequence_ranks=self._split.sequence_ranks,
            data_group=mesh.group("dp", "sp"),
            replica_group=mesh.group("pp", "sp", "tp"),
            is_primary=mesh.rank("dp", "sp") == 0,
            broadcasts_buffers=arguments.broadcast_buffers and mesh.size("dp", "sp") > 1,
            carved=carved,
            stage=mesh.rank("pp"),
        )
        wrapped = None
        if optimizer is not None:
            wrapped = HybridOptimizer(
                optimizer,
                boosted,
                self._settings(),
                carved=carved,
                sharing_groups=sharing,
                stage=mesh.rank("pp"),
                stage_group=mesh.group("pp"),
                loss_scaler=self._new_loss_scaler() if arguments.precision == "fp16" else None,
                is_primary=mesh.rank("dp", "sp") == 0 and mesh.rank("pp") == 0,
            )
        if carved is not None and arguments.pipeline is not None:
            waiting = self._split.weight_gradients
            self._runtimes[boosted] = make_runtime(boosted, carved, arguments.pipeline, mesh, self._device, waiting)
            cast_absent_tensors(model, arguments.dtype)
        if arguments.dtype is not None:
            precision = WeightPrecision(arguments.dtype, cast_inputs=arguments.cast_inputs)
            precision.cast(model)  # what is left: frozen parameters and buffers
            boosted.precision = precision
        if mesh.size("dp", "sp") > 1:
            refuse_plain_training(boosted, untrained=model.parameters() if optimizer is None else ())
        if dataloader is not None:
            dataloader = shard_dataloader(dataloader, dp_rank=self.dp_rank, dp_size=self.dp_size)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

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
        runtime = self._runtimes.get(model)
        if runtime is None:
            return super().execute_pipeline(
                data_iter, model, criterion, optimizer, return_loss, return_outputs, num_items=num_items
            )
        if optimizer is not None and (not isinstance(optimizer, HybridOptimizer) or optimizer.model is not model):
            raise ConfigError(
                f"execute_pipeline() got a {type(optimizer).__name__} that was not boosted together with this model,"
                " whose gradients it would not collect: pass the one that boost() returned with the model"
            )
        return runtime.run(
            data_iter, criterion, optimizer, return_loss=return_loss, return_outputs=return_outputs, num_items=num_items
        )

    @property
    def _offloads(self) -> bool:
        return self._arguments.cpu_offload and self._device.type != "cpu"

    def _settings(self) -> ZeroSettings:
        arguments, mesh = self._arguments, self._mesh
        replicas, shards = (("dp", "sp"), ()) if arguments.zero_stage == 0 else ((), ("dp", "sp"))
        return ZeroSettings(
            stage=max(1, arguments.zero_stage),
            sharding=Sharding(
                num_shards=mesh.size(*shards),
                rank=mesh.rank(*shards),
                is_primary=mesh.rank(*replicas) == 0,
                max_bucket_numel=arguments.max_bucket_numel,
                keeps_masters=arguments.master_weights,
                master_device=torch.device("cpu") if self._offloads else None,
            ),
            dtype=arguments.dtype,
            data_parallel_group=mesh.group("dp", "sp"),
            agreement_group=mesh.cpu_group("dp", "sp"),
            shard_group=mesh.group(*shards),
            replica_group=mesh.group(*replicas) if mesh.size(*replicas) > 1 else None,
            counting_group=mesh.group(*shards, "pp", "tp"),
            communication_dtype=arguments.communication_dtype,
            overlaps=arguments.overlap_communication,
            overlaps_gathering=arguments.overlap_allgather,
            max_norm=float(arguments.max_norm),
            norm_type=float(arguments.norm_type),
        )

    def no_sync(
        self, model: ModelWrapper | None = None, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        if not isinstance(optimizer, HybridOptimizer):
            raise ConfigError(
                "no_sync() needs the optimizer that boost() returned, which holds the gradients: write"
                " booster.no_sync(model, optimizer)"
            )
        return optimizer.no_sync()

    def estimate_memory(self, question: MemoryQuestion) -> RankMemory:
        return hybrid_memory(question, self._arguments, self._mesh, self._split, offloads=self._offloads)

    @classmethod
    def settings_for(cls, num_ranks: int) -> list[dict[str, Any]]:
        return hybrid_settings(num_ranks)
