"""Tensors of which every rank has its own: random states, and gradients that wait for their step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from booster.checkpoint_io.layout import GRADIENTS, RANDOM_STATE, Kind
from booster.checkpoint_io.loading.loader import Loader
from booster.checkpoint_io.loading.range_reader import read_slices
from booster.checkpoint_io.loading.reader import Checkpoint
from booster.checkpoint_io.saving.component import Component
from booster.errors import CheckpointError
from booster.interface import OptimizerWrapper, PendingGradients, TensorSlice, WindowCounts

__all__ = ["GradientsLoad", "RandomState", "RandomStateLoad", "rank_component"]


class RandomState(Protocol):
    """The random generators of this process, as the facade knows them."""

    def capture(self) -> Mapping[str, torch.Tensor]:
        """Returns the state of every generator as tensors on the CPU."""
        ...

    def derive(self, state: Mapping[str, torch.Tensor], rank: int) -> Mapping[str, torch.Tensor]:
        """Returns the state of a rank that stored none, from another rank's."""
        ...

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises CheckpointError if the state can't be restored."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Puts the generators into the state."""
        ...


def rank_component(
    kind: Kind, tensors: Mapping[str, torch.Tensor], rank: int, *, folder: str, max_shard_bytes: int
) -> Component:
    """Returns this rank's own tensors as a component: `rank<r>.<name>`, each written by the rank that has it."""
    slices = [TensorSlice.whole(f"rank{rank}.{name}", tensor, primary=True) for name, tensor in tensors.items()]
    return Component(
        kind=kind,
        names=kind.names(is_safetensors=True),
        slices=slices,
        max_shard_bytes=max_shard_bytes,
        is_sharded=True,
        folder=folder,
    )


class RandomStateLoad:
    """Restores the random generators of this rank.

    Args:
        loader: Opens the files.
        directory: Where the training state is.
        num_stored: How many ranks saved.
        random_state: This process's generators.
    """

    def __init__(self, loader: Loader, directory: Path, num_stored: int, random_state: RandomState) -> None:
        self._loader = loader
        self._directory = directory
        self._num_stored = num_stored
        self._random_state = random_state

    def check(self) -> None:
        """Reads the states, which are small. Collective.

        Raises:
            CheckpointError: One is missing or damaged.
        """
        stored = self._loader.open(self._directory, RANDOM_STATE)
        self._loader.verify(stored)
        self._state = self._loader.ranks.agree(lambda: self._read(stored), self._doing)

    def fill(self) -> None:
        """Restores the generators. Collective."""
        self._loader.ranks.agree(lambda: self._random_state.restore(self._state), self._doing)

    def _read(self, stored: Checkpoint) -> Mapping[str, torch.Tensor]:
        rank = self._loader.ranks.rank
        prefix = f"rank{rank % self._num_stored}."
        names = [name for name in stored.specs if name.startswith(prefix)]
        state: Mapping[str, torch.Tensor] = {name.removeprefix(prefix): _whole(stored, name) for name in names}
        self._random_state.check(state)
        return state if rank < self._num_stored else self._random_state.derive(state, rank)

    @property
    def _doing(self) -> str:
        return f"loading the random state from {self._directory}"


class GradientsLoad:
    """Fills gradients that waited for their step; see Note [Gradients of other ranks].

    Args:
        loader: Opens the files.
        optimizer: The boosted optimizer, whose state is loaded before.
        directory: Where the gradients are.
        counts: What every stored rank's window counted, as `WindowCounts.to_plain` gave it.
    """

    def __init__(self, loader: Loader, optimizer: OptimizerWrapper, directory: Path, counts: Sequence[object]) -> None:
        self._loader = loader
        self._optimizer = optimizer
        self._directory = directory
        self._plain_counts = counts

    def check(self) -> None:
        """Opens, compares and verifies. Collective.

        Raises:
            CheckpointError: Gradients of other parameters or shapes; damage.
        """
        self._stored = stored = self._loader.open(self._directory, GRADIENTS)
        self._loader.ranks.agree(self._compare, self._doing)
        self._loader.verify(stored)

    def fill(self) -> None:
        """Replaces this rank's gradients. Collective."""
        self._loader.ranks.agree(lambda: self._pending.fill(self._gradients(), self._own_counts()), self._doing)

    def _compare(self) -> None:
        self._counts = [WindowCounts.from_plain(plain) for plain in self._plain_counts]
        self._pending: PendingGradients = self._optimizer.pending_gradients()
        parameters = self._pending.parameters()
        self._names: dict[str, list[str]] = {}  # of the stored tensors, by parameter
        for full_name, spec in self._stored.specs.items():
            rank, _, name = full_name.partition(".")
            if name not in parameters or tuple(parameters[name].shape) != spec.shape:
                raise CheckpointError(
                    f"{self._directory} holds a gradient of {name!r} with shape {spec.shape}, and this optimizer has no"
                    " such parameter, nothing was loaded: build it over the same model as the one that was saved"
                )
            if not self._is_same_world or rank == f"rank{self._loader.ranks.rank}":
                self._names.setdefault(name, []).append(full_name)

    @property
    def _is_same_world(self) -> bool:
        return len(self._plain_counts) == self._loader.ranks.size

    def _own_counts(self) -> WindowCounts:
        return WindowCounts.of_rank(self._counts, self._loader.ranks.rank, self._loader.ranks.size)

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, stored_names in self._names.items():
            parts = (_whole(self._stored, stored_name) for stored_name in stored_names)
            yield name, next(parts) if self._is_same_world else self._mean(parts)

    def _mean(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """Returns this rank's share of the ranks' gradients; those that had none count as zero."""
        total = next(parts).double()  # in fp64: scaled fp16 gradients of several ranks may overflow their own format
        for part in parts:
            total += part
        has_items = self._counts[0].num_items is not None
        return total / (self._loader.ranks.size if has_items else len(self._counts))

    @property
    def _doing(self) -> str:
        return f"loading the gradients from {self._directory}"


def _whole(stored: Checkpoint, name: str) -> torch.Tensor:
    spec = stored.specs[name]
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    read_slices(stored, [(name, TensorSlice.whole(name, tensor, primary=False))])
    return tensor
