"""Shard and parallelize a model on this rank's device, and explain the result beforehand."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import agree
from booster.errors import ConfigError
from booster.interface import ParameterLayout
from booster.mixed_precision.fp16_naive import log_on_master
from booster.plugins.hybrid_parallel.activation_checkpointing import (
    GradientCheckpointConfig,
    checkpoint_layers,
    require_stacks,
)
from booster.plugins.hybrid_parallel.cutting import cut_model, cut_parameter
from booster.plugins.hybrid_parallel.layouts import planned_layouts
from booster.plugins.hybrid_parallel.mesh import HybridMesh
from booster.plugins.hybrid_parallel.parallelize import parallelize
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.balance import divide_units
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.carving import CarvedModel, carve, connect
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.choosing import choose_stage_plan
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.explain import explain_stages
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import StageDivision
from booster.plugins.hybrid_parallel.pipeline_parallel.weight_gradients import WeightGradients, defer_weight_gradients
from booster.plugins.hybrid_parallel.plans.choose import choose_plan
from booster.plugins.hybrid_parallel.plans.explain import explain
from booster.plugins.hybrid_parallel.plans.plan import TensorParallelPlan
from booster.plugins.hybrid_parallel.plans.stacks import find_stacks
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks
from booster.plugins.hybrid_parallel.sequence_parallel.recorded_outputs import join_kept_outputs
from booster.plugins.hybrid_parallel.sequence_parallel.splitters import SequenceAxisSplitter
from booster.plugins.hybrid_parallel.sequence_parallel.stacks import attach_stack
from booster.plugins.hybrid_parallel.sequence_parallel.token_mixing import check_attention_alone_mixes_tokens
from booster.plugins.hybrid_parallel.sequence_parallel.transformers_attention import use_sequence_attention
from booster.plugins.hybrid_parallel.settings import HybridArguments
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.sharding.materializing import Materializer

__all__ = ["ModelSplit"]


class ModelSplit:
    """Partitions models by the plugin's arguments.

    Args:
        arguments: The plugin's checked arguments.
        mesh: The device mesh.
        device: Device of the model.
        verbose: If True, log the plan of every model, otherwise only derived plans.

    Attributes:
        tensor_ranks: The tensor-parallel group, or None if layers are unsharded.
        sequence_ranks: The group of the sp axis, or None without one.
        weight_gradients: Queue of deferred weight gradients, or None if the schedule defers none.
    """

    def __init__(
        self, arguments: HybridArguments, mesh: HybridMesh, device: torch.device, *, verbose: bool = False
    ) -> None:
        self._verbose = verbose
        self._arguments = arguments
        self._mesh = mesh
        self._device = device
        self._divisions: WeakKeyDictionary[nn.Module, StageDivision] = WeakKeyDictionary()  # checked, not yet applied
        self._carved: WeakKeyDictionary[nn.Module, CarvedModel] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[nn.Module, TensorParallelPlan] = WeakKeyDictionary()  # checked, not yet applied
        pipeline = arguments.pipeline
        defers = pipeline is not None and pipeline.schedule.defers_weights
        self.weight_gradients = WeightGradients() if defers else None
        self.tensor_ranks: TensorParallelRanks | None = None
        self.sequence_ranks: SequenceParallelRanks | None = None
        if arguments.tp_size > 1:
            mode = arguments.tensor_axis_mode
            self.tensor_ranks = TensorParallelRanks(mesh.group("tp"), sequence_mode=mode)
        if arguments.own_axis_mode is not None:
            self.sequence_ranks = SequenceParallelRanks(mesh.group("sp"), arguments.own_axis_mode)

    def plan(self, model: nn.Module) -> TensorParallelPlan:
        """Return the tensor-parallel plan of a model.

        Raises:
            ConfigError: There is no plan for the model, or it is not applicable.

        Collective: no.
        """
        arguments = self._arguments
        if self.tensor_ranks is None:
            if arguments.given_plan is not None:
                choose_plan(model, tp_size=1, plan=arguments.given_plan)  # report its mistakes at any size
            needs_stacks = self.sequence_ranks is not None or arguments.checkpointing is not None
            stacks = find_stacks(model) if needs_stacks else ()
            return TensorParallelPlan(stacks=stacks, source="tp_size=1: layers are unsharded")
        return choose_plan(
            model, tp_size=arguments.tp_size, plan=arguments.given_plan, sequence_mode=arguments.tensor_axis_mode
        )

    def explain(self, model: nn.Module) -> str:
        """Return a table of this rank's shards of a model, and one of the pipeline stages."""
        table = self._table(model, self.plan(model))
        pipeline, division = self._arguments.pipeline, self.division(model)
        if pipeline is None or division is None:
            return table
        stages = explain_stages(
            model,
            division.plan,
            division.bounds,
            division.schedule,
            division.num_stages,
            division.num_chunks,
            pipeline.num_microbatches,
        )
        return f"{stages}\n\n{table}" if self.tensor_ranks is not None else stages

    def _table(self, model: nn.Module, plan: TensorParallelPlan) -> str:
        rank = 0 if self.tensor_ranks is None else self.tensor_ranks.rank
        multiple = self._arguments.make_vocab_size_divisible_by
        return explain(plan, model, self._arguments.tp_size, rank, vocabulary_multiple=multiple)

    def carved(self, model: nn.Module) -> CarvedModel | None:
        """Return this stage's part of a partitioned model, or None without pipeline parallelism."""
        return self._carved.get(model)

    def division(self, model: nn.Module) -> StageDivision | None:
        """Return the layers of each pipeline stage, or None without pipeline parallelism.

        Raises:
            ConfigError: The model cannot be partitioned into these stages.

        Collective: no.
        """
        pipeline = self._arguments.pipeline
        if pipeline is None:
            return None
        plan = choose_stage_plan(model, split=pipeline.split, execution_sequence=pipeline.execution_sequence)
        bounds = divide_units(model, plan, pipeline.num_positions, pipeline.num_layers_per_stage)
        return StageDivision(plan, bounds, pipeline.schedule, pipeline.num_stages, pipeline.num_chunks)

    def check(self, model: nn.Module) -> None:
        """Check everything about the partition of a model that this rank can check alone.

        Raises:
            ConfigError: The model cannot be partitioned.

        Collective: no.
        """
        self._plans[model] = plan = self.plan(model)
        self.layouts(model, plan)
        if self._arguments.checkpointing is not None:
            require_stacks(model, plan.stacks)
        if self._arguments.sequence_mode is not None and not any(plan.stacks):
            raise ConfigError(
                f"sequence_parallelism_mode={self._arguments.sequence_mode!r} shards sequences within stacks of layers,"
                f" but {type(model).__name__} has none: leave it out, or put the layers in an nn.ModuleList"
            )
        if self.sequence_ranks is not None:
            check_attention_alone_mixes_tokens(model, plan.stacks)
        self._materializer(model).check()
        division = self.division(model)
        if division is not None:
            self._divisions[model] = division

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Partition the model in place, after `check`.

        Raises:
            DesyncError: The ranks have different models.
            ConfigError: A module does not support its style.

        Collective: yes.
        """
        plan = self._plans.pop(model)
        agree("the plan", [repr(entry) for entry in plan.entries])
        if plan.is_derived or self._verbose:
            log_on_master(f"HybridParallelPlugin plan of {type(model).__name__}:\n{self._table(model, plan)}")
        layouts = self.layouts(model, plan)
        tensor_rank = 0 if self.tensor_ranks is None else self.tensor_ranks.rank
        own = {name: of_ranks[tensor_rank] for name, of_ranks in layouts.items()}
        division = self._divisions.pop(model, None)
        if division is None:
            cut_model(model, optimizer, own, self._materializer(model))
            self._parallelize(model, plan, layouts)
            return
        carved = carve(model, optimizer, own, self._materializer(model), division, self._stage, self._device)
        self._carved[model] = carved
        local = {name: layouts[logical] for name, logical in carved.logical_names.items()}
        self._parallelize(model, self._plan_of_stage(model, plan, division), local)
        if self.weight_gradients is not None:
            defer_weight_gradients(model, self.weight_gradients)
        connect(model, carved, self._stage)

    def divide_layers(self, model: nn.Module, plan: TensorParallelPlan) -> None:
        """Shard the layers of all stages of an unsharded model, in place.

        Args:
            model: Unsharded model, on its final device.
            plan: Tensor-parallel plan of the model.

        Collective: no.
        """
        layouts = self.layouts(model, plan)
        tensor_rank = 0 if self.tensor_ranks is None else self.tensor_ranks.rank
        for name, parameter in model.named_parameters():
            cut_parameter(parameter, layouts[name][tensor_rank])
        self._parallelize(model, plan, layouts)

    @property
    def _stage(self) -> int:
        return self._mesh.rank("pp")

    def _plan_of_stage(self, model: nn.Module, plan: TensorParallelPlan, division: StageDivision) -> TensorParallelPlan:
        """Return the plan restricted to this stage's modules, with stacks cut at the stage's bounds."""
        stages = division.module_stages(model)
        held = {name for name, module in model.named_modules() if self._stage in stages[id(module)]}

        def is_held(name: str, is_parameter: bool = False) -> bool:
            return (name.rpartition(".")[0] if is_parameter else name) in held

        return replace(
            plan,
            entries=tuple(
                replace(entry, siblings=tuple(name for name in entry.siblings if is_held(name)))
                for entry in plan.entries
                if is_held(entry.name, entry.is_parameter)
            ),
            attributes=tuple(change for change in plan.attributes if is_held(change.module)),
            arguments=tuple(split for split in plan.arguments if is_held(split.module)),
            stacks=tuple(tuple(part) for stack in plan.stacks for part in division.units_of(self._stage, stack)),
        )

    def _parallelize(
        self, model: nn.Module, plan: TensorParallelPlan, layouts: dict[str, list[ParameterLayout]]
    ) -> None:
        if self.tensor_ranks is not None:
            parallelize(
                model,
                plan,
                self.tensor_ranks,
                layouts,
                vocabulary_multiple=self._arguments.make_vocab_size_divisible_by,
                parallel_output=self._arguments.parallel_output,
            )
        if self.sequence_ranks is not None:
            self._split_sequences(model, plan, self.sequence_ranks)
        if self._arguments.checkpointing is not None:
            self._checkpoint_layers(model, plan, self._arguments.checkpointing)

    def _checkpoint_layers(self, model: nn.Module, plan: TensorParallelPlan, config: GradientCheckpointConfig) -> None:
        if self._arguments.pipeline is None:
            for stack in plan.stacks:
                checkpoint_layers(model, stack, config)
            return
        layers = [name for part in plan.stacks for name in part]
        checkpoint_layers(model, layers, config, stage=self._stage)

    def _split_sequences(self, model: nn.Module, plan: TensorParallelPlan, ranks: SequenceParallelRanks) -> None:
        use_sequence_attention(model)
        modules = dict(model.named_modules())
        for stack in plan.stacks:
            attach_stack([modules[name] for name in stack], SequenceAxisSplitter(ranks))
        join_kept_outputs(model)

    def layouts(self, model: nn.Module, plan: TensorParallelPlan) -> dict[str, list[ParameterLayout]]:
        """Return each parameter's shard specs by name, one per tensor-parallel rank. Collective: no."""
        return planned_layouts(model, plan, self._arguments.tp_size, self._arguments.make_vocab_size_divisible_by)

    def _materializer(self, model: nn.Module) -> Materializer:
        return Materializer(model, self._device, param_init_fn=None, sync=True)
