"""What the ranks hold in slices, put together element by element; every claim of a slice is checked on the way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from booster.interface import TensorSlice

Own = TypeVar("Own")


def copied_slices(slices: Iterable[TensorSlice]) -> list[TensorSlice]:
    """Returns slices, such as what this rank holds of a boosted model, in host memory of their own."""
    return [dataclasses.replace(one, tensor=one.tensor.detach().clone().cpu()) for one in slices]


def join_slices(
    of_ranks: Sequence[Iterable[TensorSlice]], tied_names: Mapping[str, Sequence[str]] | None = None, *, what: str = ""
) -> dict[str, torch.Tensor]:
    """Returns the logical tensors by name.

    Raises:
        AssertionError: An element is on no rank, has not exactly one primary rank, or differs between ranks.
    """
    whole: dict[str, torch.Tensor] = {}
    num_holders: dict[str, torch.Tensor] = {}
    num_primary: dict[str, torch.Tensor] = {}
    for one in itertools.chain.from_iterable(of_ranks):
        joined = whole.setdefault(one.name, torch.zeros(one.global_shape, dtype=one.tensor.dtype))
        assert tuple(joined.shape) == one.global_shape, f"{one.name} of {what} has two shapes"
        holders = num_holders.setdefault(one.name, torch.zeros(one.global_shape, dtype=torch.int32))
        primaries = num_primary.setdefault(one.name, torch.zeros(one.global_shape, dtype=torch.int32))
        for index, part in _rows(one):
            part = part.to(joined)
            known = holders[index] > 0
            is_same = (
                (joined[index] == part) | (joined[index].isnan() & part.isnan())
                if part.is_floating_point()
                else (joined[index] == part)
            )
            assert bool(is_same[known].all()), f"ranks hold different values of {one.name} of {what}"
            joined[index] = part
            holders[index] += 1
            primaries[index] += int(one.primary)
    for name in whole:
        assert bool((num_holders[name] > 0).all()), f"no rank holds some elements of {name} of {what}"
        assert bool((num_primary[name] == 1).all()), f"not one primary rank for each element of {name} of {what}"
    for name, others in (tied_names or {}).items():
        whole |= dict.fromkeys(others, whole[name])
    return whole


def joined_over_ranks(model) -> dict[str, torch.Tensor]:
    """Returns the logical tensors of a boosted model on every rank. Collective."""
    slices = copied_slices(model.tensor_slices())
    # A pipeline stage knows the ties of what it holds.
    tied_names = {
        name: others for of_rank in gathered_over_ranks(model.tied_names()) for name, others in of_rank.items()
    }
    return join_slices(gathered_over_ranks(slices), tied_names)


def gathered_over_ranks(own: Own) -> list[Own]:
    """Returns what all ranks have, such as their slices, on every rank. Collective."""
    if not dist.is_initialized():
        return [own]
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return of_ranks


def _rows(one: TensorSlice) -> Iterable[tuple[tuple, torch.Tensor]]:
    """Yields an index into the logical tensor, and what the slice has there."""
    flat = one.tensor.reshape(-1)
    lengths = [length for _, length in one.box]
    numbers = torch.arange(one.box_numel)[slice(*one.span)]
    if not lengths:
        yield (), flat.view(())
        return
    coordinates = torch.unravel_index(numbers, lengths)
    yield tuple(place + offset for place, (offset, _) in zip(coordinates, one.box, strict=True)), flat
