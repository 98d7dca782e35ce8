"""What disk.py puts beside each other: the disk alone, steps with states on the disk, and steps without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from _harness.engine import Step
from disk.raw import BLOCK_BYTES, RawFile

from booster.kernels.disk_io import DiskQueue
from booster.optim import HybridAdam

__all__ = ["IN_MEMORY", "ON_DISK", "STATE_BYTES", "Variants", "is_raw"]

IN_MEMORY = "step, states in memory"
ON_DISK = "step, states on the disk"
STATE_BYTES = 8  # of a parameter: two moments in fp32

_RAW = "raw: "
_COLUMNS = 2048
_SHAPE = (BLOCK_BYTES // STATE_BYTES // _COLUMNS, _COLUMNS)  # of a parameter tensor, so that a half is whole blocks


def is_raw(name: str) -> bool:
    """Returns True for the variants that compute nothing."""
    return name.startswith(_RAW)


class Variants:
    """Everything that takes part; see Note [The same blocks].

    Args:
        directory: Where the files go.
        num_parameters: At least; rounded up to whole tensors.

    Attributes:
        num_parameters: How many there are.
        is_direct: Whether files are read and written past the page cache.
    """

    def __init__(self, directory: Path, num_parameters: int) -> None:
        num_tensors = -(-num_parameters // (_SHAPE[0] * _SHAPE[1]))
        self.num_parameters = num_tensors * _SHAPE[0] * _SHAPE[1]
        self._models = {
            ON_DISK: _Model(num_tensors, offload_directory=directory),
            IN_MEMORY: _Model(num_tensors, offload_directory=None),
        }
        for model in self._models.values():
            model.step(0)  # makes the file, and one half of it valid
        self._file = RawFile(_largest_file(directory))
        self.is_direct = self._file.is_direct
        self._queue = DiskQueue()

    @property
    def num_bytes(self) -> int:
        """What every variant but IN_MEMORY reads in a round, and as much it writes."""
        return self._file.num_bytes

    def steps(self) -> Mapping[str, Step]:
        """Returns what each variant does in a round."""
        models = {name: model.step for name, model in self._models.items()}
        return {f"{_RAW}plain loop": self._run_loop, f"{_RAW}queue": self._run_queue, **models}

    def has_same_weights(self) -> bool:
        """Returns whether both kinds of steps gave the same bits."""
        disk, memory = (model.parameters for model in self._models.values())
        return all(torch.equal(ours, theirs) for ours, theirs in zip(disk, memory, strict=True))

    def close(self) -> None:
        """Closes the files; the optimizer's go with it."""
        self._queue.close()
        self._file.close()
        self._models.clear()

    def _run_loop(self, _: int) -> float:
        self._file.run_loop(self._valid_half())
        return 0.0

    def _run_queue(self, _: int) -> float:
        self._file.run_queue(self._queue, self._valid_half())
        return 0.0

    def _valid_half(self) -> int:
        return self._models[ON_DISK].num_steps % 2  # were it the other one, the weights would show it in the end


def _largest_file(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


class _Model:
    """Parameters with gradients that stay, and their optimizer."""

    def __init__(self, num_tensors: int, offload_directory: str | os.PathLike[str] | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(_SHAPE, generator=generator)) for _ in range(num_tensors)]
        for parameter in self.parameters:
            parameter.grad = torch.randn(_SHAPE, generator=generator)
        self.num_steps = 0
        self._optimizer = HybridAdam(
            self.parameters,
            weight_decay=0.01,
            nvme_offload_fraction=float(offload_directory is not None),
            nvme_offload_dir=offload_directory,
        )

    def step(self, _: int) -> float:
        """Updates the parameters."""
        self._optimizer.step()
        self.num_steps += 1
        return float(self.parameters[0].detach()[0, 0])
