"""From a dataset, or from a plain torch loader, to the loader that gives this rank its part."""

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

from .dataloader import DistributedDataLoader, announce
from .sampler import CustomBatchSampler, DistributedBatchSampler, EpochSampler, check_data_world
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
    """A loader over this rank's part of a dataset, reshuffled in every epoch if it shuffles.

    A map-style dataset gives a `DistributedDataLoader`: every rank gets equally many batches of equal length. Without
    `drop_last` the last ones are shorter, and what is missing to equal lengths is repeated from the start of the
    epoch's order; how many samples an epoch repeats or drops is logged once.

    An `IterableDataset` can't be split from outside. For more than one rank it has to give each rank its own part by
    itself and to say so by an attribute `is_sharded = True`; it then gets a plain torch DataLoader, whose state and
    number of batches are the dataset's own affair. Where ranks may get different numbers of them, which is logged once
    as nobody can know it before, read it with `booster.join_uneven(loader)`.

    Args:
        dataset: With `__len__` and `__getitem__`, or an IterableDataset.
        batch_size: Samples per rank and batch.
        dp_rank: Which part this rank reads.
        dp_size: How many parts there are.
        shuffle: A new order in every epoch.
        seed: Of the orders and of the workers' random states; the same on all ranks.
        drop_last: Leaves out the last global batch if it is not full.
        pin_memory: As torch's DataLoader has it.
        num_workers: As torch's DataLoader has it. Random augmentation in workers depends on seed, epoch and the
            sample's place in the epoch's order only, not on the number of workers.
        distributed_sampler_cls: The user's own sampler, called as
            `cls(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=shuffle)`, with `seed` and `drop_last` if it
            takes them.
        **kwargs: collate_fn, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor,
            persistent_workers, pin_memory_device: as torch's DataLoader has them.

    Raises:
        ConfigError: an empty dataset, no batch left, ranks or sizes out of range, arguments that contradict.
    """
    _check_dataset(dataset)
    _check_options(kwargs)
    _check_plain_arguments(shuffle=shuffle, drop_last=drop_last, pin_memory=pin_memory)
    check_seed(seed)
    options = {"num_workers": num_workers, "pin_memory": pin_memory, **kwargs}
    if isinstance(dataset, IterableDataset):
        _check_iterable(dataset, dp_size, shuffle, distributed_sampler_cls)
        check_data_world(dp_rank, dp_size, 1 if batch_size is None else batch_size)
        if kwargs.get("generator") is None:  # else every rank's workers draw the same numbers
            options["generator"] = torch.Generator().manual_seed(derive_seed("workers", seed, dp_rank))
        if dp_size > 1:
            announce(
                f"{type(dataset).__name__} splits itself over {dp_size} ranks: whether all get as many batches is"
                " its own affair; if some may get fewer, read them with booster.join_uneven(loader)"
            )
        return _made(DataLoader, dataset, batch_size=batch_size, drop_last=drop_last, **options)
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
    loader = _made(DistributedDataLoader, dataset, sampler, batch_size=batch_size, drop_last=drop_last, **options)
    announce(sampler.announcement())
    return loader


def check_can_shard(loader: DataLoader[Any], dp_rank: int, dp_size: int) -> None:
    """Returns if a torch loader is split for this rank, or can be. No communication.

    Raises:
        ConfigError: It is split for other ranks, can't be split (each rank would read the same), or has no batch.
    """
    split_for = _split_of(loader)
    if split_for is not None:
        if split_for != (dp_rank, dp_size):
            raise ConfigError(
                f"a dataloader split for rank {split_for[0]} of {split_for[1]}, boosted on rank {dp_rank} of "
                f"{dp_size}: samples would be read twice or never; make it with num_replicas={dp_size}, "
                f"rank={dp_rank}, or with plugin.prepare_dataloader"
            )
        return
    obstacle = _obstacle(loader)
    if obstacle is None and loader.batch_size is not None:
        DistributedBatchSampler(
            _length(loader.dataset), loader.batch_size, dp_rank, dp_size, drop_last=loader.drop_last
        )  # checks its numbers
    elif obstacle is not None and dp_size > 1:
        raise ConfigError(
            f"a dataloader with {obstacle}: it can't be split over {dp_size} ranks, and each would read the same data; "
            "use plugin.prepare_dataloader(dataset, batch_size, ...), or a sampler of the kind of "
            "torch.utils.data.DistributedSampler"
        )


def loader_facts(loader: DataLoader[Any]) -> list[str]:
    """Returns what of a loader that `check_can_shard` accepts must be the same on all ranks, as lines of text.

    That is all by which its samples are split. Of the user's own sampler it is the class alone: it may give each rank
    as many samples, in batches of such a size, as it likes. Only torch's own counts on a dataset and a seed that are
    the same everywhere. What is left as it is, as the data has one part only, is read by all ranks alike.
    """
    kind, facts = _rule(loader)
    return [f"a dataloader {kind}", *(f"a dataloader with {name}={value!r}" for name, value in facts.items())]


def _rule(loader: DataLoader[Any]) -> tuple[str, dict[str, Any]]:
    """By what a loader is split, in words, and on which values that depends."""
    batches = {"batch_size": loader.batch_size, "drop_last": bool(loader.drop_last)}
    sampler = _splitting_sampler(loader)
    if sampler is None and _obstacle(loader) is not None:
        return "left as it is", batches
    if sampler is None:
        order = {"num_samples": _length(loader.dataset), "shuffle": isinstance(loader.sampler, RandomSampler)}
        if order["shuffle"]:
            order["seed"] = _seed_of(loader)
        return "to be split", order | batches
    kind = f"split by its {type(sampler).__name__}"
    if isinstance(sampler, (DistributedBatchSampler, CustomBatchSampler)):
        return kind, sampler.describe() | {"batch_size": sampler.batch_size, "drop_last": bool(sampler.drop_last)}
    if type(sampler) is not DistributedSampler:
        return kind, {}
    dataset: Any = sampler.dataset
    order = {"num_samples": len(dataset), "shuffle": bool(sampler.shuffle), "seed": sampler.seed}
    return kind, order | {"drop_last": bool(sampler.drop_last)}


def shard_dataloader(loader: DataLoader[Any], dp_rank: int, dp_size: int) -> DataLoader[Any]:
    """A loader for this rank's part of what a torch loader reads; loaders that are split already come back unchanged.

    The batch size stays that of one rank. Orders follow from the seed of the loader's (or its sampler's) `generator`,
    or from that of the launch, and from the epoch alone, not from what the generator has drawn: one rank reads the
    same global batches as several. With `dp_size` 1 a loader of a kind that can't be split comes back unchanged.

    Raises:
        ConfigError: a loader that is split for other ranks, or that can't be split (each rank would read the same).
    """
    check_can_shard(loader, dp_rank, dp_size)
    # With an obstacle the one rank reads everything, in whatever order the user's own sampler gives.
    if loader.batch_size is None or _split_of(loader) is not None or _obstacle(loader) is not None:
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
    """Returns what the orders and the workers' random states of a loader that is split follow from."""
    generator = getattr(loader.sampler, "generator", None) or loader.generator
    return default_seed() if generator is None else generator.initial_seed() % 2**32


def _made(kind: Callable[..., DataLoader[Any]], *args: Any, **options: Any) -> DataLoader[Any]:
    """Returns a loader of torch's, or a `ConfigError` with what torch says of the options that it does not take."""
    try:
        return kind(*args, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torch's DataLoader does not take these options ({error}): give num_workers= a whole number from 0, and"
            " prefetch_factor, persistent_workers and timeout together with workers only"
        ) from error


def _check_plain_arguments(**flags: Any) -> None:
    for name, value in flags.items():
        check_flag(name, value)


def _check_options(options: dict[str, Any]) -> None:
    for name in ("collate_fn", "worker_init_fn"):
        if options.get(name) is not None and not callable(options[name]):
            raise ConfigError(f"prepare_dataloader({name}={options[name]!r}) can't be called: give a function")
    samplers = sorted({"sampler", "batch_sampler"} & set(options))
    if samplers:
        raise ConfigError(
            f"prepare_dataloader({samplers[0]}=...): the batches of each rank, shuffled or not, are made here, and a "
            "second sampler would contradict; pass distributed_sampler_cls=YourSampler, or make a torch DataLoader "
            "with a DistributedSampler yourself"
        )
    unknown = sorted(set(options).difference(_LOADER_OPTIONS))
    if unknown:
        raise ConfigError(
            f"prepare_dataloader got {', '.join(unknown)}, which torch's DataLoader does not take here: "
            f"correct or leave out what is not one of {', '.join(_LOADER_OPTIONS)}"
        )
    if not options.get("in_order", True):
        raise ConfigError(
            "prepare_dataloader(in_order=False): batches would come in the order in which workers happen to finish, "
            "so the ranks' batches would not belong together and no position could be saved; leave in_order out"
        )


def _check_iterable(dataset: Any, dp_size: int, shuffle: bool, distributed_sampler_cls: Any) -> None:
    name = type(dataset).__name__
    if shuffle or distributed_sampler_cls is not None:
        argument = "shuffle=True" if shuffle else "distributed_sampler_cls"
        raise ConfigError(
            f"prepare_dataloader({name}, {argument}): an IterableDataset decides its order by itself; shuffle inside "
            "of the dataset and leave the argument out"
        )
    if dp_size > 1 and not getattr(dataset, "is_sharded", False):
        raise ConfigError(
            f"prepare_dataloader({name}) for {dp_size} ranks: an IterableDataset can't be split from outside, so each "
            "rank would read the same data; let it yield this rank's part only and set dataset.is_sharded = True"
        )


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"prepare_dataloader({type(dataset).__name__}) makes a loader out of a dataset, and was given a loader:"
            " give loader.dataset here, or the loader to boost()"
        )


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"prepare_dataloader({type(dataset).__name__}): its samples are counted and read by number; give the "
            "dataset __len__ and __getitem__, or derive it from torch.utils.data.IterableDataset"
        )
    return len(dataset)


def _split_of(loader: DataLoader[Any]) -> tuple[int, int] | None:
    """(rank, ranks) that a loader's sampler is made for; None if it knows nothing of ranks."""
    sampler = _splitting_sampler(loader)
    if isinstance(sampler, (DistributedBatchSampler, CustomBatchSampler)):
        return sampler.dp_rank, sampler.dp_size
    return None if sampler is None else (sampler.rank, sampler.num_replicas)


def _splitting_sampler(loader: DataLoader[Any]) -> Any | None:
    """The one of a loader's samplers that knows of ranks."""
    if isinstance(loader.batch_sampler, (DistributedBatchSampler, CustomBatchSampler)):
        return loader.batch_sampler
    sampler: Any
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return sampler
    return None


def _obstacle(loader: DataLoader[Any]) -> str | None:
    """What keeps a loader from being made anew with another sampler, in words."""
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
