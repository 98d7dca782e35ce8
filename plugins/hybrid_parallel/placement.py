"""Brings a model to this rank's device, cut and parallelized; and says beforehand what that would be."""

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
    """How the plugin's arguments divide models.

    Args:
        arguments: Of the plugin, checked.
        mesh: Of the ranks.
        device: Where the model goes.
        verbose: Log what is done with every model; else with those whose plan was derived.

    Attributes:
        tensor_ranks: The ranks that share the layers; None: each has them whole.
        sequence_ranks: The ranks that share the sequences by an axis of their own; None: there is none.
        weight_gradients: Where gradients of weights wait that the schedule computes later; None: it has none.
    """

    def __init__(
        self, arguments: HybridArguments, mesh: HybridMesh, device: torch.device, *, verbose: bool = False
    ) -> None:
        self._verbose = verbose
        self._arguments = arguments
        self._mesh = mesh
        self._device = device
        self._divisions: WeakKeyDictionary[nn.Module, StageDivision] = WeakKeyDictionary()  # likewise
        self._carved: WeakKeyDictionary[nn.Module, CarvedModel] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[nn.Module, TensorParallelPlan] = WeakKeyDictionary()  # checked, to be applied
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
        """Returns which module is split how. No communication.

        Raises:
            ConfigError: There is no plan for the model, or it can't be carried out.
        """
        arguments = self._arguments
        if self.tensor_ranks is None:
            if arguments.given_plan is not None:
                choose_plan(model, tp_size=1, plan=arguments.given_plan)  # a mistake in it is one at any size
            needs_stacks = self.sequence_ranks is not None or arguments.checkpointing is not None
            stacks = find_stacks(model) if needs_stacks else ()
            return TensorParallelPlan(stacks=stacks, source="tp_size=1: every rank has all layers whole")
        return choose_plan(
            model, tp_size=arguments.tp_size, plan=arguments.given_plan, sequence_mode=arguments.tensor_axis_mode
        )

    def explain(self, model: nn.Module) -> str:
        """Returns a table of what this rank would hold of a model, and one of the pipeline's stages."""
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
        """Returns what this stage has of a model that was divided; None: there is one stage."""
        return self._carved.get(model)

    def division(self, model: nn.Module) -> StageDivision | None:
        """Returns which stage has which layers of a model; None: there is one stage. No communication.

        Raises:
            ConfigError: The model can't be divided so.
        """
        pipeline = self._arguments.pipeline
        if pipeline is None:
            return None
        plan = choose_stage_plan(model, split=pipeline.split, execution_sequence=pipeline.execution_sequence)
        bounds = divide_units(model, plan, pipeline.num_positions, pipeline.num_layers_per_stage)
        return StageDivision(plan, bounds, pipeline.schedule, pipeline.num_stages, pipeline.num_chunks)

    def check(self, model: nn.Module) -> None:
        """Raises if this rank alone can tell that the model can't be divided. No communication.

        Raises:
            ConfigError: It can't.
        """
        self._plans[model] = plan = self.plan(model)
        self.layouts(model, plan)
        if self._arguments.checkpointing is not None:
            require_stacks(model, plan.stacks)
        if self._arguments.sequence_mode is not None and not any(plan.stacks):
            raise ConfigError(
                f"sequence_parallelism_mode={self._arguments.sequence_mode!r} splits sequences within stacks of layers,"
                f" and {type(model).__name__} has none: leave it out, or hold the layers in an nn.ModuleList"
            )
        if self.sequence_ranks is not None:
            check_attention_alone_mixes_tokens(model, plan.stacks)
        self._materializer(model).check()
        division = self.division(model)
        if division is not None:
            self._divisions[model] = division

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Divides the model, in place; after `check`. Collective.

        Raises:
            DesyncError: The ranks have different models.
            ConfigError: A module can't be treated as planned.
        """
        plan = self._plans.pop(model)
        agree("the plan", [repr(entry) for entry in plan.entries])
        if plan.is_derived or self._verbose:
            log_on_master(f"HybridParallelPlugin divides {type(model).__name__} so:\n{self._table(model, plan)}")
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
        """Makes of a whole model what a rank has of its layers, with those of all stages, in place. No communication.

        Args:
            model: Not divided yet, on the device that it is to be on.
            plan: See `plan`.
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
        """Returns the part of a plan that is about modules of this stage; stacks end with its pieces."""
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
        """Returns by parameter name what every tensor parallel rank holds of it. No communication."""
        return planned_layouts(model, plan, self._arguments.tp_size, self._arguments.make_vocab_size_divisible_by)

    def _materializer(self, model: nn.Module) -> Materializer:
        return Materializer(model, self._device, param_init_fn=None, sync=True)
