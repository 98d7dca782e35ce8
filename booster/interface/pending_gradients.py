"""Gradients that wait for their step when a checkpoint is taken in the middle of an accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.comm import group_rank, group_size
from booster.errors import CheckpointError, ConfigError
from booster.interface.gradient_window import GradientWindow
from booster.interface.parameter_layout import layout_of
from booster.interface.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from booster.interface.optimizer import OptimizerWrapper

__all__ = ["PendingGradients", "ReducedGradients", "WindowCounts"]

# Note [Gradients of other ranks]
# Inside of a window a rank holds a raw gradient g_r that the others lack. Ranks that share shards hold together, each a
# part, the sum R of what they have reduced already; every group of them has its own R. The step uses a number times
# D = 1/W (sum g_r + sum R) over the W ranks. (It does not matter whether backward() has averaged already: then every
# g_r is D.) W' ranks that load must arrive at the same gradient of the step, so
# - without num_items what counts is D. Every rank takes the mean of the stored g_r, and W'/W times the sum of all R is
#   divided evenly among those that hold sums: 1/W' times (W' mean g_r + W'/W sum R) is D;
# - with num_items the step multiplies D by W / (items of all ranks): what counts is W D. Every rank takes 1/W' of the
#   sum of g_r and 1/W' of the sum of items, and the sum of all R is divided evenly, so that what follows adds to the
#   same two sums, and an item weighs alike before and after the load.
# A rank without shards shares with nobody: it is a group of one, and adds its part of the R to its own gradient.
# Ranks that share a model's layers hold between them the same g_r, each a part: they count as one, the *data rank*.
# Where W' = W every rank takes its own g_r, and where the groups are the same too its own part of R, bit for bit. Raw
# gradients carry the loss scale they were made with: under another one they are multiplied by the quotient.


@dataclass(slots=True, kw_only=True)
class WindowCounts:
    """The numbers of a gradient window that belong to its gradients.

    Attributes:
        num_backwards: See `GradientWindow`.
        num_averaged: See `GradientWindow`.
        num_micro_steps: Micro-steps of `Booster.accumulate` since the last step.
        loss_scale: What the losses were multiplied with.
        num_items: This rank's sum of `num_items`; None where backward() was called without.
        data_rank: Of the rank, see Note [Gradients of other ranks]; None: its rank.
    """

    num_backwards: int
    num_averaged: int
    num_micro_steps: int
    loss_scale: float
    num_items: float | None
    data_rank: int | None = None

    def to_plain(self) -> dict[str, float | None]:
        """Returns the numbers as JSON has them; `from_plain` reads them."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> WindowCounts:
        """Returns the counts of what `to_plain` gave.

        Raises:
            CheckpointError: It is something else.
        """
        names = [field.name for field in fields(cls)]
        given = {"data_rank": None, **plain} if isinstance(plain, dict) else {}  # older files have no data_rank
        optional = [name for name in ("num_items", "data_rank") if given.get(name) is None]
        if set(given) != set(names) or not all(
            type(given[name]) in (int, float) and 0 <= given[name] < math.inf for name in names if name not in optional
        ):
            raise CheckpointError(
                f"{str(plain)[:200]} are no counts of stored gradients: take another copy of the checkpoint"
            )
        return cls(**given)

    @classmethod
    def of_rank(cls, stored: Sequence[WindowCounts], rank: int, num_ranks: int) -> WindowCounts:
        """Returns what a rank goes on with; see Note [Gradients of other ranks].

        Args:
            stored: The counts of all ranks that saved.
            rank: The rank that loads.
            num_ranks: How many ranks load.
        """
        own = stored[rank % len(stored)]
        if num_ranks == len(stored) or own.num_items is None:
            return own
        return replace(own, num_items=sum(counts.num_items or 0.0 for counts in stored) / num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedGradients:
    """Stored sums over ranks, made to fit the ranks that load; see Note [Gradients of other ranks].

    Attributes:
        names: Parameters that have them, the same on all ranks.
        read: Returns the elements of a slice of a parameter's sum, in order. The slice's own tensor is not touched.
    """

    names: Collection[str]
    read: Callable[[TensorSlice], torch.Tensor]


NOTHING_REDUCED = ReducedGradients(names=(), read=lambda part: part.tensor)


class PendingGradients:
    """A live view of the gradients that wait for a boosted optimizer's step, and of what is known about them.

    Call `synchronize` on all ranks before looking at them. A plugin that shards gradients overrides `synchronize`,
    `tensors`, `reduced`, `first_rank` and `_replace`; one whose ranks use a parameter in turns `share_of`, `num_shares`
    and `slices`.

    Args:
        optimizer: The optimizer to read and fill.
    """

    def __init__(self, optimizer: OptimizerWrapper) -> None:
        self.optimizer = optimizer

    def synchronize(self) -> None:
        """Brings together what single ranks know of the window. Collective; here nothing."""

    @property
    def is_waiting(self) -> bool:
        """True where gradients are there that no step has used."""
        window = self.optimizer.window
        if window.has_stepped:
            return False
        gradients = [*self.tensors().values(), *(part.tensor for part in self.reduced())]
        if window.num_backwards > 0:
            return len(gradients) > 0  # none: the user cleared them by hand
        # zero_grad(set_to_none=False) leaves zeros, a loss.backward() of the user's own does not.
        return any(bool(gradient.any()) for gradient in gradients if not gradient.is_sparse)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the model's parameters that the optimizer updates, by name: those that can hold a gradient."""
        named = self.optimizer.checkpoint_state().named_parameters()
        return {name: self.optimizer.working_parameter(parameter) for name, parameter in named.items()}

    def logical_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the same for all ranks that hold the model between them: `parameters` of each, here this one's."""
        return self.parameters()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns this rank's raw gradients by parameter name; parameters without one are left out."""
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def reduced(self) -> list[TensorSlice]:
        """Returns what this rank holds of raw gradients that are summed over ranks already, by parameter name.

        The slices of the ranks with the same `first_rank` make up whole tensors, each element on one of them. Here
        there are none.
        """
        return []

    @property
    def first_rank(self) -> int:
        """The first of the ranks that share the sums in `reduced`; here every rank is alone."""
        return group_rank()

    def share_of(self, name: str) -> int:
        """Returns which summand of a data rank's gradient of a parameter this rank has, from 0."""
        return 0

    def num_shares(self, name: str) -> int:
        """Returns of how many summands, each on another rank, a data rank's gradient of a parameter is made."""
        return 1

    @property
    def data_rank(self) -> int:
        """Which of the parts of the data this rank's gradients are of; see Note [Gradients of other ranks]."""
        return group_rank(self.optimizer.data_parallel_group)

    @property
    def num_data_ranks(self) -> int:
        """In how many parts the data are divided."""
        return group_size(self.optimizer.data_parallel_group)

    def slices(self) -> list[TensorSlice]:
        """Returns what this rank holds of its data rank's raw gradients, by parameter name."""
        parameters = self.parameters()
        own = self.tensors().items()
        return [part for name, one in own for part in layout_of(parameters[name]).slices(name, one.contiguous())]

    def counts(self) -> WindowCounts:
        """Returns the numbers that belong to the gradients."""
        window = self.optimizer.window
        is_shown = window.shown_factor != 1.0  # then they are the mean already
        return WindowCounts(
            num_backwards=window.num_backwards,
            num_averaged=1 if is_shown else window.num_averaged,
            num_micro_steps=self.optimizer.num_micro_steps,
            loss_scale=self._loss_scale(),
            num_items=None if is_shown else window.num_items,
            data_rank=self.data_rank,
        )

    def check(self) -> None:
        """Raises if the gradients can't be stored.

        Raises:
            ConfigError: They were unscaled, averaged or clipped already: a save between clip and step.
            CheckpointError: One of them is sparse.
        """
        if self.optimizer.window.is_final and self.optimizer.window.was_multiplied:
            raise ConfigError(
                "a checkpoint was asked for between clipping (or the gradient's norm) and optimizer.step(), where"
                " gradients are neither raw nor used: save after step(), or before the clipping"
            )
        sparse = [name for name, gradient in self.tensors().items() if gradient.is_sparse]
        if sparse:
            raise CheckpointError(
                f"the gradient of {sparse[0]!r} waits for its step and is sparse, without a place in a checkpoint: save"
                " after step()"
            )

    @torch.no_grad()
    def fill(
        self,
        gradients: Iterable[tuple[str, torch.Tensor]],
        counts: WindowCounts,
        reduced: ReducedGradients = NOTHING_REDUCED,
    ) -> None:
        """Replaces all gradients and the window; call it after the loss scaler got its state.

        Args:
            gradients: Names of parameters with this rank's raw gradients; the others get None.
            counts: The numbers that belong to them.
            reduced: Raw sums over ranks.
        """
        self.clear()
        factor = self._loss_scale() / counts.loss_scale
        self._replace(gradients, reduced, lambda raw: raw if factor == 1.0 else raw.double() * factor)
        window = GradientWindow(num_backwards=counts.num_backwards, num_averaged=counts.num_averaged)
        window.num_items = counts.num_items
        self.optimizer.restore_window(window, counts.num_micro_steps)

    def _replace(
        self,
        gradients: Iterable[tuple[str, torch.Tensor]],
        reduced: ReducedGradients,
        rescaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Fills the gradients, of which there are none, after `rescaled` brought them under this loss scale."""
        parameters = self.parameters()
        for name, raw in _with_sums(gradients, reduced, parameters):
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(rescaled(raw))

    def clear(self) -> None:
        """Forgets gradients and window, as after a step."""
        self.optimizer.restore_window(GradientWindow(), 0)
        self.optimizer.zero_grad()

    def _loss_scale(self) -> float:
        scaler = self.optimizer.loss_scaler
        return 1.0 if scaler is None else scaler.scale


def _with_sums(
    gradients: Iterable[tuple[str, torch.Tensor]], reduced: ReducedGradients, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a rank's own gradients with its part of the sums added."""

    def part_of(name: str) -> torch.Tensor:
        parameter = parameters[name]
        total = torch.zeros(parameter.shape, dtype=torch.float64)
        for part in layout_of(parameter).slices(name, total):
            part.tensor.copy_(reduced.read(part).view(part.tensor.shape))
        return total

    left = set(reduced.names)
    for name, own in gradients:
        if name in left:
            left.remove(name)
            own = own.double() + part_of(name)  # in fp64: scaled fp16 gradients may overflow their own format
        yield name, own
    yield from ((name, part_of(name)) for name in reduced.names if name in left)
