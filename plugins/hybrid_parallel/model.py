"""The boosted model of the hybrid plugin: checks between ranks, pipeline stages, full and sharded state dicts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import (
    all_gather_bytes,
    all_gather_numbers,
    all_reduce_max,
    all_reduce_sum,
    any_rank,
    broadcast,
    broadcast_coalesced,
    check_same_across_ranks,
    collective_device,
    host_value,
    is_fake_world,
    max_of_numbers,
    raise_on_all_ranks,
)
from booster.core.compiling import calls_compiled, not_compiled
from booster.core.plain_torch import refuse_transforms
from booster.core.shard_spec import is_sharded, set_shard_spec, shard_spec_of
from booster.device import current_device
from booster.errors import BoosterError, CheckpointError, ConfigError, format_list
from booster.interface import ModelWrapper, Shard
from booster.kernels.checksum import tensor_crc32
from booster.plugins.base import check_save_pretrained
from booster.plugins.low_level_zero.model import ZeroModel
from booster.pytree import iter_tensors, map_tensors
from booster.rng_state import get_rng_state, set_rng_state

from .expert_parallel.experts import ExpertParallelGroup
from .mesh import HybridMesh
from .pipeline_parallel.microbatch import PipelineRun
from .pipeline_parallel.stage_forward import StageActivation, run_chunk
from .pipeline_parallel.stage_module import StageModel
from .pipeline_parallel.stage_partition.stage_plan import ModelChunk
from .sequence_parallel.between_layers import explained_errors
from .sequence_parallel.group import SequenceParallelGroup
from .tensor_parallel.group import TensorParallelGroup
from .tensor_parallel.mappings import gather_from_tp_region
from .tp_plan.attention_heads import NUM_QUERY_NAMES

# Outputs of transformers' models with the attention weights of each layer.
_ATTENTIONS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")

_GRADIENT_TOLERANCE = 1e-2  # relative, of sums of squares
_COMPARED_BATCHES = 3  # number of first training forwards and backwards whose batches and losses ranks compare
_SAME_BATCH = (
    "Ranks that share layers or sequences compute each batch together: call the model on all of them, with batches that"
    " are sharded by plugin.dp_rank and plugin.dp_size, as the loaders of boost() and plugin.prepare_dataloader() are"
)
_LOSS_TOLERANCE_ULPS = 8  # ulps by which losses of the same batch may differ, because reductions have no fixed order


class HybridModel(ZeroModel):
    """The boosted model, of which this rank holds shards.

    `state_dict()` and `named_parameters()` return this rank's shards, under the user's names; `load_state_dict` takes
    shards or full tensors.

    Args:
        module: The user's model, sharded and parallelized.
        mesh: The device mesh. Ranks along dp and sp hold the same shards and get different data.
        tp_group: The tensor-parallel group, or None if layers are unsharded.
        sp_group: The group of the sp axis, or None without one.
        ep_group: The group of the ep axis, or None if experts are unsharded.
        stage_model: The pipeline stage's part of the model, or None without a pipeline.
        broadcasts_buffers: If True, buffers are made equal on all ranks after each step in training.

    Collective: yes, over the world.

    Attributes:
        last_pipeline_run: Record of this rank's work on the last batch of `Booster.execute_pipeline`.
        run_batch: Runs a batch through the pipeline stages, `PipelineRuntime.run`; None without pipeline parallelism.
    """

    last_pipeline_run: PipelineRun | None
    run_batch: Callable[..., dict[str, Any]] | None

    def __init__(
        self,
        module: nn.Module,
        mesh: HybridMesh,
        *,
        tp_group: TensorParallelGroup | None,
        sp_group: SequenceParallelGroup | None,
        ep_group: ExpertParallelGroup | None,
        stage_model: StageModel | None,
        broadcasts_buffers: bool,
    ) -> None:
        super().__init__(
            module,
            mesh.group("dp", "sp"),
            is_primary=mesh.rank("dp", "sp", *mesh.extra_axes) == 0,
            broadcasts_buffers=broadcasts_buffers,
        )
        if tp_group is not None:
            _gather_attention_weights(module, tp_group)
        self._tensor_rank = 0 if tp_group is None else tp_group.rank
        parameters = dict(module.named_parameters(remove_duplicate=False))
        logical_names = {} if stage_model is None else stage_model.logical_names
        parameters |= {logical: parameters[name] for name, logical in logical_names.items()}
        self._parameter_names = frozenset(parameters)
        self._sharded_names = _sharded_names(module)
        self._experts = frozenset(name for name, one in parameters.items() if shard_spec_of(one).is_expert)
        self._replicated_names = sorted(
            name for name, one in parameters.items() if shard_spec_of(one).is_unsharded and name not in self._experts
        )
        self._is_expert_primary = mesh.rank("edp", "sp", *mesh.extra_axes) == 0
        self._ep_group = ep_group
        self._tp_group = tp_group
        self._parallel_groups = [group for group in (tp_group, sp_group) if group is not None]
        self._replica_group = mesh.control_group("pp", "sp", "tp")  # of the ranks that get the same batch
        has_extra_axes = mesh.size(*mesh.extra_axes) > 1
        self._extra_group = mesh.control_group(*mesh.extra_axes) if has_extra_axes else None
        self.model_parallel_size = mesh.size("pp", "sp", "tp")
        self.first_model_rank = mesh.rank_at(pp=0, sp=0, tp=0) if self.model_parallel_size > 1 else None
        self.tensor_parallel_size = 1 if tp_group is None else tp_group.size
        is_partial = tp_group is not None or stage_model is not None or bool(self._experts)
        if is_partial:
            check_save_pretrained(module, _holds_shards)
        self._stage_model = stage_model
        self._stage = mesh.rank("pp")
        self.last_pipeline_run = None
        self.run_batch = None
        self._num_compared = self._num_losses = self._num_gradients = self._num_buffer_changes = 0
        self._mark_rng_out_of_sync()
        self.register_load_hook(self._mark_rng_out_of_sync)

    @calls_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward; arguments and result are those of the user's model.

        Raises:
            ConfigError: The rank is a pipeline stage, which has only some of the layers.

        Collective: yes.
        """
        try:
            with explained_errors(self.module):
                return super().forward(*args, **kwargs)
        finally:
            self.reset_parallel_state()

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stage_model is not None:
            raise ConfigError(
                "the boosted model was called directly, but with pp_size > 1 each rank holds only some of its layers:"
                " write booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all stages"
                " (evaluates without an optimizer, and returns outputs with return_outputs=True)"
            )
        if self._parallel_groups:
            refuse_transforms(
                "use torch.autograd.grad, with create_graph=True for second derivatives, or a plugin whose ranks have"
                " entire layers",
                including_vmap=True,
            )
        self._begin_batch(args, kwargs)
        super()._begin_run(args, kwargs)

    def _end_run(self) -> None:
        self.reset_parallel_state()

    @not_compiled
    def _begin_batch(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.reset_parallel_state()
        if self._parallel_groups and self.training:
            self._check_same_batch(args, kwargs)
            self.sync_rng_state()

    def expert_loads(self) -> dict[str, torch.Tensor]:
        """Return the number of tokens of each expert in the last forward, of all ranks together, before any is dropped.

        Returns:
            Tensors of shape (experts,) by name of the module of experts; none without expert parallelism.

        Collective: over the ranks with the same layers.
        """
        loads = {} if self._ep_group is None else self._ep_group.loads
        return {name: all_reduce_sum(load.clone(), self._group) for name, load in sorted(loads.items())}

    # Pipeline stages.

    def begin_batch(self) -> None:
        """Prepare the forwards of a batch's microbatches. Collective: yes."""
        self.wait_for_weights()
        self._begin_training_forward()

    def run_chunk(
        self, chunk: ModelChunk, received: StageActivation | None, batch: Any
    ) -> tuple[StageActivation | None, Any]:
        """Run one microbatch's forward of a model chunk.

        Returns:
            The activations for the next chunk, and the model's outputs if the chunk is the last.
        """
        assert self._stage_model is not None
        self.reset_parallel_state()
        try:
            if self.precision is None:
                with explained_errors(self.module):
                    return run_chunk(self.module, self._stage_model.context, chunk, received, batch)
            (batch,), _ = self.precision.convert_inputs((batch,), {})
            with explained_errors(self.module), self.precision.forward_context(self._compute_device_type):
                boundary, outputs = run_chunk(self.module, self._stage_model.context, chunk, received, batch)
            return boundary, self.precision.convert_outputs(outputs)
        finally:
            self.reset_parallel_state()

    # Names.

    def logical_name(self, name: str) -> str:
        if self._stage_model is None:
            return name
        buffer = self._stage_model.buffers.get(name)
        return self._stage_model.logical_names.get(name, name) if buffer is None else buffer.names[0]

    def logical_parameters(self) -> list[nn.Parameter]:
        return (
            super().logical_parameters() if self._stage_model is None else list(self._stage_model.parameters.values())
        )

    def writes(self, name: str) -> bool:
        if name in self._experts:
            return self._is_expert_primary
        if not super().writes(name):
            return False
        if name in self._parameter_names:  # its shard spec marks the primary rank and stage
            return True
        # Other entries have no shard spec: all tensor-parallel ranks hold them, and possibly several stages.
        if self._tensor_rank != 0:
            return False
        if self._stage_model is None:
            return True
        buffer = self._stage_model.buffers.get(name)
        stages = self._stage_model.partition.stages_of(name.rpartition(".")[0]) if buffer is None else buffer.stages
        return min(stages) == self._stage

    def require_equal_copies(self) -> None:
        self._require_known_shards()
        if self._extra_group is not None:
            self._require_equal_along_extra_axes(self._extra_group)
        self._require_equal_buffers(", nothing was written", CheckpointError)

    def _require_equal_buffers(self, consequence: str, error_class: type[BoosterError]) -> None:
        """Raise on all ranks if ranks that share layers or sequences have different values of a persistent buffer."""
        state = self.module.state_dict().items()
        own = {name: one for name, one in state if name not in self._parameter_names and torch.is_tensor(one)}
        # A stage without buffers takes part in the collectives if another stage has some.
        has_buffers = bool(own if self._stage_model is None else self._stage_model.buffers)
        if not has_buffers or not self._parallel_groups or is_fake_world():
            return
        differing: dict[str, None] = {}
        for group in self._parallel_groups:
            first = {name: buffer.detach().clone() for name, buffer in own.items()}
            broadcast_coalesced(list(first.values()), group.group)
            differing |= {name: None for name, buffer in own.items() if not _is_close(buffer, first[name])}
        error = None
        if differing:
            error = error_class(
                "ranks that share layers or sequences have different values of the buffer"
                f" {', '.join(map(repr, differing))} because each rank computes it from its shard{consequence}: compute"
                " it outside of the sharded layers, leave its module unsharded (a plan with 'replicated'), or register"
                " it with persistent=False"
            )
        raise_on_all_ranks(error)

    def synchronize_buffers(self) -> None:
        """Make the buffers equal on data-parallel ranks, after a check that those of a rank's shards are so, as well.

        The check is made in the first batches, and later in ever fewer. Collective.
        """
        if self._has_changed_buffers and self._parallel_groups:
            self._num_buffer_changes += 1
            if _is_compared(self._num_buffer_changes):
                self._require_equal_buffers("", ConfigError)
        super().synchronize_buffers()

    def _require_known_shards(self) -> None:
        """Check that each sharded parameter is the one that boost() sharded, under the same name."""
        if not self._sharded_names or is_fake_world():
            return
        changed = sorted(self._sharded_names ^ _sharded_names(self.module))
        error = None
        if changed:
            error = CheckpointError(
                f"{', '.join(map(repr, changed))}: a sharded parameter was renamed or replaced after boost(), such as"
                " by a parametrization or pruning, so which part of it each rank has can't be told, and nothing was"
                " written: undo it before the save, or do it before boost()"
            )
        raise_on_all_ranks(error)

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        if self._stage_model is None:
            return super().tied_names()
        self.wait_for_weights()
        local_names = {self.logical_name(name) for name in self.module.state_dict()}
        return {name: others for name, others in self._stage_model.tied.items() if name in local_names}

    @not_compiled
    def reset_parallel_state(self) -> None:
        """Reset the per-forward state of the parallel groups."""
        for group in self._parallel_groups:
            group.reset()

    def _check_same_batch(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Check that ranks sharing layers or sequences got the same batch, in the first forwards only."""
        if self._num_compared >= _COMPARED_BATCHES or is_fake_world():
            return
        self._num_compared += 1
        given = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
        fingerprint = [
            f"{name}: {tensor.dtype} {tuple(tensor.shape)}, checksum {tensor_crc32(tensor)}"
            for name, value in given.items()
            for tensor in iter_tensors(value)
        ]
        check_same_across_ranks(
            "the batch that the model was called with", fingerprint, self._replica_group, instead=_SAME_BATCH
        )

    @not_compiled
    def _check_loss(self, loss: torch.Tensor) -> None:
        """Check that ranks with the same batch have the same loss, in the first backwards, and later in ever fewer.

        Ranks compute everything outside of sharded layers redundantly. Losses differ if one depends on a rank's shard
        only, such as its tokens. Gradients would then be wrong without any other symptom. Collective over these ranks.
        """
        if not self._parallel_groups or self._stage_model is not None or is_fake_world():
            return
        self._num_losses += 1
        if not _is_compared(self._num_losses):
            return
        value = float(host_value(loss.detach()))
        extremes = [value, -value, 0.0] if math.isfinite(value) else [0.0, 0.0, 1.0]  # not finite: fp16 overflow
        packed = torch.tensor(extremes, dtype=torch.float64, device=collective_device(self._replica_group))
        largest, negated, overflows = all_reduce_max(packed, self._replica_group).tolist()
        if overflows or largest + negated <= _LOSS_TOLERANCE_ULPS * torch.finfo(loss.dtype).eps * max(
            abs(largest), abs(negated)
        ):
            return
        raise ConfigError(
            f"ranks that share layers or sequences have losses of the same batch from {-negated:.9g} to {largest:.9g},"
            " so a loss was computed from sharded tokens or features inside the model: compute it from the model's"
            " outputs (where transformers' router_logits and hidden_states are unsharded), or do not shard such layers"
        )

    def compares_gradients(self) -> bool:
        if self._tp_group is None or self._tp_group.size == 1 or is_fake_world():
            return False
        self._num_gradients += 1
        return _is_compared(self._num_gradients)

    @torch.no_grad()
    def compare_gradients(self, shards: Sequence[Shard]) -> None:
        """Check that tensor-parallel ranks have equal gradients of the parameters that each has whole.

        They differ if a parameter is used on a rank's own tokens or features where that is not known, as by the model's
        own forward between layers with a sharded sequence. Its copies would then differ without any other symptom.
        Collective over the ranks that share a stage's layers, and over their data-parallel ranks.

        Raises:
            ConfigError: They differ; on all ranks.
        """
        assert self._tp_group is not None
        if self._num_gradients == 1:  # a rank may have all of what another one has nothing of, such as a single head
            payloads, _ = all_gather_bytes(json.dumps(self._replicated_names).encode(), self._tp_group.group)
            of_all = set.intersection(*(set(json.loads(payload)) for payload in payloads))
            self._replicated_names = [name for name in self._replicated_names if name in of_all]
        names = self._replicated_names
        index = {name: place for place, name in enumerate(names)}
        found = [(index[shard.name], shard.parameter.grad) for shard in shards if shard.name in index]
        parts = [(place, gradient) for place, gradient in found if gradient is not None]
        squares = torch.zeros(len(names), dtype=torch.float64, device=collective_device(self._group))
        if parts:
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for _, gradient in parts]
            places = torch.tensor([place for place, _ in parts], device=squares.device)
            squares.index_add_(0, places, torch.stack(norms).square().to(squares))
        totals = all_reduce_sum(squares, self._group)
        largest, negated = all_reduce_max(torch.cat([totals, -totals]), self._tp_group.group).cpu().chunk(2)
        differing = [
            name
            for name, one, other in zip(names, largest.tolist(), negated.tolist(), strict=True)
            if one + other > _GRADIENT_TOLERANCE * one
        ]
        if differing:
            raise ConfigError(
                f"ranks with the same layers have other gradients of {format_list(map(repr, differing), 3)}: they are"
                " used on a rank's own tokens or features where that is not known, such as by the model's forward"
                " between its layers: use it within a layer or outside of the layers, or"
                " sequence_parallelism_mode='all_to_all' or 'ring_attn'"
            )

    def _require_equal_along_extra_axes(self, group: dist.ProcessGroup) -> None:
        tensors = [one for _, one in sorted(self.module.state_dict().items()) if torch.is_tensor(one)]
        checksum = tensor_crc32(*tensors)
        largest, negated = max_of_numbers([checksum, -checksum], group)
        if any_rank([largest + negated != 0])[0]:
            raise CheckpointError(
                "weights differ along an axis of extra_axes, and a checkpoint stores one copy of them: let a gradient"
                " hook or handler reduce the gradients along it, or make the weights equal before the save"
            )

    def _mark_rng_out_of_sync(self) -> None:
        """Synchronize the RNG state in the next training forward, if other ranks get the same batch."""
        self._is_rng_out_of_sync = bool(self._parallel_groups) or self._stage_model is not None

    def sync_rng_state(self) -> None:
        """Synchronize the RNG state of ranks with the same batch, so that dropout outside of sharded layers is equal.

        Only at the first forward in training and the first after a load, which may have derived the RNG states from
        those of another number of ranks.
        """
        if not self._is_rng_out_of_sync or is_fake_world():
            return
        first = next(self.module.parameters(), None)
        device = current_device() if first is None else first.device  # a stage may have no parameters
        state = get_rng_state(device)
        broadcast(list(state.values()), self._replica_group)
        set_rng_state(state, device)
        self._is_rng_out_of_sync = False

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's shards, or full tensors, which are sharded here; fp32 masters are updated."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        if self._stage_model is not None:
            state_dict = self._stage_state_dict(state_dict)
        local_state: dict[str, Any] = {}
        for name, value in state_dict.items():
            parameter = named.get(name)
            local_state[name] = value
            if parameter is not None and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                shard_spec = shard_spec_of(parameter)
                if tuple(value.shape) == shard_spec.logical_shape:
                    local_state[name] = shard_spec.shard(value)
        return super().load_state_dict(local_state, strict, assign)

    def load_computed_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_computed_state(state if self._stage_model is None else self._stage_state_dict(state))

    def _stage_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return this stage's entries of a full state dict, and unexpected ones, which the strict check reports."""
        assert self._stage_model is not None
        stage_model = self._stage_model
        local_state = self.module.state_dict(keep_vars=True)
        found = {}
        for name, value in state_dict.items():
            if name not in local_state:
                is_tied = name in stage_model.tied
                if is_tied or self._stage not in stage_model.partition.stages_of(name.rpartition(".")[0]):
                    continue
            found[name] = value
        for name in local_state:
            logical = self.logical_name(name)
            if name not in found and logical in state_dict:
                found[name] = state_dict[logical]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy of the model with the same shards, without an optimizer."""
        copied = super().__deepcopy__(memo)
        copied_parameters = dict(copied.module.named_parameters())
        for name, parameter in self.module.named_parameters():
            set_shard_spec(copied_parameters[name], shard_spec_of(parameter))
        return copied


def _gather_attention_weights(module: nn.Module, tp_group: TensorParallelGroup) -> None:
    """Have transformers' models in a module return attention weights of all heads; each rank has those of its own."""
    config = getattr(module, "config", None) if hasattr(module, "save_pretrained") else None
    num_heads = set(_numbers_of_heads(config))
    if not num_heads:
        for child in module.children():
            _gather_attention_weights(child, tp_group)
        return

    def all_heads(weights: torch.Tensor) -> torch.Tensor:  # (sequences, heads, queries, keys)
        if weights.dim() != 4 or weights.shape[1] in num_heads:
            return weights
        sizes = [size for (size,) in all_gather_numbers([weights.shape[1]], tp_group.group)]
        return gather_from_tp_region(weights, tp_group, sizes, dim=1)

    @not_compiled
    def gather(_: nn.Module, args: Any, outputs: Any) -> None:
        if isinstance(outputs, Mapping):
            for key in _ATTENTIONS:
                if outputs.get(key) is not None:
                    outputs[key] = map_tensors(all_heads, outputs[key])  # type: ignore[index]

    module.register_forward_hook(gather)


def _is_compared(number: int) -> bool:
    """Whether ranks compare what they have computed in the step or backward of this number, from 1."""
    return number <= _COMPARED_BATCHES or (number >= 8 and number & (number - 1) == 0)


def _sharded_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, one in module.named_parameters(remove_duplicate=False) if is_sharded(one))


def _numbers_of_heads(config: Any) -> Iterator[int]:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, int) and (name in NUM_QUERY_NAMES or str(name).endswith("attention_heads")):
            yield value
        yield from _numbers_of_heads(value)


def _holds_shards(_: nn.Module) -> bool:
    return True


def _is_close(buffer: torch.Tensor, first: torch.Tensor) -> bool:
    if not buffer.is_floating_point() or buffer.numel() == 0:
        return torch.equal(buffer, first)
    # The order of sums may differ between accelerators.
    largest = float(first.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(buffer.double(), first.double(), rtol=1e-3, atol=1e-3 * largest, equal_nan=True)
