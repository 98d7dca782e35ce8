"""Distributed data loader with resumable epochs, and the registry of active iterations.

The registry shows whether a batch is the last of its epoch. An iteration is registered from its first batch until it
ends, is closed or is garbage collected (as after `break` in a `for` loop). The registry holds weak references, so it
does not keep iterations alive.
"""

from __future__ import annotations

import base64
import copy
import functools
import operator
import weakref
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Sampler

from booster.errors import ConfigError
from booster.fault_tolerance.progress import in_phase
from booster.logger import log_rank_zero
from booster.rng_state import preserved_rng

from .sampler import BatchPosition, EpochSampler
from .stream import StreamPosition, StreamReader, StreamShard, collate_shard
from .worker_seeding import SeededDataset, init_worker, may_draw


def _check_state(state: Mapping[str, Any], expected: set[str], *, has_generator: bool) -> None:
    """Raise `ConfigError` if a loader state is not one of such a loader."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"a loader state of class {type(state).__name__}: pass what a loader's state_dict() returned")
    missing = sorted(expected - set(state))
    if missing:
        raise ConfigError(
            f"a loader state without {', '.join(missing)} (it has {', '.join(sorted(map(str, state))) or 'nothing'}) is"
            " of another kind of loader: pass the state_dict() of a loader of the same kind of dataset, map-style or a"
            " stream, and with the same sampler or distributed_sampler_cls"
        )
    for key in sorted(expected & {"epoch", "samples_consumed", "batches_consumed"}):
        if not isinstance(state[key], int) or state[key] < 0:
            raise ConfigError(
                f"a loader state with {key}={state[key]!r}, which is not a non-negative int: pass an unchanged state"
            )
    if has_generator != ("generator" in state):
        raise ConfigError(
            f"a loader state with{'out' if has_generator else ''} a generator for a loader "
            f"with{'' if has_generator else 'out'} one: the random numbers would differ; create the loader with the"
            " same `generator` argument as when the state was saved"
        )


class Iteration(Protocol):
    """One pass over a loader, or over other batches (`loader` is None), and the position of the current batch."""

    @property
    def loader(self) -> DistributedDataLoader[Any] | None: ...

    @property
    def position(self) -> BatchPosition: ...


# Innermost last. An iteration moves to the end with each batch, so that a second loader whose iterator is only held
# (`val_iter = iter(val_loader)`) does not hide the one that is really being read.
_active_iterations: list[weakref.ref[Iteration]] = []


def register_iteration(iteration: Iteration) -> None:
    if _active_iterations and _active_iterations[-1]() is iteration:
        return
    unregister_iteration(iteration)
    _active_iterations.append(weakref.ref(iteration))


def unregister_iteration(iteration: Iteration) -> None:
    """Remove an iteration, if registered, and references to iterations that no longer exist."""
    _active_iterations[:] = [ref for ref in _active_iterations if ref() is not None and ref() is not iteration]


def active_position(loader: Any = None) -> BatchPosition | None:
    """Return the position of the current batch of the innermost iteration, or None. Each rank has its own registry.

    Args:
        loader: Loader of the iteration, or the iteration itself; optional, defaults to any.
    """
    for ref in reversed(_active_iterations):
        iteration = ref()
        if iteration is not None and (loader is None or loader is iteration.loader or loader is iteration):
            return iteration.position
    return None


def log_uneven_end(sampler: EpochSampler, position: int = 0) -> None:
    """Log on rank 0 what the ends of epochs repeat or drop, if anything. No communication."""
    message = sampler.uneven_end_message(position)
    if message is not None:
        log_rank_zero(message, "booster.data")


T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position in the data; `position` is in the sampler's unit, 0 at the start of the epoch."""

    epoch: int
    position: int = 0
    stream_state: Any = None  # of a stream with a state_dict: its state there


class LoaderIterator(Iterator[T_co]):
    """Iterator over one epoch of one of our loaders."""

    @property
    @abstractmethod
    def position(self) -> BatchPosition:
        """Position of the current batch. Requires that one was returned."""

    @abstractmethod
    def truncate(self) -> None:
        """Mark the current batch as the last one of the epoch, even if more follow."""

    @abstractmethod
    def close(self) -> None:
        """End the pass and release its workers."""


class EpochIterator(LoaderIterator[T_co]):
    """Iterator over one epoch, which tracks the position. `close()` or garbage collection ends the epoch."""

    def __init__(
        self, loader: DistributedDataLoader[T_co], source: Iterator[Any], sampler: EpochSampler, cursor: Cursor
    ) -> None:
        self.loader = loader
        self._source: Iterator[Any] | None = source
        self._sampler: Any = sampler
        self._cursor = cursor
        self._position: BatchPosition | None = None

    @property
    def position(self) -> BatchPosition:
        assert self._position is not None
        return self._position

    @property
    def is_open(self) -> bool:
        """Whether more batches may come."""
        return self._source is not None

    @in_phase("data")
    def __next__(self) -> T_co:
        if self._source is None:
            raise StopIteration
        try:
            place, batch = self._read(self._source)
        except StopIteration:
            self.close()
            raise
        self._position = place
        self.loader._on_batch(None if place.is_last else self._cursor)
        register_iteration(self)
        return batch

    def _read(self, source: Iterator[Any]) -> tuple[BatchPosition, T_co]:
        place: BatchPosition = self._sampler.batch_at(self._cursor.position)
        if not place.is_last:
            # Also if the dataset raises now: after a failed batch torch continues with the next one.
            self._cursor = Cursor(epoch=self._cursor.epoch, position=place.stop)
        if not self.loader._seeds_here:
            return place, next(source)
        with preserved_rng():
            return place, next(source)

    def truncate(self) -> None:
        if self._position is not None:
            self._position = replace(self._position, is_last=True)
        self.loader._on_batch(None)

    def close(self) -> None:
        self._source = None
        unregister_iteration(self)


class _UserIterator(LoaderIterator[T_co]):
    """Iterator that the `__iter__` of a user's DataLoader class makes around ours."""

    def __init__(self, loader: DistributedDataLoader[T_co], source: Iterator[T_co]) -> None:
        self._loader = loader
        self._source = source
        self._num_passes = loader._num_passes
        self._inner: EpochIterator[T_co] | None = None

    @property
    def position(self) -> BatchPosition:
        assert self._inner is not None
        return self._inner.position

    def __next__(self) -> T_co:
        batch = next(self._source)
        if self._inner is None:
            inner = None if self._loader._last_iterator is None else self._loader._last_iterator()
            if inner is None or self._loader._num_passes == self._num_passes:
                raise ConfigError(
                    f"{type(self._loader).__name__}.__iter__ does not take its batches from super().__iter__() one"
                    " after another, so they are neither this rank's part of the data nor counted: write `for batch in"
                    " super().__iter__()` there, or leave __iter__ out"
                )
            self._inner = inner
        return batch

    def truncate(self) -> None:
        if self._inner is not None:
            self._inner.truncate()

    def close(self) -> None:
        if isinstance(self._source, Generator):
            self._source.close()
        if self._inner is not None:
            self._inner.close()


class _EpochSetter(Sampler[Any]):
    """The sampler of the loader that was divided, with the `set_epoch` of ours."""

    def __init__(self, loader: DistributedDataLoader[Any], sampler: Sampler[Any]) -> None:
        self._loader = loader
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader; see `DistributedDataLoader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(cast("Sized", self._sampler))


class DistributedDataLoader(DataLoader[T_co]):
    """Stateful DataLoader over one rank's shard of the data. Created by `prepare_dataloader`.

    Every `iter()` is the next epoch, in a new order if the sampler shuffles. `state_dict()` returns the position in the
    data after the batches that were yielded, regardless of prefetching: inside the loop body the current batch counts
    as consumed. After `load_state_dict` the next `iter()` resumes with the following batch. After `break` the state
    stays inside the epoch, but the next `iter()` of the same loader starts the next epoch; `set_epoch(n)` moves the
    state, too.

    The global RNG is not used: samples are seeded by their position, see Note [Sample seeds], and the user's
    `generator` advances by one draw per epoch and is part of the state.

    Args:
        loader: Loader of all samples, whose attributes are taken over, except for the sampler.
        sampler: Order of this rank's samples; a batch sampler, unless the dataset is a stream.
    """

    def __init__(self, loader: DataLoader[T_co], sampler: EpochSampler) -> None:
        # torch's constructor is not called: it does not know a subclass's attributes, and forbids to assign these.
        vars(self).update(vars(loader))
        self._user_generator: torch.Generator | None = loader.generator
        self.generator = torch.Generator() if loader.generator is None else loader.generator
        self._iterator = None  # of the loader's own persistent workers
        batch_size = getattr(sampler, "batch_size", loader.batch_size)
        vars(self).update(batch_size=batch_size, drop_last=bool(getattr(sampler, "drop_last", False)))
        if isinstance(sampler, Sampler):
            vars(self).update(batch_sampler=sampler)
        self.epoch_sampler = sampler
        self._cursor = Cursor(epoch=0)  # after the last yielded batch
        self._next = Cursor(epoch=0)  # start of the next iter()
        self._last_iterator: weakref.ref[EpochIterator[T_co]] | None = None
        self._num_passes = 0

    @in_phase("data")
    def __iter__(self) -> EpochIterator[T_co]:  # type: ignore[override]
        cursor = self._next
        self.epoch_sampler.start_at(cursor.epoch, cursor.position)
        source = self._start_source(cursor)
        self._cursor, self._next = cursor, Cursor(epoch=cursor.epoch + 1)
        self._num_passes += 1
        # A copy of the sampler, because another pass may start while this one is read.
        iterator = self._make_iterator(source, copy.copy(self.epoch_sampler), cursor)
        self._last_iterator = weakref.ref(iterator)
        return iterator

    def _make_iterator(self, source: Iterator[Any], sampler: EpochSampler, cursor: Cursor) -> EpochIterator[T_co]:
        return EpochIterator(self, source, sampler, cursor)

    def _start_source(self, cursor: Cursor) -> Iterator[Any]:
        # torch's iterator draws one number to seed workers; persistent workers draw only in their first epoch.
        if self._user_generator is None:
            self.generator.manual_seed(self.epoch_sampler.stream_seed(cursor.epoch))
            return self._base_iterator()
        before = self._user_generator.get_state()
        source = self._base_iterator()
        self._user_generator.set_state(before)
        if cursor.position == 0:  # one draw per epoch: the restored state of a resumed epoch already includes it
            torch.empty((), dtype=torch.int64).random_(generator=self._user_generator)
        return source

    def _base_iterator(self) -> Iterator[Any]:
        last_iterator = None if self._last_iterator is None else self._last_iterator()
        if self.persistent_workers and last_iterator is not None and last_iterator.is_open:
            # Persistent workers serve one pass at a time, and torch would silently end the outer one.
            return iter(self._get_iterator())
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if self.num_workers == 0 and not self._seeds_here:
            return super()._get_iterator()
        # torch's iterator passes the loader's dataset to its workers; `self.dataset` must stay the user's object.
        workers_view = copy.copy(self)
        initialize = functools.partial(init_worker, self.worker_init_fn)
        vars(workers_view).update(dataset=SeededDataset(self.dataset), worker_init_fn=initialize)
        return super(DistributedDataLoader, workers_view)._get_iterator()

    @property
    def _seeds_here(self) -> bool:
        """Whether this process reads the samples and seeds them; see Note [Sample seeds]."""
        return self.num_workers == 0 and may_draw(self.dataset, self.collate_fn)

    def __len__(self) -> int:
        return self.epoch_sampler.num_batches()

    def _on_batch(self, after: Cursor | None) -> None:
        # None after the last batch of the epoch: the next iter() follows, not the empty rest of this epoch.
        self._cursor = self._next if after is None else after

    # As an attribute it would be a reference cycle.
    @property  # type: ignore[override]
    def sampler(self) -> _EpochSetter:  # type: ignore[override]
        """Sampler whose `set_epoch` is the loader's, for loops that were written for a `DistributedSampler`."""
        return _EpochSetter(self, vars(self)["sampler"])

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; in the loop body of an epoch's last batch this is the next epoch."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`. If a state inside this epoch was just loaded, `iter()` resumes there.

        Optional: every `iter()` starts the next epoch.

        Raises:
            ConfigError: It is not the number of an epoch.
        """
        try:
            number = operator.index(epoch)
        except TypeError:
            number = -1
        if number < 0:
            raise ConfigError(f"set_epoch({epoch!r}) is not the number of an epoch: give 0 or more")
        if self._next.epoch != number:
            self._next = Cursor(epoch=number)
        self._cursor = self._next

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data as a JSON-serializable dict.

        Collective: no. The state is the same on every rank, except for the user's `generator`.
        """
        state = self.epoch_sampler.settings() | {
            "epoch": self._cursor.epoch,
            self.epoch_sampler.position_key: self._cursor.position,
            "in_epoch": self._cursor.position > 0,
            "global_batch_size": getattr(self.epoch_sampler, "global_batch_size", None),
        }
        if self._user_generator is not None:
            generator_bytes = bytes(self._user_generator.get_state().tolist())
            state["generator"] = base64.b64encode(generator_bytes).decode("ascii")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; the next `iter()` resumes there.

        Args:
            state: Result of `state_dict` of a loader over the same dataset. The number of ranks and the batch size may
                differ unless a `distributed_sampler_cls` is used. The seed is taken from the state; another one of the
                loader is logged.

        Raises:
            ConfigError: The state is invalid, or the dataset's length or the kind of order differs.

        Collective: no, but all ranks must load the same state.
        """
        sampler = self.epoch_sampler
        settings = sampler.settings()
        expected = {*settings, "epoch", sampler.position_key}
        _check_state(state, expected, has_generator=self._user_generator is not None)
        position = state[sampler.position_key]
        generator_bytes = base64.b64decode(state.get("generator", ""))
        sampler.resume_from(state, position)
        if self._user_generator is not None:
            self._user_generator.set_state(torch.tensor(list(generator_bytes), dtype=torch.uint8))
        # With drop_last and a larger global batch, the rest of the epoch may hold no batch.
        if position > 0 and self._has_ended(position):
            cursor = Cursor(epoch=state["epoch"] + 1)
        else:
            cursor = Cursor(epoch=state["epoch"], position=position, stream_state=state.get("stream_state"))
        self._cursor = self._next = cursor
        if self._next.position:
            log_uneven_end(sampler, self._next.position)
        if settings["seed"] != state["seed"]:
            log_rank_zero(
                f"the data continues with seed={state['seed']} of the checkpoint, and this loader was made with"
                f" seed={settings['seed']}: for the orders and random samples of that one, don't load its position",
                "booster.data",
            )
        before, now = state.get("global_batch_size"), getattr(sampler, "global_batch_size", None)
        if None not in (before, now) and before != now:
            log_rank_zero(
                f"the data continues with {now} samples in a batch of all ranks, and the checkpoint had {before}: a"
                " step is another one than before, unless the number of accumulated batches makes up for it",
                "booster.data",
            )

    def _has_ended(self, position: int) -> bool:
        """Whether no batch follows in the epoch."""
        return self.epoch_sampler.num_batches(position) == 0

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last of its epoch. False outside of an iteration."""
        position = active_position(self)
        return position is not None and position.is_last

    @property
    def current_batch_samples(self) -> int:
        """Number of samples in this rank's current batch, repeats included; 0 outside of an iteration."""
        position = active_position(self)
        return 0 if position is None else position.num_samples

    @property
    def num_repeated_in_batch(self) -> int:
        """Number of repeated samples at the end of the current global batch (all ranks in rank order).

        Nonzero only in the last batch of an epoch. Always 0 outside of an iteration and with a
        `distributed_sampler_cls`, whose repeats are unknown.
        """
        position = active_position(self)
        return 0 if position is None else position.num_repeated


class DistributedStreamLoader(DistributedDataLoader[T_co]):
    """`DistributedDataLoader` over an `IterableDataset`; see Note [Streams]."""

    epoch_sampler: StreamShard

    def _make_iterator(self, source: Iterator[Any], sampler: EpochSampler, cursor: Cursor) -> EpochIterator[T_co]:
        return _StreamIterator(self, source, sampler, cursor)

    def _base_iterator(self) -> Iterator[Any]:
        cursor = self._next
        if cursor.position:
            self._iterator = None  # persistent workers know no other state than that of their start
        if self._iterator is not None:
            vars(self._iterator)["stream_reader"].restart(cursor.epoch)
        return super()._base_iterator()

    def _get_iterator(self) -> Any:
        shard = self.epoch_sampler
        view = copy.copy(self)
        collate = functools.partial(collate_shard, self.collate_fn, self.batch_size is not None)
        # Without a batch sampler the reader yields whole batches.
        lock = (self.multiprocessing_context or torch.multiprocessing).Lock() if self.num_workers else None
        reader = StreamReader(self.dataset, copy.copy(shard), self._next.stream_state, lock)
        vars(view).update(dataset=reader, batch_sampler=None, collate_fn=collate)
        if self.num_workers:
            vars(view).update(worker_init_fn=functools.partial(init_worker, self.worker_init_fn))
        iterator = super(DistributedDataLoader, view)._get_iterator()
        vars(iterator).update(stream_reader=reader)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, with the dataset's own state if it has one."""
        return super().state_dict() | {"stream_state": self._cursor.stream_state}

    def _has_ended(self, position: int) -> bool:
        return False  # unknown until it is read


class _StreamIterator(EpochIterator[T_co]):
    """Iterator over one epoch of a stream, whose reader reports the positions."""

    def _read(self, source: Iterator[Any]) -> tuple[BatchPosition, T_co]:
        position, batch = self._read_first(source) if self._position is None else next(source)
        if not position.shard.is_last:
            self._cursor = Cursor(epoch=self._cursor.epoch, position=position.shard.stop, stream_state=position.state)
        return position.shard, batch

    def _read_first(self, source: Iterator[Any]) -> tuple[StreamPosition, T_co]:
        error: Exception | None = None
        first: tuple[StreamPosition, T_co] | None = None
        try:
            first = next(source, None)
        except Exception as raised:  # raised on all ranks
            error = raised
        if self._sampler.reading_size > 1:
            self._sampler.check_same_stream(self._cursor.epoch, None if first is None else first[0].digest, error)
        if error is not None:
            raise error
        if first is None:
            raise StopIteration
        return first


def distributed_loader(loader: DataLoader[T_co], sampler: EpochSampler) -> DistributedDataLoader[T_co]:
    """Return a loader like `loader` over this rank's samples, of its class, if that is a user's."""
    base = DistributedStreamLoader if isinstance(sampler, StreamShard) else DistributedDataLoader
    user_class: Any = type(loader)
    made: DistributedDataLoader[T_co] = _loader_class(base, user_class)(loader, sampler)
    return made


@functools.cache
def _loader_class(base: Any, user_class: Any) -> Any:
    """Return a class with our methods and else the user's, whose `__iter__` is given our batches."""
    if user_class is DataLoader or issubclass(base, user_class) or is_stateful_loader(user_class):
        return base
    special = ("__dict__", "__weakref__", "__doc__", "__module__", "__iter__", "__orig_bases__", "__parameters__")
    ours = {
        name: value
        for cls in reversed(base.__mro__[: base.__mro__.index(DataLoader)])
        for name, value in vars(cls).items()
        if name not in special
    }
    if user_class.__iter__ is not DataLoader.__iter__:

        def iterate(self: Any) -> Any:
            source = user_class.__iter__(self)
            return source if isinstance(source, EpochIterator) else _UserIterator(self, iter(source))

        ours["__iter__"] = iterate
    name = user_class.__name__
    return type(name, (user_class, base), ours | {"__module__": user_class.__module__, "__doc__": user_class.__doc__})


def is_stateful_loader(user_class: type[Any]) -> bool:
    """Return whether a class is torchdata's StatefulDataLoader, in place of which ours keep the position."""
    return user_class.__name__ == "StatefulDataLoader" and user_class.__module__.startswith("torchdata.")
