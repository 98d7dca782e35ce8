"""Kinds of data that users bring: samplers, batch samplers, DataLoader classes and streams, each with 23 numbers."""

from __future__ import annotations

import importlib.util
import io
import random
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from booster.data import DistributedDataLoader, dataloader

NUM_SAMPLES = 23
NUMBERS = list(range(NUM_SAMPLES))
BATCH_SIZE = 2


def active_loader() -> DistributedDataLoader[Any] | None:
    """Returns the loader of the innermost iteration that has one, or None."""
    loaders = (one.loader for ref in reversed(dataloader._active_iterations) if (one := ref()) is not None)
    return next((loader for loader in loaders if loader is not None), None)


class CountingSampler(Sampler):  # type: ignore[type-arg]
    """Counts its own epochs, and draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.epoch = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = NUMBERS[self.epoch % 5 :] + NUMBERS[: self.epoch % 5]
        self.epoch += 1
        self.rng.shuffle(order)
        return iter(order)


class EpochSampler(Sampler):  # type: ignore[type-arg]
    """Follows `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.RandomState(self.epoch).permutation(NUM_SAMPLES))


class Buckets(Sampler):  # type: ignore[type-arg]
    """Batches of 1 to 3 samples, in an order drawn from numpy."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[list[int]]:
        bounds = [0, 1, 4, 6, 9, 10, 12, 14, 17, 19, 20, NUM_SAMPLES]
        batches = [NUMBERS[a:b] for a, b in pairwise(bounds)]
        return (batches[index] for index in self.rng.permutation(len(batches)))


class ScalingLoader(DataLoader):  # type: ignore[type-arg]
    """Changes its batches by an attribute, and has a method."""

    def __init__(self, *args: Any, scale: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = scale

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * self.scale

    def __len__(self) -> int:
        return -1

    def doubled(self) -> int:
        return 2 * self.scale


class NamedLoader(DataLoader):  # type: ignore[type-arg]
    """Has a constructor of its own only."""

    def __init__(self, name: str) -> None:
        super().__init__(NUMBERS, BATCH_SIZE, shuffle=True)
        self.name = name


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


class ShuffledStream(IterableDataset):  # type: ignore[type-arg]
    """A buffer shuffled by the global generators; divides itself among workers, as many streams do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        numbers = NUMBERS if info is None else NUMBERS[info.id :: info.num_workers]
        buffer: list[int] = []
        for number in numbers:
            buffer.append(number)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        order = torch.randperm(len(buffer)).tolist()
        yield from (buffer[index] for index in order)


class StatefulStream(IterableDataset):  # type: ignore[type-arg]
    """Has a position; `num_read` counts what was really read."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.start = 0
        self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[int]:
        self.position, self.start = self.start, 0
        order = np.random.RandomState(self.epoch).permutation(NUM_SAMPLES).tolist()
        for number in order[self.position :]:
            self.position += 1
            self.num_read += 1
            yield number


class SharedEpoch(IterableDataset):  # type: ignore[type-arg]
    """Keeps its epoch in memory that all workers share, and adds to it, as Hugging Face's streams do."""

    def __init__(self) -> None:
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        difference = epoch - int(self.epoch)
        time.sleep(0.2)
        self.epoch += difference

    def __iter__(self) -> Iterator[int]:
        return iter([int(self.epoch)] * 8)


class SizedStream(Stream):
    """Knows its length."""

    def __len__(self) -> int:
        return NUM_SAMPLES


def hugging_face_stream(buffer_size: int | None = None) -> Any:
    """Returns a streaming dataset of Hugging Face in three shards, as tensors."""
    import datasets

    stream = datasets.Dataset.from_dict({"number": NUMBERS}).to_iterable_dataset(num_shards=3)
    if buffer_size is not None:
        stream = stream.shuffle(seed=3, buffer_size=buffer_size)
    return stream.map(lambda row: {"number": row["number"]})


def hugging_face_rows() -> Any:
    """Returns a map-style dataset of Hugging Face."""
    import datasets

    return datasets.Dataset.from_dict({"number": NUMBERS})


def _number(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([row["number"] for row in rows])


def write_web_shards(folder: str) -> None:
    """Writes a webdataset in three shards."""
    for shard in range(3):
        with tarfile.open(f"{folder}/numbers-{shard}.tar", "w") as archive:
            for number in NUMBERS[8 * shard : 8 * shard + 8]:
                content = str(number).encode()
                entry = tarfile.TarInfo(f"{number:03}.number.txt")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def _web_stream(folder: str) -> Any:
    import webdataset

    shards = f"{folder}/numbers-{{0..2}}.tar"
    stream = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None, empty_check=False)
    return stream.decode().to_tuple("number.txt")


def _of_web(rows: list[tuple[str]]) -> torch.Tensor:
    return torch.tensor([int(row[0]) for row in rows])


def _stateful_loader(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls what this torch deprecates
        return StatefulDataLoader(dataset, BATCH_SIZE, **options)


Make = Callable[..., Any]  # DataLoader's options -> DataLoader

SAMPLERS: dict[str, Make] = {
    "plain": lambda **options: DataLoader(NUMBERS, BATCH_SIZE, **options),
    "shuffled": lambda **options: DataLoader(NUMBERS, BATCH_SIZE, shuffle=True, **options),
    "list": lambda **options: DataLoader(NUMBERS, BATCH_SIZE, sampler=NUMBERS[::-1], **options),
    "counting": lambda **options: DataLoader(NUMBERS, BATCH_SIZE, sampler=CountingSampler(), **options),
    "set_epoch": lambda **options: DataLoader(NUMBERS, BATCH_SIZE, sampler=EpochSampler(), **options),
    "subset": lambda **options: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(SubsetRandomSampler(NUMBERS[:-1]), 3, False), **options
    ),
    "buckets": lambda **options: DataLoader(NUMBERS, batch_sampler=Buckets(), **options),
    "batches": lambda **options: DataLoader(NUMBERS, batch_sampler=[[1, 2], (0,), torch.tensor([5, 6, 7])], **options),
    "scaling loader": lambda **options: ScalingLoader(NUMBERS, BATCH_SIZE, shuffle=True, scale=1, **options),
    "Hugging Face rows": lambda **options: DataLoader(
        hugging_face_rows(), BATCH_SIZE, shuffle=True, collate_fn=_number, **options
    ),
    "StatefulDataLoader": lambda **options: _stateful_loader(NUMBERS, shuffle=True, **options),
}
DRAWN: dict[str, Make] = {  # with repeats
    "weighted": lambda **options: DataLoader(
        NUMBERS, BATCH_SIZE, sampler=WeightedRandomSampler([1.0, 3.0] * 11 + [1.0], 20), **options
    ),
    "replacement": lambda **options: DataLoader(
        NUMBERS, BATCH_SIZE, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=17), **options
    ),
}
STREAMS: dict[str, Make] = {
    "stream": lambda **options: DataLoader(Stream(), BATCH_SIZE, **options),
    "sized stream": lambda **options: DataLoader(SizedStream(), BATCH_SIZE, **options),
    "shuffled stream": lambda **options: DataLoader(ShuffledStream(), BATCH_SIZE, **options),
    "stateful stream": lambda **options: DataLoader(StatefulStream(), BATCH_SIZE, **options),
    "unbatched stream": lambda **options: DataLoader(Stream(), None, **options),
    "scaling loader of a stream": lambda **options: ScalingLoader(SizedStream(), BATCH_SIZE, scale=1, **options),
    "stream in a StatefulDataLoader": lambda **options: _stateful_loader(StatefulStream(), **options),
    "Hugging Face": lambda **options: DataLoader(hugging_face_stream(), BATCH_SIZE, collate_fn=_number, **options),
    "Hugging Face shuffled": lambda **options: DataLoader(
        hugging_face_stream(5), BATCH_SIZE, collate_fn=_number, **options
    ),
}
PACKAGES = {
    "Hugging Face": "datasets",
    "StatefulDataLoader": "torchdata.stateful_dataloader",
    "webdataset": "webdataset",
}


def package_of(name: str) -> str | None:
    """Returns the package that a source needs, or None."""
    return next((package for word, package in PACKAGES.items() if word in name), None)


def missing_packages() -> list[str]:
    """Returns the packages of sources that are not installed."""
    names = {package.partition(".")[0] for package in PACKAGES.values()}
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def is_installed(name: str) -> bool:
    """Returns whether the package that a source needs is there."""
    package = package_of(name)
    return package is None or package.partition(".")[0] not in missing_packages()


def web_loader(folder: str, **options: Any) -> Any:
    """Returns a loader over the webdataset of `write_web_shards`."""
    return DataLoader(_web_stream(folder), BATCH_SIZE, collate_fn=_of_web, **options)


class OwnPart(ShuffledStream):
    """Divides itself over the ranks: the later ranks have more samples."""

    is_sharded = True

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self.bounds = [NUM_SAMPLES * rank // dp_size for rank in (dp_rank, dp_rank + 1)]

    def __iter__(self) -> Iterator[int]:
        return (number for number in super().__iter__() if self.bounds[0] <= number < self.bounds[1])


def hugging_face_part(dp_rank: int, dp_size: int, num_shards: int) -> Any:
    """Returns a streaming dataset of Hugging Face that reads this rank's shards or samples only."""
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(hugging_face_rows().to_iterable_dataset(num_shards), dp_rank, dp_size)


OF_RANKS: dict[str, Make] = {  # rank and number of ranks, DataLoader's options -> DataLoader of the rank's samples
    "own part": lambda rank, size, **options: DataLoader(OwnPart(rank, size), BATCH_SIZE, **options),
    "Hugging Face's shards by node": lambda rank, size, **options: DataLoader(
        hugging_face_part(rank, size, 4), BATCH_SIZE, collate_fn=_number, **options
    ),
    "Hugging Face's samples by node": lambda rank, size, **options: DataLoader(
        hugging_face_part(rank, size, 3), BATCH_SIZE, collate_fn=_number, **options
    ),
}


def own_numbers(batch: Any, num_repeated: int) -> list[int]:
    """Returns the numbers of a batch without the repeats at its end."""
    numbers = batch.tolist() if isinstance(batch, torch.Tensor) else [batch]
    numbers = numbers if isinstance(numbers, list) else [numbers]
    return numbers[: len(numbers) - num_repeated]
