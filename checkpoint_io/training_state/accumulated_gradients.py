"""Accumulated gradients in checkpoints: each rank's own ones, and shards of those already reduced over ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from booster.checkpoint_io.layout import GRADIENTS, SaveTarget
from booster.checkpoint_io.loading.fill import read_slices
from booster.checkpoint_io.loading.load import Loader
from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.checkpoint_io.saving.part import CheckpointPart
from booster.errors import CheckpointError
from booster.interface import (
    AccumulatedGradients,
    AccumulationCounters,
    OptimizerWrapper,
    ReducedShards,
    TensorSlice,
    shard_spec_of,
)

# Note [Stored gradient names]
# `rank<r>.<parameter>` is the local gradient of data rank r, of an expert that of the data ranks that share it, whose
# first is r. `reduced<r>.<parameter>` is the gradient already reduced over a sharding group, whose first rank is r. For
# their use in the step, and for loads with another number of ranks, see Note [Accumulated gradients].
# If several pipeline stages use a parameter, each has a partial gradient, and `rank<r>share<s>.<parameter>` is that of
# the s-th stage after the first. They are not summed for the save, because rounding would change. A load with the same
# number of stages assigns them one to one; with fewer stages, each stage sums some of them.
_NAME = re.compile(r"(rank|reduced)(\d+)(?:share(\d{1,6}))?\.(.+)", re.DOTALL)


def gradients_part(pending: AccumulatedGradients, target: SaveTarget, folder: str) -> CheckpointPart:
    """Build the checkpoint part of this rank's accumulated gradients of an optimizer.

    Raises:
        ConfigError: The gradients are already unscaled, averaged or clipped.
        CheckpointError: A gradient is sparse.
    """
    pending.check()
    local: list[TensorSlice] = []
    for tensor_slice in pending.slices():
        share = pending.summand_index(tensor_slice.name)
        prefix = f"rank{min(pending.data_ranks_of(tensor_slice.name))}{f'share{share}' if share else ''}"
        local.append(replace(tensor_slice, name=f"{prefix}.{tensor_slice.name}"))
    reduced = [
        replace(tensor_slice, name=f"reduced{pending.first_rank}.{tensor_slice.name}")
        for tensor_slice in pending.reduced()
    ]
    return CheckpointPart(
        target=target.with_kind(GRADIENTS),
        slices=[*local, *reduced],
        folder=folder,
    )


class AccumulatedGradientsLoad:
    """Load of accumulated gradients; see Note [Accumulated gradients].

    Args:
        loader: Loader that opens the files.
        optimizer: Boosted optimizer, whose state is loaded before.
        directory: Directory of the gradients.
        counts: Accumulation counters of every stored rank, as returned by `AccumulationCounters.to_plain`.
    """

    def __init__(self, loader: Loader, optimizer: OptimizerWrapper, directory: Path, counts: Sequence[object]) -> None:
        self._loader = loader
        self._optimizer = optimizer
        self._directory = directory
        self._plain_counts = counts
        self._action = f"loading the gradients from {directory}"

    def check(self) -> None:
        """Open, compare and verify. Collective.

        Raises:
            CheckpointError: Gradients of other parameters or shapes, or damaged files.
        """
        self._stored = stored = self._loader.open(self._directory, GRADIENTS)
        self._loader.ranks.run_on_all_ranks(self._compare, self._action)
        self._first_ranks = self._loader.names_of_all_ranks({self._first_rank})
        groups = {first_rank for stored_names in self._reduced_names.values() for first_rank in stored_names}
        self._is_same_grouping = self._is_same_world and self._first_ranks == groups
        self._loader.verify(stored)

    def fill(self) -> None:
        """Replace this rank's gradients. Collective."""

        def fill() -> None:
            reduced = ReducedShards(names=list(self._reduced_names), read=self._read_reduced)
            counts = AccumulationCounters.for_rank(self._counts, self._pending.data_rank, self._pending.num_data_ranks)
            local = ((name, self._local_gradient(name, stored)) for name, stored in self._local_names.items())
            self._pending.fill(local, counts, reduced)

        self._loader.ranks.run_on_all_ranks(fill, self._action)

    def _compare(self) -> None:
        self._pending: AccumulatedGradients = self._optimizer.pending_gradients()
        self._first_rank = str(self._pending.first_rank)
        of_data_rank: dict[int, AccumulationCounters] = {}
        for rank, plain in enumerate(self._plain_counts):
            counts = AccumulationCounters.from_plain(plain)
            of_data_rank[rank if counts.data_rank is None else int(counts.data_rank)] = counts
        self._counts = [of_data_rank[rank] for rank in sorted(of_data_rank)]
        self._is_same_world = len(self._counts) == self._pending.num_data_ranks
        parameters = self._pending.logical_parameters()
        self._parameters = self._pending.parameters()
        self._local_names: dict[str, list[str]] = {}  # names of the stored tensors, by parameter
        self._reduced_names: dict[str, dict[str, str]] = {}  # likewise, by parameter and first rank
        for full_name, spec in self._stored.specs.items():
            match = _NAME.fullmatch(full_name)
            if match is None:
                raise CheckpointError(
                    f"{self._directory} holds a tensor {full_name!r:.200} among its gradients that is not a gradient:"
                    " take another copy of the checkpoint"
                )
            kind, stored_rank, share, name = match.groups()
            if name not in parameters or shard_spec_of(parameters[name]).logical_shape != spec.shape:
                raise CheckpointError(
                    f"{self._directory} holds a gradient of {name!r} with shape {spec.shape}, but this optimizer has no"
                    " such parameter, so nothing was loaded: build it over the model that was saved"
                )
            if name not in self._parameters:
                continue
            if kind == "reduced":
                self._reduced_names.setdefault(name, {})[stored_rank] = full_name
            elif int(share or 0) % self._pending.num_summands(name) != self._pending.summand_index(name):
                continue
            elif not self._is_same_world or int(stored_rank) in self._pending.data_ranks_of(name):
                self._local_names.setdefault(name, []).append(full_name)

    def _local_gradient(self, name: str, stored_names: Sequence[str]) -> torch.Tensor:
        """Return this rank's share of stored local gradients, in the shape of the local parameter.

        With as many ranks as stored, that is the gradient itself, or the fp64 sum of several: scaled fp16 sums could
        overflow. Otherwise it is the mean over all of them; ranks without a gradient count as zero.
        """
        parameter = self._parameters[name]
        total: torch.Tensor | None = None
        for stored_name in stored_names:
            gradient = torch.zeros(parameter.shape, dtype=self._stored.specs[stored_name].dtype)
            slices = shard_spec_of(parameter).slices(name, gradient)
            read_slices(self._stored, [(stored_name, tensor_slice) for tensor_slice in slices])
            total = gradient if total is None else total.double() + gradient
        assert total is not None, f"{name} is listed without a stored gradient"
        if self._is_same_world:
            return total
        has_items = self._counts[0].num_items is not None
        num_ranks = self._pending.num_data_ranks if has_items else len(self._counts)
        return total.double() * (len(self._pending.data_ranks_of(name)) / num_ranks)

    def _read_reduced(self, tensor_slice: TensorSlice) -> torch.Tensor:
        """Return a slice of the reduced gradient of this rank's group; groups without one count as zero."""
        stored = self._reduced_names[tensor_slice.name]
        if self._is_same_grouping and self._first_rank in stored:
            return _read_slice(self._stored, stored[self._first_rank], tensor_slice)
        total = torch.zeros(tensor_slice.tensor.numel(), dtype=torch.float64)
        for stored_name in () if self._is_same_grouping else stored.values():
            total += _read_slice(self._stored, stored_name, tensor_slice)
        num_stored, num_ranks = len(self._counts), self._pending.num_data_ranks
        has_items = self._counts[0].num_items is not None
        # Ranks that share an expert are one group, also where each has other gradients of its own.
        num_groups = max(len(self._first_ranks) // len(self._pending.data_ranks_of(tensor_slice.name)), 1)
        return total * ((1.0 if has_items else num_ranks / num_stored) / num_groups)


def _read_slice(stored: StoredCheckpoint, name: str, tensor_slice: TensorSlice) -> torch.Tensor:
    tensor = torch.empty(tensor_slice.tensor.numel(), dtype=stored.specs[name].dtype)
    read_slices(stored, [(name, replace(tensor_slice, tensor=tensor))])
    return tensor
