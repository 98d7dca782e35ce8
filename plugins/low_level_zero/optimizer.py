"""The optimizer side: the user's own optimizer updates this rank's shards, and the weights are spread afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from booster.comm import group_size
from booster.errors import ConfigError
from booster.interface import LossScaler, Shard, Shards, shard_spec_of
from booster.plugins.sharding.optimizer import ShardedOptimizer
from booster.plugins.sharding.shard_states import shard_state

from .config import ZeroSettings
from .flat_params import FlatGroup, OwnedPart
from .grad_bucket import GradientBucket, Slot
from .model import ZeroModel
from .param_all_gather import WeightGathering
from .reducer import GradientReducer


class ZeroOptimizer(ShardedOptimizer):
    """An optimizer whose states, and in stage 2 gradients, are divided among the data-parallel ranks.

    `param_groups` hold this rank's shards in place of the parameters (and frozen parameters, whole); everything else in
    a group is the user's own, live. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020.

    Args:
        optim: The user's optimizer, elementwise or `ShardAware`.
        model: The boosted model.
        settings: Sharding settings.
        loss_scaler: Of half precision; None: losses are not scaled.
        is_primary: True on the rank that writes what all ranks hold alike.
    """

    model: ZeroModel

    def __init__(
        self,
        optim: Optimizer,
        model: ZeroModel,
        settings: ZeroSettings,
        *,
        loss_scaler: LossScaler | None = None,
        is_primary: bool = True,
    ) -> None:
        super().__init__(
            optim,
            model,
            data_parallel_group=settings.data_parallel_group,
            shard_group=settings.shard_group,
            counting_group=settings.counting_group,
            max_norm=settings.max_norm,
            norm_type=settings.norm_type,
            loss_scaler=loss_scaler,
            is_primary=is_primary,
        )
        self._settings = settings
        self._synchronizes = True
        self._flat_groups: list[FlatGroup] = []
        for index in range(len(optim.param_groups)):
            self._note_group(index)
            self._shard_group(index)
        self._connect()

    # Sharding.

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
                own = [one.shard for one in flat.owned if one.shard.model_param is parameter]
                shard_state(self.optim, parameter, own)
            shards += [one.shard.parameter for one in flat.owned]
            self._working_of |= {id(one.shard.parameter): one.shard.model_param for one in flat.owned}
        sharded = {id(parameter) for parameter in new}
        # In place: optimizers may keep the list itself.
        group["params"][:] = [one for one in group["params"] if id(one) not in sharded] + shards

    def _connect(self) -> None:
        """Make what knows all flat groups: reducer, gathering, and the shards that an optimizer may ask about."""
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
        shapes = {name: shard_spec_of(parameter).logical_shape for name, parameter in self._sharded_parameters()}
        self._use_shards(Shards(parts, list(shapes), self._counting_group, shapes=shapes))

    def _sharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what the ranks of the counting group have shards of between them, the same on all of them."""
        for flat in self._flat_groups:
            yield from zip(flat.names, flat.parameters, strict=True)

    def _model_order(self) -> list[nn.Parameter]:
        return list(self.model.unwrap().parameters())

    def _weight_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        casts = self._settings.dtype is not None and parameter.is_floating_point()
        return self._settings.dtype if casts and self._settings.dtype is not None else parameter.dtype

    def _refresh_masters(self) -> None:
        for flat in self._flat_groups:
            flat.refresh_masters()

    def _reshard(self, indices: Sequence[int]) -> None:
        self.gathering.wait()
        self._reducer.close()
        for index in indices:
            self._shard_group(index)
        self._connect()

    # Backward.

    def _backward_context(self) -> AbstractContextManager[None]:
        return self._reducer.collecting(synchronizes=self._synchronizes)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on this rank alone (stage 1); stage 2 reduces all the same, as it keeps no others."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    # Gradients.

    def _reduce_gradients(self) -> float:
        self._known_norm = None
        self._reducer.finish()
        for bucket in self._reducer.buckets:
            for slot, owned in bucket.owned:
                owned.shard.parameter.grad = _gradient_of(bucket, slot, owned)
        return 1.0 / group_size(self.data_parallel_group)

    def _has_gradients(self) -> bool:
        return self._reducer.has_gradients

    # Step.

    def _fetch_weights(self) -> None:
        self.gathering.wait()  # no forward came since the last step: own pieces may still be on their way
        for flat in self._flat_groups:
            if flat.changed_outside():  # by unwrap_model(model).apply(...) or the like
                flat.refresh_masters()

    def _update_parameters(self) -> None:
        self._fetch_weights()
        self._is_stepping = True
        try:
            self._run_on_all_ranks(self._step_shards)
        finally:
            self._is_stepping = False
        if self._accumulation.num_backwards == 0:
            return
        self._restore_memory()
        self._publish(are_rounded=self._accumulation.factors is not None)

    def _shard_memory(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for flat in self._flat_groups:
            yield from ((one.shard.parameter, flat.memory_of(one.part)) for one in flat.owned)

    def _publish_weights(self) -> None:
        self._publish(are_rounded=False)

    def _publish(self, *, are_rounded: bool) -> None:
        """Distribute the weights, of which the optimizer may have rounded those beside their masters itself."""
        for flat in self._flat_groups:
            if not (are_rounded and flat.rounds_in_place):
                flat.write_weights()
            # Autograd sees no write through the flat buffer, and would go on with a graph from before the step.
            torch.autograd.graph.increment_version(flat.parameters)
            flat.note_versions()
        self.gathering.start()
        if not self._settings.overlaps_gathering:
            self.gathering.wait()

    def _step_shards(self) -> None:
        if self._accumulation.factors is None:
            self._step_parts()
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
        """Clear the gradients and end the window; held back while `Booster.accumulate` collects micro-steps."""
        if self._is_accumulating:
            return
        super().zero_grad()
        self._reducer.reset(keeps_use=not set_to_none)

    # Parameters.

    # What a checkpoint reads and fills.

    def local_gradients(self) -> dict[str, torch.Tensor]:
        """Return this rank's raw gradients that were not reduced yet, by name, in the parameters' shapes."""
        found = {slot.name: self._reducer.local(slot) for slot in self._reducer.slots}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]:
        """Return the raw gradients that were summed over the ranks already, shard by shard, as live memory.

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
        """Make a raw gradient in the parameter's shape this rank's own, to be reduced with the others'."""
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


def _gradient_of(bucket: GradientBucket, slot: Slot, owned: OwnedPart) -> torch.Tensor | None:
    if not slot.is_used:
        return None
    parameter = owned.shard.parameter
    if bucket.sums is None:  # zero_grad(set_to_none=False), and nothing since
        return torch.zeros_like(parameter, requires_grad=False)
    return bucket.sums[owned.part.in_piece].to(device=parameter.device, dtype=parameter.dtype)
