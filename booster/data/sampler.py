"""Distributed batch samplers: equal numbers of samples on all ranks, resumable at any position of any epoch.

# Note [Global order]: an epoch has one order of the dataset, determined by (seed, epoch). The next global batch is the
# next `batch_size * dp_size` samples of it, of which rank r reads the r-th contiguous shard. So the concatenated
# batches of the ranks equal the batch of one process with the global batch size. A position is a number of samples,
# which stays valid when the number of ranks or the batch size changes. If less than a global batch is left, it is
# either dropped, or every rank reads ceil(rest / dp_size) samples and the last ranks repeat samples from the start of
# the order. Repeats are therefore at the end of the last global batch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from booster.errors import ConfigError
from booster.validation import is_count

from .worker_seeding import SampleBatch, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPosition:
    """This rank's share of one global batch, and the position after it."""

    num_samples: int  # in this rank's batch, repeats included
    num_repeated: int  # at the end of the global batch
    num_repeated_local: int  # at the end of this rank's batch
    stop: int  # position after the batch
    is_last: bool


def shard_of_batch(num_real: int, dp_rank: int, dp_size: int, *, stop: int, is_last: bool) -> BatchPosition:
    """Return a rank's share of a global batch of `num_real` samples; see Note [Global order]."""
    num_samples = -(-num_real // dp_size)
    num_real_local = min(max(num_real - dp_rank * num_samples, 0), num_samples)
    return BatchPosition(
        num_samples=num_samples,
        num_repeated=num_samples * dp_size - num_real,
        num_repeated_local=num_samples - num_real_local,
        stop=stop,
        is_last=is_last,
    )


class EpochSampler(ABC):
    """Order of one rank's samples, which can start at any position of any epoch; position 0 is the start of one.

    Attributes:
        position_key: Key of the position in the loader's state, which names its unit.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        seed: Seed of the orders and of the workers' random numbers, the same on all ranks.
        start: Epoch and position of the next `iter()`.
    """

    position_key: str
    dp_rank: int
    dp_size: int
    seed: int
    start: tuple[int, int] = (0, 0)

    def start_at(self, epoch: int, position: int) -> None:
        """Start the next `iter()` at this position of this epoch."""
        self.start = epoch, position

    def stream_seed(self, epoch: int) -> int:
        """Return a seed for this epoch and rank, for random numbers that workers draw before their first sample."""
        return derive_seed("workers", self.seed, epoch, self.dp_rank)

    @abstractmethod
    def num_batches(self, position: int = 0) -> int:
        """Return the number of this rank's batches after this position of an epoch.

        Raises:
            TypeError: The dataset is a stream without a length.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that, with epoch and position, determine the remaining samples (JSON-serializable)."""

    @abstractmethod
    def resume_from(self, settings: Mapping[str, Any], position: int) -> None:
        """Continue as the sampler described by a loader's state; raise ConfigError if the rest would differ."""

    @abstractmethod
    def uneven_end_message(self, position: int = 0) -> str | None:
        """Return a log line about the uneven end of an epoch resumed at this position, or None if it is even."""


def check_data_parallel(dp_rank: int, dp_size: int, batch_size: int) -> None:
    """Raise `ConfigError` if a data-parallel rank, group size or batch size is out of range."""
    if dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise ConfigError(
            f"dp_rank={dp_rank} of dp_size={dp_size} is not in 0..dp_size-1: pass dp_rank and dp_size of the plugin"
        )
    if not is_count(batch_size):
        raise ConfigError(
            f"batch_size={batch_size!r} is not a number of samples per rank and batch: pass a positive int"
        )


class DistributedBatchSampler(EpochSampler, Sampler[list[int]]):
    """Batch sampler of one rank: equal numbers of batches and equal batch lengths on all ranks.

    See Note [Global order]. The batches are `SampleBatch`: lists of indices with their random stream.

    Args:
        num_samples: Length of the dataset, at least 1.
        batch_size: Samples per rank and batch.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        shuffle: If True, a new order in every epoch, else the dataset's order.
        seed: Seed of the orders, the same on all ranks.
        drop_last: If True, drop an incomplete last global batch instead of repeating samples.

    Attributes:
        global_batch_size: Number of samples in a complete batch of all ranks.

    Raises:
        ConfigError: The dataset is empty, a rank or size is out of range, or `drop_last` leaves no batch.

    Examples:
        >>> [list(DistributedBatchSampler(5, 2, rank, 2)) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3], [0]]]
    """

    position_key = "samples_consumed"

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
    ) -> None:
        check_data_parallel(dp_rank, dp_size, batch_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.shuffle = bool(shuffle)
        self.seed = seed
        self.drop_last = bool(drop_last)
        self.global_batch_size = batch_size * dp_size
        if num_samples < 1:
            raise ConfigError("an empty dataset (length 0) has no batches: pass a non-empty dataset on all ranks")
        if drop_last and num_samples < self.global_batch_size:
            raise ConfigError(
                f"drop_last=True leaves no batch: {num_samples} samples are less than a global batch of"
                f" {self.global_batch_size} (batch_size={batch_size} on {dp_size} ranks). Pass drop_last=False, which"
                " repeats samples, or a smaller batch_size"
            )

    @property
    def num_repeated(self) -> int:
        """Number of samples that an epoch repeats, over all ranks."""
        return self._num_repeated_and_dropped(0)[0]

    @property
    def num_dropped(self) -> int:
        """Number of samples that an epoch drops, over all ranks."""
        return self._num_repeated_and_dropped(0)[1]

    def _num_repeated_and_dropped(self, position: int) -> tuple[int, int]:
        tail = (self.num_samples - position) % self.global_batch_size
        return (0, tail) if self.drop_last else (-tail % self.dp_size, 0)

    def set_epoch(self, epoch: int) -> None:
        """Start the next `iter()` at the start of this epoch."""
        self.start_at(epoch, 0)

    def num_batches(self, position: int = 0) -> int:
        """Return the number of batches of every rank after this position (in samples of all ranks)."""
        rest = max(self.num_samples - position, 0)
        return rest // self.global_batch_size if self.drop_last else -(-rest // self.global_batch_size)

    def batch_at(self, position: int) -> BatchPosition:
        """Return the batch that starts at this position (in samples)."""
        num_real = min(self.global_batch_size, self.num_samples - position)
        stop = position + num_real
        return shard_of_batch(num_real, self.dp_rank, self.dp_size, stop=stop, is_last=self.num_batches(stop) == 0)

    def __len__(self) -> int:
        return self.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself, so that epoch and position are read now and not at the first `next`.
        return self._batches_from(*self.start)

    def _batches_from(self, epoch: int, position: int) -> Iterator[SampleBatch]:
        order = self._order(epoch)
        for _ in range(self.num_batches(position)):
            batch_position = self.batch_at(position)
            first = position + self.dp_rank * batch_position.num_samples
            indices = self._indices(order, range(first, first + batch_position.num_samples))
            yield SampleBatch(indices, stream=f"{self.seed}/{epoch}", start=first)
            position = batch_position.stop

    def _indices(self, order: Any, positions: range) -> Sequence[int]:
        """Return the samples at these positions of the order; those beyond its end are repeats from its start."""
        if positions.stop <= self.num_samples:
            return positions if order is None else order[positions.start : positions.stop].tolist()
        repeated = [index % self.num_samples for index in positions]
        return repeated if order is None else order[repeated].tolist()

    def _order(self, epoch: int) -> Any:
        """Return the order of the epoch; None for the dataset's own order, which needs no memory."""
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the remaining samples; independent of dp_size and batch size."""
        return {"seed": self.seed, "num_samples": self.num_samples, "shuffle": self.shuffle}

    def resume_from(self, settings: Mapping[str, Any], position: int) -> None:
        """Use the described seed; raise `ConfigError` if the dataset's length or `shuffle` differs."""
        for key in ("num_samples", "shuffle"):
            if settings[key] != getattr(self, key):
                raise ConfigError(
                    f"a loader state with {key}={settings[key]!r} for a loader with {key}={getattr(self, key)!r}: its"
                    " position refers to other samples. Load it into a loader with the same dataset and shuffle, or"
                    " start the data from the beginning by not loading it"
                )
        self.seed = settings["seed"]

    def uneven_end_message(self, position: int = 0) -> str | None:
        """Format the numbers of repeated or dropped samples; None if the epoch is even or already logged."""
        given = f"{self.num_samples} samples, batch_size={self.batch_size} on {self.dp_size} ranks"
        epoch = f"the epoch resumed after {position} samples" if position else "every epoch"
        repeated, dropped = self._num_repeated_and_dropped(position)
        if position and (repeated, dropped) == self._num_repeated_and_dropped(0):
            return None  # logged before
        if repeated:
            return f"{given}: {epoch} repeats {repeated} at its end to give all ranks the same number"
        if dropped:
            return f"{given}, drop_last=True: {epoch} drops the last {dropped} of its order"
        return None


class CustomBatchSampler(EpochSampler, BatchSampler):
    """Batches of a user's `sampler_cls(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=shuffle, ...)`.

    `seed` and `drop_last` are passed if the constructor takes them. `set_epoch`, if defined, is called at the start of
    every epoch. The order depends on the number of ranks, so a position counts batches and is valid for the same batch
    size and number of ranks only. Repeated samples are unknown: `num_repeated` is 0.

    Raises:
        ConfigError: The class does not take these arguments, or its sampler has no length or no samples.
    """

    position_key = "batches_consumed"

    def __init__(
        self,
        sampler_cls: Callable[..., Sampler[int]],
        dataset: Any,
        batch_size: int,
        *,
        dp_rank: int,
        dp_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        check_data_parallel(dp_rank, dp_size, batch_size)
        given = {"num_replicas": dp_size, "rank": dp_rank, "shuffle": shuffle}
        optional = {"seed": seed, "drop_last": drop_last}
        sampler = sampler_cls(dataset, **given, **_supported_arguments(sampler_cls, given, optional))
        super().__init__(sampler, batch_size, drop_last)
        self.num_samples = _length(sampler)
        self.dataset_length = len(dataset)
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = bool(shuffle)
        if len(self) == 0:
            raise ConfigError(
                f"{type(sampler).__name__} leaves no batch: {self.num_samples} samples for rank {dp_rank}, "
                f"batch_size={batch_size}, drop_last={drop_last}; pass drop_last=False or a smaller batch_size"
            )

    def num_batches(self, position: int = 0) -> int:
        """Return the number of this rank's batches after this position (in batches)."""
        return max(len(self) - position, 0)

    def batch_at(self, position: int) -> BatchPosition:
        """Return the batch that starts at this position (in batches)."""
        num_samples = min(self.batch_size, self.num_samples - position * self.batch_size)
        is_last = self.num_batches(position + 1) == 0
        return BatchPosition(
            num_samples=num_samples, num_repeated=0, num_repeated_local=0, stop=position + 1, is_last=is_last
        )

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches_from(super().__iter__(), *self.start)

    def _batches_from(self, batches: Iterator[list[int]], epoch: int, position: int) -> Iterator[SampleBatch]:
        # The sampler is first used at the first `next`: torch creates two iterators for workers and uses one, and a
        # sampler that counts its own epochs must not count both.
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        stream = f"{self.seed}/{epoch}/{self.dp_rank}"
        for index, batch in enumerate(islice(batches, position, None), start=position):
            yield SampleBatch(batch, stream=stream, start=index * self.batch_size)

    def settings(self) -> dict[str, Any]:
        """Return all settings that the order of a custom sampler may depend on."""
        return {
            "sampler": type(self.sampler).__name__,
            "seed": self.seed,
            "num_samples": self.dataset_length,
            "shuffle": self.shuffle,
            "dp_size": self.dp_size,
            "batch_size": self.batch_size,
            "drop_last": bool(self.drop_last),
        }

    def resume_from(self, settings: Mapping[str, Any], position: int) -> None:
        """Raise `ConfigError` if settings differ: inside an epoch any, at its start those that are fixed for a run."""
        own = self.settings()
        lasting = ("sampler", "seed", "num_samples", "shuffle")
        differing = [key for key in (own if position else lasting) if settings[key] != own[key]]
        if differing:
            raise ConfigError(
                "a loader state with "
                + ", ".join(f"{key}={settings[key]!r} (here {own[key]!r})" for key in differing)
                + f": the position of a {own['sampler']} is not valid here. Create the loader as it was saved, or leave"
                " out distributed_sampler_cls, so that positions are valid for any number of ranks and batch size"
            )

    def uneven_end_message(self, position: int = 0) -> str | None:
        """Format the number of this rank's samples if it is not an even share; once for all epochs."""
        dropped = self.num_samples % self.batch_size if self.drop_last else 0
        if position or (not dropped and self.num_samples * self.dp_size == self.dataset_length):
            return None
        name = type(self.sampler).__name__
        less = f", of which drop_last=True drops the last {dropped}" if dropped else ""
        return (
            f"{name} gives rank {self.dp_rank} of {self.dp_size} {self.num_samples} samples of {self.dataset_length} in"
            f" an epoch{less}: samples may be repeated, dropped or unevenly distributed; if some ranks have fewer"
            " batches, read them with booster.join_uneven(loader)"
        )


def _supported_arguments(
    sampler_cls: Callable[..., Sampler[int]], given: Mapping[str, Any], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the optional arguments that the class takes; raise ConfigError if it lacks a required one."""
    if not callable(sampler_cls):
        raise ConfigError(
            f"distributed_sampler_cls={sampler_cls!r} is not callable: pass a class with a constructor (dataset,"
            " num_replicas=, rank=, shuffle=), or leave it out"
        )
    parameters = inspect.signature(sampler_cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [name for name in given if name not in parameters and not takes_any]
    if missing:
        raise ConfigError(
            f"distributed_sampler_cls={getattr(sampler_cls, '__name__', sampler_cls)!s} takes no {', '.join(missing)}: "
            "it is called as cls(dataset, num_replicas=, rank=, shuffle=); pass such a class, or leave it out"
        )
    return {name: value for name, value in optional.items() if takes_any or name in parameters}


def _length(sampler: Sampler[int]) -> int:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"{type(sampler).__name__} has no length, so the number of batches per rank is unknown: define __len__"
            " (samples per rank) on the sampler class"
        ) from error
