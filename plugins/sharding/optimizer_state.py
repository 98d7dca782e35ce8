"""Checkpoint views of an optimizer with sharded parameters: its state, and its accumulated gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from booster.comm import all_gather_bytes, global_rank_of, raise_on_all_ranks
from booster.core.optimizer_state import StatefulOptimizer
from booster.interface import (
    AccumulatedGradients,
    OptimizerState,
    ReducedShards,
    Shard,
    Shards,
    TensorSlice,
    TensorSpec,
)


class ShardedStatefulOptimizer(StatefulOptimizer, Protocol):
    """What the views use of `ShardedOptimizer`, which creates them and therefore imports them."""

    shards: Shards
    logical_groups: list[list[tuple[str, nn.Parameter]]]

    @property
    def gradient_shards(self) -> Sequence[Shard]: ...

    def follow_weights(self, shard: Shard) -> None: ...

    def local_gradients(self) -> dict[str, torch.Tensor]: ...

    def reduced_gradients(self, allocate: Collection[str] | None = None) -> list[tuple[Shard, torch.Tensor]]: ...

    def set_local_gradient(self, name: str, gradient: torch.Tensor) -> None: ...


# Note [Optimizer states of shards]
# A state with the shard's shape is elementwise, a range of the full state. Every other state ("step", and states that
# `ShardAware` optimizers keep per parameter) is replicated on all shards, and the shard with the parameter's first
# element saves it.
# A saved state is sharded if it has its parameter's shape. This is ambiguous for 0-dim parameters: a state that is one
# number for other parameters is a number here too; otherwise the names used by torch's optimizers decide.
_NUMBER_STATES = frozenset({"step", "eta", "mu", "mu_product"})


class ShardedOptimizerState(OptimizerState):
    """Checkpoint view of an optimizer with sharded parameters; frozen parameters are unsharded."""

    optimizer: ShardedStatefulOptimizer

    def __init__(self, optimizer: ShardedStatefulOptimizer) -> None:
        super().__init__(optimizer)
        # This rank's shards of every sharded parameter, possibly none.
        self._shards: dict[str, list[Shard]] = {name: [] for name in optimizer.shards.names}
        for shard in sorted(optimizer.shards.parts, key=lambda shard: shard.span):
            self._shards[shard.name].append(shard)
        self._number_states: Collection[str] = _NUMBER_STATES

    def allocate(self, specs: Mapping[str, TensorSpec], values: Mapping[str, Any]) -> list[TensorSlice]:
        self._number_states = _number_states(specs, values["shapes"])
        return super().allocate(specs, values)

    def _groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        return self.optimizer.logical_groups

    def _held(self, name: str, parameter: nn.Parameter) -> list[nn.Parameter]:
        if name in self._shards:
            return [shard.parameter for shard in self._shards[name]]
        return super()._held(name, parameter)

    def _state_slices(self, name: str, parameter: nn.Parameter) -> Iterator[TensorSlice]:
        if name not in self._shards:
            yield from super()._state_slices(name, parameter)
        for shard in self._shards.get(name, ()):
            for key, tensor in self._state_tensors(shard.parameter):
                if self._is_elementwise(key, tensor, shard.parameter.shape, shard.global_shape):
                    yield from shard.slices(f"{name}.{key}", tensor)
                else:
                    is_first = shard.shard_spec.holds_first(shard.span)
                    yield TensorSlice.full(f"{name}.{key}", tensor, primary=shard.is_primary and is_first)

    def _master_slices(self, name: str, parameter: nn.Parameter) -> Iterator[TensorSlice]:
        if name not in self._shards:
            yield from super()._master_slices(name, parameter)
        for shard in self._shards.get(name, ()):
            if shard.has_master:
                yield from shard.slices(f"{name}.master", shard.parameter.detach())

    def _all_numbers(self) -> dict[str, dict[str, Any]]:
        own: dict[str, dict[str, Any]] = {}
        failure: Exception | None = None
        try:
            for name, parameter in self.named_parameters().items():
                for held in self._held(name, parameter)[:1]:
                    if numbers := self._numbers(name, held):
                        own[name] = numbers
        except Exception as error:  # raised on all ranks below
            failure = error
        raise_on_all_ranks(failure)
        payloads, _ = all_gather_bytes(json.dumps(own).encode(), None)
        found: dict[str, dict[str, Any]] = {}
        for payload in payloads:
            found = json.loads(payload) | found  # if several ranks have shards of a parameter, the first rank's numbers
        return {name: found[name] for name in self.named_parameters() if name in found}

    def _own_spec(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a saved state for a parameter of `param_groups`; see Note [Optimizer states of shards]."""
        shard = self.optimizer.shards.shard_of(parameter)
        if shard is None:
            return super()._own_spec(parameter, key, spec)
        is_cut = spec.shape == tuple(shard.global_shape)
        if is_cut and (spec.shape or key not in self._number_states):
            return replace(spec, shape=tuple(parameter.shape))
        return spec

    @torch.no_grad()
    def _refresh_masters(self, stored: Collection[str]) -> None:
        for name, shards in self._shards.items():
            for shard in shards if f"{name}.master" not in stored else ():
                if shard.has_master:
                    self.optimizer.follow_weights(shard)


class ShardedPendingGradients(AccumulatedGradients):
    """Checkpoint view of accumulated gradients: local unsharded ones, and reduced ones that are sharded."""

    optimizer: ShardedStatefulOptimizer

    def __init__(self, optimizer: ShardedStatefulOptimizer) -> None:
        super().__init__(optimizer)
        self._reduced: list[TensorSlice] | None = None

    def synchronize(self) -> None:
        shards = self.optimizer.shards
        found = self.optimizer.reduced_gradients()
        mine = {shard.name: str(sums.dtype).removeprefix("torch.") for shard, sums in found}
        payloads, _ = all_gather_bytes(json.dumps(mine).encode(), shards.group)
        dtypes = {name: getattr(torch, dtype) for one in payloads for name, dtype in json.loads(one).items()}
        # Only some of a parameter's buckets may be reduced: its sum in the others is zero.
        held = {(shard.name, shard.span) for shard, _ in found}
        missing = [
            one for one in self.optimizer.gradient_shards if one.name in dtypes and (one.name, one.span) not in held
        ]
        found += [(one, torch.zeros_like(one.parameter, dtype=dtypes[one.name])) for one in missing]
        # Every replica has its own, so `Shard.slices`, which is for data that the replicas share, is not used.
        self._reduced = [
            part for shard, sums in found for part in shard.shard_spec.slices(shard.name, sums, span=shard.span)
        ]

    def parameters(self) -> dict[str, nn.Parameter]:
        names = set(self.optimizer.shards.names)
        return {name: one for group in self.optimizer.logical_groups for name, one in group if name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.optimizer.local_gradients()

    def reduced(self) -> list[TensorSlice]:
        assert self._reduced is not None, "synchronize() comes first"
        return self._reduced

    @property
    def first_rank(self) -> int:
        return global_rank_of(0, self.optimizer.shards.group)

    def _replace(
        self,
        gradients: Iterable[tuple[str, torch.Tensor]],
        reduced: ReducedShards,
        rescaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._reduced = None
        if reduced.names:  # first, because it drops all gradients
            for shard, sums in self.optimizer.reduced_gradients(allocate=reduced.names):
                for part in shard.slices(shard.name, sums) if shard.name in reduced.names else ():
                    part.tensor.copy_(rescaled(reduced.read(part)).view(part.tensor.shape))
        for name, raw in gradients:
            self.optimizer.set_local_gradient(name, rescaled(raw))


def _number_states(specs: Mapping[str, TensorSpec], shapes: Mapping[str, Collection[int]]) -> frozenset[str]:
    """Return the keys of saved states that are one number per parameter; see Note [Optimizer states of shards]."""
    numbers: set[str] = set()
    others: set[str] = set()
    for full_name, spec in specs.items():
        name, key = full_name.rsplit(".", 1)
        if shapes[name]:
            (others if spec.shape else numbers).add(key)
    return frozenset(numbers | (_NUMBER_STATES - others))
