"""Accumulated gradients in checkpoints that are saved in the middle of an accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from booster.comm import any_rank, group_rank, group_size
from booster.errors import CheckpointError, ConfigError

from .accumulation import AccumulationState
from .optimizer_state import StatefulOptimizer
from .shard_spec import TensorSlice, shard_spec_of

# Note [Accumulated gradients]
# During an accumulation each rank holds a local scaled gradient g_r. The ranks of a sharding group hold shards of the
# sum R of gradients that they have reduced already; every group has its own R. The step uses a multiple of D = 1/W (sum
# g_r + sum R) over the W ranks. (Whether backward() has averaged already does not matter: then every g_r is D.) W'
# ranks that load must compute the same step:
# - Without num_items, D must be equal. Every rank gets the mean of the stored g_r, and W'/W times the sum of all R is
#   distributed evenly over the ranks that hold sums: 1/W' times (W' mean g_r + W'/W sum R) is D.
# - With num_items, the step multiplies D by W / (items of all ranks), so W D must be equal. Every rank gets 1/W' of the
#   sum of g_r and 1/W' of the sum of items, and the sum of all R is distributed evenly. Later gradients then add to the
#   same two sums, and an item has the same weight before and after the load.
# A rank without shards is a group of one, and adds its share of the R to its local gradient.
# Ranks that share a model's layers hold shards of one g_r: they count as one, the *data rank*. The gradient of an
# expert that E data ranks share is the sum of their g_r: it is stored under the first of them. A rank that loads takes
# the sum of those stored under its E' ones; if W' differs, E' times what it takes of another parameter.
# If W' = W every rank gets its own g_r, and if the groups are equal, too, its own shard of R, bit for bit. Scaled
# gradients include their loss scale: under another one they are multiplied by the quotient.


_STORED_NUM_MICROBATCHES = "num_micro_steps"  # name of the first file format


@dataclass(slots=True, kw_only=True)
class AccumulationCounters:
    """Counters of an accumulation that are stored with its gradients.

    Attributes:
        num_backwards: Number of backward() calls, as in `AccumulationState`.
        num_averaged: Number of averaged microbatches, as in `AccumulationState`.
        num_microbatches: Microbatches of `Booster.accumulate` since the last step.
        loss_scale: Loss scale of the gradients.
        num_items: This rank's sum of `num_items`, or None if backward() was called without.
        data_rank: Data rank, see Note [Accumulated gradients]; optional, defaults to the global rank.
    """

    num_backwards: int
    num_averaged: int
    num_microbatches: int
    loss_scale: float
    num_items: float | None
    data_rank: int | None = None

    def to_plain(self) -> dict[str, float | None]:
        """Return the counters as JSON values; `from_plain` reads them."""
        plain = asdict(self)
        plain[_STORED_NUM_MICROBATCHES] = plain.pop("num_microbatches")
        return plain

    @classmethod
    def from_plain(cls, plain: Any) -> AccumulationCounters:
        """Return the counters of a result of `to_plain`; raise `CheckpointError` if the values are malformed."""
        names = [field.name for field in fields(cls)]
        given = {"data_rank": None, **plain} if isinstance(plain, dict) else {}  # older files have no data_rank
        if _STORED_NUM_MICROBATCHES in given:
            given["num_microbatches"] = given.pop(_STORED_NUM_MICROBATCHES)
        optional = [name for name in ("num_items", "data_rank") if given.get(name) is None]
        if set(given) != set(names) or not all(
            type(given[name]) in (int, float) and 0 <= given[name] < math.inf for name in names if name not in optional
        ):
            raise CheckpointError(
                f"{str(plain)[:200]} are not counters of stored gradients: use another copy of the checkpoint"
            )
        return cls(**given)

    @classmethod
    def for_rank(cls, stored: Sequence[AccumulationCounters], rank: int, num_ranks: int) -> AccumulationCounters:
        """Return the counters of a rank that loads; see Note [Accumulated gradients].

        Args:
            stored: Counters of all ranks that saved.
            rank: Rank that loads.
            num_ranks: Number of ranks that load.
        """
        own = stored[rank % len(stored)]
        if num_ranks == len(stored) or own.num_items is None:
            return own
        return replace(own, num_items=sum(counts.num_items or 0.0 for counts in stored) / num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedShards:
    """Stored sums over ranks, converted for the ranks that load; see Note [Accumulated gradients].

    Attributes:
        names: Names of their parameters, equal on all ranks.
        read: Function that returns the elements of a slice of a parameter's sum, in order. It does not change the
            slice's tensor.
    """

    names: Collection[str]
    read: Callable[[TensorSlice], torch.Tensor]


NO_REDUCED_SHARDS = ReducedShards(names=(), read=lambda part: part.tensor)


class AccumulatedGradients:
    """Live view of a boosted optimizer's accumulated gradients and their counters.

    Call `synchronize` on all ranks before reading it. A plugin that shards gradients overrides `synchronize`,
    `tensors`, `reduced`, `first_rank` and `_replace`; one whose ranks compute summands of a parameter's gradient
    overrides `summand_index`, `num_summands` and `slices`.

    Args:
        optimizer: Optimizer to read and fill.
    """

    def __init__(self, optimizer: StatefulOptimizer) -> None:
        self.optimizer = optimizer

    def synchronize(self) -> None:
        """Synchronize the state of the accumulation over ranks. Collective; does nothing by default."""

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no step has used."""
        accumulation = self.optimizer.accumulation
        if accumulation.has_stepped:
            return False
        gradients = [*self.tensors().values(), *(part.tensor for part in self.reduced())]
        if accumulation.num_backwards > 0:
            return len(gradients) > 0  # none if the user cleared them directly
        # zero_grad(set_to_none=False) leaves zeros, the user's loss.backward() does not.
        return any(bool(gradient.any()) for gradient in gradients if not gradient.is_sparse)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters that the optimizer updates, by name."""
        named = self.optimizer.checkpoint_state().named_parameters()
        return {name: self.optimizer.model_parameter(parameter) for name, parameter in named.items()}

    def logical_parameters(self) -> dict[str, nn.Parameter]:
        """Return the union of `parameters` over the ranks of a model-parallel group; by default this rank's."""
        return self.parameters()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's scaled gradients by parameter name, without parameters that have none."""
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def reduced(self) -> list[TensorSlice]:
        """Return this rank's slices of scaled gradients that are summed over ranks already, by parameter name.

        The slices of the ranks with the same `first_rank` form full tensors, with each element on one of them. None by
        default.
        """
        return []

    @property
    def first_rank(self) -> int:
        """First of the ranks that share the sums in `reduced`; by default every rank is alone."""
        return group_rank()

    def summand_index(self, name: str) -> int:
        """Return the index of this rank's summand of a data rank's gradient of a parameter, from 0."""
        return 0

    def num_summands(self, name: str) -> int:
        """Return the number of summands, each on another rank, of a data rank's gradient of a parameter."""
        return 1

    @property
    def data_rank(self) -> int:
        """Data rank of this rank's gradients; see Note [Accumulated gradients]."""
        return group_rank(self.optimizer.data_parallel_group)

    @property
    def num_data_ranks(self) -> int:
        return group_size(self.optimizer.data_parallel_group)

    def data_ranks_of(self, name: str) -> Sequence[int]:
        """Return the data ranks whose samples a parameter's gradient on this rank is of; by default this rank's."""
        return (self.data_rank,)

    def slices(self) -> list[TensorSlice]:
        """Return this rank's slices of its data rank's scaled gradients, by parameter name."""
        parameters = self.parameters()
        own = self.tensors().items()
        return [part for name, one in own for part in shard_spec_of(parameters[name]).slices(name, one.contiguous())]

    def counts(self) -> AccumulationCounters:
        accumulation = self.optimizer.accumulation
        is_shown = accumulation.grad_factor != 1.0  # they are the mean already
        return AccumulationCounters(
            num_backwards=accumulation.num_backwards,
            num_averaged=1 if is_shown else accumulation.num_averaged,
            num_microbatches=self.optimizer.num_microbatches,
            loss_scale=self._loss_scale(),
            num_items=None if is_shown else accumulation.num_items,
            data_rank=self.data_rank,
        )

    def check(self) -> None:
        """Raise if the gradients cannot be stored.

        Raises:
            ConfigError: They are unscaled, averaged or clipped: a save between clip and step.
            CheckpointError: A gradient is sparse.
        """
        if self.optimizer.accumulation.is_unscaled and self.optimizer.accumulation.was_unscaled:
            raise ConfigError(
                "a save between clipping (or the gradient's norm) and optimizer.step() is not possible, as gradients"
                " are unscaled and not yet used: save after step(), or before the clipping"
            )
        sparse = [name for name, gradient in self.tensors().items() if gradient.is_sparse]
        if sparse:
            raise CheckpointError(
                f"the accumulated gradient of {sparse[0]!r} is sparse, which cannot be stored: save after step()"
            )

    @torch.no_grad()
    def fill(
        self,
        gradients: Iterable[tuple[str, torch.Tensor]],
        counts: AccumulationCounters,
        reduced: ReducedShards = NO_REDUCED_SHARDS,
    ) -> None:
        """Replace all gradients and the state of the accumulation, after the loss scaler was loaded.

        Args:
            gradients: Names of parameters with this rank's scaled gradients; the others get None.
            counts: Counters of the gradients.
            reduced: Scaled sums over ranks.
        """
        self.clear()
        factor = self._loss_scale() / counts.loss_scale
        # Without a loss scaler nothing looks for the overflow of a run that had one.
        looks_for_overflow = self.optimizer.loss_scaler is None and counts.loss_scale != 1.0
        has_overflowed = False

        def rescaled(raw: torch.Tensor) -> torch.Tensor:
            nonlocal has_overflowed
            has_overflowed = has_overflowed or (looks_for_overflow and not bool(raw.isfinite().all()))
            return raw if factor == 1.0 else raw.double() * factor

        self._replace(gradients, reduced, rescaled)
        accumulation = AccumulationState(num_backwards=counts.num_backwards, num_averaged=counts.num_averaged)
        accumulation.num_items = counts.num_items
        if looks_for_overflow:
            accumulation.found_nonfinite = any_rank([has_overflowed])[0]
        self.optimizer.restore_accumulation(accumulation, counts.num_microbatches)

    def _replace(
        self,
        gradients: Iterable[tuple[str, torch.Tensor]],
        reduced: ReducedShards,
        rescaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Set the gradients, converted by `rescaled` to the current loss scale; there must be none before."""
        parameters = self.parameters()
        for name, scaled in _add_sums(gradients, reduced, parameters):
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(rescaled(scaled))

    def clear(self) -> None:
        """Clear gradients and the state of the accumulation, as after a step."""
        self.optimizer.restore_accumulation(AccumulationState(), 0)
        self.optimizer.zero_grad()

    def _loss_scale(self) -> float:
        scaler = self.optimizer.loss_scaler
        return 1.0 if scaler is None else scaler.scale


def _add_sums(
    gradients: Iterable[tuple[str, torch.Tensor]], reduced: ReducedShards, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a rank's local gradients with its shards of the sums added."""

    def part_of(name: str) -> torch.Tensor:
        parameter = parameters[name]
        total = torch.zeros(parameter.shape, dtype=torch.float64)
        for part in shard_spec_of(parameter).slices(name, total):
            part.tensor.copy_(reduced.read(part).view(part.tensor.shape))
        return total

    left = set(reduced.names)
    for name, own in gradients:
        if name in left:
            left.remove(name)
            own = own.double() + part_of(name)  # in fp64: scaled fp16 gradients may overflow fp16
        yield name, own
    yield from ((name, part_of(name)) for name in reduced.names if name in left)
