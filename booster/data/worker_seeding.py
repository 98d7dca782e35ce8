"""Random streams of worker processes that depend on which samples are read, not on who reads them or when.

# Note [Sample seeds]: torch seeds a worker once, so what a random augmentation draws depends on how many workers there
# are, on what the worker read before, and, with one seed on every rank, is the same on all of them. Here every batch
# carries the name of its stream (seed and epoch) and the position of its first sample in the epoch's order. A worker
# seeds python, numpy and torch from (stream, position) before each sample, or once a batch where the dataset reads
# whole batches (`__getitems__`). The same sample of the same epoch is then augmented alike for every number of
# workers and ranks, and after a restart inside the epoch. In the main process (num_workers=0) nothing is seeded:
# its random state belongs to the training loop, which saves and restores it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits, the same on every machine, that differs whenever one of the parts does."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seeds this process's python, numpy and torch (CPU) random states."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # a list would hold all bits, at five times the cost
    # Not torch.manual_seed: that one also records the call for accelerators, at the price of a formatted stack.
    torch.default_generator.manual_seed(seed)


class SampleBatch(list[int]):
    """The indices of one batch, with the random stream that each of its samples has.

    Args:
        indices: What the dataset is asked for.
        stream: Name of the stream; equal for all batches of an epoch that share one numbering.
        start: Number of the first sample in the stream; the others follow it one by one.
    """

    def __init__(self, indices: Iterable[int] = (), stream: str = "", start: int = 0) -> None:
        super().__init__(indices)
        self.stream = stream
        self.start = start

    def seed_of(self, offset: int) -> int:
        """The seed of the sample at this place in the batch."""
        return derive_seed(self.stream, self.start + offset)


class SeededDataset:
    """A map-style dataset as worker processes see it: seeds before it reads. See Note [Sample seeds]."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, batch: SampleBatch) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            seed_everything(batch.seed_of(0))
            return self.dataset.__getitems__(list(batch))
        return [self._read(index, batch.seed_of(offset)) for offset, index in enumerate(batch)]

    def _read(self, index: int, seed: int) -> Any:
        seed_everything(seed)
        return self.dataset[index]


class WorkerStart:
    """A worker_init_fn that shows the user's own one, and `get_worker_info()`, the user's dataset."""

    def __init__(self, user_init_fn: Callable[[int], None] | None) -> None:
        self.user_init_fn = user_init_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # WorkerInfo refuses assignment; code that opens files on `get_worker_info().dataset` must reach the real one.
        object.__setattr__(info, "dataset", getattr(info.dataset, "dataset"))  # noqa: B009  (typed as a Dataset)
        if self.user_init_fn is not None:
            self.user_init_fn(worker_id)
