"""Streams: one rank's batches of an `IterableDataset`, resumable at any position and on any number of ranks.

# Note [Streams]: a stream has the order in which one process reads it, and is divided as in Note [Global order].
# Nothing outside of it can divide it sooner, so every rank and every worker reads all samples and keeps its own
# batches; worker w of W makes every W-th batch. All see the same end, so ranks have equal numbers of batches without
# communication. The dataset must not divide itself among workers, so it sees none. Its random numbers must
# be the same everywhere and after a restart, so each sample is read with the generators seeded by (seed, epoch,
# position), and in the main process they are put back. Random numbers from elsewhere are detected: ranks compare the
# first samples of each epoch. A position is a number of samples. To resume there the reader loads the state that the
# dataset's `state_dict` had, or skips by reading. Hugging Face's datasets with a shuffle buffer refill it after
# `load_state_dict` with other samples, so they are skipped, too.
# A dataset with `is_sharded = True`, or of Hugging Face's `split_dataset_by_node`, yields this rank's samples only: a
# stream of one rank. Shards are not assigned to ranks here: how many samples each has is known only when it was
# read, so ranks could neither end together nor save a position that other numbers of ranks continue from.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from booster.comm import check_same_across_ranks
from booster.errors import ConfigError
from booster.pytree import children_of
from booster.rng_state import preserved_rng

from .sampler import BatchPosition, EpochSampler, check_data_parallel, shard_of_batch
from .worker_seeding import derive_seed, seed_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """Position of a batch of a stream.

    Attributes:
        shard: This rank's share of the global batch.
        state: State of the dataset after the global batch, or None.
        digest: Digest of the samples of the epoch's first global batch, if several ranks read the stream.
        seed: Seed of what collates this rank's samples.
    """

    shard: BatchPosition
    state: Any
    digest: str | None
    seed: int


class StreamShard(EpochSampler):
    """Part of a stream that one rank reads, and where the next epoch starts.

    Args:
        dataset: The stream.
        batch_size: Samples per rank and batch; None for samples as they are, without batches.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        seed: Seed of the dataset's random numbers, the same on all ranks.
        drop_last: If True, drop an incomplete last global batch.

    Raises:
        ConfigError: A rank, size or batch size is out of range, or Hugging Face's dataset is split for another rank.
    """

    position_key = "samples_consumed"

    def __init__(
        self, dataset: Any, batch_size: int | None, dp_rank: int, dp_size: int, seed: int, drop_last: bool
    ) -> None:
        check_data_parallel(dp_rank, dp_size, 1 if batch_size is None else batch_size)
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.drop_last = drop_last
        self.is_sharded = _is_sharded(dataset, dp_rank, dp_size)
        self.name = type(dataset).__name__
        self.length: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        self.can_load_state = has_exact_state(dataset)

    @property
    def reading_rank(self) -> int:
        """Rank among those that read the same stream."""
        return 0 if self.is_sharded else self.dp_rank

    @property
    def reading_size(self) -> int:
        """Number of ranks that read the same stream."""
        return 1 if self.is_sharded else self.dp_size

    @property
    def global_batch_size(self) -> int:
        """Number of samples in a complete batch of the ranks that read the same stream."""
        return (self.batch_size or 1) * self.reading_size

    def num_batches(self, position: int = 0) -> int:
        """Return the number of this rank's batches after this position, if the dataset has a length."""
        if self.length is None:
            raise TypeError(f"{self.name} has no length, so its loader has none: define __len__ on the dataset")
        rest = max(self.length - position, 0) / self.global_batch_size
        return math.floor(rest) if self.drop_last else math.ceil(rest)

    def random_stream(self, epoch: int) -> str:
        """Return the name of the epoch's random numbers: of all ranks, or of this one, if the dataset is sharded."""
        return f"{self.seed}/{epoch}/{self.dp_rank}" if self.is_sharded else f"{self.seed}/{epoch}"

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the remaining samples; independent of dp_size, unless it is sharded."""
        common = {"seed": self.seed, "dataset": self.name, "is_sharded": self.is_sharded}
        return common | ({"dp_size": self.dp_size, "dp_rank": self.dp_rank} if self.is_sharded else {})

    def resume_from(self, settings: Mapping[str, Any], position: int) -> None:
        """Use the described seed; raise `ConfigError` if the position is of another dataset, or another shard of it."""
        own = self.settings()
        lasting = ("dataset", "is_sharded")
        differing = [key for key in (own if position else lasting) if key != "seed" and settings[key] != own[key]]
        if differing:
            raise ConfigError(
                "a loader state with "
                + ", ".join(f"{key}={settings[key]!r} (here {own[key]!r})" for key in differing)
                + f" for a loader of the stream {self.name}: its position refers to other samples. Load it into a"
                " loader of the same dataset, on as many ranks if that is sharded (is_sharded=True), or start the data"
                " from the beginning by not loading it"
            )
        self.seed = settings["seed"]

    def check_same_stream(self, epoch: int, digest: str | None, error: Exception | None) -> None:
        """Raise on all ranks if one has failed, or if they read other samples at the start of an epoch. Collective."""
        line = f"a stream {self.name} whose first samples in epoch {epoch} have the digest {digest}"
        instead = (
            f"Let {self.name} yield the same samples on every rank, as webdataset does with nodesplitter=None, and the"
            " loader divides them; or, if it divides them itself, set dataset.is_sharded = True"
        )
        check_same_across_ranks(f"the first batch of a {self.name}", [line], error=error, instead=instead)

    def uneven_end_message(self, position: int = 0) -> str | None:
        """Format what is known of the end of an epoch, and what resuming costs."""
        if position:
            how = (
                "" if self.can_load_state else f", which {self.name} reads again and skips: it has no exact state_dict"
            )
            return f"{self.name} resumes after {position} samples{how}"
        if self.dp_size == 1:
            return None
        if self.is_sharded:
            return (
                f"{self.name} shards itself over {self.dp_size} ranks, possibly unevenly: if some ranks may get fewer"
                " batches, read them with booster.join_uneven(loader)"
            )
        return (
            f"each of {self.dp_size} ranks reads all samples of {self.name} and keeps its own; where reading is slow,"
            " let the dataset yield this rank's samples only and set dataset.is_sharded = True"
        )


def _is_sharded(dataset: Any, dp_rank: int, dp_size: int) -> bool:
    """Return whether the dataset yields this rank's samples only."""
    node = getattr(dataset, "_distributed", None)  # of Hugging Face's split_dataset_by_node
    if not all(hasattr(node, name) for name in ("rank", "world_size")):
        return bool(getattr(dataset, "is_sharded", False))
    if (node.rank, node.world_size) != (dp_rank, dp_size):  # type: ignore[union-attr]
        raise ConfigError(
            f"split_dataset_by_node(rank={node.rank}, world_size={node.world_size}) on data-parallel rank {dp_rank} of"  # type: ignore[union-attr]
            f" {dp_size}: samples would be read twice or never. Pass rank=booster.plugin.dp_rank and"
            " world_size=booster.plugin.dp_size, or leave it out, and the loader divides the stream"
        )
    return True


def has_exact_state(dataset: Any) -> bool:
    """Return whether the dataset continues with the very next sample after `load_state_dict`."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    sources = [getattr(dataset, "_ex_iterable", None)]  # Hugging Face's: a tree
    for source in sources:
        if "BufferShuffled" in type(source).__name__:
            return False
        sources += [getattr(source, "ex_iterable", None)] if hasattr(source, "ex_iterable") else []
        sources += getattr(source, "ex_iterables", [])
    return True


class StreamReader(IterableDataset[Any]):
    """Reads the stream in a worker or in the main process, and yields this rank's batches with their positions.

    Args:
        dataset: The user's dataset.
        shard: Part of it that this rank reads, and where it starts.
        state: State of the dataset there, if it has one.
        lock: Lock that the workers share, if there are any.
    """

    def __init__(
        self, dataset: Any, shard: StreamShard, state: Any, lock: AbstractContextManager[Any] | None = None
    ) -> None:
        self.dataset = dataset
        self.shard = shard
        self._state = state
        self._lock = nullcontext() if lock is None else lock
        self._start_at = torch.tensor(shard.start).share_memory_()  # persistent workers see the later epochs

    def restart(self, epoch: int) -> None:
        """Start the next pass of persistent workers at the start of this epoch."""
        self._start_at.copy_(torch.tensor([epoch, 0]))

    def __iter__(self) -> Iterator[tuple[StreamPosition, list[Any]]]:
        return self._batches(*self._start_at.tolist())

    def _batches(self, epoch: int, position: int) -> Iterator[tuple[StreamPosition, list[Any]]]:
        shard, info = self.shard, get_worker_info()
        turn, num_turns = (0, 1) if info is None else (info.id, info.num_workers)
        size, ahead = shard.global_batch_size, shard.global_batch_size if shard.drop_last else 1
        source = self._start(epoch, position)
        stream = shard.random_stream(epoch)
        samples: deque[Any] = deque()
        states: deque[Any] = deque()  # of the stream after each global batch
        first, stop, has_ended = position, position, False
        number = 0
        while True:
            with _reading_alone():
                while not has_ended and len(samples) < size + ahead:
                    seed_worker(derive_seed(stream, stop))
                    try:
                        samples.append(next(source))
                    except StopIteration:
                        has_ended = True
                        break
                    stop += 1
                    if (stop - position) % size == 0:
                        is_own = ((stop - position) // size - 1) % num_turns == turn
                        keeps_state = is_own and shard.can_load_state
                        # A copy, as the state may be the dataset's own objects, which change as it reads ahead.
                        states.append(copy.deepcopy(self.dataset.state_dict()) if keeps_state else None)
            if len(samples) < (size if shard.drop_last else 1):
                return
            batch = [samples.popleft() for _ in range(min(size, len(samples)))]
            first += len(batch)
            state = states.popleft() if len(batch) == size else None
            if number % num_turns == turn:
                rank, num_ranks = shard.reading_rank, shard.reading_size
                place = shard_of_batch(len(batch), rank, num_ranks, stop=first, is_last=len(samples) < ahead)
                # Repeats are from the same global batch: what an epoch began with is not known after a resume.
                start = rank * place.num_samples
                own = [batch[index % len(batch)] for index in range(start, start + place.num_samples)]
                digest = _digest(batch) if number == 0 and num_ranks > 1 else None
                seed = derive_seed(stream, "collate", first - len(batch) + start)
                yield StreamPosition(shard=place, state=state, digest=digest, seed=seed), own
            number += 1

    def _start(self, epoch: int, position: int) -> Iterator[Any]:
        """Return an iterator over the samples after this position of the epoch."""
        shard = self.shard
        stream = shard.random_stream(epoch)
        with _reading_alone():
            seed_worker(derive_seed(stream, "start"))
            if hasattr(self.dataset, "set_epoch"):
                with self._lock:  # Hugging Face's adds the difference to a number in memory that the workers share
                    self.dataset.set_epoch(epoch)
            has_state = position > 0 and shard.can_load_state and self._state is not None
            if has_state:
                self.dataset.load_state_dict(self._state)
            source: Iterator[Any] = iter(self.dataset)
            for skipped in range(0 if has_state else position):
                seed_worker(derive_seed(stream, skipped))
                if next(source, self) is self:
                    raise ConfigError(
                        f"a loader state after {position} samples of {shard.name}, which now has {skipped} only: load"
                        " it into a loader of the same dataset"
                    )
        return source


@contextmanager
def _reading_alone() -> Iterator[None]:
    """Let the dataset see no workers, as in the main process, or there keep the random states."""
    info = get_worker_info()
    if info is None:
        with preserved_rng():
            yield
        return
    try:
        torch_worker._worker_info = None  # what get_worker_info() returns; Hugging Face's streams have two orders else
        yield
    finally:
        torch_worker._worker_info = info


def collate_shard(
    collate_fn: Callable[[Any], Any], is_batched: bool, shard: tuple[StreamPosition, list[Any]]
) -> tuple[StreamPosition, Any]:
    """Collate the samples of a batch, or its only one, by the user's function, and pass its position on."""
    position, samples = shard
    if collate_fn is default_collate:  # draws nothing
        return position, collate_fn(samples if is_batched else samples[0])
    # Not the state that reading has left: a rank reads the samples of all ranks, and ahead.
    with preserved_rng() if get_worker_info() is None else nullcontext():
        seed_worker(position.seed)
        return position, collate_fn(samples if is_batched else samples[0])


def _digest(samples: Any) -> str:
    """Return a digest of what of the samples is plain: the same in every process."""
    digest = hashlib.blake2b(digest_size=16)

    def update(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        children = children_of(value)
        if children is not None:
            for key, child in children.items():
                digest.update(repr(key).encode())
                update(child)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            array = torch.as_tensor(value).cpu() if isinstance(value, torch.Tensor) else value
            digest.update(repr((tuple(array.shape), array.tolist())).encode())
        elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            digest.update(repr(value).encode())

    update(samples)
    return digest.hexdigest()
