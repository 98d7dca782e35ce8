"""Shard and parallelize a model on this rank's device, and explain the result beforehand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import check_same_across_ranks, real_tensors
from booster.core.layer_stacks import STACK_ADVICE, find_stacks
from booster.errors import ConfigError
from booster.interface import ShardSpec, set_shard_spec, shard_spec_of
from booster.logger import log_rank_zero
from booster.plugins.sharding.deferred_init import Materializer
from booster.pytree import copy_with_tensors

from .activation_checkpointing import checkpoint_layers
from .config import HybridConfig
from .expert_parallel.experts import ExpertParallelGroup, make_expert_parallel
from .expert_parallel.loops import make_loop_expert_parallel
from .expert_parallel.plan import ExpertPlan, find_experts
from .expert_parallel.shared_experts import overlap_shared_experts
from .mesh import HybridMesh
from .parallelize import attach_stacks, leave_fused_layers, parallelize
from .pipeline_parallel.placeholders import drop_tensors, replace_by_meta
from .pipeline_parallel.stage_module import StageModel, build_stage, install_chunk_forward
from .pipeline_parallel.stage_partition.balance import partition_layers
from .pipeline_parallel.stage_partition.partition import choose_stage_plan, explain_stages
from .pipeline_parallel.stage_partition.stage_plan import StagePartition
from .sequence_parallel.attention_dispatch import use_sequence_attention
from .sequence_parallel.group import SequenceParallelGroup
from .sequence_parallel.layer_stack import check_last_layers, check_only_attention_mixes_tokens
from .sequence_parallel.splitters import SequenceAxisSplitter
from .sequence_parallel.token_parallel_logits import share_head
from .tensor_parallel.deferred_wgrad import DeferredWeightGrads
from .tensor_parallel.group import TensorParallelGroup
from .tensor_parallel.linear import defer_weight_gradients
from .tensor_parallel.random_functions import intercept_random_functions
from .tensor_parallel.shard_spec import sharded_spec, vocabulary_spec
from .tensor_parallel_nd.grid import TensorGrid, TensorGridShape
from .tensor_parallel_nd.layer_check import verify_layers
from .tensor_parallel_nd.plan import activation_shapes, grid_spec, is_on_grid, plan_for_grid
from .tp_plan.annotations import marked_placements
from .tp_plan.plan import (
    CLOSING_STYLES,
    COLUMN_STYLES,
    FEATURE_STYLES,
    OPEN_STYLES,
    ROW_STYLES,
    SHARDED_STYLES,
    VOCABULARY_STYLES,
    PlannedEntry,
    TensorParallelPlan,
    explain,
    generalize,
)
from .tp_plan.resolve import choose_plan
from .tp_plan.token_wise_check import check_attention_alone_mixes_tokens


def planned_shard_specs(
    model: nn.Module,
    plan: TensorParallelPlan,
    num_ranks: int,
    vocabulary_multiple: int,
    grid: TensorGridShape | None = None,
) -> dict[str, list[ShardSpec]]:
    """Return each parameter's shard specs by name, tied parameters once, one spec per rank.

    Args:
        model: The user's unsharded model, possibly on the meta device.
        plan: Tensor-parallel style of each module.
        num_ranks: Number of tensor-parallel ranks.
        vocabulary_multiple: Multiple to which the vocabulary is padded.
        grid: Grid of the ranks, optional.

    Raises:
        ConfigError: Modules that share a parameter shard it in different ways.

    Collective: no.
    """
    sharded: dict[int, tuple[str, list[ShardSpec]]] = {}
    for name, parameter, entry, own_name in _planned_parameters(model, plan):
        shard_specs = [
            grid_spec(entry, own_name, tuple(parameter.shape), grid, rank)
            if grid is not None and is_on_grid(entry)
            else _shard_spec(entry, own_name, parameter, num_ranks, rank, vocabulary_multiple)
            for rank in range(num_ranks)
        ]
        other = sharded.setdefault(id(parameter), (name, shard_specs))
        if other[1] != shard_specs:
            raise ConfigError(
                f"{name!r} is the same parameter as {other[0]!r}, but the plan shards them differently: give both"
                " modules styles that shard the same dimension, such as 'vocab' and 'vocab_head', or none"
            )
    found = {}
    for name, parameter in model.named_parameters():
        replicated = [ShardSpec.unsharded(parameter.shape, is_primary=rank == 0) for rank in range(num_ranks)]
        found[name] = sharded.get(id(parameter), (name, replicated))[1]
    return found


def _planned_parameters(
    model: nn.Module, plan: TensorParallelPlan
) -> Iterator[tuple[str, nn.Parameter, PlannedEntry, str]]:
    """Yield the planned parameters: full name, parameter, entry and name within the module."""
    modules = dict(model.named_modules())
    for entry in plan.entries:
        if entry.is_parameter:
            module_name, _, own_name = entry.name.rpartition(".")
            yield entry.name, modules[module_name]._parameters[own_name], entry, "weight"  # type: ignore[misc]
            continue
        if entry.style not in SHARDED_STYLES and not is_on_grid(entry):
            continue  # the style covers a subtree, whose parameters may have their own entries
        for own_name, parameter in modules[entry.name].named_parameters(recurse=False):
            yield f"{entry.name}.{own_name}", parameter, entry, own_name


def _shard_spec(
    entry: PlannedEntry, own_name: str, parameter: nn.Parameter, num_ranks: int, rank: int, multiple: int
) -> ShardSpec:
    shape, style, is_bias = tuple(parameter.shape), entry.style, own_name == "bias"
    if style in VOCABULARY_STYLES:
        return vocabulary_spec(shape, multiple, num_ranks, rank)
    is_sharded = entry.is_parameter or style in COLUMN_STYLES or (style in ROW_STYLES | FEATURE_STYLES and not is_bias)
    if not is_sharded or not entry.blocks:
        return ShardSpec.unsharded(shape, is_primary=rank == 0)
    return sharded_spec(shape, 0 if is_bias else entry.dim, entry.blocks, num_ranks, rank)


@torch.no_grad()
def _shard_parameters(
    model: nn.Module,
    optimizer: Optimizer | None,
    shard_specs: Mapping[str, ShardSpec],
    materializer: Materializer,
    absent_ids: Collection[int],
) -> dict[str, nn.Parameter]:
    """Materialize every parameter and keep this rank's shard of it, but none of modules of `absent_ids`.

    Lazy and meta parameters are materialized module by module, so that the unsharded parameters of at most one module
    are in memory at a time. States of the optimizer are sharded as well.

    Returns:
        The model's parameters by name, tied ones once. Those of absent modules only are on the meta device, and are
        removed from the optimizer's param groups.

    Collective: yes.
    """
    materializer.sync_initialized()
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # moves every state to its parameter's device
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {
        names[id(parameter)]
        for module in model.modules()
        if id(module) not in absent_ids
        for parameter in module.parameters(recurse=False)
    }
    before = dict(model.named_parameters())
    after: dict[str, nn.Parameter] = {}
    placeholders: dict[int, nn.Parameter] = {}
    dropped: list[nn.Parameter] = []  # keeps the objects alive, so that their ids stay unique
    for module in model.modules():
        own = [names[id(one)] for one in module.parameters(recurse=False)]
        materializer.fill([module])
        found = dict(zip(own, module.parameters(recurse=False), strict=True))
        for name, parameter in found.items():
            names[id(parameter)] = name
            if name in held and name not in after:
                _shard_parameter(parameter, shard_specs[name], optimizer)
                after[name] = parameter
        if id(module) in absent_ids:
            replace_by_meta(module, placeholders)
            for name, parameter in found.items():
                if name not in held:
                    after.setdefault(name, placeholders[id(parameter)])
                    parameter.data, parameter.grad = parameter.data.new_empty(0), None  # other references may remain
                    dropped.append(parameter)
    # Only after all modules: materializing an ancestor may initialize all of its descendants.
    for module in model.modules():
        if id(module) in absent_ids:
            drop_tensors(module)
    after = {name: after[name] for name in before}
    if optimizer is not None:
        _repoint_optimizer(optimizer, before, after, held)
    return after


@torch.no_grad()
def _shard_parameter(parameter: nn.Parameter, shard_spec: ShardSpec, optimizer: Optimizer | None = None) -> None:
    """Keep the shard of a parameter that its spec describes, in place, and of its optimizer state."""
    if not shard_spec.is_unsharded:
        parameter.data = shard_spec.shard(parameter.data)
        parameter.grad = None
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            state[key] = copy_with_tensors(
                lambda one: shard_spec.shard(one) if one.shape == shard_spec.logical_shape else one.detach().clone(),
                value,
            )
    set_shard_spec(parameter, shard_spec)


def _repoint_optimizer(
    optimizer: Optimizer,
    before: Mapping[str, nn.Parameter],
    after: Mapping[str, nn.Parameter],
    held: Collection[str],
) -> None:
    """Point an optimizer at the replaced parameters, and drop those that this rank does not hold."""
    names = {id(parameter): name for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [after[names[id(one)]] for one in group["params"] if names[id(one)] in held]
    for old in [one for one in optimizer.state if id(one) in names]:
        name = names[id(old)]
        if name not in held:
            del optimizer.state[old]
        elif after[name] is not old:
            optimizer.state[after[name]] = optimizer.state.pop(old)
    assert all(shard_spec_of(after[name]).local_shape == tuple(after[name].shape) for name in held)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """Plan of a model's partition over the ranks.

    Attributes:
        plan: Its tensor-parallel plan.
        stages: Layers of each pipeline stage, or None without pipeline parallelism.
        experts: Experts of each rank, or None without expert parallelism.
    """

    plan: TensorParallelPlan
    stages: StagePartition | None
    experts: ExpertPlan | None


class ModelPartitioner:
    """Partitions models by the plugin's arguments.

    Args:
        arguments: The plugin's checked arguments.
        mesh: The device mesh.
        device: Device of the model.
        verbose: If True, log the plan of every model, otherwise only derived plans.

    Attributes:
        tp_group: The tensor-parallel group, or None if layers are unsharded.
        grid: The grid of its ranks, or None in the mode "1d".
        sp_group: The group of the sp axis, or None without one.
        ep_group: The group of the ep axis, or None if experts are unsharded.
        weight_gradients: Queue of deferred weight gradients, or None if the schedule defers none.
    """

    def __init__(
        self, arguments: HybridConfig, mesh: HybridMesh, device: torch.device, *, verbose: bool = False
    ) -> None:
        self._verbose = verbose
        self._arguments = arguments
        self._device = device
        self._stage = mesh.rank("pp")
        pipeline = arguments.pipeline
        defers = pipeline is not None and pipeline.schedule.defers_weights
        self.weight_gradients = DeferredWeightGrads() if defers else None
        self.tp_group: TensorParallelGroup | None = None
        self.sp_group: SequenceParallelGroup | None = None
        if arguments.tp_size > 1:
            mode = arguments.tp_axis_mode
            self.tp_group = TensorParallelGroup(mesh.group("tp"), sequence_mode=mode)
        self.grid: TensorGrid | None = None
        if self.tp_group is not None and arguments.tensor_grid is not None:
            self.grid = TensorGrid(arguments.tensor_grid, self.tp_group, mesh)
        if arguments.sp_axis_mode is not None:
            self.sp_group = SequenceParallelGroup(mesh.group("sp"), arguments.sp_axis_mode)
        self.ep_group: ExpertParallelGroup | None = None
        if arguments.ep_size > 1:
            self.ep_group = ExpertParallelGroup.of(mesh.group("ep"), arguments.capacity)

    def plan(self, model: nn.Module) -> TensorParallelPlan:
        """Return the tensor-parallel plan of a model.

        Raises:
            ConfigError: There is no plan for the model, or it is not applicable.

        Collective: no.
        """
        arguments = self._arguments
        if self.tp_group is None:
            if arguments.layer_plan is not None:
                choose_plan(model, tp_size=1, plan=arguments.layer_plan)  # report its mistakes at any size
            needs_stacks = self.sp_group is not None or arguments.checkpointing is not None
            stacks = find_stacks(model) if needs_stacks else ()
            return TensorParallelPlan(stacks=stacks, source="tp_size=1: layers are unsharded")
        grid = arguments.tensor_grid
        num_shards = arguments.tp_size if grid is None else grid.side
        try:
            shards_sequence = arguments.tp_axis_mode is not None
            found = choose_plan(model, tp_size=num_shards, plan=arguments.layer_plan, shards_sequence=shards_sequence)
        except ConfigError as error:
            if grid is None:
                raise
            raise ConfigError(
                f"tp_mode={grid.mode!r} with tp_size={grid.num_ranks} divides features over {num_shards} ranks, as"
                f" tp_mode='1d' with tp_size={num_shards} does, for which: {error}"
            ) from error
        if grid is None:
            return found
        on_grid = plan_for_grid(found, model, grid)
        if not (found.is_derived or arguments.layer_plan is not None or marked_placements(model)):
            return on_grid  # layers of transformers have the examples in their first dimension
        with real_tensors():
            return replace(on_grid, notes=(*on_grid.notes, *verify_layers(on_grid, model, grid)))

    def experts(self, model: nn.Module) -> ExpertPlan | None:
        """Return the experts of each rank, or None without expert parallelism.

        Raises:
            ConfigError: There are no experts, or fewer than ranks.

        Collective: no.
        """
        given = self._arguments.given_plan
        if self.ep_group is None:
            if given != self._arguments.layer_plan:
                find_experts(model, 1, given)  # report the mistakes of a plan with experts at any size
            return None
        return find_experts(model, self.ep_group.size, given)

    def explain(self, model: nn.Module, batch_size: int | None = None) -> str:
        """Return a table of this rank's shards of a model, one of its experts, and one of the pipeline stages.

        Args:
            model: The user's model.
            batch_size: Number of examples of a batch; optional, for the shapes of activations.
        """
        plan, experts = self.plan(model), self.experts(model)
        table = self._table(model, plan, experts)
        if batch_size is not None:
            table = f"{table}\n{self._activations(model, plan, batch_size)}"
        if experts is not None and self.ep_group is not None:
            table = f"{experts.explain(self.ep_group.rank)}\n\n{table}"
        pipeline, stage_partition = self._arguments.pipeline, self.stage_partition(model)
        if pipeline is None or stage_partition is None:
            return table
        stages = explain_stages(model, stage_partition, pipeline.num_microbatches)
        return f"{stages}\n\n{table}" if self.tp_group is not None or experts is not None else stages

    def _activations(self, model: nn.Module, plan: TensorParallelPlan, batch_size: int) -> str:
        """Return the shapes of the activations between the linear layers of pairs, equal ones once."""
        grid, size = self._arguments.tensor_grid, self._arguments.tp_size
        lines = [f"activations of {batch_size} examples"]
        for entry in plan.entries:
            if not entry.is_parameter and entry.style in OPEN_STYLES | CLOSING_STYLES:
                shapes = activation_shapes(entry, model.get_submodule(entry.name), grid, size, batch_size)
                given, returned = ("x".join(map(str, shape)) for shape in shapes)
                lines.append(f"  {generalize(entry.name)}: {given} -> {returned}")
        return "\n".join(dict.fromkeys(lines))

    def _table(self, model: nn.Module, plan: TensorParallelPlan, experts: ExpertPlan | None) -> str:
        rank = 0 if self.tp_group is None else self.tp_group.rank
        specs = self._local_specs(model, self.shard_specs(model, plan), experts)
        return explain(plan, model, specs, rank, self._arguments.tp_size)

    def stage_partition(self, model: nn.Module) -> StagePartition | None:
        """Return the layers of each pipeline stage, or None without pipeline parallelism.

        Raises:
            ConfigError: The model cannot be partitioned into these stages.

        Collective: no.
        """
        pipeline = self._arguments.pipeline
        if pipeline is None:
            return None
        plan = choose_stage_plan(model, split=pipeline.split, execution_sequence=pipeline.execution_sequence)
        bounds = partition_layers(model, plan, pipeline.num_positions, pipeline.num_layers_per_stage)
        return StagePartition(plan, bounds, pipeline.schedule, pipeline.pp_size, pipeline.num_model_chunks)

    def check(self, model: nn.Module) -> PartitionPlan:
        """Plan the partition of a model, and check everything about it that this rank can check alone.

        Raises:
            ConfigError: The model cannot be partitioned.

        Collective: no.
        """
        plan, experts = self.plan(model), self.experts(model)
        self._local_specs(model, self.shard_specs(model, plan), experts)
        if self._arguments.checkpointing is not None and not any(plan.stacks):
            raise ConfigError(
                f"gradient_checkpoint_config was given, but {type(model).__name__} has no stack of equal layers to"
                f" recompute: leave it out, or {STACK_ADVICE}"
            )
        if self._arguments.sequence_mode is not None and not any(plan.stacks):
            raise ConfigError(
                f"sequence_parallelism_mode={self._arguments.sequence_mode!r} shards sequences within stacks of layers,"
                f" but {type(model).__name__} has none: leave it out, or {STACK_ADVICE}"
            )
        if self._arguments.sequence_mode is not None:
            check_last_layers(model, plan.stacks)
        if self.sp_group is not None:
            check_only_attention_mixes_tokens(model, plan.stacks)
            with real_tensors():  # layers are tried out on values
                check_attention_alone_mixes_tokens(model, plan.stacks)
        Materializer(model, self._device, param_init_fn=None, sync=True).check()
        return PartitionPlan(plan, self.stage_partition(model), experts)

    def apply(self, model: nn.Module, optimizer: Optimizer | None, partition_plan: PartitionPlan) -> StageModel | None:
        """Partition the model in place; return this stage's part, or None without pipeline parallelism.

        Raises:
            DesyncError: The ranks have different models.
            ConfigError: A module does not support its style.

        Collective: yes.
        """
        plan, stage_partition, experts = partition_plan.plan, partition_plan.stages, partition_plan.experts
        entries = [*plan.entries, *(experts.entries if experts is not None else ())]
        check_same_across_ranks("the plan", [repr(entry) for entry in entries])
        if plan.is_derived or self._verbose:
            log_rank_zero(f"HybridParallelPlugin plan of {type(model).__name__}:\n{self._table(model, plan, experts)}")
        if self.ep_group is not None:
            self.ep_group = replace(self.ep_group, loads={})  # loads are of one model
        shard_specs = self.shard_specs(model, plan)
        local_specs = self._local_specs(model, shard_specs, experts)

        def shard(specs: Mapping[str, ShardSpec], absent_ids: Collection[int] = ()) -> dict[str, nn.Parameter]:
            materializer = Materializer(model, self._device, param_init_fn=None, sync=True)
            return _shard_parameters(model, optimizer, specs, materializer, absent_ids)

        if stage_partition is None:
            shard(local_specs)
            self._parallelize(model, plan, shard_specs)
            self._parallelize_experts(model, experts)
            return None
        stage_model = build_stage(model, optimizer, local_specs, stage_partition, self._stage, self._device, shard)
        stages = stage_partition.module_stages(model)
        held = {name for name, module in model.named_modules() if self._stage in stages[id(module)]}
        stage_specs = {name: shard_specs[logical] for name, logical in stage_model.logical_names.items()}
        self._parallelize(model, self._stage_plan(plan, stage_partition, held), stage_specs)
        self._parallelize_experts(model, experts, held)
        if self.weight_gradients is not None:
            defer_weight_gradients(model, self.weight_gradients)
        install_chunk_forward(model, stage_model, self._stage)
        return stage_model

    def _stage_plan(
        self, plan: TensorParallelPlan, stage_partition: StagePartition, held: Collection[str]
    ) -> TensorParallelPlan:
        """Return the plan restricted to this stage's modules, with stacks cut at the stage's bounds."""

        def cut(stacks: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
            return tuple(tuple(layers) for stack in stacks for layers in stage_partition.layers_of(self._stage, stack))

        return replace(
            plan,
            entries=tuple(
                replace(entry, siblings=tuple(name for name in entry.siblings if name in held))
                for entry in plan.entries
                if (entry.name.rpartition(".")[0] if entry.is_parameter else entry.name) in held
            ),
            attributes=tuple(change for change in plan.attributes if change.module in held),
            arguments=tuple(split for split in plan.arguments if split.module in held),
            stacks=cut(plan.stacks),
            divided_stacks=cut(plan.divided_stacks),
            handovers=tuple(stage_partition.handovers(plan.stacks)),
        )

    def _parallelize(self, model: nn.Module, plan: TensorParallelPlan, shard_specs: dict[str, list[ShardSpec]]) -> None:
        if any(one is not None for one in (self.tp_group, self.sp_group, self._arguments.pipeline)):
            leave_fused_layers(model)
        if self.tp_group is not None:
            parallelize(
                model,
                plan,
                self.tp_group,
                shard_specs,
                vocabulary_multiple=self._arguments.make_vocab_size_divisible_by,
                parallel_output=self._arguments.parallel_output,
                grid=self.grid,
            )
            if not self.tp_group.shards_sequence and self.grid is None:
                in_stacks = (model.get_submodule(name) for stack in plan.stacks for name in stack)
                intercept_random_functions(model, in_stacks, self.tp_group)
        if self.sp_group is not None:
            use_sequence_attention(model)
            attach_stacks(model, plan, SequenceAxisSplitter(self.sp_group))
            if self._arguments.parallel_output:
                share_head(model, self.sp_group, shard_specs)
        checkpointing = self._arguments.checkpointing
        if checkpointing is not None and self._arguments.pipeline is not None:
            layers = [name for stage_layers in plan.stacks for name in stage_layers]
            checkpoint_layers(model, layers, checkpointing, stage=self._stage)
        elif checkpointing is not None:
            for stack in plan.stacks:
                checkpoint_layers(model, stack, checkpointing)

    def _parallelize_experts(
        self, model: nn.Module, experts: ExpertPlan | None, held: Collection[str] | None = None
    ) -> None:
        """Make the modules of experts compute with this rank's, all of them or those of a stage."""
        if experts is None or self.ep_group is None:
            return
        for entry in experts.entries:
            if held is None or entry.name in held:
                bounds = experts.bounds(entry)
                if entry.is_looped:
                    make_loop_expert_parallel(model, entry.name, self.ep_group, bounds)
                    continue
                overlaps = self._arguments.overlap_shared_experts
                shared = overlap_shared_experts(model, entry.name) if overlaps else None
                module = model.get_submodule(entry.name)
                make_expert_parallel(
                    module, entry.name, self.ep_group, bounds, is_stacked=entry.is_stacked, shared=shared
                )

    def _local_specs(
        self, model: nn.Module, shard_specs: dict[str, list[ShardSpec]], experts: ExpertPlan | None
    ) -> dict[str, ShardSpec]:
        tensor_rank = 0 if self.tp_group is None else self.tp_group.rank
        specs = {name: rank_specs[tensor_rank] for name, rank_specs in shard_specs.items()}
        if experts is None or self.ep_group is None:
            return specs
        specs = experts.shard_specs(model, specs, self.ep_group.rank)
        if self._arguments.zero_stage == 0 and self.ep_group.rank > 0:
            # Norms are summed over the ranks that share the experts, all of which hold the other parameters.
            specs = {name: spec if spec.is_expert else replace(spec, is_counted=False) for name, spec in specs.items()}
        return specs

    def shard_specs(self, model: nn.Module, plan: TensorParallelPlan) -> dict[str, list[ShardSpec]]:
        """Return each parameter's shard specs by name, one per tensor-parallel rank. Collective: no."""
        arguments = self._arguments
        return planned_shard_specs(
            model, plan, arguments.tp_size, arguments.make_vocab_size_divisible_by, arguments.tensor_grid
        )
