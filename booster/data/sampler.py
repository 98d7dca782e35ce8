"""Which samples each rank reads in which batch: equal counts on all ranks, from any position of any epoch.

# Note [Global order]: an epoch has one order of the dataset, known from (seed, epoch) alone. The next batch of the
# whole job is the next `batch_size * dp_size` samples of it, and rank r takes the r-th contiguous part. So the ranks'
# batches one after another are the batch that one process with the large batch size reads, and a position is a
# number of samples: it keeps its meaning when the number of ranks or the batch size changes. When less than a global
# batch is left, either it is dropped, or every rank takes ceil(rest / dp_size) samples, and what the last ranks lack
# is repeated from the start of the order. Repeats are therefore the very end of the last global batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, Sampler

from booster.errors import ConfigError

from .worker_seeding import SampleBatch, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlace:
    """What one rank gets of one global batch, and where the epoch stands after it."""

    num_samples: int  # in this rank's batch, repeats included
    num_repeated: int  # in the global batch; they are its very end
    num_repeated_here: int  # of these, in this rank's batch; they are the end of that
    stop: int  # position after the batch
    is_last: bool


class EpochSampler(Protocol):
    """What the loader asks of a batch sampler: any epoch, from any position. A position of 0 is the epoch's start."""

    position_key: str  # what a position counts, under the name that the loader's state has for it

    def start_at(self, epoch: int, position: int) -> None:
        """The next `iter()` yields the batches of this epoch that follow this position."""

    def num_batches(self, position: int = 0) -> int:
        """How many batches this rank gets after this position of an epoch."""

    def place(self, position: int) -> BatchPlace:
        """The batch that begins at this position."""

    def stream_seed(self, epoch: int) -> int:
        """A seed for this epoch and rank, for what workers draw before their first sample."""

    def describe(self) -> dict[str, Any]:
        """What, beside epoch and position, says which samples follow: plain numbers, strings and booleans."""

    def adopt(self, described: Mapping[str, Any], position: int) -> None:
        """Goes on as the described sampler does; ConfigError where the samples to follow would not be its own."""

    def announcement(self, position: int = 0) -> str | None:
        """What the user should know about the uneven end of an epoch that goes on here; None where it is even."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int: ...


def check_data_world(dp_rank: int, dp_size: int, batch_size: int) -> None:
    """ConfigError unless these can be a rank's place in the data-parallel world and its batch size."""
    if dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise ConfigError(
            f"dp_rank={dp_rank} of dp_size={dp_size}: there are dp_size parts of the data, numbered from 0; "
            "pass the plugin's own dp_rank and dp_size"
        )
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(
            f"batch_size={batch_size!r}: every rank reads this many samples at a time; pass an integer of at least 1"
        )


class DistributedBatchSampler(Sampler[list[int]]):
    """One rank's batches of an epoch: lists of indices, equally many and equally long on all ranks.

    See Note [Global order]. The batches are `SampleBatch`: lists that also know their random stream.

    Args:
        num_samples: Length of the dataset, at least 1.
        batch_size: Samples per rank and batch.
        dp_rank: Which part of each global batch this rank reads.
        dp_size: How many parts there are.
        shuffle: A new order in every epoch; else the dataset's own.
        seed: Of the orders; the same on all ranks.
        drop_last: Leaves out the last global batch if it is not full, instead of repeating samples.

    Raises:
        ConfigError: an empty dataset, a rank outside of its world, or `drop_last` that leaves no batch at all.

    Example:
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
        check_data_world(dp_rank, dp_size, batch_size)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.shuffle = bool(shuffle)
        self.seed = seed
        self.drop_last = bool(drop_last)
        self._check_not_empty()
        self._epoch = 0
        self._position = 0

    def _check_not_empty(self) -> None:
        if self.num_samples < 1:
            raise ConfigError("an empty dataset (length 0) has no batches: give every rank the same non-empty dataset")
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise ConfigError(
                f"drop_last=True leaves no batch: {self.num_samples} samples are less than one global batch of "
                f"{self.global_batch_size} (batch_size={self.batch_size} on {self.dp_size} ranks); use "
                "drop_last=False, which repeats samples, or a smaller batch_size"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples in a full batch of all ranks together."""
        return self.batch_size * self.dp_size

    @property
    def num_repeated(self) -> int:
        """How many samples a full epoch reads twice, over all ranks."""
        return self._num_repeated_from(0)

    @property
    def num_dropped(self) -> int:
        """How many samples a full epoch leaves out, over all ranks."""
        return self._num_dropped_from(0)

    def _num_repeated_from(self, position: int) -> int:
        tail = (self.num_samples - position) % self.global_batch_size
        return 0 if self.drop_last else -tail % self.dp_size

    def _num_dropped_from(self, position: int) -> int:
        return (self.num_samples - position) % self.global_batch_size if self.drop_last else 0

    def set_epoch(self, epoch: int) -> None:
        """The next `iter()` yields this epoch from its start."""
        self.start_at(epoch, 0)

    def start_at(self, epoch: int, position: int) -> None:
        """The next `iter()` yields the batches of this epoch after its first `position` samples (of all ranks)."""
        self._epoch = epoch
        self._position = position

    def num_batches(self, position: int = 0) -> int:
        """How many batches every rank gets after this position."""
        rest = max(self.num_samples - position, 0)
        return rest // self.global_batch_size if self.drop_last else -(-rest // self.global_batch_size)

    def place(self, position: int) -> BatchPlace:
        """The batch that begins at this position (in samples)."""
        num_real = min(self.global_batch_size, self.num_samples - position)
        num_samples = -(-num_real // self.dp_size)
        num_real_here = min(max(num_real - self.dp_rank * num_samples, 0), num_samples)
        stop = position + num_real
        return BatchPlace(
            num_samples=num_samples,
            num_repeated=num_samples * self.dp_size - num_real,
            num_repeated_here=num_samples - num_real_here,
            stop=stop,
            is_last=self.num_batches(stop) == 0,
        )

    def __len__(self) -> int:
        return self.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        # Not itself a generator: epoch and position are those of this call, not those of the first `next`.
        return self._walk(self._epoch, self._position)

    def _walk(self, epoch: int, position: int) -> Iterator[SampleBatch]:
        order = self._order(epoch)
        for _ in range(self.num_batches(position)):
            place = self.place(position)
            first = position + self.dp_rank * place.num_samples
            wanted = range(first, first + place.num_samples)
            yield SampleBatch(self._read(order, wanted), stream=f"{self.seed}/{epoch}", start=first)
            position = place.stop

    def _order(self, epoch: int) -> torch.Tensor | None:
        """The epoch's order; None for the dataset's own, which needs no memory."""
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def _read(self, order: torch.Tensor | None, wanted: range) -> Sequence[int]:
        places = wanted if wanted.stop <= self.num_samples else [i % self.num_samples for i in wanted]
        if order is None:
            return places
        return order[places.start : places.stop].tolist() if isinstance(places, range) else order[places].tolist()

    def stream_seed(self, epoch: int) -> int:
        """A seed for this epoch and rank, for what workers draw before their first sample."""
        return derive_seed("workers", self.seed, epoch, self.dp_rank)

    def describe(self) -> dict[str, Any]:
        """What, beside epoch and position, fixes the samples to follow. Neither the ranks nor the batch size do."""
        return {"seed": self.seed, "num_samples": self.num_samples, "shuffle": self.shuffle}

    def adopt(self, described: Mapping[str, Any], position: int) -> None:
        """Takes the described seed.

        Raises:
            ConfigError: another length of the dataset, or shuffled and not shuffled.
        """
        for key in ("num_samples", "shuffle"):
            if described[key] != getattr(self, key):
                raise ConfigError(
                    f"a loader state with {key}={described[key]!r} for a loader with {key}={getattr(self, key)!r}: "
                    "its position means other samples here; load it into a loader over the same dataset with the "
                    "same shuffle, or start the data anew by not loading it"
                )
        self.seed = described["seed"]

    def announcement(self, position: int = 0) -> str | None:
        """How many samples every epoch repeats or drops, or the one that goes on here if that differs; None: none."""
        given = f"{self.num_samples} samples, batch_size={self.batch_size} on {self.dp_size} ranks"
        epoch = f"the epoch that goes on after {position} samples" if position else "every epoch"
        repeated, dropped = self._num_repeated_from(position), self._num_dropped_from(position)
        if position and (repeated, dropped) == (self.num_repeated, self.num_dropped):
            return None  # was said
        if repeated:
            return f"{given}: {epoch} repeats {repeated} at its end to give all ranks equally many"
        if dropped:
            return f"{given}, drop_last=True: {epoch} drops the last {dropped} of its order"
        return None


class CustomBatchSampler(BatchSampler):
    """Batches of `sampler_cls(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=shuffle, ...)`.

    `seed` and `drop_last` are given to the class if its constructor has them; its `set_epoch`, if there is one, is
    called at the start of every epoch. Its order belongs to one number of ranks, so a position counts batches and is
    good for the same batch size and number of ranks only. Which samples it repeats is not known: `num_repeated` is 0.

    Raises:
        ConfigError: a class that can't be called like this, or whose objects have no length or nothing to read.
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
        check_data_world(dp_rank, dp_size, batch_size)
        given = {"num_replicas": dp_size, "rank": dp_rank, "shuffle": shuffle}
        offered = {"seed": seed, "drop_last": drop_last}
        sampler = sampler_cls(dataset, **given, **_accepted(sampler_cls, given, offered))
        super().__init__(sampler, batch_size, drop_last)
        self.num_samples = _length(sampler)
        self.dataset_length = len(dataset)
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.shuffle = bool(shuffle)
        self._epoch = 0
        self._position = 0
        if len(self) == 0:
            raise ConfigError(
                f"{type(sampler).__name__} leaves no batch: {self.num_samples} samples for rank {dp_rank}, "
                f"batch_size={batch_size}, drop_last={drop_last}; use drop_last=False or a smaller batch_size"
            )

    def start_at(self, epoch: int, position: int) -> None:
        """The next `iter()` yields the batches of this epoch after the first `position`."""
        self._epoch = epoch
        self._position = position

    def num_batches(self, position: int = 0) -> int:
        """How many batches this rank gets after this position."""
        return max(len(self) - position, 0)

    def place(self, position: int) -> BatchPlace:
        """The batch that begins at this position (in batches)."""
        num_samples = min(self.batch_size, self.num_samples - position * self.batch_size)
        is_last = self.num_batches(position + 1) == 0
        return BatchPlace(
            num_samples=num_samples, num_repeated=0, num_repeated_here=0, stop=position + 1, is_last=is_last
        )

    def __iter__(self) -> Iterator[list[int]]:
        return self._walk(super().__iter__(), self._epoch, self._position)

    def _walk(self, batches: Iterator[list[int]], epoch: int, position: int) -> Iterator[SampleBatch]:
        # The sampler is touched at the first `next` only: torch makes two iterators for workers and uses one, and a
        # sampler that counts its epochs by itself must not count both.
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        stream = f"{self.seed}/{epoch}/{self.dp_rank}"
        for index, batch in enumerate(islice(batches, position, None), start=position):
            yield SampleBatch(batch, stream=stream, start=index * self.batch_size)

    def stream_seed(self, epoch: int) -> int:
        """A seed for this epoch and rank, for what workers draw before their first sample."""
        return derive_seed("workers", self.seed, epoch, self.dp_rank)

    def describe(self) -> dict[str, Any]:
        """All that the order of such a sampler can depend on."""
        return {
            "sampler": type(self.sampler).__name__,
            "seed": self.seed,
            "num_samples": self.dataset_length,
            "shuffle": self.shuffle,
            "dp_size": self.dp_size,
            "batch_size": self.batch_size,
            "drop_last": bool(self.drop_last),
        }

    def adopt(self, described: Mapping[str, Any], position: int) -> None:
        """Compares. Inside an epoch everything must be equal; between two, only what lasts for the whole run.

        Raises:
            ConfigError: the described sampler would go on with other samples.
        """
        own = self.describe()
        lasting = ("sampler", "seed", "num_samples", "shuffle")
        differing = [key for key in (own if position else lasting) if described[key] != own[key]]
        if differing:
            raise ConfigError(
                "a loader state with "
                + ", ".join(f"{key}={described[key]!r} (here {own[key]!r})" for key in differing)
                + f": the position of a {own['sampler']} can't be carried over to that; make the loader as it was "
                "saved, or leave out distributed_sampler_cls, whose positions hold for any ranks and batch size"
            )

    def announcement(self, position: int = 0) -> str | None:
        """What this rank reads of the dataset, where that is not an equal part of it; said of every epoch at once."""
        dropped = self.num_samples % self.batch_size if self.drop_last else 0
        if position or (not dropped and self.num_samples * self.dp_size == self.dataset_length):
            return None
        name = type(self.sampler).__name__
        less = f", of which drop_last=True drops the last {dropped}" if dropped else ""
        return (
            f"{name} gives rank {self.dp_rank} of {self.dp_size} {self.num_samples} samples of {self.dataset_length} in"
            f" an epoch{less}: what it repeats, leaves out or gives other ranks is its own affair; if some have fewer"
            " batches, read them with booster.join_uneven(loader)"
        )


def _accepted(
    sampler_cls: Callable[..., Sampler[int]], given: Mapping[str, Any], offered: Mapping[str, Any]
) -> dict[str, Any]:
    """The offered arguments that the class takes; ConfigError if it does not take the given ones."""
    if not callable(sampler_cls):
        raise ConfigError(
            f"distributed_sampler_cls={sampler_cls!r} can't be called: pass a class that is made as cls(dataset,"
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
    return {name: value for name, value in offered.items() if takes_any or name in parameters}


def _length(sampler: Sampler[int]) -> int:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"{type(sampler).__name__} has no length: whether all ranks have equally many batches can't be known; "
            "give the sampler class a __len__ (samples per rank)"
        ) from error
