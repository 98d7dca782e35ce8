"""Accumulated gradients in checkpoints: each rank's own ones, and shards of those already reduced over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from booster.checkpoint_io.layout import GRADIENTS
from booster.checkpoint_io.loading.loader import Loader
from booster.checkpoint_io.loading.range_reader import read_slices
from booster.checkpoint_io.loading.reader import Checkpoint
from booster.checkpoint_io.saving.component import Component
from booster.errors import CheckpointError
from booster.interface import OptimizerWrapper, PendingGradients, ReducedGradients, TensorSlice, WindowCounts, layout_of

__all__ = ["GradientsLoad", "gradients_component"]

# Note [Names of stored gradients]
# `rank<r>.<parameter>` is the local gradient of data rank r. `reduced<r>.<parameter>` is the gradient already reduced
# over a sharding group, whose first rank is r. For their use in the step, and for loads with another number of ranks,
# see Note [Gradients of other ranks].
# If several pipeline stages use a parameter, each has a partial gradient, and `rank<r>share<s>.<parameter>` is that of
# the s-th stage after the first. They are not summed for the save, because rounding would change. A load with the same
# number of stages assigns them one to one; with fewer stages, each stage sums some of them.
_NAME = re.compile(r"(rank|reduced)(\d+)(?:share(\d{1,6}))?\.(.+)", re.DOTALL)


def gradients_component(pending: PendingGradients, *, folder: str, max_shard_bytes: int) -> Component:
    """Build the checkpoint part of this rank's accumulated gradients of an optimizer.

    Raises:
        ConfigError: The gradients are already unscaled, averaged or clipped.
        CheckpointError: A gradient is sparse.
    """
    pending.check()
    own = [replace(part, name=_own_name(pending, part.name)) for part in pending.slices()]
    sums = [replace(part, name=f"reduced{pending.first_rank}.{part.name}") for part in pending.reduced()]
    return Component(
        kind=GRADIENTS,
        names=GRADIENTS.names(is_safetensors=True),
        slices=[*own, *sums],
        max_shard_bytes=max_shard_bytes,
        is_sharded=True,
        folder=folder,
    )


def _own_name(pending: PendingGradients, name: str) -> str:
    share = pending.share_of(name)
    return f"rank{pending.data_rank}{f'share{share}' if share else ''}.{name}"


class GradientsLoad:
    """Load of accumulated gradients; see Note [Gradients of other ranks].

    Args:
        loader: Loader that opens the files.
        optimizer: Boosted optimizer, whose state is loaded before.
        directory: Directory of the gradients.
        counts: Accumulation counters of every stored rank, as returned by `WindowCounts.to_plain`.
    """

    def __init__(self, loader: Loader, optimizer: OptimizerWrapper, directory: Path, counts: Sequence[object]) -> None:
        self._loader = loader
        self._optimizer = optimizer
        self._directory = directory
        self._plain_counts = counts

    def check(self) -> None:
        """Open, compare and verify. Collective.

        Raises:
            CheckpointError: Gradients of other parameters or shapes, or damaged files.
        """
        self._stored = stored = self._loader.open(self._directory, GRADIENTS)
        self._loader.ranks.agree(self._compare, self._doing)
        self._first_ranks = self._loader.names_of_all_ranks({self._first_rank})
        self._loader.verify(stored)

    def fill(self) -> None:
        """Replace this rank's gradients. Collective."""

        def fill() -> None:
            reduced = ReducedGradients(names=list(self._sums), read=self._read_sum)
            self._pending.fill(self._own_gradients(), self._own_counts(), reduced)

        self._loader.ranks.agree(fill, self._doing)

    def _compare(self) -> None:
        self._pending: PendingGradients = self._optimizer.pending_gradients()
        self._counts = _of_data_ranks([WindowCounts.from_plain(plain) for plain in self._plain_counts])
        parameters = self._pending.logical_parameters()
        self._parameters = self._pending.parameters()
        self._owns: dict[str, list[str]] = {}  # names of the stored tensors, by parameter
        self._sums: dict[str, dict[str, str]] = {}  # likewise, by parameter and first rank
        for full_name, spec in self._stored.specs.items():
            match = _NAME.fullmatch(full_name)
            if match is None:
                raise CheckpointError(
                    f"{self._directory} holds a tensor {full_name!r:.200} among its gradients that is not a gradient:"
                    " take another copy of the checkpoint"
                )
            kind, rank, share, name = match.groups()
            if name not in parameters or layout_of(parameters[name]).logical_shape != spec.shape:
                raise CheckpointError(
                    f"{self._directory} holds a gradient of {name!r} with shape {spec.shape}, but this optimizer has no"
                    " such parameter, so nothing was loaded: build it over the model that was saved"
                )
            if name not in self._parameters:
                continue
            if kind == "reduced":
                self._sums.setdefault(name, {})[rank] = full_name
            elif int(share or 0) % self._pending.num_shares(name) != self._pending.share_of(name):
                continue
            elif not self._is_same_world or rank == str(self._pending.data_rank):
                self._owns.setdefault(name, []).append(full_name)

    @property
    def _is_same_world(self) -> bool:
        return len(self._counts) == self._pending.num_data_ranks

    def _own_counts(self) -> WindowCounts:
        return WindowCounts.of_rank(self._counts, self._pending.data_rank, self._pending.num_data_ranks)

    def _own_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, stored_names in self._owns.items():
            parts = (self._own_part(name, stored_name) for stored_name in stored_names)
            yield name, self._sum(parts) if self._is_same_world else self._mean(parts)

    def _own_part(self, name: str, stored_name: str) -> torch.Tensor:
        """Read this rank's shard of a stored gradient, in the shape of the local parameter."""
        parameter = self._parameters[name]
        gradient = torch.zeros(parameter.shape, dtype=self._stored.specs[stored_name].dtype)
        parts = layout_of(parameter).slices(name, gradient)
        read_slices(self._stored, [(stored_name, part) for part in parts])
        return gradient

    def _sum(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return a single gradient unchanged, or the fp64 sum of several: scaled fp16 sums could overflow."""
        total = next(parts)
        for part in parts:
            total = total.double() + part
        return total

    def _mean(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return this rank's share of all stored local gradients; ranks without a gradient count as zero."""
        return self._sum(parts).double() / (self._pending.num_data_ranks if self._has_items else len(self._counts))

    def _read_sum(self, part: TensorSlice) -> torch.Tensor:
        """Return a slice of the reduced gradient of this rank's group; groups without one count as zero."""
        stored = self._sums[part.name]
        if self._is_same_grouping and self._first_rank in stored:
            return _read_slice(self._stored, stored[self._first_rank], part)
        total = torch.zeros(part.tensor.numel(), dtype=torch.float64)
        for stored_name in () if self._is_same_grouping else stored.values():
            total += _read_slice(self._stored, stored_name, part)
        num_stored, num_ranks = len(self._counts), self._pending.num_data_ranks
        return total * ((1.0 if self._has_items else num_ranks / num_stored) / len(self._first_ranks))

    @property
    def _is_same_grouping(self) -> bool:
        groups = {first_rank for stored in self._sums.values() for first_rank in stored}
        return self._is_same_world and self._first_ranks == groups

    @property
    def _first_rank(self) -> str:
        return str(self._pending.first_rank)

    @property
    def _has_items(self) -> bool:
        return self._counts[0].num_items is not None

    @property
    def _doing(self) -> str:
        return f"loading the gradients from {self._directory}"


def _of_data_ranks(counts: Sequence[WindowCounts]) -> list[WindowCounts]:
    """Return the counters by data rank, from those of all ranks."""
    found = {rank if one.data_rank is None else int(one.data_rank): one for rank, one in enumerate(counts)}
    return [found[rank] for rank in sorted(found)]


def _read_slice(stored: Checkpoint, name: str, part: TensorSlice) -> torch.Tensor:
    tensor = torch.empty(part.tensor.numel(), dtype=stored.specs[name].dtype)
    read_slices(stored, [(name, replace(part, tensor=tensor))])
    return tensor
