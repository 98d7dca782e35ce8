"""Optimizer wrapper of Gemini: the user's optimizer updates this rank's shard of every chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_sum, collective_device, group_size
from booster.core.shard_aware import shard_state, update_master
from booster.errors import ConfigError
from booster.interface import Shard, Shards, TensorSlice, TensorSpec
from booster.plugins.sharding.optimizer import ShardedOptimizer
from booster.plugins.sharding.optimizer_state import ShardedOptimizerState
from booster.plugins.sharding.step_in_parts import Arrival, step_in_parts

from .chunk import Chunk, ChunkParam
from .chunk_layout import ShardRegionInChunk
from .config import GeminiSettings
from .model import GeminiModel
from .tiers import ChunkShard, Tier


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard and its region."""

    shard: Shard
    part: ShardRegionInChunk
    param: ChunkParam


class ChunkUpdate:
    """Shards of a chunk that this rank updates, as views of the chunk's master shard.

    Args:
        chunk: Trained chunk with allocated memory.
        group_of: Index of the param group by a parameter's `id`.
        is_primary: If True, this rank saves its shards; its replicas do not.

    Attributes:
        owned: Shards in chunk order.
        states: Per-element optimizer states in a tier, by name.
    """

    def __init__(self, chunk: Chunk, group_of: Mapping[int, int], *, is_primary: bool) -> None:
        self.chunk = chunk
        self.states: dict[str, ChunkShard] = {}
        self.owned: list[OwnedShard] = []
        main = chunk.master.as_tensor()
        for part in chunk.layout.parts(chunk.rank):
            param = chunk.params[part.region_index]
            shard = Shard(
                name=param.name,
                global_shape=param.region.shape,
                span=part.span,
                parameter=nn.Parameter(main[part.in_shard], requires_grad=True),
                model_param=param.parameter,
                group_index=group_of[id(param.parameter)],
                has_master=chunk.master.dtype != chunk.layout.dtype,
                is_primary=is_primary,
            )
            self.owned.append(OwnedShard(shard, part, param))

    @property
    def has_copy(self) -> bool:
        """Whether the weights are a copy of the master shard."""
        return self.chunk.master is not self.chunk.weights

    @property
    def rounds_in_place(self) -> bool:
        """Whether a fused optimizer step may write this rank's weights together with their masters."""
        return self.has_copy and self.chunk.master.device == self.chunk.weights.device

    def point(self) -> None:
        """Rebind the shards to the master shard, which may have moved to another tier."""
        main = self.chunk.master.as_tensor()
        for one in self.owned:
            one.shard.parameter.data = main[one.part.in_shard]

    def point_gradients(self, *, waits: bool = True) -> Arrival | None:
        """Set `.grad` of every used shard to its reduced gradient, and clear those of the others.

        Args:
            waits: If True, the host waits for gradients in flight.

        Returns:
            Gradients that are still in flight, if any.
        """
        shard, main = self.chunk.grad_shard, self.chunk.master
        is_arriving = not waits and self.chunk.has_grad_shard and shard.has_streams
        is_arriving = is_arriving and (main.dtype, main.device.type) == (shard.dtype, "cpu")  # else they are copied
        sums = shard.as_tensor(waits=not is_arriving) if self.chunk.has_grad_shard else None
        main.as_tensor(waits=not is_arriving)  # the update writes it: copies of it have ended
        for one in self.owned:
            parameter = one.shard.parameter
            if not one.param.is_used:
                parameter.grad = None
            elif sums is None:  # no backward since zero_grad(set_to_none=False)
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            else:
                parameter.grad = sums[one.part.in_shard].to(device=parameter.device, dtype=parameter.dtype)
        if not is_arriving:
            return None
        return Arrival([one.shard.parameter for one in self.owned], lambda: (shard.as_tensor(), main.as_tensor()))

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copy the master shard into this rank's weights."""
        if self.has_copy:
            self.chunk.master.copy_to(self.chunk.weights)

    def refresh_master(self) -> None:
        """Update the master shard from weights that were changed outside of the optimizer."""
        update_master(self.chunk.master.as_tensor(), self.chunk.weights.as_tensor())

    def migrate_master(self, dtype: torch.dtype, device: torch.device, tier: Tier | None) -> bool:
        """Move the master shard, unless the weights themselves are updated.

        Args:
            dtype: Dtype of the master shard.
            device: Device of the update.
            tier: Tier that stores the master shard, or None for memory.

        Returns:
            True if the dtype or the device has changed, so that the chunk needs new shards.
        """
        chunk, before = self.chunk, self.chunk.master
        if before.dtype != dtype or before.device != device:
            values = before.as_tensor().to(device=device, dtype=dtype)
            if dtype == chunk.layout.dtype and device == chunk.weights.device:
                chunk.master = chunk.weights  # of equal values
            else:
                chunk.master = ChunkShard(chunk.layout.shard_numel, dtype, device)
                chunk.master.tensor = values
                if tier is not None:
                    chunk.master.offload(tier)
            if before is not chunk.weights:
                before.drop()
            return True
        if not self.has_copy:
            return False
        if tier is None:
            before.fetch()
        elif not before.is_offloaded:
            before.offload(tier)
        return False

    # Optimizer states in a tier.

    @torch.no_grad()
    def offload_states(self, optimizer: Optimizer, tier: Tier) -> None:
        """Move per-element states to a tier, unless they are already there."""
        keys: dict[str, None] = {}
        for one in self.owned:
            for key, value in optimizer.state.get(one.shard.parameter, {}).items():
                if is_elementwise_state(value, one.shard.parameter) and not self._is_offloaded(key, value):
                    keys.setdefault(key)
        for key in keys:
            states = [optimizer.state[one.shard.parameter].get(key) for one in self.owned]
            dtype = next(state.dtype for state in states if state is not None)
            state_shard = self._new_state_shard(key, dtype, tier)
            memory = state_shard.as_tensor()
            for one, state in zip(self.owned, states, strict=True):
                if state is not None:
                    view = memory[one.part.in_shard]
                    view.copy_(state)
                    optimizer.state[one.shard.parameter][key] = view

    def _new_state_shard(self, key: str, dtype: torch.dtype, tier: Tier) -> ChunkShard:
        old = self.states.pop(key, None)
        if old is not None:
            old.drop()
        shard = self.states[key] = ChunkShard(self.chunk.layout.shard_numel, dtype, self.chunk.master.device)
        shard.allocate(tier)
        return shard

    def _is_offloaded(self, key: str, value: torch.Tensor) -> bool:
        shard = self.states.get(key)
        if shard is None:
            return False
        memory = shard.as_tensor()
        start = memory.data_ptr()
        return start <= value.data_ptr() < start + memory.nbytes

    @torch.no_grad()
    def fetch_states(self, optimizer: Optimizer) -> None:
        """Move the states back to memory."""
        for key, shard in self.states.items():
            for one in self.owned:
                state = optimizer.state.get(one.shard.parameter, {})
                if key in state:
                    state[key] = state[key].clone()
            shard.drop()
        self.states.clear()

    def new_state(self, parameter: torch.Tensor, key: str, dtype: torch.dtype, tier: Tier) -> torch.Tensor:
        """Allocate a state of a shard in a tier."""
        shard = self.states.get(key)
        if shard is None or shard.dtype != dtype:
            shard = self._new_state_shard(key, dtype, tier)
        part = next(one.part for one in self.owned if one.shard.parameter is parameter)
        return shard.as_tensor()[part.in_shard]

    def state_bytes(self, optimizer: Optimizer | None) -> int:
        """Return the bytes of masters and per-element states in all tiers; an estimate before the first step.

        Counts the full shard including waste, so that the result is equal on all ranks.
        """
        masters = self.chunk.master.num_bytes if self.has_copy else 0
        # An optimizer may keep more in its states than those of parameters.
        bytes_per_element = [
            sum(value.element_size() for value in state.values() if is_elementwise_state(value, parameter))
            for parameter, state in ({} if optimizer is None else optimizer.state).items()
            if isinstance(parameter, torch.Tensor) and isinstance(state, Mapping)
        ]
        if not bytes_per_element:
            return masters + 2 * self.chunk.master.num_bytes  # Adam's two moments
        return masters + self.chunk.layout.shard_numel * max(bytes_per_element)


def is_elementwise_state(value: Any, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Whether a state has one value for every element of a shard."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


class GeminiOptimizerState(ShardedOptimizerState):
    """Checkpoint view of an optimizer with states that may be offloaded to disk, where they are read and written."""

    optimizer: GeminiOptimizer

    def _new_state_tensor(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> torch.Tensor:
        own = self._own_spec(parameter, key, spec)
        if not own.shape or own.shape != tuple(parameter.shape):
            return super()._new_state_tensor(parameter, key, spec)
        is_converted = own.dtype.is_floating_point and parameter.is_floating_point()  # as in memory
        dtype = parameter.dtype if is_converted else own.dtype
        if self._allocator is not None:
            allocated = super()._new_state_tensor(parameter, key, spec)
            if self._allocator.may_fail_locally:  # the allocator uses a separate disk
                return allocated
            dtype = allocated.dtype
        state = self.optimizer.new_state(parameter, key, dtype)
        return super()._new_state_tensor(parameter, key, spec) if state is None else state


# Note [Steps by chunk]
# Chunks with states on a disk are stepped one by one, so at most one chunk's states are in memory at a time, also in
# the first step, which creates them. All other chunks are updated in one call. Step hooks, step counters and what the
# optimizer counts in its param groups see a single step.


class GeminiOptimizer(ShardedOptimizer):
    """Optimizer that updates this rank's shards of the chunks.

    Args:
        optim: The user's optimizer, elementwise or `ShardAware`.
        model: The boosted model, with its chunks.
        settings: Sharding settings.
    """

    model: GeminiModel

    def __init__(self, optim: Optimizer, model: GeminiModel, settings: GeminiSettings) -> None:
        super().__init__(
            optim,
            model,
            settings,
            updates_on_host=model.manager.placement.offloads_all_states,
            clip=settings.config.clip,
            loss_scaler=settings.config.new_loss_scaler(),
        )
        self._settings = settings
        self._manager = model.manager
        self._updates: dict[int, ChunkUpdate] = {}
        self._update_of: dict[int, ChunkUpdate] = {}
        for index in range(len(optim.param_groups)):
            self._record_group(index)
        self._shard_chunks(self._manager.chunks)
        self._manager.state_bytes = self._state_bytes
        self._manager.on_trace = self._migrate_chunks
        self._may_fail_locally |= self._manager.tier is not None and self._manager.tier.name == "disk"
        self._has_stepped = False

    # Sharding.

    def _shard_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Replace parameters in the param groups by this rank's shards of these chunks."""
        group_of = {id(one): index for index, members in enumerate(self.logical_groups) for _, one in members}
        for chunk in chunks:
            if not chunk.layout.trains:
                continue
            update = ChunkUpdate(chunk, group_of, is_primary=self._settings.is_primary)
            self._updates[chunk.index] = update
            self._replace_in_groups(update)
            disk = self._manager.disk_of_states(chunk.index)
            if disk is not None:
                update.offload_states(self.optim, disk)
        self._note_shards()

    def _note_shards(self) -> None:
        updates = self._updates.values()
        self._update_of = {id(one.shard.parameter): update for update in updates for one in update.owned}
        shards = [one.shard for update in updates for one in update.owned]
        shapes = {param.name: param.region.shape for param in self._trained_params()}
        self._use_shards(Shards(shards, list(shapes), self._settings.shard_group, shapes=shapes))

    def _replace_in_groups(self, update: ChunkUpdate) -> None:
        shards_of: dict[int, list[Shard]] = {id(param.parameter): [] for param in update.chunk.params}
        for one in update.owned:
            shards_of[id(one.param.parameter)].append(one.shard)
        for param in update.chunk.params:
            shard_state(self.optim, param.parameter, shards_of[id(param.parameter)])
        for group in self.param_groups:
            members = group["params"]
            shards = [shard.parameter for one in members for shard in shards_of.get(id(one), ())]
            members[:] = [one for one in members if id(one) not in shards_of] + shards
        self._model_param_of |= {id(one.shard.parameter): one.shard.model_param for one in update.owned}
        # Also for parameters without elements on this rank, which are not new either.
        self._model_param_of |= {id(param.parameter): param.parameter for param in update.chunk.params}

    def _migrate_chunks(self) -> None:
        """Move all shards to the locations of the placement policy. Collective over the shard group."""
        manager, settings = self._manager, self._settings
        locations = manager.choose_locations()
        if locations == manager.locations:
            return
        manager.locations = locations
        tier = manager.needed_tier() if locations.weights or locations.states else None
        for chunk in (one for one in manager.chunks if one.params):
            weights_tier = tier if chunk.index in locations.weights else None
            states_tier = tier if chunk.index in locations.states else None
            chunk.migrate_weights(weights_tier)
            update = self._updates.get(chunk.index)
            if update is None:
                continue
            dtype, device = settings.master_dtype(chunk.layout), settings.master_device(states_tier)
            if update.migrate_master(dtype, device, states_tier):
                update = self._replace_shards(update)
            else:
                update.point()
            disk = manager.disk_of_states(chunk.index)
            if disk is not None:
                update.offload_states(self.optim, disk)
            else:
                update.fetch_states(self.optim)
        manager.note_addresses(manager.chunks)
        self._note_shards()

    def _replace_shards(self, old: ChunkUpdate) -> ChunkUpdate:
        """Return new shards, with the states of the old ones, for a chunk whose update moved to another device."""
        group_of = {id(one): index for index, members in enumerate(self.logical_groups) for _, one in members}
        new = ChunkUpdate(old.chunk, group_of, is_primary=self._settings.is_primary)
        replaced = {
            id(before.shard.parameter): after.shard.parameter
            for before, after in zip(old.owned, new.owned, strict=True)
        }
        for group in self.param_groups:
            group["params"][:] = [replaced.get(id(one), one) for one in group["params"]]
        for before, after in zip(old.owned, new.owned, strict=True):
            was, now = before.shard.parameter, after.shard.parameter
            state = self.optim.state.pop(was, None)
            if state is not None:
                for key, value in state.items():
                    is_beside = isinstance(value, torch.Tensor) and value.device == was.device
                    if is_beside or is_elementwise_state(value, was):
                        state[key] = value.to(now.device)
                self.optim.state[now] = state
            self._model_param_of[id(now)] = after.shard.model_param
        self._updates[old.chunk.index] = new
        return new

    def _trained_params(self) -> list[ChunkParam]:
        return [param for update in self._updates.values() for param in update.chunk.params]

    def _reshard(self, indices: Sequence[int]) -> None:
        whole = [
            one
            for index in indices
            for one in self.param_groups[index]["params"]
            if one.requires_grad and id(one) not in self._model_param_of
        ]
        if whole:
            self._shard_chunks(self.model.regroup(whole))

    def _refresh_masters(self) -> None:
        for update in self._updates.values():
            if update.has_copy:
                update.refresh_master()

    def follow_weights(self, shard: Shard) -> None:
        update = self._update_of[id(shard.parameter)]
        part = next(one.part for one in update.owned if one.shard is shard)
        if update.has_copy:
            weights, master = update.chunk.weights.as_tensor(), update.chunk.master.as_tensor()
            update_master(master[part.in_shard], weights[part.in_shard])

    def _state_bytes(self, chunk: Chunk) -> int:
        update = self._updates.get(chunk.index)
        return 0 if update is None else update.state_bytes(self.optim)

    # Backward.

    def _backward_context(self) -> AbstractContextManager[None]:
        return self.model.hooks.backward()

    # Gradients.

    def _finish_reduction(self) -> float:
        self._cached_norm = None
        for update in self._agree_on_use():
            if self._settings.replica_group is not None:
                self._sum_over_replicas(update.chunk)
        waits = not self._can_fuse_unscaling()
        in_order = reversed(list(self._updates.values()))  # of backward
        self._arriving = [one for update in in_order if (one := update.point_gradients(waits=waits)) is not None]
        return 1.0 / group_size(self.data_parallel_group)

    def _agree_on_use(self) -> list[ChunkUpdate]:
        """Mark parameters used on any rank as used; return the chunks with reduced gradients on any rank.

        Also reduces gradients that did not come from a backward. Collective over the data-parallel ranks.
        """
        params, updates = self._trained_params(), list(self._updates.values())
        flags = [param.is_used for param in params] + [update.chunk.has_grad_shard for update in updates]
        is_unreduced = any(chunk.has_gradients for chunk in self._manager.chunks)
        *agreed, is_any_unreduced = self._any_rank_in_step([*flags, is_unreduced])
        if is_any_unreduced:
            self._manager.reduction.reduce_late_grads()
            self._manager.pool.trim()
            has_sums = [one.chunk.has_grad_shard for one in updates]
            agreed = self._any_rank_in_step([*flags[: len(params)], *has_sums])
        for param, is_used in zip(params, agreed, strict=False):
            param.is_used = is_used
        return [update for update, has_sums in zip(updates, agreed[len(params) :], strict=True) if has_sums]

    def _sum_over_replicas(self, chunk: Chunk) -> None:
        self._manager.reduction.allocate_sums(chunk)
        sums = chunk.grad_shard.as_tensor()
        if not chunk.has_grad_shard:
            sums.zero_()
            chunk.has_grad_shard = True
        home = collective_device(self._settings.replica_group)
        summed = all_reduce_sum(sums.to(home), self._settings.replica_group)
        if summed.data_ptr() != sums.data_ptr():
            sums.copy_(summed)

    def _has_gradients(self) -> bool:
        return any(param.is_used for param in self._trained_params())

    # Step.

    def _fetch_weights(self) -> None:
        self._wait_for_copies()
        self._follow_modified()

    def _follow_modified(self) -> None:
        for update in self._updates.values():
            # By unwrap_model(model).apply(...) or the like: weights that are not kept gathered refuse that.
            if (
                update.has_copy
                and update.chunk.is_kept_gathered
                and any(one.is_modified for one in update.chunk.params)
            ):
                update.refresh_master()

    def _update_parameters(self) -> None:
        self._follow_modified()
        super()._update_parameters()

    def _finish_step(self) -> None:
        self.model.weights_changed()
        if not self._has_stepped:  # the states exist now, and their size is known
            self._has_stepped = True
            self._migrate_chunks()

    def _step_shards(self) -> None:
        disk_of = {index: self._manager.disk_of_states(index) for index in self._updates}
        together = [update for index, update in self._updates.items() if disk_of[index] is None]
        alone = [[update] for index, update in self._updates.items() if disk_of[index] is not None]
        calls = [together, *alone] if together or not alone else alone

        def step(number: int) -> None:
            self._step_some(calls[number])
            for update in calls[number]:
                disk = disk_of[update.chunk.index]
                if disk is not None:
                    for one in update.owned:
                        one.shard.parameter.grad = None  # it is done, should the disk fail now
                    update.offload_states(self.optim, disk)

        parts = [[one.shard.parameter for update in members for one in update.owned] for members in calls]
        step_in_parts(self.optim, parts, step)
        if len(calls) > 1 and self._has_hooks() and self._accumulation.num_backwards > 0:
            for update in self._updates.values():  # a hook of the last call may have modified any of them
                update.write_weights()

    def _step_some(self, members: Sequence[ChunkUpdate]) -> None:
        if self._accumulation.factors is None:
            self._step_parts()
        else:
            weights: dict[nn.Parameter, torch.Tensor] = {}
            for update in members:
                if update.rounds_in_place:
                    shard = update.chunk.weights.as_tensor()
                    weights |= {one.shard.parameter: shard[one.part.in_shard] for one in update.owned}
            self._step_fused(weights, {})
        if self._accumulation.num_backwards == 0:
            return
        self._restore_memory()
        for update in members:
            if self._accumulation.factors is None or not update.rounds_in_place:
                update.write_weights()

    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for update in self._updates.values():
            main = update.chunk.master.as_tensor()
            yield from ((one.shard.parameter, main[one.part.in_shard]) for one in update.owned)

    def _publish_weights(self) -> None:
        for update in self._updates.values():
            update.write_weights()
        self.model.weights_changed()

    def _check_weights(self) -> None:
        if self._manager.is_whole:
            raise ConfigError("optimizer.step() inside of `with model.gathered():`: leave the block first")
        self.model.check_weights()
        with torch._C.DisableTorchFunctionSubclass():  # of hidden parameters
            self._check_no_foreign_gradients((param.name, param.parameter) for param in self._trained_params())

    def _clear_gradients(self, set_to_none: bool) -> None:
        super()._clear_gradients(True)
        self._manager.reduction.reset(keeps_use=not set_to_none)

    # Interface of CheckpointIO.

    def _master_slices(self) -> list[TensorSlice]:
        self._wait_for_copies()
        return super()._master_slices()

    def _wait_for_copies(self) -> None:
        """Wait for copies of masters in flight, as the caller may write them."""
        for update in self._updates.values():
            update.chunk.master.as_tensor()

    def checkpoint_state(self) -> GeminiOptimizerState:
        self._wait_for_copies()
        return GeminiOptimizerState(self)

    def new_state(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate disk space for a shard's state, or return None if the state belongs in memory."""
        update = self._update_of.get(id(parameter))
        disk = None if update is None else self._manager.disk_of_states(update.chunk.index)
        return None if update is None or disk is None else update.new_state(parameter, key, dtype, disk)

    def local_gradients(self) -> dict[str, torch.Tensor]:
        found = {param.name: param.chunk.local_gradient(param) for param in self._trained_params()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        if allocate is None:
            self._agree_on_use()
        else:
            self._make_sums(allocate)
        found: list[tuple[Shard, torch.Tensor]] = []
        for update in self._updates.values():
            sums = update.chunk.grad_shard.as_tensor() if update.chunk.has_grad_shard else None
            if sums is not None:
                found += [(one.shard, sums[one.part.in_shard]) for one in update.owned if one.param.is_used]
        return found

    def _make_sums(self, names: Collection[str]) -> None:
        self._manager.reduction.reset()
        for update in self._updates.values():
            chunk = update.chunk
            used = [param for param in chunk.params if param.name in names]
            for param in used:
                param.is_used = True
            if used:
                self._manager.reduction.allocate_sums(chunk)
                chunk.grad_shard.as_tensor().zero_()
                chunk.has_grad_shard = True

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        param = next(param for param in self._trained_params() if param.name == name)
        parameter = param.parameter
        parameter.grad = torch.empty(param.region.shape, dtype=parameter.dtype, device=parameter.device).copy_(gradient)
        param.chunk.on_grad_ready(param, self._manager.take_buffer)
