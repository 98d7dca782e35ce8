"""What a checkpoint reads and fills of a sharded optimizer: states and gradients by the whole parameters' names."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.comm import all_gather_bytes, global_rank_of, raise_on_all_ranks
from booster.errors import CheckpointError
from booster.interface import AccumulatedGradients, OptimizerState, ReducedShards, Shard, TensorSlice, TensorSpec

if TYPE_CHECKING:
    from booster.plugins.sharding.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizerState", "ShardedPendingGradients"]

# Note [States of shards]
# A state of the shard's own shape holds one value per element and is a span of the logical state. Every other state
# ("step", and what `ShardAware` optimizers know of a whole parameter) each shard has in full, the same on all ranks,
# and the shard with the parameter's first element writes it.
# A stored state is cut if it has its parameter's shape. For a parameter without dimensions that says nothing: what is a
# single number for another parameter is one here too, else the names of torch's own optimizers decide.
_NUMBER_STATES = frozenset({"step", "eta", "mu", "mu_product"})


class ShardedOptimizerState(OptimizerState):
    """The view of an optimizer whose parameters are cut into shards; frozen ones it has whole, as any other.

    Args:
        optimizer: The optimizer to read and fill.
    """

    optimizer: ShardedOptimizer

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__(optimizer)
        self._shards = _shards_by_name(optimizer)
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
                if tensor.shape == shard.parameter.shape:
                    yield from shard.slices(f"{name}.{key}", tensor)
                else:
                    is_first = shard.shard_spec.holds_first(shard.span)
                    yield TensorSlice.whole(f"{name}.{key}", tensor, primary=shard.is_primary and is_first)

    def _master_slices(self, name: str, parameter: nn.Parameter) -> Iterator[TensorSlice]:
        if name not in self._shards:
            yield from super()._master_slices(name, parameter)
        for shard in self._shards.get(name, ()):
            if shard.has_master:
                yield from shard.slices(f"{name}.master", shard.parameter.detach())

    def _all_numbers(self) -> dict[str, dict[str, Any]]:
        own: dict[str, dict[str, Any]] = {}
        failure: CheckpointError | None = None
        try:
            own = self._own_numbers()
        except CheckpointError as error:  # raised by all ranks below
            failure = error
        raise_on_all_ranks(failure)
        payloads, _ = all_gather_bytes(json.dumps(own).encode(), None)
        found: dict[str, dict[str, Any]] = {}
        for payload in payloads:
            found = json.loads(payload) | found  # the first rank's count, where several have shards of a parameter
        return {name: found[name] for name in self.named_parameters() if name in found}

    def _own_numbers(self) -> dict[str, dict[str, Any]]:
        named = self.named_parameters().items()
        held = ((name, one) for name, parameter in named for one in self._held(name, parameter)[:1])
        return {name: numbers for name, one in held if (numbers := self._numbers(name, one))}

    def _own_spec(self, parameter: nn.Parameter, key: str, spec: TensorSpec) -> TensorSpec:
        """Returns what one of `param_groups` has of a stored state; see Note [States of shards]."""
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
    """The view of gradients of which some are a rank's own, whole, and others sums over the ranks, cut into shards.

    Args:
        optimizer: The optimizer to read and fill.
    """

    optimizer: ShardedOptimizer

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__(optimizer)
        self._reduced: list[TensorSlice] | None = None

    def synchronize(self) -> None:
        shards = self.optimizer.shards
        found = self.optimizer.reduced_gradients()
        mine = {shard.name: str(sums.dtype).removeprefix("torch.") for shard, sums in found}
        payloads, _ = all_gather_bytes(json.dumps(mine).encode(), shards.group)
        dtypes = {name: getattr(torch, dtype) for one in payloads for name, dtype in json.loads(one).items()}
        # A parameter may lie in several buckets, of which only some were reduced: in the others its sum is zero.
        held = {(shard.name, shard.span) for shard, _ in found}
        missing = [
            one for one in self.optimizer.gradient_shards if one.name in dtypes and (one.name, one.span) not in held
        ]
        found += [(one, torch.zeros_like(one.parameter, dtype=dtypes[one.name])) for one in missing]
        self._reduced = [part for shard, sums in found for part in _replica_slices(shard, sums)]

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
        if reduced.names:  # first, as it forgets all gradients
            for shard, sums in self.optimizer.reduced_gradients(allocate=reduced.names):
                for part in shard.slices(shard.name, sums) if shard.name in reduced.names else ():
                    part.tensor.copy_(rescaled(reduced.read(part)).view(part.tensor.shape))
        for name, raw in gradients:
            self.optimizer.set_local_gradient(name, rescaled(raw))


def _shards_by_name(optimizer: ShardedOptimizer) -> dict[str, list[Shard]]:
    """Returns this rank's shards of every sharded parameter, of some parameters none."""
    found: dict[str, list[Shard]] = {name: [] for name in optimizer.shards.names}
    for shard in optimizer.shards.parts:
        found[shard.name].append(shard)
    return {name: sorted(shards, key=lambda shard: shard.span) for name, shards in found.items()}


def _replica_slices(shard: Shard, sums: torch.Tensor) -> list[TensorSlice]:
    """Returns sums over the ranks of one replica as slices, of which every replica has its own."""
    return shard.shard_spec.slices(shard.name, sums, span=shard.span)


def _number_states(specs: Mapping[str, TensorSpec], shapes: Mapping[str, Collection[int]]) -> frozenset[str]:
    """Returns the keys of stored states that are one number per parameter; see Note [States of shards]."""
    numbers: set[str] = set()
    others: set[str] = set()
    for full_name, spec in specs.items():
        name, key = full_name.rsplit(".", 1)
        if shapes[name]:
            (others if spec.shape else numbers).add(key)
    return frozenset(numbers | (_NUMBER_STATES - others))
