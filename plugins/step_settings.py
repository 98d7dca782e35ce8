"""What ranks that average gradients must have in common in a step, and how they compare it."""

from __future__ import annotations

import json
import math
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from booster.comm import all_gather_bytes
from booster.errors import DesyncError

_NOT_CLIPPED = 0


@dataclass(slots=True)
class Hyperparameters:
    """Numbers in an optimizer's param groups, such as learning rates.

    Attributes:
        names: Name of each number of a group, of which a tuple such as betas has several.
        numbers: Numbers of all groups, one group after the other.
    """

    names: Sequence[str] = ()
    numbers: array[float] = field(default_factory=lambda: array("d"))

    @classmethod
    def of(cls, optim: Optimizer) -> Hyperparameters:
        """Return those that have a number or a tuple as default."""
        defaults = [(name, value) for name, value in optim.defaults.items() if type(value) in (float, int, tuple)]
        names = [name for name, value in defaults for _ in range(len(value) if type(value) is tuple else 1)]
        numbers: list[Any] = []
        for group in optim.param_groups:
            for name, default in defaults:
                value = group.get(name)
                if type(default) is tuple:
                    numbers.extend(value or default)
                else:
                    numbers.append(value)
        try:
            return cls(names, array("d", numbers))
        except TypeError:  # not all of them are numbers
            return cls(names, array("d", map(_float_of, numbers)))


def _float_of(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        # Not from an accelerator, which the host would wait for in each step.
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


@dataclass(slots=True)
class StepSettings:
    """What must be equal on all ranks where they average gradients; see `any_rank_or_different`.

    Attributes:
        num_steps: Number of steps of the model's optimizer.
        has_num_items: Whether backward() was given num_items.
        num_averaged: Number of microbatches that the gradient is divided by; 0 with num_items.
        clipping: Checksum of the limits that gradients were clipped to since the last comparison; 0 if to none.
        limit: The last of them.
        hyperparameters: Those of the step.
    """

    num_steps: int = 0
    has_num_items: bool = False
    num_averaged: int = 1
    clipping: int = _NOT_CLIPPED
    limit: float = math.inf
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)

    def note_clipping(self, limit: float) -> None:
        """Note the norm or value that gradients are clipped to. That of infinity computes the norm alone."""
        if float(limit) < math.inf:
            self.clipping, self.limit = zlib.crc32(struct.pack("<d", limit), self.clipping), float(limit)

    def note_items(self, num_items: float | None, num_averaged: int) -> None:
        """Note what the gradients are divided by; a sum of any number of microbatches by the items of all ranks."""
        self.has_num_items = num_items is not None
        self.num_averaged = 0 if self.has_num_items else max(1, num_averaged)

    def bytes(self) -> tuple[int, ...]:
        """Return what the ranks compare, as numbers from 0 to 255."""
        numbers = zlib.crc32(self.hyperparameters.numbers)
        counts = self.num_steps & 255, self.has_num_items, self.num_averaged & 255
        return (*counts, self.clipping & 255, self.clipping >> 8 & 255, numbers & 255, numbers >> 8 & 255)

    def forget_clipping(self) -> None:
        """Begin again, as the ranks have compared."""
        self.clipping, self.limit = _NOT_CLIPPED, math.inf

    def error(self, group: dist.ProcessGroup | None) -> DesyncError:
        """Return the error of what differs. Collective over the ranks that compared."""
        *own, (names, numbers) = astuple(self)
        payloads, index_of_rank = all_gather_bytes(json.dumps([*own, list(numbers)]).encode(), group)
        ranks = [json.loads(payloads[index]) for index in index_of_rank]
        steps, items, averaged, clipping, limits, rows = zip(*ranks, strict=True)
        if len(set(steps)) > 1:
            return DesyncError(
                f"the ranks average gradients of different steps: {_of_ranks('after step {}', steps)}. A rank has left"
                " out a backward() before its step, as of a batch that it skipped: call backward() equally often on"
                " every rank, for a batch without a loss with model(inputs).sum() * 0, or leave out optimizer.step() on"
                " all ranks"
            )
        if len(set(items)) > 1:
            given = ["gave num_items" if one else "did not give num_items" for one in items]
            return DesyncError(
                f"some ranks sum their losses, and others average: {_of_ranks('{}', given)}. Give num_items to"
                " backward() on every rank or on none, 0 for a batch without any"
            )
        if len(set(averaged)) > 1:
            return DesyncError(
                f"the ranks average different numbers of microbatches: {_of_ranks('averages {}', averaged)}. Call"
                " accumulate() with the same steps on every rank, and backward() in each microbatch, or give num_items"
                " to backward(), which divides by the items of all microbatches"
            )
        if len(set(clipping)) > 1:
            to = [f"to {limit:g}" if one else "not at all" for one, limit in zip(clipping, limits, strict=True)]
            return DesyncError(
                f"the ranks clip gradients differently, after step {self.num_steps}: {_of_ranks('{}', to)}. Clip on"
                " every rank, to the same limit. If a step was made with them, the ranks' weights differ: begin again"
                " from a checkpoint from before"
            )
        return _hyperparameters_error(names, rows, self.num_steps)


def _hyperparameters_error(names: Sequence[str], rows: Sequence[Sequence[float]], num_steps: int) -> DesyncError:
    columns = list(zip(*rows, strict=False))
    place = next((index for index, one in enumerate(columns) if len(set(one)) > 1), None)
    where = "in their param groups"
    if place is not None:
        index, name = divmod(place, len(names))
        where = f"of {names[name]!r} in param_groups[{index}]: {_of_ranks('{:g}', columns[place])}"
    return DesyncError(
        f"the ranks have other values, after step {num_steps}, {where}. Probably a scheduler is stepped with each"
        " rank's own metric, as ReduceLROnPlateau with a local loss: give it that of all ranks, as in"
        " scheduler.step(booster.gather_for_metrics(loss.detach().reshape(1)).mean()). If a step was made with them,"
        " the ranks' weights differ: begin again from a checkpoint from before"
    )


def _of_ranks(description: str, values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank} {description.format(one)}" for rank, one in enumerate(values))
