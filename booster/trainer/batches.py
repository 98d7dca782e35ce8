"""Batches of a `Trainer`: which part is given to the model, and in which order loaders are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from booster.core.model_wrapper import LabeledBatch
from booster.data.dataloader import DistributedDataLoader, active_position
from booster.data.join import JoinIterator
from booster.data.prepare import distributed_sampler_of, loader_fingerprint
from booster.errors import ConfigError
from booster.pytree import children_of, iter_tensors, with_children


def as_batch(given: Any) -> Any:
    """Return a loader's batch as the Trainer runs it.

    Args:
        given: A mapping, which the model takes by keyword; a pair of inputs and targets; or inputs alone, also as a
            sequence of one.

    Returns:
        The mapping, or a `LabeledBatch`.

    Raises:
        ConfigError: It is a sequence of more than two, of which it is unknown what the model takes.
    """
    if isinstance(given, (Mapping, LabeledBatch)):
        return given
    if not isinstance(given, (list, tuple)):
        return LabeledBatch(given, None)
    if len(given) == 1:
        return LabeledBatch(given[0], None)
    if len(given) == 2:
        return LabeledBatch(*given)
    raise ConfigError(
        f"the loader yields a {type(given).__name__} of {len(given)} values, and a Trainer takes pairs of inputs and"
        " targets: let it yield ((first, second), targets), or a dict of the model's keyword arguments"
    )


def targets_of(batch: Any) -> Any:
    """Return what the criterion gets beside the outputs: the targets of a pair, else what the model got."""
    if isinstance(batch, LabeledBatch):
        return batch.inputs if batch.targets is None else batch.targets
    return batch


def loss_of(criterion: Callable[[Any, Any], torch.Tensor] | None, outputs: Any, batch: Any) -> torch.Tensor:
    """Return the loss that a criterion computes from outputs and targets, or without one the model's own."""
    if criterion is not None:
        return criterion(outputs, targets_of(batch))
    loss: torch.Tensor | None = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ConfigError(
            f"the Trainer has criterion=None, and the model returned a {type(outputs).__name__} without a loss: pass a"
            " criterion, or let the batches have the labels that the model computes its loss from"
        )
    return loss


def num_samples_of(batch: Any) -> int:
    """Return the number of samples in this rank's batch: the size of dim 0 of its first tensor."""
    return next((one.shape[0] for one in iter_tensors(batch) if one.dim()), 1)


def check_loader(loader: Any, name: str, dp_size: int) -> None:
    """Check that a loader yields this rank's batches.

    Args:
        loader: The loader.
        name: Name of the argument, for the message.
        dp_size: Number of data-parallel ranks.

    Raises:
        ConfigError: It is not iterable, there are several, every rank would read all samples, or they are divided by
            another sampler.
    """
    several = isinstance(loader, Sequence) and any(isinstance(one, DataLoader) for one in loader)
    if several or isinstance(loader, Mapping):
        raise ConfigError(
            f"{name} is a {type(loader).__name__}, and a Trainer reads one loader: pass one of them, and call"
            " trainer.evaluate(loader) for each of the others; to train on several datasets, pass one loader over a"
            " torch.utils.data.ConcatDataset"
        )
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise ConfigError(
            f"{name} must be iterable once per epoch, got one of class {type(loader).__name__}: pass the loader that"
            " booster.prepare_dataloader() or boost() returned, or any other iterable of this rank's batches"
        )
    if not isinstance(loader, DataLoader) or isinstance(loader, DistributedDataLoader):
        return
    sampler = distributed_sampler_of(loader)
    if sampler is not None:
        raise ConfigError(
            f"{name} is divided by a {type(sampler).__name__}, of which a Trainer knows neither the epoch nor the"
            " samples that it repeats: pass booster.prepare_dataloader(dataset, batch_size=...) without it"
        )
    if dp_size > 1:
        raise ConfigError(
            f"{name} is a plain {type(loader).__name__}, of which each of the {dp_size} data-parallel ranks would read"
            " all samples: pass booster.prepare_dataloader(loader), or what boost(dataloader=) returned"
        )


def fingerprint_of_loader(loader: Any, name: str) -> list[str]:
    """Return what must be equal on all ranks of a checked loader: what its samples are divided by, if that is known."""
    if not isinstance(loader, DistributedDataLoader):
        return []
    return [f"{name}: {line}" for line in loader_fingerprint(loader)]


def batches_of(loader: Any) -> Iterator[Any]:
    """Yield this rank's batches of an epoch, equally many on all ranks. Collective."""
    sampler = getattr(loader, "epoch_sampler", None)
    is_even = isinstance(loader, DistributedDataLoader) and not getattr(sampler, "is_sharded", False)
    return iter(loader) if is_even else JoinIterator(loader)


def is_last_batch() -> bool:
    position = active_position()
    return position is not None and position.is_last


def join_batches(batches: Sequence[Any]) -> Any:
    """Return the outputs of all batches, concatenated along the samples."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches))
    if isinstance(first, list) and all(isinstance(one, list) for one in batches):
        return [one for batch in batches for one in batch]
    parts = [children_of(batch) for batch in batches]
    if any(part is None for part in parts):
        return first
    return with_children(first, {key: join_batches([(part or {})[key] for part in parts]) for key in parts[0] or {}})
