"""Sharded loaders for a dataset or for a torch DataLoader."""

from __future__ import annotations

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

from .dataloader import DistributedDataLoader, distributed_loader, is_stateful_loader, log_uneven_end
from .sampler import CustomBatchSampler, DistributedBatchSampler, EpochSampler
from .stream import StreamShard
from .user_sampler import SamplerOrder, UserBatchSampler, UserOrderSampler

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

_OWN_SAMPLERS = (DistributedBatchSampler, CustomBatchSampler, UserBatchSampler, StreamShard)
# torchdata puts its own samplers in the place of torch's.
_TORCH_MODULES = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")


def prepare_dataloader(
    dataset: Any,
    batch_size: int | None = None,
    *,
    dp_rank: int,
    dp_size: int,
    shuffle: bool = False,
    seed: int | None = None,
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

    An `IterableDataset` yields a `DistributedStreamLoader`: every rank reads all of it and keeps its own part; see Note
    [Streams]. One with the attribute `is_sharded = True` yields this rank's samples only. If the numbers of batches may
    then differ between ranks, read it with `booster.join_uneven(loader)`; this is logged once.

    A torch DataLoader is divided as by `shard_dataloader`: pass one to use samplers or batch samplers of your own.

    Arguments and errors are those of `Plugin.prepare_dataloader`, and the data-parallel rank and number of ranks.
    """
    if isinstance(dataset, DataLoader):
        flags = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "pin_memory": pin_memory}
        flags |= {"num_workers": num_workers, "distributed_sampler_cls": distributed_sampler_cls, **kwargs}
        given = [name for name, value in flags.items() if value is not None and value is not False and value != 0]
        if given:
            raise ConfigError(
                f"prepare_dataloader({type(dataset).__name__}, {given[0]}=...) is given a loader, which has its own"
                f" {given[0]}: leave the argument out, or pass loader.dataset"
            )
        return shard_dataloader(dataset, dp_rank, dp_size, seed)
    _check_arguments(kwargs, shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
    seed = default_seed() if seed is None else check_seed(seed)
    options = {"num_workers": num_workers, "pin_memory": pin_memory, **kwargs}
    sampler: EpochSampler
    if isinstance(dataset, IterableDataset):
        _check_iterable(dataset, shuffle, distributed_sampler_cls)
        sampler = StreamShard(dataset, batch_size, dp_rank, dp_size, seed, drop_last)
    elif distributed_sampler_cls is None:
        length = _length(dataset)
        sampler = DistributedBatchSampler(length, batch_size, dp_rank, dp_size, shuffle, seed, drop_last)  # type: ignore[arg-type]  # it checks it
    else:
        _length(dataset)
        sampler = CustomBatchSampler(
            distributed_sampler_cls,
            dataset,
            batch_size,  # type: ignore[arg-type]  # it checks it
            dp_rank=dp_rank,
            dp_size=dp_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
    log_uneven_end(sampler)
    return distributed_loader(_create_loader(dataset, batch_size=batch_size, drop_last=drop_last, **options), sampler)


def check_can_shard(loader: DataLoader[Any], dp_rank: int, dp_size: int) -> None:
    """Raise `ConfigError` unless a torch loader is sharded for this rank, or can be and has a batch."""
    _sampler_for(loader, dp_rank, dp_size, None)


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
    sampler = distributed_sampler_of(loader)
    if sampler is None and _why_not_shardable(loader) is not None:
        return "left as it is", batches
    if sampler is None:
        return _unsharded_settings(loader, batches)
    kind = f"split by its {type(sampler).__name__}"
    if isinstance(sampler, _OWN_SAMPLERS):
        settings = {name: value for name, value in sampler.settings().items() if name != "dp_rank"}
        return kind, settings | {
            "batch_size": getattr(sampler, "batch_size", None),
            "drop_last": bool(sampler.drop_last),
        }
    if type(sampler) is not DistributedSampler:
        return kind, {}
    dataset: Any = sampler.dataset
    order = {"num_samples": len(dataset), "shuffle": bool(sampler.shuffle), "seed": sampler.seed}
    return kind, order | {"drop_last": bool(sampler.drop_last)}


def _unsharded_settings(loader: DataLoader[Any], batches: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(loader.dataset, IterableDataset):
        stream = {"dataset": type(loader.dataset).__name__, "seed": _seed_of(loader)}
        return "over a stream, to be split", stream | batches
    samples = _standard_sampler(loader)
    if samples is None:
        sampler: Any = loader.batch_sampler
        own = {"length": len(sampler), "seed": _seed_of(loader)}
        return f"to be split by its {type(sampler).__name__}", own
    if not _is_standard_order(samples, loader.dataset):
        own = {"length": len(samples), "seed": _seed_of(loader)}
        return f"to be split by its {type(samples).__name__}", own | batches
    order: dict[str, Any] = {"num_samples": _length(loader.dataset), "shuffle": _is_random(samples)}
    if order["shuffle"]:
        order["seed"] = _seed_of(loader)
    return "to be split", order | batches


def shard_dataloader(loader: DataLoader[Any], dp_rank: int, dp_size: int, seed: int | None = None) -> DataLoader[Any]:
    """Return a loader for this rank's shard of a torch loader; a loader that is already sharded is returned unchanged.

    The batch size stays per rank. It keeps the loader's class and attributes. What it yields depends on how the loader
    chooses samples:

    - in order or shuffled: the global batch is the next `batch_size * dp_size` samples, in an order that depends on the
      seed and the epoch;
    - by a sampler of the user's: the same, in the sampler's order; see Note [User samplers];
    - by a batch sampler of the user's: of the next `dp_size` batches rank r gets the r-th;
    - an `IterableDataset`: see Note [Streams].

    The seed is the initial one of the loader's (or its sampler's) `generator`, or else that of the launch; the
    generator's state does not matter. With `dp_size` 1 a loader that cannot be sharded is returned unchanged.

    Args:
        loader: Loader of all samples.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        seed: Seed in place of that of the generator or the launch, optional.

    Raises:
        ConfigError: The loader is sharded for other ranks, or cannot be sharded.
    """
    sampler = _sampler_for(loader, dp_rank, dp_size, seed)
    if sampler is None:
        return loader
    log_uneven_end(sampler)
    return distributed_loader(loader, sampler)


def _sampler_for(loader: DataLoader[Any], dp_rank: int, dp_size: int, seed: int | None) -> EpochSampler | None:
    """Return the order of this rank's samples, or None for a loader that stays as it is."""
    sharded_for = _sharded_for(loader)
    if sharded_for is not None:
        if sharded_for != (dp_rank, dp_size):
            raise ConfigError(
                f"a dataloader sharded for rank {sharded_for[0]} of {sharded_for[1]}, boosted on rank {dp_rank} of "
                f"{dp_size}: samples would be read twice or never. Create it with num_replicas={dp_size}, "
                f"rank={dp_rank}, or with plugin.prepare_dataloader"
            )
        return None
    obstacle = _why_not_shardable(loader)
    if obstacle is not None:
        if dp_size > 1:
            raise ConfigError(
                f"a dataloader with {obstacle} cannot be sharded over {dp_size} ranks, and each would read the same"
                " data: use plugin.prepare_dataloader(dataset, batch_size, ...) or a"
                " torch.utils.data.DistributedSampler"
            )
        return None  # the rank reads all samples, in the order of the user's sampler
    dataset = loader.dataset
    seed = _seed_of(loader) if seed is None else check_seed(seed)
    if isinstance(dataset, IterableDataset):
        return StreamShard(dataset, loader.batch_size, dp_rank, dp_size, seed, bool(loader.drop_last))
    batch_sampler: Any = loader.batch_sampler
    samples, drop_last = _standard_sampler(loader), bool(getattr(batch_sampler, "drop_last", False))
    if samples is None:
        return UserBatchSampler(SamplerOrder(batch_sampler, seed), _length(dataset), dp_rank, dp_size, drop_last)
    batch_size: int = batch_sampler.batch_size
    if _is_standard_order(samples, dataset):
        shuffle = _is_random(samples)
        return DistributedBatchSampler(_length(dataset), batch_size, dp_rank, dp_size, shuffle, seed, drop_last)
    return UserOrderSampler(SamplerOrder(samples, seed), _length(dataset), batch_size, dp_rank, dp_size, drop_last)


def _standard_sampler(loader: DataLoader[Any]) -> Any | None:
    """Return the sampler whose samples torch's own BatchSampler batches, or None with another batch sampler."""
    batch_sampler: Any = loader.batch_sampler
    kind = type(batch_sampler)
    is_standard = kind.__name__ == BatchSampler.__name__ and kind.__module__ in _TORCH_MODULES
    return batch_sampler.sampler if is_standard else None


def _is_standard_order(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler is the one that torch makes for `shuffle` on this dataset."""
    if type(sampler).__module__ not in _TORCH_MODULES or getattr(sampler, "data_source", None) is not dataset:
        return False
    if _is_random(sampler):
        return not sampler.replacement and sampler.num_samples == _length(dataset)
    return isinstance(sampler, SequentialSampler)


def _is_random(sampler: Any) -> bool:
    return type(sampler).__name__ == RandomSampler.__name__ and type(sampler).__module__ in _TORCH_MODULES


def _seed_of(loader: DataLoader[Any]) -> int:
    # torchdata's samplers make a generator of a random seed if the user gives none.
    is_users = type(loader.sampler).__module__ != _TORCH_MODULES[1]
    generator = (getattr(loader.sampler, "generator", None) if is_users else None) or loader.generator
    return default_seed() if generator is None else generator.initial_seed() % 2**32


def _create_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    try:
        return DataLoader(dataset, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torch's DataLoader rejects these options ({error}): pass a non-negative int as num_workers, and"
            " prefetch_factor, persistent_workers and timeout only with workers"
        ) from error


def _check_arguments(options: dict[str, Any], **flags: Any) -> None:
    for name in ("collate_fn", "worker_init_fn"):
        if options.get(name) is not None and not callable(options[name]):
            raise ConfigError(f"prepare_dataloader({name}={options[name]!r}) is not callable: pass a function")
    generator = options.get("generator")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(f"prepare_dataloader(generator={generator!r}) is not a torch.Generator: pass one, or seed=")
    samplers = [name for name in ("batch_sampler", "sampler") if options.get(name) is not None]
    if samplers:
        raise ConfigError(
            f"prepare_dataloader({samplers[0]}=...) conflicts with the sampler that it creates: pass a loader, as in"
            f" prepare_dataloader(DataLoader(dataset, {samplers[0]}=...)), or distributed_sampler_cls=YourSampler"
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


def _check_iterable(dataset: Any, shuffle: bool, distributed_sampler_cls: Any) -> None:
    if shuffle or distributed_sampler_cls is not None:
        argument = "shuffle=True" if shuffle else "distributed_sampler_cls"
        raise ConfigError(
            f"prepare_dataloader({type(dataset).__name__}, {argument}): an IterableDataset determines its own order."
            " Shuffle inside the dataset and leave the argument out"
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
    sampler = distributed_sampler_of(loader)
    if isinstance(sampler, _OWN_SAMPLERS):
        return sampler.dp_rank, sampler.dp_size
    return None if sampler is None else (sampler.rank, sampler.num_replicas)


def distributed_sampler_of(loader: DataLoader[Any]) -> Any | None:
    """Return the sampler that divides a loader's samples among ranks, or None."""
    if isinstance(loader, DistributedDataLoader):
        return loader.epoch_sampler
    if isinstance(loader.batch_sampler, _OWN_SAMPLERS):
        return loader.batch_sampler
    sampler: Any
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return sampler
    return None


def _why_not_shardable(loader: DataLoader[Any]) -> str | None:
    """Describe why a loader cannot be given another sampler, or return None."""
    kind = type(loader)
    if kind._get_iterator is not DataLoader._get_iterator and not is_stateful_loader(kind):
        return f"its own _get_iterator ({kind.__name__})"
    if not loader.in_order:
        return "in_order=False, whose order depends on the timing of workers"
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        return "batch_size=None"
    return None
