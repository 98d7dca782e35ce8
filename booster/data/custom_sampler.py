"""The user's own distributed sampler class behind the loader's contract: epochs, positions in batches, streams."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from booster.data.sampler import BatchPlace, check_data_world
from booster.data.seeding import SampleBatch, derive_seed
from booster.errors import ConfigError

__all__ = ["CustomBatchSampler"]


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
