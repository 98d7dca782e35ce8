"""Optimizer wrapper of FSDP2: the user's own optimizer updates this rank's shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_sum, collective_device, group_size
from booster.core.param_redistribution import assign_owners
from booster.core.shard_aware import shard_state
from booster.interface import LossScaler, Shard, Shards
from booster.plugins.sharding.collective_order import CollectiveKind
from booster.plugins.sharding.config import ShardGroups
from booster.plugins.sharding.optimizer import ShardedOptimizer, replaced_memory_error

from .config import FSDPConfig, OptimizerKind
from .fsdp2_internals import ShardedParam
from .model import FSDPModel, refuse_weights
from .param_group import ParamGroup
from .shard_update import Param, ParamUpdate, RedistributedParams, ReplicatedParam


class FSDPOptimizer(ShardedOptimizer):
    """The user's optimizer over the shards of FSDP2.

    Args:
        optim: The user's optimizer, with the parameters from before boost().
        model: The boosted model.
        config: Options of the plugin.
        groups: Process groups of the shards.
        kind: Unit of data that an update depends on.
        loss_scaler: Loss scaler of float16; optional, by default losses are not scaled.
    """

    model: FSDPModel

    def __init__(
        self,
        optim: Optimizer,
        model: FSDPModel,
        config: FSDPConfig,
        groups: ShardGroups,
        kind: OptimizerKind,
        *,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(
            optim,
            model,
            groups,
            updates_on_host=config.offloads,
            clip=config.clip,
            loss_scaler=loss_scaler,
        )
        self._kind = kind
        self._updates: list[ParamUpdate] = []
        self._redistributed: RedistributedParams | None = None
        self._original_ids: dict[str, int] = {}
        self._keeps_masters = False
        self._replace_originals()
        for index in range(len(optim.param_groups)):
            self._record_group(index)
        self._reshard(range(len(optim.param_groups)))

    # Sharding.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the user's optimizer and shard it; see `ShardedOptimizer.add_param_group`."""
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        current = self._current_params()
        super().add_param_group({**param_group, "params": [current.get(id(one), one) for one in members]})

    def _current_params(self) -> dict[int, nn.Parameter]:
        """Return the model's sharded parameters by the `id` of those that a user may have.

        These are the ones from before boost(), and after an evaluation those of gathered weights.
        """
        params = self.model.sharded_params
        gathered = {id(param.unsharded_param): param.parameter for param in params if param.unsharded_param is not None}
        return {id(param.original): param.parameter for param in params} | gathered

    def _replace_originals(self) -> None:
        """Replace the parameters from before boost() by the model's current ones."""
        current = self._current_params()
        for group in self.param_groups:
            originals, params = list(group["params"]), group["params"]
            params[:] = [current.get(id(one), one) for one in originals]
            for original, shown in zip(originals, params, strict=True):
                self._original_ids[self._names[id(shown)]] = id(original)
                if shown is not original and original in self.optim.state:
                    self.optim.state[shown] = self.optim.state.pop(original)

    def _reshard(self, indices: Sequence[int]) -> None:
        """Replace the trainable parameters of these groups by this rank's shards."""
        for index in indices:
            group = self.param_groups[index]
            new = list(self._unfrozen(group))
            updates = self._updates_of(new, index)
            for parameter, update in zip(new, updates, strict=True):
                if self._keeps_masters:  # for a parameter that is added later only the rounded values exist
                    update.add_master(None)
                shard_state(self.optim, parameter, [] if update.shard is None else [update.shard])
            shards = [one.shard for one in updates if one.shard is not None]
            # Also if this rank has no shard of a parameter, it must not count as new later.
            self._model_param_of |= {id(one): one for one in new}
            self._model_param_of |= {id(one.parameter): one.model_param for one in shards}
            sharded = set(map(id, new))
            # In place, as optimizers may hold a reference to the list.
            group["params"][:] = [one for one in group["params"] if id(one) not in sharded]
            group["params"] += [one.parameter for one in shards]
            self._updates += updates
        self._register_shards()

    def _updates_of(self, parameters: Sequence[nn.Parameter], group_index: int) -> list[ParamUpdate]:
        params = [self.model.param_of[id(one)] for one in parameters]
        owners: dict[Param, int] = {}
        if self._kind is not OptimizerKind.ELEMENTWISE:
            sharded = [one for one in params if isinstance(one, ShardedParam)]
            sizes = [math.prod(one.shape) * one.shard.element_size() for one in sharded]
            owners = dict(zip(sharded, assign_owners(sizes, group_size(self._groups.shard_group)), strict=True))
        return [self._update_of(param, group_index, owners.get(param)) for param in params]

    def _update_of(self, param: Param, group_index: int, owner: int | None) -> ParamUpdate:
        memory, span = param.shard, (0, math.prod(param.shape))
        is_updated = True  # by this rank
        if isinstance(param, ReplicatedParam):
            is_updated = self.model.replicated_params.owns(param)
            memory = memory if self._kind is OptimizerKind.ELEMENTWISE else memory.view(param.shape)
        elif owner is None:
            span = param.flat_range
        else:
            is_updated = owner == param.rank
            memory = memory.new_empty(param.shape if is_updated else 0)
        shard = self._shard_of(param, span, memory, group_index) if is_updated and memory.numel() > 0 else None
        return ParamUpdate(param, group_index, shard, owner)

    def _shard_of(self, param: Param, span: tuple[int, int], memory: torch.Tensor, group_index: int) -> Shard:
        return Shard(
            name=param.name,
            global_shape=param.shape,
            span=span,
            parameter=nn.Parameter(memory.detach()),
            model_param=param.parameter,
            group_index=group_index,
            has_master=False,
            is_primary=self._groups.is_primary,
        )

    def _register_shards(self) -> None:
        if any(one.owner is not None for one in self._updates):
            self._redistributed = RedistributedParams(self._updates, self._groups.shard_group)
        shards = [one.shard for one in self._updates if one.shard is not None]
        shapes = {one.param.name: one.param.shape for one in self._updates}
        self._use_shards(Shards(shards, list(shapes), self._groups.shard_group, shapes=shapes))

    def _shard_unfrozen(self) -> None:
        for param in self.model.sharded_params:  # also of modules that this rank did not use
            param.sync_requires_grad()
        super()._shard_unfrozen()

    # Masters.

    def use_master_weights(self, originals: Mapping[int, torch.Tensor]) -> bool:
        """Create fp32 master weights of low-precision shards; return True, as this class implements them."""
        self._keeps_masters = True
        replaced: dict[int, nn.Parameter] = {}
        for update in self._updates:
            before = update.add_master(originals.get(self._original_ids[update.param.name]))
            if before is None:
                continue
            assert update.shard is not None
            master = update.shard.parameter
            replaced[id(before)] = master
            self._model_param_of[id(master)] = update.shard.model_param
            if before in self.optim.state:
                self.optim.state[master] = {
                    key: value.float() if isinstance(value, torch.Tensor) and value.dtype == before.dtype else value
                    for key, value in self.optim.state.pop(before).items()
                }
        for group in self.param_groups:
            group["params"][:] = [replaced.get(id(one), one) for one in group["params"]]
        self._register_shards()
        return True

    def _refresh_masters(self) -> None:
        for update in self._updates:
            update.refresh_master()

    def follow_weights(self, shard: Shard) -> None:
        update = next(one for one in self._updates if one.shard is shard)
        update.refresh_master()

    # Backward.

    def _check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        refuse_weights("backward(inputs=...)", inputs)

    def _backward_context(self) -> AbstractContextManager[None]:
        return self.model.collecting(synchronizes=self._synchronizes)

    # Gradients.

    def _finish_reduction(self) -> float:
        self._cached_norm = None
        self._reduce_unreduced_grads()
        for group in self.model.fsdp_groups:
            group.add_arriving()
        for update in self._updates:
            if update.owner is None:
                update.set_gradient(update.param.reduced_grad)
        if self._redistributed is not None:
            self._redistributed.gather_gradients()
        return 1.0 / group_size(self.data_parallel_group)

    def _reduce_unreduced_grads(self) -> None:
        """Reduce local gradients, and all-reduce over the replicas. Collective."""
        model, replicated = self.model, self.model.replicated_params
        model.collective_order.synchronize_end(CollectiveKind.GRADIENTS_READ)
        for one in model.fsdp_params:
            one.is_used = one.is_used or one.has_unreduced_grad
        unreduced, reduced_groups, reduces_replicated = self._sync_is_used()
        for group in unreduced:
            group.reduce(group.take_unreduced_grads())
        model.collective_order.wait_in_flight()
        replica_group = self._groups.replica_group
        for group in dict.fromkeys((*reduced_groups, *unreduced)) if replica_group is not None else ():
            gradients = group.reduced_grads()
            reduced = all_reduce_sum(gradients.to(collective_device(replica_group)), replica_group)
            if reduced.data_ptr() != gradients.data_ptr():
                gradients.copy_(reduced)
        if reduces_replicated:
            replicated.reduce()

    def _sync_is_used(self) -> tuple[list[ParamGroup], list[ParamGroup], bool]:
        """All-reduce `is_used`. Collective.

        Returns:
            The parameter groups with unreduced gradients on any rank, those with reduced ones, and whether replicated
            parameters have gradients.
        """
        groups, params = self.model.fsdp_groups, self.model.fsdp_params
        flags = [
            *(group.has_unreduced_grads for group in groups),
            *(group.has_reduced_grads for group in groups),
            self.model.replicated_params.has_gradients,
            *(one.is_used for one in params),
        ]
        agreed = iter(self._any_rank_in_step(flags))
        unreduced = [group for group in groups if next(agreed)]
        reduced = [group for group in groups if next(agreed)]
        has_replicated = next(agreed)
        for param in params:
            param.is_used = next(agreed)
        return unreduced, reduced, has_replicated

    def _has_gradients(self) -> bool:
        return self.model.replicated_params.has_gradients or any(
            group.has_reduced_grads or group.has_unreduced_grads for group in self.model.fsdp_groups
        )

    def _clear_gradients(self, set_to_none: bool) -> None:
        super()._clear_gradients(True)
        self.model.clear_grads(keep_used=not set_to_none)

    # Step.

    def _check_weights(self) -> None:
        self.model.check_not_gathered("optimizer.step()")
        self.model.check_not_moved()
        with torch._C.DisableTorchFunctionSubclass():
            self._check_no_foreign_gradients((param.name, param.parameter) for param in self.model.sharded_params)
        for update in self._updates:
            if update.has_moved:
                raise replaced_memory_error(update.param.name)

    def _fetch_weights(self) -> None:
        self.model.reshard()
        if self._keeps_masters:
            self._refresh_masters()
        if self._redistributed is not None:
            self._redistributed.gather_weights()

    def _update_parameters(self) -> None:
        self._fetch_weights()
        super()._update_parameters()

    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for update in self._updates:
            if update.shard is not None and not update.shard.has_master and update.owner is None:
                yield update.shard.parameter, update.param.shard

    def _publish_weights(self) -> None:
        for update in self._updates:
            update.write_weights()
        self.model.reshard()
        self.model.replicated_params.broadcast_weights(include_unused=True)
        if self._redistributed is not None:
            self._redistributed.scatter_weights(include_unused=True)
        self.model.bump_versions()

    def _step_shards(self) -> None:
        if self._accumulation.factors is None:
            if self._kind is OptimizerKind.ELEMENTWISE:
                self._step_parts()
            else:
                self.optim.step()  # PER_PARAM optimizers were probed with empty groups as well
            return
        copies = {
            update.shard.parameter: update.param.shard.view(update.shard.parameter.shape)
            for update in self._updates
            if update.shard is not None and update.master is not None
        }
        self._step_fused(copies, {})

    def _finish_step(self) -> None:
        self._restore_memory()
        if self._keeps_masters and self._accumulation.factors is None:  # else a fused step has written them
            for update in self._updates:
                update.write_weights()
        if self._redistributed is not None:
            self._redistributed.scatter_weights()
        self.model.replicated_params.broadcast_weights()
        self.model.bump_versions()

    # Interface of checkpoints.

    @property
    def gradient_shards(self) -> Sequence[Shard]:
        """Shards of the reduced gradients on this rank: row shards, also of parameters that another rank updates."""
        return [shard for shard, _ in self._grad_shards()]

    def _grad_shards(self) -> Iterator[tuple[Shard, Param]]:
        """Yield the shards of reduced gradients: this rank's rows, and full replicated parameters on their owners."""
        for update in self._updates:
            shard, param = update.shard, update.param
            if isinstance(param, ShardedParam) and update.owner is not None:
                shard = self._shard_of(param, param.flat_range, param.shard, update.group_index)
            if shard is not None and shard.parameter.numel() > 0:
                yield shard, update.param

    def local_gradients(self) -> dict[str, torch.Tensor]:
        grads = {update.param.name: update.param.unreduced_grad() for update in self._updates}
        return {name: gradient for name, gradient in grads.items() if gradient is not None}

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        if allocate is None:
            self.model.collective_order.synchronize_end(CollectiveKind.GRADIENTS_READ)
            self._sync_is_used()
        else:
            self._allocate_grads(allocate)
        for group in self.model.fsdp_groups:
            group.add_arriving()
        return [
            (shard, param.reduced_grad)
            for shard, param in self._grad_shards()
            if param.is_used and param.reduced_grad is not None
        ]

    def _allocate_grads(self, names: Collection[str]) -> None:
        self.model.clear_grads()
        for param in self.model.fsdp_params:
            param.is_used = param.name in names
        for group in self.model.fsdp_groups:
            if any(one.is_used for one in group.params):
                group.reduced_grads()
        for one in self.model.replicated_params.params:
            if one.is_used and self.model.replicated_params.owns(one):
                one.reduced_grad = torch.zeros_like(one.shard, dtype=one.grad_dtype)

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        param = next(one.param for one in self._updates if one.param.name == name)
        if isinstance(param, ReplicatedParam):
            param.parameter.grad = torch.empty_like(param.parameter, requires_grad=False).copy_(gradient)
            return
        group = next(group for group in self.model.fsdp_groups if param in group.params)
        buffer = torch.empty(param.shape, dtype=group.reduce_dtype, device=group.device)
        param.set_accumulated_grad(buffer.copy_(gradient))
