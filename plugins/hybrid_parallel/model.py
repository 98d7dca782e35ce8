"""The boosted model of the hybrid plugin: checks between ranks, pipeline stages, full and sharded state dicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from booster.comm import agree, all_reduce_max, broadcast, collective_device, raise_on_all_ranks
from booster.errors import CheckpointError, ConfigError
from booster.interface import ModelWrapper, layout_of, set_layout
from booster.kernels.checksum import crc32
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.carving import CarvedModel
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.pieces import Piece
from booster.plugins.hybrid_parallel.pipeline_parallel.stages.running import Boundary, run_piece
from booster.plugins.hybrid_parallel.sequence_parallel.ranks import SequenceParallelRanks
from booster.plugins.hybrid_parallel.tensor_parallel.ranks import TensorParallelRanks
from booster.plugins.low_level_zero.model import ZeroModel
from booster.plugins.sharding.buffers import broadcast_joined
from booster.plugins.sharding.compiling import calls_compiled, not_compiled
from booster.random_state import capture_random_state, restore_random_state
from booster.tensor_tree import map_tensors

if TYPE_CHECKING:
    from booster.plugins.hybrid_parallel.pipeline_parallel.runtime import PipelineRun

__all__ = ["HybridModel"]

_COMPARED_BATCHES = 3  # number of first training forwards and backwards whose batches and losses ranks compare
_ROUNDING = 8  # ulps by which losses of the same batch may differ, because reductions have no fixed order


class HybridModel(ZeroModel):
    """The boosted model, of which this rank holds shards.

    `state_dict()` and `named_parameters()` return this rank's shards, under the user's names; `load_state_dict` takes
    shards or full tensors.

    Args:
        module: The user's model, sharded and parallelized.
        tensor_ranks: The tensor-parallel group, or None if layers are unsharded.
        sequence_ranks: The group of the sp axis, or None without one.
        data_group: Group of the ranks that get different data and hold the same shards.
        replica_group: Group of the ranks that get the same batch.
        is_primary: If True, this rank is primary among those with the same shards.
        broadcasts_buffers: If True, broadcast the group's first rank's buffers before each forward in training.
        carved: The pipeline stage's part of the model; optional, defaults to no pipeline.
        stage: Pipeline stage of this rank.

    Attributes:
        last_pipeline_run: Record of this rank's work on the last batch of `Booster.execute_pipeline`.
    """

    last_pipeline_run: PipelineRun | None

    def __init__(
        self,
        module: nn.Module,
        *,
        tensor_ranks: TensorParallelRanks | None,
        sequence_ranks: SequenceParallelRanks | None,
        data_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup,
        is_primary: bool,
        broadcasts_buffers: bool,
        carved: CarvedModel | None = None,
        stage: int = 0,
    ) -> None:
        super().__init__(module, data_group, is_primary=is_primary, broadcasts_buffers=broadcasts_buffers)
        self._tensor_rank = 0 if tensor_ranks is None else tensor_ranks.rank
        self._parameter_names = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
        self._ranks = [ranks for ranks in (tensor_ranks, sequence_ranks) if ranks is not None]
        self._replica_group = replica_group
        holds_parts = tensor_ranks is not None or carved is not None
        if holds_parts and hasattr(module, "save_pretrained"):
            module.save_pretrained = _refuse_to_save_parts  # type: ignore[assignment]
        self._carved = carved
        self._stage = stage
        self.last_pipeline_run = None
        self._num_compared = self._num_losses = 0
        self._may_draw_differently = self._shares_batches
        self.register_load_hook(self._expect_other_random_states)

    @calls_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward; arguments and result are those of the user's model.

        Raises:
            ConfigError: The rank is a pipeline stage, which has only some of the layers.

        Collective: yes.
        """
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.reset_ranks()

    def _begin_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._carved is not None:
            raise ConfigError(
                "the boosted model was called directly, but with pp_size > 1 each rank holds only some of its layers:"
                " write booster.execute_pipeline(data_iter, model, criterion, optimizer), which runs all stages"
                " (evaluates without an optimizer, and returns outputs with return_outputs=True)"
            )
        self._begin_batch(args, kwargs)
        super()._begin_run(args, kwargs)

    def _end_run(self) -> None:
        self.reset_ranks()

    @not_compiled
    def _begin_batch(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.reset_ranks()
        if self._ranks and self.training:
            self._require_same_batch(args, kwargs)
            self.draw_alike()

    # Pipeline stages.

    @property
    def pieces(self) -> Sequence[Piece]:
        """The model chunks of this pipeline stage."""
        assert self._carved is not None
        return self._carved.pieces

    def begin_batch(self) -> None:
        """Prepare the forwards of a batch's microbatches. Collective: yes."""
        self.wait_for_weights()
        if self.training and self._broadcasts_buffers:
            broadcast_joined(list(self.module.buffers()), self._group)

    def end_batch(self, stage_group: dist.ProcessGroup | None) -> None:
        """Synchronize shared buffers after the forwards of a batch's microbatches. Collective: over the stages."""
        assert self._carved is not None
        self._carved.context.buffers.synchronize(stage_group)

    def run_piece(self, piece: Piece, received: Boundary | None, batch: Any) -> tuple[Boundary | None, Any]:
        """Run one microbatch's forward of a model chunk.

        Returns:
            The activations for the next chunk, and the model's outputs if the chunk is the last.
        """
        assert self._carved is not None
        self.reset_ranks()
        try:
            if self.precision is None:
                return run_piece(self.module, self._carved.context, piece, received, batch)
            (batch,), _ = self.precision.convert_inputs((batch,), {})
            with self.precision.forward_context(self._device_type):
                boundary, outputs = run_piece(self.module, self._carved.context, piece, received, batch)
            return boundary, self.precision.convert_outputs(outputs)
        finally:
            self.reset_ranks()

    def require_independent(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that tensors do not depend on this stage's placeholders; see `StandIns.require_independent`."""
        assert self._carved is not None
        self._carved.stand_ins.require_independent(tensors)

    # Names.

    def logical_name(self, name: str) -> str:
        if self._carved is None:
            return name
        buffer = self._carved.buffers.get(name)
        return self._carved.logical_names.get(name, name) if buffer is None else buffer.names[0]

    def logical_parameters(self) -> list[nn.Parameter]:
        return super().logical_parameters() if self._carved is None else list(self._carved.parameters.values())

    def writes(self, name: str) -> bool:
        if not super().writes(name):
            return False
        if name in self._parameter_names:  # its shard spec marks the primary rank and stage
            return True
        # A buffer has no shard spec: all tensor-parallel ranks hold it, and possibly several stages.
        return self._tensor_rank == 0 and (self._carved is None or min(self._stages_of(name)) == self._stage)

    def _stages_of(self, name: str) -> Sequence[int] | frozenset[int]:
        """Return the stages that hold a state dict entry that is not a parameter."""
        assert self._carved is not None
        buffer = self._carved.buffers.get(name)
        return self._carved.division.stages_of(name.rpartition(".")[0]) if buffer is None else buffer.stages

    def require_equal_copies(self) -> None:
        buffers = self._own_buffers() if self._carved is None else self._carved.buffers
        if not buffers or not self._ranks:
            return
        differing = {name: None for ranks in self._ranks for name in self._differing_buffers(ranks.group)}
        error = _differing_copies(list(differing)) if differing else None
        raise_on_all_ranks(error)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        state = self.module.state_dict().items()
        return {name: one for name, one in state if name not in self._parameter_names and torch.is_tensor(one)}

    def _differing_buffers(self, group: dist.ProcessGroup | None) -> list[str]:
        """Return the buffers that differ from those of the group's first rank by more than rounding."""
        own = self._own_buffers()
        first = {name: buffer.detach().clone() for name, buffer in own.items()}
        broadcast_joined(list(first.values()), group)
        return [name for name, buffer in own.items() if not _is_close(buffer, first[name])]

    def tied_names(self) -> dict[str, tuple[str, ...]]:
        if self._carved is None:
            return super().tied_names()
        self.wait_for_weights()
        here = {self.logical_name(name) for name in self.module.state_dict()}
        return {name: others for name, others in self._carved.tied.items() if name in here}

    @not_compiled
    def reset_ranks(self) -> None:
        """Reset the per-forward state of the parallel groups."""
        for ranks in self._ranks:
            ranks.reset()

    def _require_same_batch(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Check that ranks sharing layers or sequences got the same batch, in the first forwards only."""
        if self._num_compared >= _COMPARED_BATCHES:
            return
        self._num_compared += 1
        facts: list[str] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            facts.append(f"{tensor.dtype} {tuple(tensor.shape)}, checksum {crc32(content)}")
            return tensor

        map_tensors(note, (args, kwargs))
        what = (
            "the model's arguments, which must be equal on ranks that share layers or sequences (shard the data by"
            " plugin.dp_rank and plugin.dp_size, as the loaders of boost() and plugin.prepare_dataloader() do),"
        )
        agree(what, facts, self._replica_group)

    @not_compiled
    def require_same_loss(self, loss: torch.Tensor) -> None:
        """Check that ranks with the same batch have the same loss, in the first backwards only.

        Ranks compute everything outside of sharded layers redundantly. Losses differ if one depends on a rank's shard
        only, such as its tokens. Gradients would then be wrong without any other symptom.

        Args:
            loss: This rank's loss, with one element.

        Raises:
            ConfigError: The losses differ.

        Collective: over the ranks that get the same batch.
        """
        if not self._ranks or self._carved is not None or self._num_losses >= _COMPARED_BATCHES:
            return
        self._num_losses += 1
        value = float(loss.detach())
        extremes = [value, -value, 0.0] if math.isfinite(value) else [0.0, 0.0, 1.0]  # not finite: fp16 overflow
        packed = torch.tensor(extremes, dtype=torch.float64, device=collective_device(self._replica_group))
        largest, negated, overflows = all_reduce_max(packed, self._replica_group).tolist()
        if overflows or largest + negated <= _ROUNDING * torch.finfo(loss.dtype).eps * max(abs(largest), abs(negated)):
            return
        raise ConfigError(
            f"ranks that share layers or sequences have losses of the same batch from {-negated:.9g} to {largest:.9g},"
            " so a loss was computed from sharded tokens or features inside the model: compute it from the model's"
            " outputs (where transformers' router_logits and hidden_states are unsharded), or do not shard such layers"
        )

    @property
    def _shares_batches(self) -> bool:
        return bool(self._ranks) or self._carved is not None

    def _expect_other_random_states(self) -> None:
        self._may_draw_differently = self._shares_batches

    def draw_alike(self) -> None:
        """Synchronize the RNG state of ranks with the same batch, so that dropout outside of sharded layers is equal.

        Only at the first forward in training and the first after a load, which may have derived the RNG states from
        those of another number of ranks.
        """
        if not self._may_draw_differently:
            return
        state = capture_random_state(next(self.module.parameters()).device)
        broadcast(list(state.values()), self._replica_group)
        restore_random_state(state, next(self.module.parameters()).device)
        self._may_draw_differently = False

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's shards, or full tensors, which are sharded here; fp32 masters are updated."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        if self._carved is not None:
            state_dict = self._of_stage(state_dict)
        own = {name: _own_part(named.get(name), value) for name, value in state_dict.items()}
        return super().load_state_dict(own, strict, assign)

    def _of_stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return this stage's entries of a full state dict, and unexpected ones, which the strict check reports."""
        assert self._carved is not None
        carved = self._carved
        here = self.module.state_dict(keep_vars=True)
        stages = carved.division.stages_of

        def is_elsewhere(name: str) -> bool:
            return name in carved.tied or self._stage not in stages(name.rpartition(".")[0])

        found = {name: value for name, value in state_dict.items() if name in here or not is_elsewhere(name)}
        for name in here:
            logical = self.logical_name(name)
            if name not in found and logical in state_dict:
                found[name] = state_dict[logical]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Return a copy of the model with the same shards, without an optimizer."""
        copied = super().__deepcopy__(memo)
        theirs = dict(copied.module.named_parameters())
        for name, parameter in self.module.named_parameters():
            set_layout(theirs[name], layout_of(parameter))
        return copied


def _refuse_to_save_parts(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "save_pretrained() of a sharded model would write this rank's shards only: write"
        " booster.save_model(model, directory, shard=True) on all ranks, which from_pretrained() reads"
    )


def _is_close(buffer: torch.Tensor, first: torch.Tensor) -> bool:
    if not buffer.is_floating_point() or buffer.numel() == 0:
        return torch.equal(buffer, first)
    # The order of sums may differ between accelerators.
    largest = float(first.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(buffer.double(), first.double(), rtol=1e-3, atol=1e-3 * largest, equal_nan=True)


def _differing_copies(names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"ranks that share layers or sequences have different values of the buffer {', '.join(map(repr, names))}"
        " because each rank computes it from its shard, nothing was written: compute it outside of the sharded layers,"
        " leave its module unsharded (a plan with 'replicated'), or register it with persistent=False"
    )


def _own_part(parameter: nn.Parameter | None, value: Any) -> Any:
    if parameter is None or not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
        return value
    layout = layout_of(parameter)
    return layout.cut(value) if tuple(value.shape) == layout.logical_shape else value
