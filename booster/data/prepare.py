"""Sharded loaders for a dataset or for a torch DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from booster.errors import ConfigError
from booster.rng_state import check_seed, default_seed
from booster.validation import check_flag

from .dataloader import DistributedDataLoader, log_once
from .sampler import CustomBatchSampler, DistributedBatchSampler, EpochSampler, check_data_parallel
from .worker_seeding import derive_seed

_LOADER_OPTIONS = (
    "collate_fn",
    "generator",
    "in_order",
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def prepare_dataloader(
    dataset: Any,
    batch_size: int,
    *,
    dp_rank: int,
    dp_size: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    distributed_sampler_cls: Any = None,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Create a loader over this rank's shard of a dataset.

    A map-style dataset yields a `DistributedDataLoader`: equal numbers of batches of equal length on all ranks. Without
    `drop_last` the last batches are shorter, and samples from the start of the epoch's order are repeated to make their
    lengths equal. The numbers of repeated or dropped samples are logged once.

    An `IterableDataset` cannot be sharded from outside. For more than one rank it must yield only this rank's shard and
    set the attribute `is_sharded = True`. It yields a plain torch DataLoader without a resumable position. If the
    numbers of batches may differ between ranks, read it with `booster.join_uneven(loader)`; this is logged once.

    Args:
        dataset: Dataset with `__len__` and `__getitem__`, or an IterableDataset.
        batch_size: Samples per rank and batch.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        shuffle: If True, a new order in every epoch.
        seed: Seed of the orders and of the workers' RNGs, the same on all ranks.
        drop_last: If True, drop an incomplete last global batch.
        pin_memory: As in torch's DataLoader.
        num_workers: As in torch's DataLoader. Random augmentation in workers depends on the seed, the epoch and the
            sample's position in the epoch's order, but not on the number of workers.
        distributed_sampler_cls: User's sampler class, called as
            `cls(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=shuffle)`, with `seed` and `drop_last` if it
            takes them.
        **kwargs: collate_fn, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor,
            persistent_workers, pin_memory_device, as in torch's DataLoader.

    Raises:
        ConfigError: The dataset is empty, no batch is left, a rank or size is out of range, or arguments contradict.
    """
    _check_arguments(dataset, kwargs, shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
    check_seed(seed)
    options = {"num_workers": num_workers, "pin_memory": pin_memory, **kwargs}
    if isinstance(dataset, IterableDataset):
        _check_iterable(dataset, dp_size, shuffle, distributed_sampler_cls)
        check_data_parallel(dp_rank, dp_size, 1 if batch_size is None else batch_size)
        if kwargs.get("generator") is None:  # otherwise the workers of all ranks would draw the same numbers
            options["generator"] = torch.Generator().manual_seed(derive_seed("workers", seed, dp_rank))
        if dp_size > 1:
            log_once(
                f"{type(dataset).__name__} shards itself over {dp_size} ranks, possibly unevenly: if some ranks may get"
                " fewer batches, read them with booster.join_uneven(loader)"
            )
        return _create_loader(DataLoader, dataset, batch_size=batch_size, drop_last=drop_last, **options)
    length = _length(dataset)
    sampler: EpochSampler
    if distributed_sampler_cls is None:
        sampler = DistributedBatchSampler(length, batch_size, dp_rank, dp_size, shuffle, seed, drop_last)
    else:
        sampler = CustomBatchSampler(
            distributed_sampler_cls,
            dataset,
            batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
    loader = _create_loader(
        DistributedDataLoader, dataset, sampler, batch_size=batch_size, drop_last=drop_last, **options
    )
    log_once(sampler.uneven_end_message())
    return loader


def check_can_shard(loader: DataLoader[Any], dp_rank: int, dp_size: int) -> None:
    """Verify that a torch loader is sharded for this rank, or can be. No communication.

    Raises:
        ConfigError: The loader is sharded for other ranks, cannot be sharded, or has no batch.
    """
    sharded_for = _sharded_for(loader)
    if sharded_for is not None:
        if sharded_for != (dp_rank, dp_size):
            raise ConfigError(
                f"a dataloader sharded for rank {sharded_for[0]} of {sharded_for[1]}, boosted on rank {dp_rank} of "
                f"{dp_size}: samples would be read twice or never. Create it with num_replicas={dp_size}, "
                f"rank={dp_rank}, or with plugin.prepare_dataloader"
            )
        return
    obstacle = _why_not_shardable(loader)
    if obstacle is None and loader.batch_size is not None:
        DistributedBatchSampler(
            _length(loader.dataset), loader.batch_size, dp_rank, dp_size, drop_last=loader.drop_last
        )  # checks its numbers
    elif obstacle is not None and dp_size > 1:
        raise ConfigError(
            f"a dataloader with {obstacle} cannot be sharded over {dp_size} ranks, and each would read the same data:"
            " use plugin.prepare_dataloader(dataset, batch_size, ...) or a torch.utils.data.DistributedSampler"
        )


def loader_fingerprint(loader: DataLoader[Any]) -> list[str]:
    """Return the settings of a loader that must be the same on all ranks, as lines of text.

    These are the settings that determine the sharding. A user's sampler contributes its class only, as its numbers of
    samples and batch sizes may differ between ranks; torch's DistributedSampler relies on equal datasets and seeds.
    `loader` must have passed `check_can_shard`.
    """
    kind, settings = _sharding_settings(loader)
    return [f"a dataloader {kind}", *(f"a dataloader with {name}={value!r}" for name, value in settings.items())]


def _sharding_settings(loader: DataLoader[Any]) -> tuple[str, dict[str, Any]]:
    """Return a description of how a loader is sharded, and the settings that this depends on."""
    batches = {"batch_size": loader.batch_size, "drop_last": bool(loader.drop_last)}
    sampler = _distributed_sampler(loader)
    if sampler is None and _why_not_shardable(loader) is not None:
        return "left as it is", batches
    if sampler is None:
        order = {"num_samples": _length(loader.dataset), "shuffle": isinstance(loader.sampler, RandomSampler)}
        if order["shuffle"]:
            order["seed"] = _seed_of(loader)
        return "to be split", order | batches
    kind = f"split by its {type(sampler).__name__}"
    if isinstance(sampler, (DistributedBatchSampler, CustomBatchSampler)):
        return kind, sampler.settings() | {"batch_size": sampler.batch_size, "drop_last": bool(sampler.drop_last)}
    if type(sampler) is not DistributedSampler:
        return kind, {}
    dataset: Any = sampler.dataset
    order = {"num_samples": len(dataset), "shuffle": bool(sampler.shuffle), "seed": sampler.seed}
    return kind, order | {"drop_last": bool(sampler.drop_last)}


def shard_dataloader(loader: DataLoader[Any], dp_rank: int, dp_size: int) -> DataLoader[Any]:
    """Return a loader for this rank's shard of a torch loader; a loader that is already sharded is returned unchanged.

    The batch size stays per rank. Orders depend on the epoch and on the initial seed of the loader's (or its sampler's)
    `generator`, or else of the launch, but not on the generator's state. With `dp_size` 1 a loader that cannot be
    sharded is returned unchanged.

    Raises:
        ConfigError: The loader is sharded for other ranks, or cannot be sharded.
    """
    check_can_shard(loader, dp_rank, dp_size)
    # With an obstacle dp_size is 1: the rank reads all samples in the order of the user's sampler.
    if loader.batch_size is None or _sharded_for(loader) is not None or _why_not_shardable(loader) is not None:
        return loader
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    return prepare_dataloader(
        loader.dataset,
        loader.batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=_seed_of(loader),
        drop_last=loader.drop_last,
        pin_memory=loader.pin_memory,
        num_workers=loader.num_workers,
        **options,
    )


def _seed_of(loader: DataLoader[Any]) -> int:
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    return default_seed() if generator is None else generator.initial_seed() % 2**32


def _create_loader(kind: Callable[..., DataLoader[Any]], *args: Any, **options: Any) -> DataLoader[Any]:
    try:
        return kind(*args, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torch's DataLoader rejects these options ({error}): pass a non-negative int as num_workers, and"
            " prefetch_factor, persistent_workers and timeout only with workers"
        ) from error


def _check_arguments(dataset: Any, options: dict[str, Any], **flags: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"prepare_dataloader({type(dataset).__name__}) takes a dataset, got a loader: pass loader.dataset, or pass"
            " the loader to boost()"
        )
    for name in ("collate_fn", "worker_init_fn"):
        if options.get(name) is not None and not callable(options[name]):
            raise ConfigError(f"prepare_dataloader({name}={options[name]!r}) is not callable: pass a function")
    samplers = sorted({"sampler", "batch_sampler"} & set(options))
    if samplers:
        raise ConfigError(
            f"prepare_dataloader({samplers[0]}=...) conflicts with the sampler that it creates: pass"
            " distributed_sampler_cls=YourSampler, or create a torch DataLoader with a DistributedSampler"
        )
    unknown = sorted(set(options).difference(_LOADER_OPTIONS))
    if unknown:
        raise ConfigError(
            f"prepare_dataloader got unknown options {', '.join(unknown)}: correct them or leave them out; "
            f"supported are {', '.join(_LOADER_OPTIONS)}"
        )
    if not options.get("in_order", True):
        raise ConfigError(
            "prepare_dataloader(in_order=False): the order of batches would depend on the timing of workers, so ranks"
            " would not read the same global batch and no position could be saved. Leave in_order out"
        )
    for name, value in flags.items():
        check_flag(name, value)


def _check_iterable(dataset: Any, dp_size: int, shuffle: bool, distributed_sampler_cls: Any) -> None:
    name = type(dataset).__name__
    if shuffle or distributed_sampler_cls is not None:
        argument = "shuffle=True" if shuffle else "distributed_sampler_cls"
        raise ConfigError(
            f"prepare_dataloader({name}, {argument}): an IterableDataset determines its own order. Shuffle inside the"
            " dataset and leave the argument out"
        )
    if dp_size > 1 and not getattr(dataset, "is_sharded", False):
        raise ConfigError(
            f"prepare_dataloader({name}) for {dp_size} ranks: an IterableDataset cannot be sharded from outside, and"
            " each rank would read the same data. Yield only this rank's shard and set dataset.is_sharded = True"
        )


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"prepare_dataloader({type(dataset).__name__}): the dataset is not indexable; define __len__ and"
            " __getitem__, or derive it from torch.utils.data.IterableDataset"
        )
    return len(dataset)


def _sharded_for(loader: DataLoader[Any]) -> tuple[int, int] | None:
    """Return the (rank, num_ranks) of a loader's sampler, or None if it is not distributed."""
    sampler = _distributed_sampler(loader)
    if isinstance(sampler, (DistributedBatchSampler, CustomBatchSampler)):
        return sampler.dp_rank, sampler.dp_size
    return None if sampler is None else (sampler.rank, sampler.num_replicas)


def _distributed_sampler(loader: DataLoader[Any]) -> Any | None:
    if isinstance(loader.batch_sampler, (DistributedBatchSampler, CustomBatchSampler)):
        return loader.batch_sampler
    sampler: Any
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return sampler
    return None


def _why_not_shardable(loader: DataLoader[Any]) -> str | None:
    """Describe why a loader cannot be recreated with another sampler, or return None."""
    sampler: Any = loader.sampler
    if type(loader).__iter__ is not DataLoader.__iter__ or type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"its own way of iterating ({type(loader).__name__})"
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__name__})"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"batch_sampler={type(loader.batch_sampler).__name__}"
    if type(sampler) not in (SequentialSampler, RandomSampler) or sampler.data_source is not loader.dataset:
        return f"sampler={type(sampler).__name__}"
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(loader.dataset)):
        return "a RandomSampler with replacement or num_samples"
    return None
