"""The optimizer side: the user's own optimizer updates this rank's shards, and the weights are spread afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import all_reduce_numbers, group_size, raise_on_all_ranks
from booster.errors import ConfigError
from booster.interface import OptimizerWrapper, Shard, ShardAware, Shards, TensorSlice
from booster.interface.mixed_precision import LossScaler
from booster.plugins.low_level_zero.checkpoint import ZeroOptimizerState, ZeroPendingGradients, shard_slice
from booster.plugins.low_level_zero.elementwise import shard_state
from booster.plugins.low_level_zero.gathering import WeightGathering
from booster.plugins.low_level_zero.model import ZeroModel
from booster.plugins.low_level_zero.norms import norm_over_ranks
from booster.plugins.low_level_zero.reducer import GradientReducer
from booster.plugins.low_level_zero.settings import ZeroSettings
from booster.plugins.low_level_zero.slots import GradientBucket, Slot
from booster.plugins.low_level_zero.weights import FlatGroup, OwnedPart

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(OptimizerWrapper):
    """An optimizer whose states, and in stage 2 gradients, are divided among the data-parallel ranks.

    `param_groups` hold this rank's shards in place of the parameters (and frozen parameters, whole); everything else in
    a group is the user's own, live. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020.

    Args:
        optim: The user's optimizer, elementwise or `ShardAware`.
        model: The boosted model.
        settings: How it is sharded.
        loss_scaler: Of half precision; None: losses are not scaled.
        is_primary: True on the rank that writes what all ranks hold alike.
    """

    model: ZeroModel
    shards: Shards

    def __init__(
        self,
        optim: Optimizer,
        model: ZeroModel,
        settings: ZeroSettings,
        *,
        loss_scaler: LossScaler | None = None,
        is_primary: bool = True,
    ) -> None:
        super().__init__(optim, model, data_parallel_group=settings.data_parallel_group, is_primary=is_primary)
        self.loss_scaler = loss_scaler
        self._settings = settings
        self._synchronizes = True
        self._known_norm: torch.Tensor | None = None
        self._is_stepping = False
        optim.register_step_pre_hook(partial(_refuse_step_of_its_own, weakref.ref(self)))
        self._flat_groups: list[FlatGroup] = []
        self._working_of: dict[int, nn.Parameter] = {}
        self._names = {id(parameter): name for name, parameter in reversed(list(model.unwrap().named_parameters()))}
        self.logical_groups: list[list[tuple[str, nn.Parameter]]] = []
        for index in range(len(optim.param_groups)):
            self._note_group(index)
            self._shard_group(index)
        self._connect()
        model.register_load_hook(self._refresh_masters)
        model.register_exact_copies(self._master_slices)

    # Sharding.

    def _note_group(self, index: int) -> None:
        parameters = self.param_groups[index]["params"]
        self.logical_groups.append([(self._names[id(parameter)], parameter) for parameter in parameters])

    def _shard_group(self, index: int) -> None:
        """Shards the parameters of a group that train and are still whole."""
        group = self.param_groups[index]
        order = {id(parameter): number for number, parameter in enumerate(self._model_order())}
        new = [one for one in group["params"] if one.requires_grad and id(one) not in self._working_of]
        new.sort(key=lambda parameter: order[id(parameter)])
        shards: list[nn.Parameter] = []
        for dtype in dict.fromkeys(self._weight_dtype(parameter) for parameter in new):
            members = [parameter for parameter in new if self._weight_dtype(parameter) == dtype]
            named = [(self._names[id(parameter)], parameter) for parameter in members]
            flat = FlatGroup(index, named, dtype, self._settings.sharding)
            self._flat_groups.append(flat)
            for parameter in members:
                own = [one.shard for one in flat.owned if one.shard.working is parameter]
                shard_state(self.optim, parameter, own)
            shards += [one.shard.parameter for one in flat.owned]
            self._working_of |= {id(one.shard.parameter): one.shard.working for one in flat.owned}
        sharded = {id(parameter) for parameter in new}
        # In place: optimizers may keep the list itself.
        group["params"][:] = [one for one in group["params"] if id(one) not in sharded] + shards

    def _connect(self) -> None:
        """Makes what knows all flat groups: reducer, gathering, and the shards that an optimizer may ask about."""
        settings = self._settings
        self._reducer = GradientReducer(
            self._flat_groups,
            self._model_order(),
            stage=settings.stage,
            overlaps=settings.overlaps,
            agreement_group=settings.agreement_group or settings.data_parallel_group,
            shard_group=settings.shard_group,
            replica_group=settings.replica_group,
            communication_dtype=settings.communication_dtype,
        )
        self.gathering = WeightGathering(self._reducer.buckets, settings.shard_group)
        self.model.connect(self.gathering, self.zero_grad)
        parts = [one.shard for flat in self._flat_groups for one in flat.owned]
        shapes = {
            name: place.shape
            for flat in self._flat_groups
            for name, place in zip(flat.names, flat.layout.places, strict=True)
        }
        self.shards = Shards(parts, list(shapes), settings.shard_group, shapes=shapes)
        if isinstance(self.optim, ShardAware):
            self.optim.use_shards(self.shards)

    def _model_order(self) -> list[nn.Parameter]:
        return list(self.model.unwrap().parameters())

    def _weight_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        casts = self._settings.dtype is not None and parameter.is_floating_point()
        return self._settings.dtype if casts and self._settings.dtype is not None else parameter.dtype

    def _refresh_masters(self) -> None:
        for flat in self._flat_groups:
            flat.refresh_masters()

    def _master_slices(self) -> list[TensorSlice]:
        masters = (shard for shard in self.shards.parts if shard.has_master)
        return [shard_slice(shard, shard.name, shard.parameter.detach()) for shard in masters]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the user's optimizer and shards it.

        Collective: every rank must add the same group.

        Raises:
            ConfigError: Gradients wait for their step, or a parameter is not the model's.
        """
        self._check_nothing_waits("add_param_group()")
        given = param_group["params"]
        members = [given] if isinstance(given, torch.Tensor) else list(given)
        foreign = [tuple(one.shape) for one in members if id(one) not in self._names]
        if foreign:
            raise ConfigError(
                f"add_param_group() got {len(foreign)} parameters that are not the model's (the first has shape"
                f" {foreign[0]}): add parameters of the model that was boosted with this optimizer"
            )
        self.optim.add_param_group({**param_group, "params": members})
        self._note_group(len(self.param_groups) - 1)
        self._reshard([len(self.param_groups) - 1])

    def _reshard(self, indices: Sequence[int]) -> None:
        self.gathering.wait()
        self._reducer.close()
        for index in indices:
            self._shard_group(index)
        self._connect()

    def _shard_unfrozen(self) -> None:
        """Notices parameters that were frozen when they came here and train now."""
        found = [
            index
            for index, group in enumerate(self.param_groups)
            if any(one.requires_grad and id(one) not in self._working_of for one in group["params"])
        ]
        if found:
            self._check_nothing_waits("unfreezing a parameter")
            self._reshard(found)

    def _check_nothing_waits(self, what: str) -> None:
        if self._window.is_open:
            raise ConfigError(
                f"{what} while gradients wait for their step would change how they are divided among the ranks: do it"
                " after optimizer.step() and zero_grad()"
            )

    # Backward.

    def _open_window(self, num_items: float | None) -> None:
        self._shard_unfrozen()
        super()._open_window(num_items)

    def _collecting_gradients(self) -> AbstractContextManager[None]:
        return self._reducer.collecting(synchronizes=self._synchronizes)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds up gradients on this rank alone (stage 1); stage 2 reduces all the same, as it keeps no others."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    # Gradients.

    def _gradients_are_true(self) -> bool:
        return False  # they are neither reduced nor averaged

    def _reduce_gradients(self) -> float:
        self._known_norm = None
        self._reducer.finish()
        for bucket in self._reducer.buckets:
            for slot, owned in bucket.owned:
                owned.shard.parameter.grad = _gradient_of(bucket, slot, owned)
        return 1.0 / group_size(self.data_parallel_group)

    def _finalize_gradients(self) -> None:
        window = self._window
        may_have_others = not window.is_final and window.num_backwards == 0 and self.loss_scaler is None
        if may_have_others and self._any_rank_has_gradients():
            # Of a plain loss.backward(), or of another boosted model's backward that reaches into this one.
            window.count_backward(None)
        super()._finalize_gradients()
        if self._window.is_final:
            self._window.was_multiplied = True  # the local gradients are gone

    def _any_rank_has_gradients(self) -> bool:
        return all_reduce_numbers([float(self._reducer.has_gradients)], self.data_parallel_group)[0] > 0

    def _check_nothing_bypassed(self) -> None:
        error = None
        if self._reducer.has_gradients:
            error = ConfigError(
                "some gradients did not come from booster.backward(loss, optimizer) with this optimizer, and lack its"
                " loss scale: replace loss.backward() by booster.backward(loss, optimizer). A loss that goes through"
                " two boosted models takes one of them in half precision with a loss scale of its own: use bf16 or fp32"
            )
        raise_on_all_ranks(error, self.data_parallel_group)

    def _defers_factors(self) -> bool:
        return self._fused_update is not None and not self._gradient_hooks

    def _gradients(self) -> list[torch.Tensor]:
        # The shards' own, raw or not: their sums are in fp32 already.
        return [parameter.grad for parameter in self._optimized_parameters() if parameter.grad is not None]

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        if norm_type == 2.0 and self._known_norm is not None:
            norm = self._known_norm
        else:
            norm = norm_over_ranks(self._gradients(), norm_type, self._settings.shard_group)
        return norm if self._window.factors is None else self._window.factors.true_norm(norm)

    def _any_nonfinite(self, gradients: Sequence[torch.Tensor]) -> bool:
        self._known_norm = norm_over_ranks(gradients, 2.0, self._settings.shard_group)
        return not bool(torch.isfinite(self._known_norm))

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor | None:
        norm = super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        self._known_norm = None
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        super().clip_grad_by_value(clip_value)
        self._known_norm = None

    def _has_gradients(self) -> bool:
        return self._reducer.has_gradients

    # Step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates this rank's shards, or skips if a loss-scaled gradient overflowed on any rank; spreads the weights.

        Args:
            closure: Computes the loss and calls backward; called once, before the step.

        Collective: every rank must call it.

        Raises:
            ConfigError: The model's weights are no longer where they were put, or gradients came from another backward.
        """
        result = None
        if closure is not None and not self._defers_step:
            with torch.enable_grad():
                result = closure()
        if not self._defers_step:
            self._check_weights()
            self._clip_to_max_norm()
        super().step()
        return result

    def _clip_to_max_norm(self) -> None:
        window = self._window
        if self._settings.max_norm <= 0 or window.has_stepped:
            return
        self._finalize_gradients()  # which finds the gradients of a plain loss.backward()
        if window.num_backwards == 0:
            return
        norm_of_user = window.norm
        self.clip_grad_by_norm(self._settings.max_norm, self._settings.norm_type)
        if norm_of_user is not None:
            window.norm = self._last_norm = norm_of_user

    def _update_parameters(self) -> None:
        self.gathering.wait()  # no forward came since the last step: own pieces may still be on their way
        for flat in self._flat_groups:
            if flat.changed_outside():  # by unwrap_model(model).apply(...) or the like
                flat.refresh_masters()
        self._is_stepping = True
        try:
            self._run_together(self._step_shards)
        finally:
            self._is_stepping = False
        if self._window.num_backwards == 0:
            return
        for flat in self._flat_groups:
            if self._window.factors is None or not flat.rounds_in_place:
                flat.write_weights()
            # Autograd sees no write through the flat buffer, and would go on with a graph from before the step.
            torch.autograd.graph.increment_version(flat.parameters)
            flat.note_versions()
        self.gathering.start()
        if not self._settings.overlaps_gathering:
            self.gathering.wait()

    def _step_shards(self) -> None:
        if self._window.factors is None:
            self.optim.step()
            return
        flats = [flat for flat in self._flat_groups if flat.rounds_in_place]
        self._step_fused({part.shard.parameter: flat.weights_of(part) for flat in flats for part in flat.owned}, {})

    def _check_weights(self) -> None:
        for flat in self._flat_groups:
            name = flat.moved_parameter()
            if name is not None:
                raise ConfigError(
                    f"the memory of {name!r} was replaced after boost(), by model.to(), .half(), .data = or the like,"
                    " so that the optimizer's updates would not reach the model: do it before boost()"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients and ends the window; held back while `Booster.accumulate` collects micro-steps."""
        if self._holds_gradients:
            return
        super().zero_grad()
        self._reducer.reset(keeps_use=not set_to_none)

    # Parameters.

    def working_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the model's parameter for one of `param_groups`, which may hold a shard of it."""
        return self._working_of.get(id(parameter), parameter)

    def group_parameters(self, index: int) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.logical_groups[index]]

    def group_masters(self, index: int) -> list[nn.Parameter]:
        parts = [self.shards.of(parameter) for parameter in self.param_groups[index]["params"]]
        return [part.parameter for part in parts if part is not None and part.has_master]

    # What a checkpoint reads and fills.

    def checkpoint_state(self) -> ZeroOptimizerState:
        return ZeroOptimizerState(self)

    def pending_gradients(self) -> ZeroPendingGradients:
        return ZeroPendingGradients(self)

    def local_gradients(self) -> dict[str, torch.Tensor]:
        """Returns this rank's raw gradients that were not reduced yet, by name, in the parameters' shapes."""
        found = {slot.name: self._reducer.local(slot) for slot in self._reducer.slots}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        """Returns the raw gradients that were summed over the ranks already, shard by shard, as live memory.

        Args:
            allocate: Forget all gradients, and make zeros of these parameters, to be filled; None: as it is.

        Without `allocate` collective over the data-parallel ranks; with it no communication, and every rank gives the
        same names.
        """
        if allocate is None:
            self._reducer.agree_on_use()
        else:
            self._make_sums(allocate)
        return [
            (owned.shard, bucket.sums[owned.part.in_piece])
            for bucket in self._reducer.buckets
            if bucket.sums is not None
            for slot, owned in bucket.owned
            if slot.is_used
        ]

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Makes a raw gradient in the parameter's shape this rank's own, to be reduced with the others'."""
        slot = next(slot for slot in self._reducer.slots if slot.name == name)
        self._reducer.set_local(slot, gradient)

    def _make_sums(self, names: Collection[str]) -> None:
        self._reducer.reset()
        for bucket in self._reducer.buckets:
            used = [slot for slot in bucket.slots if slot.name in names]
            for slot in used:
                slot.is_used = True
            if used:
                self._reducer.zero_sums(bucket)


def _refuse_step_of_its_own(wrapper: weakref.ref[ZeroOptimizer], *_: Any) -> None:
    alive = wrapper()
    if alive is not None and not alive._is_stepping:
        raise ConfigError(
            f"step() was called on the {type(alive.optim).__name__} that went into boost(), which knows nothing of the"
            " other ranks' gradients: call step() and zero_grad() on the optimizer that boost() returned"
        )


def _gradient_of(bucket: GradientBucket, slot: Slot, owned: OwnedPart) -> torch.Tensor | None:
    if not slot.is_used:
        return None
    parameter = owned.shard.parameter
    if bucket.sums is None:  # zero_grad(set_to_none=False), and nothing since
        return torch.zeros_like(parameter, requires_grad=False)
    return bucket.sums[owned.part.in_piece].to(device=parameter.device, dtype=parameter.dtype)
