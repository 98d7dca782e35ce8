"""The loader that every rank iterates: each `iter()` is the next epoch, and it can go on from the middle of one.

Which loaders are being iterated right now, so that the facade knows when a batch is the last of its pass.

An iteration is known from its first batch until it ends, is closed or is garbage collected (what `break` does to a
`for` loop's iterator). The list holds weak references only, so that knowing an iteration does not keep it alive.
"""

from __future__ import annotations

import base64
import copy
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from booster.errors import ConfigError
from booster.fault_tolerance.progress import in_phase

from .sampler import BatchPlace, EpochSampler
from .worker_seeding import SeededDataset, WorkerStart


def encode_state(plain: dict[str, Any], generator: torch.Generator | None) -> dict[str, Any]:
    """The plain entries, and the generator's state as text if there is one."""
    if generator is None:
        return plain
    return plain | {"generator": base64.b64encode(bytes(generator.get_state().tolist())).decode("ascii")}


def decode_state(
    state: Mapping[str, Any], expected: set[str], *, has_generator: bool
) -> tuple[Mapping[str, Any], torch.Tensor | None]:
    """The state, checked, and the generator's state in it.

    Raises:
        ConfigError: entries are missing, the position is no number of at least 0, or only one of state and loader
            has a generator.
    """
    missing = sorted(expected - set(state))
    if missing:
        raise ConfigError(
            f"a loader state without {', '.join(missing)} (it has {', '.join(sorted(map(str, state))) or 'nothing'}): "
            "it is not of this kind of loader; pass what state_dict() of a loader made with the same "
            "distributed_sampler_cls (or without one) returned"
        )
    for key in sorted(expected & {"epoch", "samples_consumed", "batches_consumed"}):
        if not isinstance(state[key], int) or state[key] < 0:
            raise ConfigError(f"a loader state with {key}={state[key]!r}: it counts from 0; pass an unchanged state")
    if has_generator != ("generator" in state):
        raise ConfigError(
            f"a loader state with{'out' if has_generator else ''} a generator for a loader "
            f"with{'' if has_generator else 'out'} one: the run would draw other numbers; make the loader with the "
            "same `generator` argument as when the state was saved"
        )
    return state, _decode_generator(state["generator"]) if has_generator else None


def _decode_generator(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)


class Iteration(Protocol):
    """One pass over a loader, or over other batches (None), and the place of the batch that was handed out last."""

    @property
    def loader(self) -> DistributedDataLoader[Any] | None: ...

    @property
    def place(self) -> BatchPlace: ...


# Innermost last. An iteration moves to the end with each batch, so that a second loader whose iterator is only held
# (`val_iter = iter(val_loader)`) does not hide the one that is really being read.
_live: list[weakref.ref[Iteration]] = []


def enter_iteration(iteration: Iteration) -> None:
    """Makes an iteration the innermost one."""
    if _live and _live[-1]() is iteration:
        return
    leave_iteration(iteration)
    _live.append(weakref.ref(iteration, _forget))


def leave_iteration(iteration: Iteration) -> None:
    """Takes an iteration out; harmless if it is not in."""
    _live[:] = [ref for ref in _live if ref() is not iteration]


def _forget(dead: weakref.ref[Iteration]) -> None:
    _live[:] = [ref for ref in _live if ref is not dead]


def active_iteration(loader: DistributedDataLoader[Any] | None = None) -> Iteration | None:
    """The innermost iteration that is going on, of anything or of this loader; None outside."""
    for iteration in _innermost_first():
        if loader is None or iteration.loader is loader:
            return iteration
    return None


def active_place() -> BatchPlace | None:
    """The place of the batch that was handed out last by the innermost iteration; None outside of any.

    Collective: no. Every rank sees its own iterations only.
    """
    iteration = active_iteration()
    return None if iteration is None else iteration.place


def active_loader() -> DistributedDataLoader[Any] | None:
    """The loader whose batch was handed out last and whose iteration still goes on; None outside of any.

    Collective: no. Every rank sees its own loaders only.
    """
    loaders = (iteration.loader for iteration in _innermost_first())
    return next((loader for loader in loaders if loader is not None), None)


def _innermost_first() -> list[Iteration]:
    return [iteration for ref in reversed(_live) if (iteration := ref()) is not None]


def announce(text: str | None) -> None:
    """Logs the text on rank 0; nothing where there is none. No communication."""
    if text is not None:
        from booster.logger import get_dist_logger  # the logger asks where it runs

        get_dist_logger("booster.data").info(text, ranks=[0])


T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    """A place in the run over the data: `position` counts as the sampler does, 0 at the start of the epoch."""

    epoch: int
    position: int = 0


class EpochIterator(Iterator[T_co]):
    """One pass over a loader; counts what it hands out. `close()` or dropping it ends the pass."""

    def __init__(
        self, loader: DistributedDataLoader[T_co], source: Iterator[T_co], sampler: EpochSampler, cursor: _Cursor
    ) -> None:
        self.loader = loader
        self._source: Iterator[T_co] | None = source
        self._sampler = sampler
        self._cursor = cursor
        self._place: BatchPlace | None = None

    @property
    def place(self) -> BatchPlace:
        """The place of the batch that was handed out last; only asked for once there is one."""
        assert self._place is not None
        return self._place

    @property
    def is_open(self) -> bool:
        """Whether more batches may come."""
        return self._source is not None

    @in_phase("data")
    def __next__(self) -> T_co:
        if self._source is None:
            raise StopIteration
        place = self._sampler.place(self._cursor.position)
        if not place.is_last:
            # Also if the dataset raises now: torch goes on behind a failed batch when it is asked for another.
            self._cursor = _Cursor(epoch=self._cursor.epoch, position=place.stop)
        try:
            batch = next(self._source)
        except StopIteration:
            self.close()
            raise
        self._place = place
        self.loader._handed_out(None if place.is_last else self._cursor)
        enter_iteration(self)
        return batch

    def end_after_this(self) -> None:
        """Makes the batch that was handed out last the epoch's last one, also where there are more."""
        if self._place is not None:
            self._place = replace(self._place, is_last=True)
        self.loader._handed_out(None)

    def close(self) -> None:
        """Ends the pass and lets go of its workers."""
        self._source = None
        leave_iteration(self)


class DistributedDataLoader(DataLoader[T_co]):
    """A DataLoader over one rank's part of the data. Use `prepare_dataloader` to make one.

    Every `iter()` is the next epoch, in a new order if the sampler shuffles. `state_dict()` says where the run over
    the data stands, by the batches that were handed out (not by those that workers have read ahead): inside the loop
    body the current batch counts as consumed. After `load_state_dict` the next `iter()` goes on with the following
    batch. Leaving an epoch with `break` leaves the state inside it, while the next `iter()` of the same loader starts
    the next epoch; `set_epoch(n)` says so for the state, too.

    Nothing is drawn from the global random state: workers start from a generator of the loader's own, or from the
    user's `generator`, which advances by one draw with each epoch and is part of the state.

    Args:
        dataset: A map-style dataset.
        sampler: Which batches this rank reads.
        batch_size: Per rank; for those who ask the loader.
        drop_last: For those who ask the loader.
        **loader_options: What torch's DataLoader takes beside the dataset, samplers, batch size and shuffle.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: EpochSampler,
        *,
        batch_size: int,
        drop_last: bool = False,
        **loader_options: Any,
    ) -> None:
        self._user_generator: torch.Generator | None = loader_options.pop("generator", None)
        generator = torch.Generator() if self._user_generator is None else self._user_generator
        super().__init__(dataset, batch_sampler=sampler, generator=generator, **loader_options)
        # torch leaves None and False here for every loader with a batch sampler, and refuses assignment.
        vars(self).update(batch_size=batch_size, drop_last=drop_last)
        self.epoch_sampler = sampler
        self._here = _Cursor(epoch=0)  # where the batches that were handed out end
        self._next = _Cursor(epoch=0)  # where the next iter() begins
        self._newest: weakref.ref[EpochIterator[T_co]] | None = None

    @in_phase("data")
    def __iter__(self) -> EpochIterator[T_co]:  # type: ignore[override]
        cursor = self._next
        self.epoch_sampler.start_at(cursor.epoch, cursor.position)
        source = self._start_source(cursor)
        self._here, self._next = cursor, _Cursor(epoch=cursor.epoch + 1)
        iterator = EpochIterator(self, source, self.epoch_sampler, cursor)
        self._newest = weakref.ref(iterator)
        return iterator

    def _start_source(self, cursor: _Cursor) -> Iterator[T_co]:
        """torch's iterator. It draws one number to seed workers, but persistent workers only in their first epoch."""
        if self._user_generator is None:
            self.generator.manual_seed(self.epoch_sampler.stream_seed(cursor.epoch))
            return self._open_source()
        before = self._user_generator.get_state()
        source = self._open_source()
        self._user_generator.set_state(before)
        if cursor.position == 0:  # one draw per epoch: when an epoch goes on, the restored state has it already
            torch.empty((), dtype=torch.int64).random_(generator=self._user_generator)
        return source

    def _open_source(self) -> Iterator[T_co]:
        newest = None if self._newest is None else self._newest()
        if self.persistent_workers and newest is not None and newest.is_open:
            # Persistent workers serve one pass at a time, and torch would end the outer one without a word.
            return iter(self._get_iterator())
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        # torch's iterator reads what its workers need from the loader; `self.dataset` stays the user's own object.
        workers_view = copy.copy(self)
        vars(workers_view).update(dataset=SeededDataset(self.dataset), worker_init_fn=WorkerStart(self.worker_init_fn))
        return super(DistributedDataLoader, workers_view)._get_iterator()

    def __len__(self) -> int:
        return self.epoch_sampler.num_batches()

    def _handed_out(self, after: _Cursor | None) -> None:
        # None: the epoch's last batch. What follows is the next iter(), not the empty rest of this epoch.
        self._here = self._next if after is None else after

    @property
    def epoch(self) -> int:
        """The epoch that the next batch comes from: in the loop body of an epoch's last batch, the next one."""
        return self._here.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next `iter()` starts this epoch; one whose middle was just loaded goes on there.

        Not needed: every `iter()` starts the next epoch by itself.
        """
        if self._next.epoch != epoch:
            self._next = _Cursor(epoch=epoch)
        self._here = self._next

    def state_dict(self) -> dict[str, Any]:
        """Where the run over the data stands, as plain numbers, strings and booleans that go into JSON.

        Collective: no. The state is the same on every rank, but for the user's `generator`.
        """
        sampler = self.epoch_sampler
        cursor = {"epoch": self._here.epoch, sampler.position_key: self._here.position}
        return encode_state(sampler.describe() | cursor | {"in_epoch": self._here.position > 0}, self._user_generator)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter()` goes on where the state was taken.

        Collective: no, but all ranks have to load the same state.

        Args:
            state: What `state_dict` returned, of a loader over the same dataset. The number of ranks and the batch
                size may differ, if no `distributed_sampler_cls` is used. The seed becomes that of the state.

        Raises:
            ConfigError: not such a state, another length of the dataset, or another kind of order.
        """
        sampler = self.epoch_sampler
        expected = {*sampler.describe(), "epoch", sampler.position_key}
        plain, generator_state = decode_state(state, expected, has_generator=self._user_generator is not None)
        position = plain[sampler.position_key]
        sampler.adopt(plain, position)
        if self._user_generator is not None and generator_state is not None:
            self._user_generator.set_state(generator_state)
        # With drop_last and a larger global batch now, what is left of the epoch may be no batch any more.
        is_over = position > 0 and sampler.num_batches(position) == 0
        self._here = self._next = _Cursor(epoch=plain["epoch"] + is_over, position=0 if is_over else position)
        if self._next.position:
            announce(sampler.announcement(self._next.position))

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch that was handed out last is the last of its epoch. False outside of an iteration."""
        iteration = self._iteration()
        return iteration is not None and iteration.place.is_last

    @property
    def current_batch_samples(self) -> int:
        """How many samples this rank got in the batch that was handed out last, repeats included; 0 outside."""
        iteration = self._iteration()
        return 0 if iteration is None else iteration.place.num_samples

    @property
    def num_repeated_in_batch(self) -> int:
        """How many samples of the current global batch (all ranks in rank order, at its very end) are repeats.

        Only in the last batch of an epoch other than 0. Always 0 with a `distributed_sampler_cls`, whose repeats are
        not known, and outside of an iteration.
        """
        iteration = self._iteration()
        return 0 if iteration is None else iteration.place.num_repeated

    def _iteration(self) -> Iteration | None:
        return active_iteration(self)
