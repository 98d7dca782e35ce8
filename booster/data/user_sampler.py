"""Users' samplers and batch samplers, divided over the ranks and resumable like our own."""

from __future__ import annotations

import hashlib
import json
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from booster.comm import check_same_across_ranks
from booster.errors import ConfigError
from booster.rng_state import preserved_rng

from .sampler import BatchPosition, DistributedBatchSampler, EpochSampler, check_data_parallel
from .worker_seeding import SampleBatch, derive_seed, seed_worker

# Note [User samplers]
# An epoch's order is what the user's sampler yields in it, drawn as a whole at the start of the epoch on every rank, as
# one process would. Random numbers must be the same on all ranks and after a restart, so the order is drawn while
# Python's, numpy's and torch's global generators, and those that the sampler holds, are seeded by (seed, epoch); the
# global ones are put back. `set_epoch` is called if defined. A sampler of another class than torch's without
# `set_epoch` may count its own epochs, so earlier epochs that were not drawn here are drawn before. What cannot be
# made equal is detected: ranks compare digests of their orders at the start of each epoch, and a saved position holds
# that of its epoch.

_RNGS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_KNOWN = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class SamplerOrder:
    """Orders that a user's sampler or batch sampler draws; see Note [User samplers].

    Args:
        sampler: Sized iterable of indices, or of batches of indices.
        seed: Seed of the orders, the same on all ranks.

    Raises:
        ConfigError: The sampler has no length.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self.sampler = sampler
        self.name = type(sampler).__name__
        self.seed = seed
        self._nested = list(_nested_samplers(sampler))
        self._initial = [dict(vars(one)) for one in self._nested]
        held = (value for one in self._nested for value in vars(one).values())
        self._rngs = [(value, _rng_identity(value)) for value in held if isinstance(value, _RNGS)]
        self._counts_epochs = not all(type(one) in _KNOWN or hasattr(one, "set_epoch") for one in self._nested)
        self._num_drawn = 0
        try:
            self.length = len(sampler)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"{self.name} has no length, and may be endless: add __len__ to the class, which returns the number of"
                " what it yields in an epoch, or pass a list"
            ) from error

    def draw(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in this epoch; raise `ConfigError` if nothing, or more than its length."""
        if self._counts_epochs and epoch < self._num_drawn:
            for one, attributes in zip(self._nested, self._initial, strict=True):
                vars(one).update(attributes)
            self._num_drawn = 0
        if self._counts_epochs:
            for earlier in range(self._num_drawn, epoch):
                self._draw_once(earlier)
        return self._draw_once(epoch)

    def _draw_once(self, epoch: int) -> list[Any]:
        self._num_drawn = epoch + 1
        with preserved_rng():
            seed = derive_seed("order", self.seed, epoch)
            seed_worker(seed)
            for number, (rng, identity) in enumerate(self._rngs):
                _seed_rng(rng, derive_seed(seed, number, identity))
            for one in self._nested:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
            length = len(self.sampler)
            drawn = [_plain(one) for one in islice(self.sampler, length + 1)]
        if not 0 < len(drawn) <= length:
            raise ConfigError(
                f"{self.name} yields {'more than' if drawn else 'none of'} the {length} that its length promises in"
                f" epoch {epoch}: let __len__ be the number of what __iter__ yields, and at least 1"
            )
        return drawn


def _nested_samplers(sampler: Any) -> Iterator[Any]:
    """Yield the sampler, and samplers that it holds, if they have attributes."""
    if not hasattr(sampler, "__dict__"):
        return
    yield sampler
    for held in vars(sampler).values():
        if isinstance(held, Sampler):
            yield from _nested_samplers(held)


def _rng_identity(rng: Any) -> str:
    """Return what the user's seeding of a generator is known by; of torch's, draws before do not count."""
    if isinstance(rng, torch.Generator):
        return str(rng.initial_seed())
    state = rng.getstate() if isinstance(rng, random.Random) else _numpy_bits(rng).state
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


def _numpy_bits(rng: np.random.Generator | np.random.RandomState) -> Any:
    return rng.bit_generator if isinstance(rng, np.random.Generator) else rng._bit_generator


def _seed_rng(rng: Any, seed: int) -> None:
    if isinstance(rng, torch.Generator):
        rng.manual_seed(seed)
    elif isinstance(rng, random.Random):
        rng.seed(seed)
    else:
        bits = _numpy_bits(rng)
        bits.state = type(bits)(seed).state


def _plain(drawn: Any) -> Any:
    """Return an index or a batch with ints in place of tensors and arrays, which become lists."""
    if isinstance(drawn, (torch.Tensor, np.ndarray, np.generic)):
        return drawn.tolist()
    # A tuple stays one: datasets are indexed by it.
    return type(drawn)(_plain(index) for index in drawn) if type(drawn) in (list, tuple) else drawn


def _digest(order: Iterable[Any]) -> str:
    return hashlib.blake2b(json.dumps(order, default=repr).encode(), digest_size=16).hexdigest()


class _UserSampler(EpochSampler):
    """Base of samplers over users' orders: drawing at the start of an epoch, and the checks of the order."""

    def __init__(self, order: SamplerOrder, dataset_length: int) -> None:
        self.order = order
        self.seed = order.seed
        self.dataset_length = dataset_length
        self._drawn: tuple[int, list[Any], str] | None = None  # epoch, what was drawn, its digest

    @abstractmethod
    def _use(self, items: list[Any]) -> None:
        """Use what was drawn for an epoch."""

    def _items(self, epoch: int) -> list[Any]:
        if self._drawn is None or self._drawn[0] != epoch:
            items = self.order.draw(epoch)
            self._drawn = epoch, items, _digest(items)
        return self._drawn[1]

    def start_at(self, epoch: int, position: int) -> None:
        """Draw this epoch's order, and start the next `iter()` at this position. Collective."""
        name = self.order.name
        error: Exception | None = None
        fingerprint: list[str] = []
        try:
            self._items(epoch)
            assert self._drawn is not None
            fingerprint = [f"a {name} in epoch {epoch}", f"an order of {name} with the digest {self._drawn[2]}"]
        except Exception as raised:  # raised on all ranks
            error = raised
        check_same_across_ranks(f"the start of an epoch of a loader with a {name}", fingerprint, error=error)
        self._use(self._items(epoch))
        super().start_at(epoch, position)

    def settings(self) -> dict[str, Any]:
        """Return the settings that an order depends on, and the digest of the last one; independent of dp_size."""
        epoch, digest = (None, None) if self._drawn is None else (self._drawn[0], self._drawn[2])
        return {
            "sampler": self.order.name,
            "seed": self.order.seed,
            "dataset_length": self.dataset_length,
            "order_epoch": epoch,
            "order_digest": digest,
        }

    def resume_from(self, settings: Mapping[str, Any], position: int) -> None:
        """Use the described seed; raise `ConfigError` if the remaining samples would differ."""
        for key, own in (("sampler", self.order.name), ("dataset_length", self.dataset_length)):
            if settings[key] != own:
                raise ConfigError(
                    f"a loader state with {key}={settings[key]!r} for a loader with {key}={own!r}: its position refers"
                    " to other samples. Load it into a loader with the same dataset and sampler, or start the data from"
                    " the beginning by not loading it"
                )
        before = self.order.seed, self._drawn
        self.order.seed = settings["seed"]
        self._drawn = None
        if position:
            items = self._items(settings["epoch"])
            is_other = settings["order_digest"] != self.settings()["order_digest"]
            if settings["order_epoch"] == settings["epoch"] and is_other:
                self.order.seed, self._drawn = before
                raise ConfigError(
                    f"a loader state of epoch {settings['epoch']} of a {self.order.name} that now gives another order:"
                    " it depends on more than the epoch and random numbers. Create the sampler as when the state was"
                    " saved, and give it set_epoch(epoch), by which the order follows from the epoch"
                )
            self._use(items)
        self.seed = self.order.seed


class UserOrderSampler(_UserSampler, DistributedBatchSampler):
    """Batch sampler of one rank over the samples that a user's sampler yields; see Note [User samplers].

    Args:
        order: Orders of the sampler.
        dataset_length: Length of the dataset.
        batch_size: Samples per rank and batch.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        drop_last: If True, drop an incomplete last global batch instead of repeating samples.
    """

    def __init__(
        self, order: SamplerOrder, dataset_length: int, batch_size: int, dp_rank: int, dp_size: int, drop_last: bool
    ) -> None:
        DistributedBatchSampler.__init__(
            self, order.length, batch_size, dp_rank, dp_size, seed=order.seed, drop_last=drop_last
        )
        super().__init__(order, dataset_length)

    def _use(self, items: list[Any]) -> None:
        self.num_samples = len(items)

    def _order(self, epoch: int) -> list[Any]:
        return self._items(epoch)

    def _indices(self, order: Any, positions: range) -> list[Any]:
        return [order[position % len(order)] for position in positions]


class UserBatchSampler(_UserSampler, Sampler[list[int]]):
    """Batches of a user's batch sampler, dealt out to the ranks in turn; see Note [User samplers].

    Of the next `dp_size` batches rank r reads the r-th. A position counts the batches of all ranks, so it is valid for
    any number of ranks. If the last round is incomplete, it is dropped if the batch sampler has `drop_last=True`;
    otherwise the last ranks repeat batches from the start of the order.

    Args:
        order: Orders of the batch sampler.
        dataset_length: Length of the dataset.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        drop_last: If True, drop an incomplete last round.

    Raises:
        ConfigError: A rank or size is out of range, or `drop_last` leaves no batch.
    """

    position_key = "global_batches_consumed"

    def __init__(self, order: SamplerOrder, dataset_length: int, dp_rank: int, dp_size: int, drop_last: bool) -> None:
        check_data_parallel(dp_rank, dp_size, 1)
        super().__init__(order, dataset_length)
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.drop_last = drop_last
        self._num_global = order.length
        self._batches: list[list[int]] = []
        self._starts = [0]  # of each batch in the epoch's numbering of samples
        if self.num_batches() == 0:
            raise ConfigError(
                f"{order.name} leaves no batch: {order.length} batches on {dp_size} ranks, drop_last={drop_last}; pass"
                " drop_last=False, which repeats batches, or use fewer ranks"
            )

    def _use(self, items: list[Any]) -> None:
        self._batches = items
        self._num_global = len(self._batches)
        self._starts = np.cumsum([0, *map(len, self._batches)]).tolist()

    def num_batches(self, position: int = 0) -> int:
        """Return the number of batches of every rank after this position."""
        rest = max(self._num_global - position, 0)
        return rest // self.dp_size if self.drop_last else -(-rest // self.dp_size)

    def batch_at(self, position: int) -> BatchPosition:
        """Return the batch that starts at this position (in batches of all ranks)."""
        sizes = [len(self._batches[index % self._num_global]) for index in range(position, position + self.dp_size)]
        stop = min(position + self.dp_size, self._num_global)
        num_real = stop - position
        return BatchPosition(
            num_samples=sizes[self.dp_rank],
            num_repeated=sum(sizes[num_real:]),
            num_repeated_local=sizes[self.dp_rank] if self.dp_rank >= num_real else 0,
            stop=stop,
            is_last=self.num_batches(stop) == 0,
        )

    def __len__(self) -> int:
        return self.num_batches()

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches_from(*self.start, self._batches, self._starts)

    def _batches_from(
        self, epoch: int, position: int, batches: list[list[int]], starts: list[int]
    ) -> Iterator[SampleBatch]:
        stream = f"{self.seed}/{epoch}"
        for number in range(self.num_batches(position)):
            index = position + number * self.dp_size + self.dp_rank
            repeats, place = divmod(index, len(batches))
            yield SampleBatch(batches[place], stream=stream, start=starts[place] + repeats * starts[-1])

    def uneven_end_message(self, position: int = 0) -> str | None:
        """Format the number of repeated or dropped batches; None if the epoch is even or already logged."""
        rest = (self._num_global - position) % self.dp_size
        if not rest or (position and rest == self._num_global % self.dp_size):
            return None
        epoch = f"the epoch resumed after {position} batches" if position else "every epoch"
        what = f"drops the last {rest}" if self.drop_last else f"repeats {self.dp_size - rest} at its end"
        return f"{self._num_global} batches of {self.order.name} on {self.dp_size} ranks: {epoch} {what}"
