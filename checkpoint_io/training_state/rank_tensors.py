"""Per-rank tensors: RNG states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from booster.checkpoint_io.layout import RANDOM_STATE, FileKind
from booster.checkpoint_io.loading.load import Loader
from booster.checkpoint_io.loading.ranges import read_slices
from booster.checkpoint_io.loading.reader import StoredCheckpoint
from booster.checkpoint_io.saving.part import CheckpointPart
from booster.interface import TensorSlice
from booster.interface.checkpoint_io import RandomState


def per_rank_part(
    kind: FileKind, tensors: Mapping[str, torch.Tensor], rank: int, *, folder: str, max_shard_bytes: int
) -> CheckpointPart:
    """Build a checkpoint part of this rank's tensors, named `rank<r>.<name>`; each rank writes its own."""
    slices = [TensorSlice.full(f"rank{rank}.{name}", tensor, primary=True) for name, tensor in tensors.items()]
    return CheckpointPart(
        kind=kind,
        names=kind.names(is_safetensors=True),
        slices=slices,
        max_shard_bytes=max_shard_bytes,
        is_sharded=True,
        folder=folder,
    )


class RandomStateLoad:
    """Load of this rank's random generators.

    Args:
        loader: Loader that opens the files.
        directory: Directory of the training state.
        num_stored: Number of ranks that saved.
        random_state: Random generators of this process.
    """

    def __init__(self, loader: Loader, directory: Path, num_stored: int, random_state: RandomState) -> None:
        self._loader = loader
        self._directory = directory
        self._num_stored = num_stored
        self._random_state = random_state

    def check(self) -> None:
        """Read the states, which are small. Collective.

        Raises:
            CheckpointError: A state is missing or damaged.
        """
        stored = self._loader.open(self._directory, RANDOM_STATE)
        self._loader.verify(stored)
        self._state = self._loader.ranks.run_on_all_ranks(lambda: self._read(stored), self._action)

    def fill(self) -> None:
        """Restore the generators. Collective."""
        self._loader.ranks.run_on_all_ranks(lambda: self._random_state.restore(self._state), self._action)

    def _read(self, stored: StoredCheckpoint) -> Mapping[str, torch.Tensor]:
        rank = self._loader.ranks.rank
        prefix = f"rank{rank % self._num_stored}."
        names = [name for name in stored.specs if name.startswith(prefix)]
        state: Mapping[str, torch.Tensor] = {
            name.removeprefix(prefix): read_full_tensor(stored, name) for name in names
        }
        self._random_state.check(state)
        return state if rank < self._num_stored else self._random_state.derive(state, rank)

    @property
    def _action(self) -> str:
        return f"loading the random state from {self._directory}"


def read_full_tensor(stored: StoredCheckpoint, name: str) -> torch.Tensor:
    """Read a full stored tensor."""
    spec = stored.specs[name]
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    read_slices(stored, [(name, TensorSlice.full(name, tensor, primary=False))])
    return tensor
