"""Optimizer wrapper of ZeRO 1 and 2: the user's optimizer updates this rank's shards, then weights are all-gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import group_size
from booster.core.shard_aware import shard_state
from booster.errors import CheckpointError
from booster.interface import Shard, Shards, shard_spec_of
from booster.plugins.sharding.config import ShardGroups, ZeroConfig
from booster.plugins.sharding.optimizer import ShardedOptimizer, replaced_memory_error
from booster.plugins.sharding.optimizer_state import ShardedOptimizerState, ShardedPendingGradients
from booster.plugins.sharding.step_in_parts import Arrival

from .flat_params import FlatGroup
from .grad_bucket import GradientBucket
from .model import ParamAllGather, ZeroModel
from .reducer import GradientReducer

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]


class ModelPart:
    """Part of the model that this rank holds: all of it, unless a plugin with pipeline stages overrides the methods."""

    def logical_group(self, index: int, local: NamedParameters) -> NamedParameters:
        """Return the members of a param group on all ranks that share the gradient norm, equal on all of them.

        Args:
            index: Index of the param group.
            local: Members on this rank.

        Collective over those ranks for groups that are added after boost().
        """
        return local

    def sharded_parameters(
        self, local: Iterable[tuple[str, nn.Parameter]], groups: Iterable[NamedParameters]
    ) -> NamedParameters:
        """Return all parameters that are sharded over the gradient-norm group, in the same order on all its ranks.

        Args:
            local: Sharded parameters of this rank.
            groups: Results of `logical_group`.
        """
        return list(local)

    def tied_names(self) -> Collection[str]:
        """Return the names of parameters that other parts use too."""
        return ()

    def reduce_tied_gradients(self, reducer: GradientReducer) -> None:
        """All-reduce gradients of parameters that other parts use too, before the data-parallel reduction.

        Collective over the parts.
        """

    def checkpoint_state(self, optimizer: ZeroOptimizer) -> ShardedOptimizerState:
        """Return the checkpoint view of the optimizer's state."""
        return ShardedOptimizerState(optimizer)

    def pending_gradients(self, optimizer: ZeroOptimizer) -> ZeroPendingGradients:
        """Return the checkpoint view of the accumulated gradients."""
        return ZeroPendingGradients(optimizer)


class ZeroPendingGradients(ShardedPendingGradients):
    """Checkpoint view of accumulated gradients, some of which may be those of experts."""

    optimizer: ZeroOptimizer

    @property
    def first_rank(self) -> int:
        first_rank = self.optimizer.groups_of().first_rank
        return super().first_rank if first_rank is None else first_rank

    def check(self) -> None:
        super().check()
        if self.optimizer.groups_of().has_extra_axes:
            raise CheckpointError(
                "in the middle of an accumulation gradients may differ along an axis of extra_axes, where a gradient"
                " hook reduces them in the step: save after optimizer.step()"
            )

    def data_ranks_of(self, name: str) -> Sequence[int]:
        return self.optimizer.groups_of(self.parameters()[name]).data_ranks or super().data_ranks_of(name)


class ZeroOptimizer(ShardedOptimizer):
    """Optimizer with states, and in stage 2 gradients, sharded over the data-parallel ranks.

    `param_groups` hold this rank's shards in place of the trained parameters; frozen parameters stay unsharded. All
    other entries of a group are those of the user's optimizer. Rajbhandari et al., "ZeRO: Memory Optimizations Toward
    Training Trillion Parameter Models", SC 2020.

    Args:
        optim: The user's optimizer, elementwise or `ShardAware`.
        model: The boosted model.
        config: Options of ZeRO.
        groups: Process groups of the shards.
        expert_groups: The same for the experts of expert parallelism (`ShardSpec.is_expert`), which fewer ranks hold.
            Their gradients are summed over those; each rank's are of the tokens of all ranks that share the experts.
        part: Part of the model that this rank holds; optional, defaults to all of it.
    """

    model: ZeroModel

    def __init__(
        self,
        optim: Optimizer,
        model: ZeroModel,
        config: ZeroConfig,
        groups: ShardGroups,
        *,
        expert_groups: ShardGroups | None = None,
        part: ModelPart | None = None,
    ) -> None:
        super().__init__(
            optim,
            model,
            groups,
            updates_on_host=config.cpu_offload,
            clip=config.clip,
            loss_scaler=config.new_loss_scaler(),
        )
        self._config = config
        self._expert_groups = expert_groups or groups
        self._part = ModelPart() if part is None else part
        self._flat_groups: list[FlatGroup] = []
        for index in range(len(optim.param_groups)):
            self._record_group(index)
            self._shard_group(index)
        self._connect()

    # Sharding.

    def _record_group(self, index: int) -> None:
        super()._record_group(index)
        self.logical_groups[index] = self._part.logical_group(index, self.logical_groups[index])

    def _shard_group(self, index: int) -> None:
        """Shard the trainable parameters of a group that are not sharded yet."""
        group = self.param_groups[index]
        order = {id(parameter): number for number, parameter in enumerate(self.model.unwrap().parameters())}
        new = [one for one in group["params"] if one.requires_grad and id(one) not in self._model_param_of]
        new.sort(key=lambda parameter: order[id(parameter)])
        by_kind: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in new:
            casts_to = self._config.dtype if parameter.is_floating_point() else None
            kind = casts_to or parameter.dtype, shard_spec_of(parameter).is_expert
            by_kind.setdefault(kind, []).append(parameter)
        shards: list[nn.Parameter] = []
        for (dtype, _), members in by_kind.items():
            named = [(self._names[id(parameter)], parameter) for parameter in members]
            flat = FlatGroup(index, named, dtype, self._config, self.groups_of(members[0]))
            self._flat_groups.append(flat)
            for parameter in members:
                own = [one.shard for one in flat.owned if one.shard.model_param is parameter]
                shard_state(self.optim, parameter, own)
            shards += [one.shard.parameter for one in flat.owned]
            self._model_param_of |= {id(one.shard.parameter): one.shard.model_param for one in flat.owned}
        sharded = {id(parameter) for parameter in new}
        # In place: the optimizer may hold a reference to the list.
        group["params"][:] = [one for one in group["params"] if id(one) not in sharded] + shards

    def _connect(self) -> None:
        """Create the reducer, the all-gather, and the shards that a `ShardAware` optimizer receives, for all flat
        groups."""
        model_order = list(self.model.unwrap().parameters())
        self._reducer = GradientReducer(
            self._flat_groups,
            model_order,
            self._config,
            self._groups,
            self._part.tied_names(),
            writes=self.model.forward_writes,
        )
        self.param_all_gather = ParamAllGather(self._reducer.buckets, self.model)
        self.model.connect(self.param_all_gather)
        shards = [one.shard for flat in self._flat_groups for one in flat.owned]
        local = (one for flat in self._flat_groups for one in zip(flat.names, flat.parameters, strict=True))
        sharded = self._part.sharded_parameters(local, self.logical_groups)
        shapes = {name: shard_spec_of(parameter).logical_shape for name, parameter in sharded}
        self._use_shards(Shards(shards, list(shapes), self._grad_norm_group, shapes=shapes))

    def _refresh_masters(self) -> None:
        for flat in self._flat_groups:
            flat.refresh_masters()

    def _reshard(self, indices: Sequence[int]) -> None:
        self.param_all_gather.wait()
        self._reducer.close()
        for index in indices:
            self._shard_group(index)
        self._connect()

    # Backward.

    def _backward_context(self) -> AbstractContextManager[None]:
        return self._reducer.collecting(synchronizes=self._synchronizes)

    @contextmanager
    def accumulate_microbatches(self, num_items: float | None, num_microbatches: int) -> Iterator[Callable[[], None]]:
        """Count all microbatches' backwards in the block as one backward().

        Args:
            num_items: Number of items that the loss averages; see `Booster.backward`.
            num_microbatches: Number of microbatches.

        Yields:
            Function that starts the reduction of the gradients that are complete, and of the others as they become so.
            To be called once the block receives nothing more.

        Collective: yes.
        """
        self._begin_accumulation(num_items)
        collecting = self._reducer.collecting(
            synchronizes=self._synchronizes,
            num_microbatches=num_microbatches,
            sum_before=self._part.reduce_tied_gradients,
        )
        with self.no_sync(), collecting:
            yield self._reducer.start_issuing

    # Gradients.

    def _finish_reduction(self) -> float:
        self._cached_norm = None
        self._part.reduce_tied_gradients(self._reducer)
        self._reducer.finish(self._current_settings())
        self.step_settings.forget_clipping()
        self._start_copies_to_host()
        for bucket in self._reducer.buckets:
            sums = bucket.host_grad_shard if self._is_copied(bucket) else bucket.grad_shard
            for param_grad, owned in bucket.owned:
                parameter = owned.shard.parameter
                if not param_grad.is_used:
                    parameter.grad = None
                elif sums is None:  # no backward since zero_grad(set_to_none=False)
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                else:
                    parameter.grad = sums[owned.range.range_in_shard].to(parameter.dtype)
        if self.model.compares_gradients():
            self._wait_for_gradients()
            self.model.compare_gradients(self.shards.parts)
        return 1.0 / group_size(self.data_parallel_group)

    def _start_copies_to_host(self) -> None:
        copied = [bucket for bucket in self._reducer.buckets if self._is_copied(bucket)]
        self._arriving = [
            Arrival([owned.shard.parameter for _, owned in bucket.owned], bucket.start_copy_to_host())
            for bucket in copied
        ]
        dtypes = {(bucket.sum_dtype, owned.shard.parameter.dtype) for bucket in copied for _, owned in bucket.owned}
        if not self._can_fuse_unscaling() or any(found != wanted for found, wanted in dtypes):
            self._wait_for_gradients()

    def _is_copied(self, bucket: GradientBucket) -> bool:
        return bucket.group.is_offloaded and bucket.grad_shard is not None

    def _has_gradients(self) -> bool:
        # Also one that was set by hand, which is refused.
        return any(one.is_local or one.parameter.grad is not None for one in self._reducer.param_grads) or any(
            bucket.grad_shard is not None for bucket in self._reducer.buckets
        )

    # Step.

    def wait_for_weights(self) -> None:
        if any(flat.masters is None for flat in self._flat_groups):  # masters are not part of the all-gather
            self.param_all_gather.wait()

    def _fetch_weights(self) -> None:
        self.param_all_gather.wait()  # without a forward since the last step, own shards may still be in flight
        for flat in self._flat_groups:
            flat.follow_weights()  # which unwrap_model(model).apply(...) or the like has written

    def _update_parameters(self) -> None:
        self._fetch_weights()
        super()._update_parameters()

    def _finish_step(self) -> None:
        self._restore_memory()
        self._publish_weights(are_weights_written=self._accumulation.factors is not None)

    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for flat in self._flat_groups:
            yield from ((one.shard.parameter, flat.shard_storage(one.range)) for one in flat.owned)

    def _publish_weights(self, *, are_weights_written: bool = False) -> None:
        """All-gather the weights.

        Args:
            are_weights_written: If True, the fused optimizer step already wrote the weights next to their masters.
        """
        for flat in self._flat_groups:
            if not (are_weights_written and flat.updates_weights_in_place):
                flat.write_weights()
            # Autograd does not see writes through the flat buffer, and would accept a graph from before the step.
            torch.autograd.graph.increment_version(flat.parameters)
            flat.record_versions()
        self.param_all_gather.start()
        if self._config.overlap_allgather:
            self.param_all_gather.wait_before_modules()
        else:
            self.param_all_gather.wait()

    def _step_shards(self) -> None:
        if self._accumulation.factors is None:
            self._step_parts()
            return
        flats = [flat for flat in self._flat_groups if flat.updates_weights_in_place]
        rounded = {one.shard.parameter: flat.weights[one.range.in_buffer] for flat in flats for one in flat.owned}
        self._step_fused(rounded, {})

    def _check_weights(self) -> None:
        for flat in self._flat_groups:
            begin, size = flat.weights.data_ptr(), flat.weights.element_size()
            for name, parameter, param_range in zip(flat.names, flat.parameters, flat.layout.param_ranges, strict=True):
                if parameter.data_ptr() != begin + param_range.start * size and parameter.numel() > 0:
                    raise replaced_memory_error(name)

    def _clear_gradients(self, set_to_none: bool) -> None:
        super()._clear_gradients(True)
        self._reducer.reset(keeps_use=not set_to_none)

    # Checkpoints.

    def checkpoint_state(self) -> ShardedOptimizerState:
        return self._part.checkpoint_state(self)

    def pending_gradients(self) -> ZeroPendingGradients:
        return self._part.pending_gradients(self)

    def groups_of(self, parameter: nn.Parameter | None = None) -> ShardGroups:
        """Return the groups of a parameter's shards, by default of those that are not experts."""
        is_expert = parameter is not None and shard_spec_of(parameter).is_expert
        return self._expert_groups if is_expert else self._groups

    def local_gradients(self) -> dict[str, torch.Tensor]:
        found = {one.name: one.local for one in self._reducer.param_grads}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        if allocate is None:
            self._reducer.sync_used_params()
        else:
            self._allocate_grad_shards(allocate)
        found = []
        for bucket in self._reducer.buckets:
            sums = bucket.grad_shard
            if sums is not None and bucket.is_summed and not bucket.group.groups.is_primary:
                sums = torch.zeros_like(sums)  # summed over the replicas already, and returned on the primary one
            if sums is not None:
                used = (owned for param_grad, owned in bucket.owned if param_grad.is_used)
                found += [(owned.shard, sums[owned.range.range_in_shard]) for owned in used]
        return found

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        param_grad = next(param_grad for param_grad in self._reducer.param_grads if param_grad.name == name)
        self._reducer.set_local(param_grad, gradient)

    def _allocate_grad_shards(self, names: Collection[str]) -> None:
        self._reducer.reset()
        for bucket in self._reducer.buckets:
            used = [param_grad for param_grad in bucket.param_grads if param_grad.name in names]
            for param_grad in used:
                param_grad.is_used = True
            if used:
                numel, device = bucket.bucket.shard_numel, bucket.group.device
                bucket.grad_shard = torch.zeros(numel, dtype=bucket.sum_dtype, device=device)
