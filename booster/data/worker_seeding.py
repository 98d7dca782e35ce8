"""Per-sample seeding of what reads a dataset: data loader workers, or the main process.

# Note [Sample seeds]: torch seeds a worker once, so random augmentation depends on the number of workers and on the
# samples that a worker has read before, and repeats on all ranks that share a seed. Here every batch carries the name
# of its stream (seed and epoch) and the position of its first sample in the epoch's order. What reads it seeds python,
# numpy and torch from (stream, position) before each sample, or once per batch if the dataset has `__getitems__`. So
# the augmentation of a sample in an epoch is independent of the number of workers and ranks and of restarts inside the
# epoch. The main process (num_workers=0) restores its own states after each batch, which the training loop draws from;
# it leaves both out where nothing can be drawn: for tensors and lists, collated by torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate, get_worker_info


def derive_seed(*parts: int | str) -> int:
    """Hash the parts into a 63-bit seed, equal on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_worker(seed: int) -> None:
    """Seed the python, numpy and torch (CPU) RNGs of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # a list would keep all bits, at five times the cost
    # Not torch.manual_seed: it also formats a stack trace to record the call for accelerators.
    torch.default_generator.manual_seed(seed)


class SampleBatch(list[int]):
    """Indices of one batch, with the random stream of its samples.

    Args:
        indices: Dataset indices.
        stream: Name of the random stream, shared by batches with a common numbering of samples.
        start: Position of the first sample in the stream; the others follow consecutively.
    """

    def __init__(self, indices: Iterable[int] = (), stream: str = "", start: int = 0) -> None:
        super().__init__(indices)
        self.stream = stream
        self.start = start

    def seed_of(self, offset: int) -> int:
        """Return the seed of the sample at this offset in the batch."""
        return derive_seed(self.stream, self.start + offset)


def may_draw(dataset: Any, collate_fn: Any) -> bool:
    """Return whether reading and collating samples may draw random numbers."""
    if type(dataset) is Subset:
        return may_draw(dataset.dataset, collate_fn)
    if type(dataset) is ConcatDataset:
        return any(may_draw(one, collate_fn) for one in dataset.datasets)
    return type(dataset) not in (TensorDataset, list, tuple) or collate_fn is not default_collate


class SeededDataset:
    """Wrapper, where it is read, of a map-style dataset that seeds before it reads; see Note [Sample seeds]."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, batch: SampleBatch) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            seed_worker(batch.seed_of(0))
            return self.dataset.__getitems__(list(batch))
        samples = []
        for offset, index in enumerate(batch):
            seed_worker(batch.seed_of(offset))
            samples.append(self.dataset[index])
        return samples


def init_worker(user_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Unwrap the dataset in `get_worker_info()`, then call the user's worker_init_fn."""
    info = get_worker_info()
    assert info is not None
    # WorkerInfo forbids assignment, but code that opens files on `get_worker_info().dataset` needs the real one.
    object.__setattr__(info, "dataset", getattr(info.dataset, "dataset"))  # noqa: B009  (typed as a Dataset)
    if user_init_fn is not None:
        user_init_fn(worker_id)
