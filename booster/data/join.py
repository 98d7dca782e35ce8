"""Uneven inputs: ranks with different numbers of batches all stop after the last one that every rank has."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

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
        self._source: LoaderIterator[T_co] | None = None
        self._num_batches = 0
        self._has_ended = False
        self.position = _UNKNOWN_POSITION

    @in_phase("data")
    def __next__(self) -> T_co:
        read = None if self._has_ended else self._read_synchronized()
        if read is None:
            self.close()
            raise StopIteration
        self._num_batches += 1
        if isinstance(self._source, _PrefetchIterator):  # other iterators report their positions themselves
            self.position = replace(self._source.position, is_last=self._has_ended)
            register_iteration(self)
        return read[0]

    def close(self) -> None:
        """End the epoch on this rank and close its source. No communication."""
        self._has_ended = True
        source, self._source, self._batches = self._source, None, ()
        unregister_iteration(self)
        if source is not None:
            source.close()

    def _read_synchronized(self) -> tuple[T_co] | None:
        """Return the next batch, or None if some rank has none; record whether it is the last one. Collective."""
        read: tuple[T_co] | None = None
        error, num_left = None, 0
        try:
            if self._source is None:
                self._source = _loader_iterator(self._batches)
            read = (next(self._source),)
            num_left = 1 if self._source.position.is_last else 2
        except StopIteration:
            pass
        except RankFailedError:  # of a collective inside: the others raise it, too, or cannot be reached
            self.close()
            raise
        except Exception as caught:  # raised on all ranks below
            error = caught
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
            if self._source is not None:
                self._source.truncate()
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


def _loader_iterator(batches: Iterable[T]) -> LoaderIterator[T]:
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise ConfigError(
            f"join_uneven() was given a {type(batches).__name__}, which is not iterable: give it this rank's loader, or"
            " any iterable of batches, once an epoch: for batch in booster.join_uneven(loader)"
        )
    try:
        source = iter(batches)
    except StopIteration as error:  # which would look like the end of the epoch
        raise RuntimeError(
            f"{type(batches).__name__}.__iter__ raised StopIteration, as next() of an exhausted iterator does: return"
            " an iterator"
        ) from error
    # Not of our loaders, whose saved position prefetching would change.
    return source if isinstance(source, LoaderIterator) else _PrefetchIterator(source)


class _PrefetchIterator(LoaderIterator[T_co]):
    """Iterator over any batches that prefetches one, so that it knows which is the last."""

    def __init__(self, source: Iterator[T_co]) -> None:
        self._source: Iterator[T_co] | None = source
        self._position = _UNKNOWN_POSITION
        self._next = self._fetch()

    @property
    def position(self) -> BatchPosition:
        return self._position

    def __next__(self) -> T_co:
        fetched = self._next
        if fetched is None:
            raise StopIteration
        if isinstance(fetched, Exception):
            raise fetched
        batch, position = fetched
        self._next = self._fetch()
        self._position = replace(position, is_last=self._next is None)
        return batch

    def _fetch(self) -> tuple[T_co, BatchPosition] | Exception | None:
        """Return the next batch and its position, the error in its place, or None."""
        if self._source is None:
            return None
        before = active_position()
        try:
            batch = next(self._source)
        except StopIteration:
            return None
        except Exception as error:  # raised in place of this batch
            return error
        # If one of our loaders inside of a generator has just advanced, the batch has its samples.
        position = active_position()
        is_its_own = position is not None and position is not before
        return batch, position if position is not None and is_its_own else _UNKNOWN_POSITION

    def truncate(self) -> None:
        """Do nothing: the iterator is not read any further."""

    def close(self) -> None:
        source, self._source, self._next = self._source, None, None
        if isinstance(source, (Generator, JoinIterator)):  # other sources, such as files, are left to their owners
            source.close()
