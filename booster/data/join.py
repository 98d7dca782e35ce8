"""Uneven inputs: ranks with different numbers of batches all stop after the last one that every rank has."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from booster.comm import all_gather_equal, all_reduce_numbers, group_size, raise_on_all_ranks
from booster.errors import ConfigError, RankFailedError, format_ranks
from booster.fault_tolerance.progress import in_phase
from booster.logger import get_dist_logger

from .dataloader import LoaderIterator, active_position, register_iteration, unregister_iteration
from .sampler import BatchPosition

# Note [Uneven inputs]
# Before each batch the ranks sum three numbers: how many ranks have no batch left, how many have their last one, and
# how many have failed. If any rank has none, all end here. If it is the last one of any rank, it is the last of all,
# and is marked as such, so that `accumulate` ends its step there. So it must be known with each batch whether another
# one follows: our loaders report that; from other iterators one batch is prefetched. An error of a prefetched batch is
# raised in its place, after the batches before it.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_UNKNOWN_POSITION = BatchPosition(num_samples=0, num_repeated=0, num_repeated_local=0, stop=0, is_last=False)


class JoinIterator(Iterator[T_co]):
    """Iterator over one epoch of each rank's batches; see `Booster.join_uneven`. Collective."""

    loader = None  # as in `booster.data.dataloader.Iteration`: it has no loader

    def __init__(self, batches: Iterable[T_co]) -> None:
        self._batches: Iterable[T_co] = batches
        self._reader: _Reader[T_co] | None = None
        self._num_batches = 0
        self._has_ended = False
        self.position = _UNKNOWN_POSITION

    @in_phase("data")
    def __next__(self) -> T_co:
        if self._has_ended:
            self.close()
            raise StopIteration
        read = self._read_synchronized()
        if read is None:
            self.close()
            raise StopIteration
        self._num_batches += 1
        if read.position is not None:
            self.position = replace(read.position, is_last=self._has_ended)
            register_iteration(self)
        return read.batch

    def close(self) -> None:
        """End the epoch on this rank and close its source. No communication."""
        self._has_ended = True
        reader, self._reader, self._batches = self._reader, None, ()
        unregister_iteration(self)
        if reader is not None:
            reader.close()

    def _read_synchronized(self) -> _ReadBatch[T_co] | None:
        """Return the next batch, or None if some rank has none; record whether it is the last one. Collective."""
        read, error = None, None
        try:
            if self._reader is None:
                self._reader = _reader_of(self._batches)
            read = self._reader.read()
        except RankFailedError:  # of a collective inside: the others raise it, too, or cannot be reached
            self.close()
            raise
        except Exception as caught:  # raised on all ranks below
            error = caught
        num_left = 0 if read is None else 1 + read.is_followed
        num_ended, num_ending, num_failed = all_reduce_numbers([num_left == 0, num_left == 1, error is not None])
        if num_failed:
            self.close()
            raise_on_all_ranks(error)
        if not num_ended and not num_ending:
            return read
        self._has_ended = True
        if max(num_ended, num_ending) < group_size():  # not all ranks end here by themselves
            left = all_gather_equal(torch.tensor([num_left])).tolist()
            _log_end([rank for rank, num in enumerate(left) if num == min(left)], self._num_batches + (not num_ended))
            if self._reader is not None:
                self._reader.truncate()
        return None if num_ended else read


def _log_end(ended: Sequence[int], num_batches: int) -> None:
    logger = get_dist_logger("booster.data")
    ranks = format_ranks(ended)
    if num_batches == 0:
        logger.warning(f"join_uneven() ends before the first batch: {ranks} had none", ranks=[0])
    else:
        logger.info(
            f"join_uneven() ends after {num_batches} batches on each rank: {ranks} had no more; remaining batches are"
            " dropped",
            ranks=[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadBatch(Generic[T]):
    """Batch of a reader.

    Attributes:
        batch: Batch for the user.
        is_followed: Whether this rank has another one, or an error in its place.
        position: Position of the batch, or None if its loader reports that itself.
    """

    batch: T
    is_followed: bool
    position: BatchPosition | None


class _Reader(Protocol[T]):
    """Reader of one rank's batches."""

    def read(self) -> _ReadBatch[T] | None:
        """Return the next batch, or None."""

    def truncate(self) -> None:
        """Make the last read batch the last one that is used."""

    def close(self) -> None:
        """Close the source."""


def _reader_of(batches: Iterable[T]) -> _Reader[T]:
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise ConfigError(
            f"join_uneven() was given a {type(batches).__name__}, which is not iterable: give it this rank's loader, or"
            " any iterable of batches, once an epoch: for batch in booster.join_uneven(loader)"
        )
    source = iter(batches)
    return _LoaderReader(source) if isinstance(source, LoaderIterator) else _PrefetchReader(source)


class _LoaderReader(Generic[T]):
    """Reader of our loaders, without prefetching, which would change their saved position."""

    def __init__(self, source: LoaderIterator[T]) -> None:
        self._source = source

    def read(self) -> _ReadBatch[T] | None:
        try:
            batch = next(self._source)
        except StopIteration:
            return None
        return _ReadBatch(batch=batch, is_followed=not self._source.position.is_last, position=None)

    def truncate(self) -> None:
        self._source.truncate()

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    error: Exception


class _PrefetchReader(Generic[T]):
    """Reader of any iterator that prefetches one batch."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source: Iterator[T] | None = source
        self._next = self._fetch()

    def read(self) -> _ReadBatch[T] | None:
        now = self._next
        if isinstance(now, _Failed):
            raise now.error
        if now is not None:
            self._next = self._fetch()
            return replace(now, is_followed=self._next is not None)
        return None

    def _fetch(self) -> _ReadBatch[T] | _Failed | None:
        if self._source is None:
            return None
        before = active_position()
        try:
            batch = next(self._source)
        except StopIteration:
            return None
        except Exception as error:  # raised in place of this batch
            return _Failed(error=error)
        # If one of our loaders inside of a generator has just advanced, the batch has its samples.
        position = active_position()
        is_its_own = position is not None and position is not before
        return _ReadBatch(batch=batch, is_followed=True, position=position if is_its_own else _UNKNOWN_POSITION)

    def truncate(self) -> None:
        pass

    def close(self) -> None:
        source, self._source, self._next = self._source, None, None
        if isinstance(source, (Generator, JoinIterator)):  # other sources, such as files, are left to their owners
            source.close()
