"""Exact metrics: tensors and objects of all ranks, each sample once, with uneven numbers of samples per rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint_io.formats import json_values
from .comm import all_gather_bytes, all_gather_equal, all_gather_text, global_rank_of, group_rank
from .data.dataloader import active_position
from .errors import CheckpointError, ConfigError, DesyncError
from .pytree import children_of, iter_tensors, with_children

# The ranks first exchange dtypes and shapes, and the numbers of samples and of repeated samples of the current batch.
# In most batches these are equal, which a digest shows. Then each tensor is gathered once, as bytes, padded to the
# longest, and all lists of objects together, as JSON. A tensor or list has one row per sample if that holds on all
# ranks; then the repeats, at the end of a rank's batch, are not sent.

_OBJECTS = "objects"  # in place of a dtype, for a list of objects


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Shape of one rank's rows of one tensor, or number of objects of one list."""

    dtype: str
    row_shape: tuple[int, ...]
    num_rows: int
    is_scalar: bool

    @property
    def fits_any(self) -> bool:
        """Whether it is an empty 1-D tensor, which torch.cat accepts beside any shape."""
        return self.num_rows == 0 and not self.row_shape and not self.is_objects

    @property
    def is_objects(self) -> bool:
        return self.dtype == _OBJECTS

    def fits(self, other: _Rows) -> bool:
        """Whether the rows of the two can be concatenated."""
        if self.is_objects or other.is_objects:
            return self.dtype == other.dtype
        return self.fits_any or other.fits_any or (self.dtype, self.row_shape) == (other.dtype, other.row_shape)

    def __str__(self) -> str:
        return "a list without tensors" if self.is_objects else f"{self.dtype} with rows of shape {self.row_shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRows:
    """Shapes of one rank's results, and the numbers of samples and repeats of its batch."""

    results: tuple[_Rows, ...]
    num_samples: int
    num_repeated: int

    @classmethod
    def from_text(cls, text: str) -> _RankRows:
        """Return the object of which `json.dumps(asdict(...))` is the text."""
        fields = json.loads(text)
        blocks = tuple(_Rows(**(block | {"row_shape": tuple(block["row_shape"])})) for block in fields.pop("results"))
        return cls(results=blocks, **fields)


def gather_for_metrics(data: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Concatenate the tensors and lists of the ranks of a group; see `Booster.gather_for_metrics`. Collective."""
    local = list(_iter_results(data))
    own: _RankRows | None = None
    error: ConfigError | None = None
    encoded: dict[int, list[Any]] = {}
    try:
        _check_supported(local, data)
        encoded = {index: _encode(result) for index, result in enumerate(local) if isinstance(result, list)}
        own = _local_rows(local)
    except ConfigError as raised:  # raised on all ranks
        error = raised
    texts = all_gather_text("gather_for_metrics()", [] if own is None else [json.dumps(asdict(own))], group, error)
    ranks = [_RankRows.from_text(fact) for (fact,) in texts]
    references = _check_matching(ranks, group)
    objects = _gather_objects(encoded, ranks, group)
    joined = iter(
        [
            objects[index]
            if isinstance(result, list)
            else _concatenated(result, index, ranks, references[index], group)
            for index, result in enumerate(local)
        ]
    )
    return _map_results(lambda _: next(joined), data)


def _is_result(tree: Any) -> bool:
    """Return whether it is gathered as one: a tensor, or a list without any tensor, which is one of objects."""
    return isinstance(tree, torch.Tensor) or (isinstance(tree, list) and next(iter_tensors(tree), None) is None)


def _iter_results(tree: Any) -> Iterator[torch.Tensor | list[Any]]:
    if _is_result(tree):
        yield tree
        return
    for child in (children_of(tree) or {}).values():
        yield from _iter_results(child)


def _map_results(function: Callable[[Any], Any], tree: Any) -> Any:
    if _is_result(tree):
        return function(tree)
    children = children_of(tree)
    if children is None:
        return tree
    return with_children(tree, {key: _map_results(function, child) for key, child in children.items()})


def _check_supported(results: Sequence[torch.Tensor | list[Any]], data: Any) -> None:
    if not results:
        raise ConfigError(
            f"gather_for_metrics() was given a {type(data).__name__} without any tensor or list, and gathers these"
            " only: put numbers into a tensor, for example torch.tensor(value), and other objects into a list, one per"
            " sample"
        )
    for result in results:
        if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
            raise ConfigError(
                f"gather_for_metrics() was given a tensor of layout {result.layout}, whose rows are not contiguous:"
                " pass tensor.to_dense(), or a padded one"
            )


def _encode(objects: list[Any]) -> list[Any]:
    """Return the objects as JSON values; also on one rank, which takes what several take."""
    try:
        return [json_values.encode(one, f"object {index}") for index, one in enumerate(objects)]
    except CheckpointError as error:
        raise ConfigError(f"gather_for_metrics() cannot send a list's objects: {error}") from None


def _local_rows(results: Sequence[torch.Tensor | list[Any]]) -> _RankRows:
    rows = []
    for result in results:
        if isinstance(result, list):
            rows.append(_Rows(dtype=_OBJECTS, row_shape=(), num_rows=len(result), is_scalar=False))
            continue
        num_rows, *row_shape = result.shape or (1,)
        dtype = str(result.dtype).removeprefix("torch.")
        is_scalar = result.dim() == 0
        rows.append(_Rows(dtype=dtype, row_shape=tuple(row_shape), num_rows=num_rows, is_scalar=is_scalar))
    position = active_position()
    return _RankRows(
        results=tuple(rows),
        num_samples=0 if position is None else position.num_samples,
        num_repeated=0 if position is None else position.num_repeated_local,
    )


def _check_matching(ranks: Sequence[_RankRows], group: dist.ProcessGroup | None) -> list[_Rows]:
    """Return, for each result, rows with the dtype and row shape of the concatenated one."""
    counts = [len(one.results) for one in ranks]
    if len(set(counts)) > 1:
        raise DesyncError(
            "gather_for_metrics() got different numbers of tensors and lists: "
            + _by_ranks(list(map(str, counts)), group)
            + ". Pass the same structure on every rank, with torch.empty(0) or [] where one has no rows"
        )
    references = []
    for index in range(counts[0]):
        blocks = [one.results[index] for one in ranks]
        reference = next((block for block in blocks if not block.fits_any), blocks[0])
        if not all(block.fits(reference) for block in blocks):
            raise DesyncError(
                f"gather_for_metrics() cannot concatenate the ranks' results, number {index + 1} of {counts[0]}: "
                + _by_ranks([str(block) for block in blocks], group)
                + ". They may differ in dim 0 only: pad or convert them to one shape and dtype before"
            )
        references.append(reference)
    return references


def _by_ranks(texts: Sequence[str], group: dist.ProcessGroup | None) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(global_rank_of(rank, group))
    return ", ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} passed {text}"
        for text, ranks in ranks_of.items()
    )


def _num_unrepeated(index: int, ranks: Sequence[_RankRows]) -> list[int]:
    """Return the ranks' numbers of rows of a result, without repeats."""
    blocks = [one.results[index] for one in ranks]
    # Whether the result may have one row for each sample, on all ranks.
    is_per_sample = all(
        not block.is_scalar and block.num_rows == one.num_samples for block, one in zip(blocks, ranks, strict=True)
    )
    return [block.num_rows - is_per_sample * one.num_repeated for block, one in zip(blocks, ranks, strict=True)]


def _gather_objects(
    encoded: dict[int, list[Any]], ranks: Sequence[_RankRows], group: dist.ProcessGroup | None
) -> dict[int, list[Any]]:
    """Return the lists of all ranks, concatenated, without repeats. Collective."""
    if not encoded:
        return {}
    rank = group_rank(group)
    own = [objects[: _num_unrepeated(index, ranks)[rank]] for index, objects in encoded.items()]
    payloads, owners = all_gather_bytes(json.dumps(own, allow_nan=False).encode(), group)
    # Decoded once for every rank, as equal payloads must not become the same objects.
    of_ranks = [json_values.loads(payloads[owner], "a rank's list") for owner in owners]
    return {index: [one for lists in of_ranks for one in lists[number]] for number, index in enumerate(encoded)}


def _concatenated(
    tensor: torch.Tensor,
    index: int,
    ranks: Sequence[_RankRows],
    reference: _Rows,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the rows of all ranks, without repeats."""
    counts = _num_unrepeated(index, ranks)
    own = tensor.detach().reshape(tensor.shape or (1,))[: counts[group_rank(group)]]
    if len(counts) == 1:
        return own
    dtype, shape = getattr(torch, reference.dtype), (sum(counts), *reference.row_shape)
    row_bytes = dtype.itemsize * math.prod(reference.row_shape)
    if max(counts) * row_bytes == 0:
        return own.new_empty(shape, dtype=dtype)
    padded = own.new_zeros(max(counts) * row_bytes, dtype=torch.uint8)
    padded[: own.nbytes].copy_(own.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8))
    gathered = all_gather_equal(padded, group)
    if len(set(counts)) > 1:
        rows = gathered.view(len(counts), -1)
        gathered = torch.cat([row[: count * row_bytes] for row, count in zip(rows, counts, strict=True)])
    return gathered.view(dtype).view(shape)
