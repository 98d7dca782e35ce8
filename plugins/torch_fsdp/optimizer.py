"""Optimizer wrapper of FSDP2: the user's own optimizer updates this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_max, all_reduce_sum, collective_device, group_size
from booster.errors import ConfigError
from booster.interface import Shard, Shards
from booster.interface.mixed_precision import LossScaler
from booster.phases import in_phase
from booster.plugins.sharding.elementwise import shard_state
from booster.plugins.sharding.optimizer import ShardedOptimizer
from booster.plugins.torch_fsdp.closures import drive
from booster.plugins.torch_fsdp.coordination import TaskKind
from booster.plugins.torch_fsdp.members import Member
from booster.plugins.torch_fsdp.model import FSDPModel
from booster.plugins.torch_fsdp.optimizer_kinds import OptimizerKind
from booster.plugins.torch_fsdp.piece_exchange import Divided, PieceExchange, choose_owners
from booster.plugins.torch_fsdp.units import Unit
from booster.plugins.torch_fsdp.updates import OwnedUpdate, OwnedUpdates, PieceUpdate, Update, WholeUpdate
from booster.plugins.torch_fsdp.whole_parameters import WholeMember

__all__ = ["FSDPOptimizer", "OptimizerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Configuration of the sharded optimizer.

    Attributes:
        kind: Unit of data that an update depends on.
        agreement_group: CPU group of all data-parallel ranks; None if the world group is one.
        shard_group: Group that the parameters are sharded over.
        replica_group: Group of the ranks with the same shards, or None.
        is_primary: If True, this rank writes its shards; False on the other replicas.
        max_norm: Maximum gradient norm at every step; 0 disables clipping.
        norm_type: Order of that norm.
    """

    kind: OptimizerKind
    agreement_group: dist.ProcessGroup | None
    shard_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None
    is_primary: bool
    max_norm: float
    norm_type: float


class FSDPOptimizer(ShardedOptimizer):
    """The user's optimizer over the shards of FSDP2.

    Args:
        optim: The user's optimizer, with the parameters from before boost().
        model: The boosted model.
        settings: Configuration.
        loss_scaler: Loss scaler of float16; optional, by default losses are not scaled.
        is_primary: If True, this rank writes data that all ranks hold.
    """

    model: FSDPModel

    def __init__(
        self,
        optim: Optimizer,
        model: FSDPModel,
        settings: OptimizerSettings,
        *,
        loss_scaler: LossScaler | None = None,
        is_primary: bool = True,
    ) -> None:
        super().__init__(
            optim,
            model,
            data_parallel_group=None,
            shard_group=settings.shard_group,
            max_norm=settings.max_norm,
            norm_type=settings.norm_type,
            loss_scaler=loss_scaler,
            is_primary=is_primary,
        )
        self._settings = settings
        self._updates: list[Update] = []
        self._original_ids: dict[str, int] = {}
        self._keeps_masters = False
        self._synchronizes = True
        self._replace_originals()
        for index in range(len(optim.param_groups)):
            self._note_group(index)
        self._shard_groups(range(len(optim.param_groups)))
        model.connect(self.zero_grad)

    # Sharding.

    def _replace_originals(self) -> None:
        """Replace the parameters from before boost() by the model's current ones."""
        for group in self.param_groups:
            originals, members = list(group["params"]), group["params"]
            members[:] = [self.model.shown(one) for one in originals]
            for original, shown in zip(originals, members, strict=True):
                self._original_ids[self._names[id(shown)]] = id(original)
                if shown is not original and original in self.optim.state:
                    self.optim.state[shown] = self.optim.state.pop(original)

    def _shard_groups(self, indices: Collection[int]) -> None:
        """Replace the trainable parameters of these groups by this rank's shards."""
        for index in indices:
            group = self.param_groups[index]
            new = [one for one in group["params"] if one.requires_grad and id(one) not in self._working_of]
            updates = self._updates_of(new, index)
            for parameter, update in zip(new, updates, strict=True):
                if self._keeps_masters:  # for a parameter that is added later only the rounded values exist
                    update.keep_master({}, id(parameter))
                shards = [] if update.shard is None else [update.shard]
                shard_state(self.optim, parameter, shards)
                self._working_of |= {id(one.parameter): one.working for one in shards}
            sharded = {id(one) for one in new}
            shards_of_group = [one.shard.parameter for one in updates if one.shard is not None]
            # In place, as optimizers may hold a reference to the list.
            group["params"][:] = [one for one in group["params"] if id(one) not in sharded] + shards_of_group
            # Also if this rank has no shard of a parameter, it must not count as new later.
            self._working_of |= {id(one): one for one in new}
            self._updates += updates
        self._note_shards()

    def _updates_of(self, parameters: Sequence[nn.Parameter], group_index: int) -> list[Update]:
        settings, owners = self._settings, iter(self._owners_of(parameters))
        updates: list[Update] = []
        for parameter in parameters:
            place = self.model.place_of(parameter)
            if isinstance(place, WholeMember):
                is_flat = settings.kind is OptimizerKind.PIECES
                if settings.kind is OptimizerKind.TOGETHER:
                    place.owner = 0
                updates.append(
                    WholeUpdate(self.model.whole, place, group_index, is_primary=settings.is_primary, is_flat=is_flat)
                )
            elif settings.kind is OptimizerKind.PIECES:
                unit, member = place
                updates.append(PieceUpdate(unit, member, group_index, is_primary=settings.is_primary))
            else:
                unit, member = place
                updates.append(OwnedUpdate(unit, member, group_index, next(owners), is_primary=settings.is_primary))
        return updates

    def _owners_of(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Return the owners of the sharded ones among `parameters`, in order."""
        places = [self.model.place_of(one) for one in parameters]
        divided = [_divided(place[1]) for place in places if not isinstance(place, WholeMember)]
        if self._settings.kind is OptimizerKind.TOGETHER:
            return [0] * len(divided)
        return choose_owners(divided, group_size(self._settings.shard_group))

    def _note_shards(self) -> None:
        owned = [one for one in self._updates if isinstance(one, OwnedUpdate)]
        exchange = PieceExchange(
            [_divided(one.member) for one in owned],
            [one.owner for one in owned],
            self._settings.shard_group,
            self.model.shard_device,
        )
        self._owned = OwnedUpdates(owned, exchange)
        parts = [one.shard for one in self._updates if one.shard is not None]
        shapes = {one.member.name: one.member.shape for one in self._updates}
        self._use_shards(Shards(parts, list(shapes), self._settings.shard_group, shapes=shapes))

    def _shard_unfrozen(self) -> None:
        for member in self.model.members:  # also of modules that this rank did not use
            member.settle_training()
        super()._shard_unfrozen()

    def _reshard(self, indices: Sequence[int]) -> None:
        self._shard_groups(indices)

    # Masters.

    def adopt_masters(self, originals: Mapping[int, torch.Tensor]) -> bool:
        """Create fp32 master weights of low-precision shards; return True, as this class implements them."""
        self._keeps_masters = True
        replaced: dict[int, nn.Parameter] = {}
        for update in self._updates:
            before = update.keep_master(originals, self._original_ids[update.member.name])
            if before is None:
                continue
            assert update.shard is not None
            master = update.shard.parameter
            replaced[id(before)] = master
            self._working_of[id(master)] = update.shard.working
            if before in self.optim.state:
                self.optim.state[master] = {
                    key: value.float() if isinstance(value, torch.Tensor) and value.dtype == before.dtype else value
                    for key, value in self.optim.state.pop(before).items()
                }
        for group in self.param_groups:
            group["params"][:] = [replaced.get(id(one), one) for one in group["params"]]
        self._note_shards()
        return True

    def _refresh_masters(self) -> None:
        for update in self._updates:
            update.follow()

    def follow_weights(self, shard: Shard) -> None:
        update = next(one for one in self._updates if one.shard is shard)
        update.follow()

    # Backward.

    def _collecting_gradients(self) -> AbstractContextManager[None]:
        return self.model.backward(synchronizes=self._synchronizes)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which gradients are accumulated locally, unsharded."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    # Gradients.

    def _reduce_gradients(self) -> float:
        self._known_norm = None
        self._bring_together()
        for update in self._updates:
            update.point_gradient()
        if self._owned.updates:
            self._owned.bring_gradients()
        return 1.0 / group_size(self.data_parallel_group)

    def _bring_together(self) -> None:
        """Reduce local gradients, and all-reduce over the replicas. Collective."""
        model, whole = self.model, self.model.whole
        model.coordinator.close(TaskKind.COLLECTION)
        whole.note_use()
        *has_local, reduces_whole = self._any_rank([*(unit.has_local for unit in model.units), whole.has_gradients])
        for unit, reduces in zip(model.units, has_local, strict=True):
            if reduces:
                unit.reduce_local()
        summed = self._agree_on_use()
        if self._settings.replica_group is not None:
            for unit in summed:
                self._sum_over_replicas(unit)
        if reduces_whole:
            whole.reduce()

    def _agree_on_use(self) -> list[Unit]:
        """All-reduce `is_used`; return the parameter groups with reduced gradients on any rank. Collective."""
        units = self.model.units
        members: list[Member | WholeMember] = [*self.model.members, *self.model.whole.members]
        agreed = self._any_rank([*(one.is_used for one in members), *(unit.has_sums for unit in units)])
        for member, is_used in zip(members, agreed, strict=False):
            member.is_used = is_used
        return [unit for unit, has_sums in zip(units, agreed[len(members) :], strict=True) if has_sums]

    def _any_rank(self, facts: Sequence[bool]) -> list[bool]:
        group = self._settings.agreement_group or self.data_parallel_group
        mask = torch.tensor(facts, dtype=torch.uint8, device=collective_device(group))
        return [bool(fact) for fact in all_reduce_max(mask, group).tolist()] if facts else []

    def _sum_over_replicas(self, unit: Unit) -> None:
        sums = unit.sums()
        home = collective_device(self._settings.replica_group)
        summed = all_reduce_sum(sums.to(home), self._settings.replica_group)
        if summed.data_ptr() != sums.data_ptr():
            sums.copy_(summed)

    def _has_gradients(self) -> bool:
        return self.model.whole.has_gradients or any(unit.has_sums or unit.has_local for unit in self.model.units)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and end the accumulation; no effect inside `Booster.accumulate` before its last step."""
        if self._holds_gradients:
            return
        super().zero_grad()
        self.model.forget_gradients(keeps_use=not set_to_none)

    # Step.

    def _check_weights(self) -> None:
        self.model.check_may_step()
        self.model.require_unmoved()
        for update in self._updates:
            if update.has_moved():
                raise ConfigError(
                    f"the memory of {update.member.name!r} was replaced after boost(), by model.to(), .half(), .data ="
                    " or the like, so that the optimizer's updates would not reach the model: do it before boost()"
                )

    def _fetch_weights(self) -> None:
        self.model.reshard()
        if self._owned.updates:
            self._owned.bring_weights()

    def _update_parameters(self) -> None:
        self._fetch_weights()
        self._is_stepping = True
        try:
            self._run_together(self._step_shards)
        finally:
            self._is_stepping = False
        if self._window.num_backwards > 0:
            self._restore_memory()
            self._write_weights()

    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for update in self._updates:
            memory = update.memory
            if update.shard is not None and memory is not None:
                yield update.shard.parameter, memory

    def _publish_weights(self) -> None:
        for update in self._updates:
            update.write_weights()
        self._spread_everything()

    @in_phase("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters, as in `ShardedOptimizer.step`. LBFGS may call the closure several times.

        Raises:
            ConfigError: As in `ShardedOptimizer.step`; and for a closure of an optimizer over all parameters together
                with loss scaling or master weights.
        """
        if closure is None or self._defers_step or self._settings.kind is not OptimizerKind.TOGETHER:
            return super().step(closure)
        if self.loss_scaler is not None or any(one.has_master for one in self.shards.parts):
            raise ConfigError(
                f"{type(self.optim).__name__}.step(closure) computes gradients inside of the step, where they cannot be"
                " unscaled: use fp32 or mixed_precision='bf16' with an optimizer that needs a closure"
            )
        self._check_weights()
        self.model.reshard()
        self._owned.bring_weights()
        self._is_stepping = True
        try:
            result = drive(
                lambda driving: self.optim.step(driving),  # type: ignore[arg-type, return-value]
                lambda: self._evaluate(closure),
                self._spread_everything,
                shard_group=self._settings.shard_group,
                data_parallel_group=self.data_parallel_group,
            )
        finally:
            self._is_stepping = False
        self._end_step()
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> torch.Tensor:
        with torch.enable_grad():
            loss = torch.as_tensor(closure())
        self._finalize_gradients()
        self._clip_to_max_norm()
        return loss

    def _spread_everything(self) -> None:
        self.model.reshard()
        self.model.whole.spread(everything=True)
        self._owned.spread(everything=True)
        self.model.outdate_graphs()

    def _step_shards(self) -> None:
        if self._window.factors is None:
            self._step_by_kind()
            return
        copies = {
            update.shard.parameter: update.weights.view(update.shard.parameter.shape)
            for update in self._updates
            if update.shard is not None and update.rounds_in_place
        }
        self._step_fused(copies, {})

    def _step_by_kind(self) -> None:
        if self._settings.kind is OptimizerKind.PIECES:
            self._step_parts()
        elif self._settings.kind is OptimizerKind.WHOLES or self.shards.parts or not self._updates:
            self.optim.step()  # PER_PARAM optimizers were probed with empty groups as well
        else:  # another rank has all parameters; only the step's hooks run here
            Optimizer.profile_hook_step(_step_nothing)(self.optim)
            self.optim._opt_called = True  # type: ignore[attr-defined]  # checked by LR schedulers

    def _write_weights(self) -> None:
        for update in self._updates:
            if self._window.factors is None or not update.rounds_in_place:
                update.write_weights()
        if self._owned.updates:
            self._owned.spread()
        self.model.whole.spread()
        self.model.outdate_graphs()

    # Interface of checkpoints.

    @property
    def gradient_shards(self) -> Sequence[Shard]:
        """Shards of the reduced gradients on this rank: row shards, also of parameters that another rank updates."""
        return [shard for shard, _ in self._pieces()]

    def _pieces(self) -> Iterator[tuple[Shard, Update]]:
        """Yield the shards of reduced gradients: this rank's rows, and full replicated parameters on their owners."""
        for update in self._updates:
            member = update.member
            if isinstance(update, PieceUpdate) and update.shard is not None:
                yield update.shard, update
            elif isinstance(member, Member):
                start, stop = member.span
                if stop > start and not isinstance(update, PieceUpdate):
                    yield _row_shard(member, update, is_primary=self._settings.is_primary), update
            elif update.shard is not None:
                yield update.shard, update

    def local_gradients(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for update in self._updates:
            member = update.member
            gradient = member.parameter.grad if isinstance(member, WholeMember) else member.local_gradient()
            if gradient is not None:
                found[member.name] = gradient
        return found

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        if allocate is None:
            self.model.coordinator.close(TaskKind.COLLECTION)
            self._agree_on_use()
        else:
            self._make_sums(allocate)
        found = []
        for shard, update in self._pieces():
            sums = update.sums()
            if sums is not None and update.member.is_used:
                found.append((shard, sums))
        return found

    def _make_sums(self, names: Collection[str]) -> None:
        self.model.forget_gradients()
        for unit in self.model.units:
            used = [one for one in unit.members if one.name in names]
            for one in used:
                one.is_used = True
            if used:
                unit.sums()
        for member in self.model.whole.members:
            if member.name in names:
                member.is_used = True
                if self.model.whole.is_own(member):
                    member.sums = torch.zeros(
                        member.parameter.numel(), dtype=member.sum_dtype, device=member.parameter.device
                    )

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        member = next(one.member for one in self._updates if one.member.name == name)
        if isinstance(member, WholeMember):
            member.parameter.grad = torch.empty_like(member.parameter, requires_grad=False).copy_(gradient)
            return
        unit = next(unit for unit in self.model.units if member in unit.members)
        room = torch.empty(member.shape, dtype=unit.reduce_dtype, device=unit.device)
        member.state.unsharded_accumulated_grad = room.copy_(gradient)


def _step_nothing(optimizer: Optimizer) -> None:
    """No-op step."""


def _divided(member: Member) -> Divided:
    return Divided(name=member.name, shape=member.shape, dtype=member.piece.dtype)


def _row_shard(member: Member, update: Update, *, is_primary: bool) -> Shard:
    return Shard(
        name=member.name,
        global_shape=member.shape,
        span=member.span,
        parameter=nn.Parameter(member.piece.detach(), requires_grad=False),
        working=member.parameter,
        group_index=update.group_index,
        has_master=False,
        is_primary=is_primary,
    )
