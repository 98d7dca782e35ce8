"""Exact metrics: results of all ranks, each sample once, with uneven numbers of samples per rank."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import all_gather_equal, all_gather_text, global_rank_of, group_rank
from booster.errors import ConfigError, DesyncError
from booster.pytree import iter_tensors, map_tensors

from .dataloader import active_position

# The ranks first exchange dtypes and shapes, and the numbers of samples and of repeated samples of the current batch.
# In most batches these are equal, which a digest shows. Then each tensor is gathered once, as bytes, padded to the
# longest. A tensor has one row per sample if that holds on all ranks; then the repeats, at the end of a rank's batch,
# are not sent.


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorRows:
    """Shape of one rank's rows of one tensor."""

    dtype: str
    row_shape: tuple[int, ...]
    num_rows: int
    is_scalar: bool

    @property
    def fits_any(self) -> bool:
        """Whether it is an empty 1-D tensor, which torch.cat accepts beside any shape."""
        return self.num_rows == 0 and not self.row_shape

    def fits(self, other: _TensorRows) -> bool:
        """Whether the rows of the two can be concatenated."""
        return self.fits_any or other.fits_any or (self.dtype, self.row_shape) == (other.dtype, other.row_shape)

    def __str__(self) -> str:
        return f"{self.dtype} with rows of shape {self.row_shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankRows:
    """Shapes of one rank's tensors, and the numbers of samples and repeats of its batch."""

    tensors: tuple[_TensorRows, ...]
    num_samples: int
    num_repeated: int

    @classmethod
    def from_text(cls, text: str) -> _RankRows:
        """Return the object of which `json.dumps(asdict(...))` is the text."""
        fields = json.loads(text)
        blocks = tuple(
            _TensorRows(**(block | {"row_shape": tuple(block["row_shape"])})) for block in fields.pop("tensors")
        )
        return cls(tensors=blocks, **fields)


def gather_for_metrics(data: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Concatenate the tensors of all ranks along dim 0; see `Booster.gather_for_metrics`. Collective.

    Args:
        data: Tensors, in any nesting.
        group: Data-parallel group; optional, defaults to the world.

    Raises:
        ConfigError: The data has no tensor, or one that is not dense.
        DesyncError: The ranks' tensors do not match.
    """
    local = list(iter_tensors(data))
    error = _unsupported(local, data)
    own = None if error is not None else _local_rows(local)
    texts = all_gather_text("gather_for_metrics()", [] if own is None else [json.dumps(asdict(own))], group, error)
    ranks = [_RankRows.from_text(fact) for (fact,) in texts]
    references = _check_matching(ranks, group)
    joined = iter([_concatenated(tensor, index, ranks, references[index], group) for index, tensor in enumerate(local)])
    return map_tensors(lambda _: next(joined), data)


def _unsupported(tensors: Sequence[torch.Tensor], data: Any) -> ConfigError | None:
    """Return the error of data that cannot be gathered, or None."""
    if not tensors:
        return ConfigError(
            f"gather_for_metrics() was given a {type(data).__name__} without any tensor, and gathers tensors only: put"
            " numbers into one, for example torch.tensor(value)"
        )
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            return ConfigError(
                f"gather_for_metrics() was given a tensor of layout {tensor.layout}, whose rows are not contiguous:"
                " pass tensor.to_dense(), or a padded one"
            )
    return None


def _local_rows(tensors: Sequence[torch.Tensor]) -> _RankRows:
    rows = []
    for tensor in tensors:
        num_rows, *row_shape = tensor.shape or (1,)
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_scalar = tensor.dim() == 0
        rows.append(_TensorRows(dtype=dtype, row_shape=tuple(row_shape), num_rows=num_rows, is_scalar=is_scalar))
    position = active_position()
    return _RankRows(
        tensors=tuple(rows),
        num_samples=0 if position is None else position.num_samples,
        num_repeated=0 if position is None else position.num_repeated_local,
    )


def _check_matching(ranks: Sequence[_RankRows], group: dist.ProcessGroup | None) -> list[_TensorRows]:
    """Return, for each tensor, rows with the dtype and row shape of the concatenated one."""
    counts = [len(one.tensors) for one in ranks]
    if len(set(counts)) > 1:
        raise DesyncError(
            "gather_for_metrics() got different numbers of tensors: "
            + _by_ranks([f"{count} tensors" for count in counts], group)
            + ". Pass the same structure on every rank, with torch.empty(0) where one has no rows"
        )
    references = []
    for index in range(counts[0]):
        blocks = [one.tensors[index] for one in ranks]
        reference = next((block for block in blocks if not block.fits_any), blocks[0])
        if not all(block.fits(reference) for block in blocks):
            raise DesyncError(
                f"gather_for_metrics() cannot concatenate the ranks' tensors, number {index + 1} of {counts[0]}: "
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


def _concatenated(
    tensor: torch.Tensor,
    index: int,
    ranks: Sequence[_RankRows],
    reference: _TensorRows,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the rows of all ranks, without repeats."""
    blocks = [one.tensors[index] for one in ranks]
    # Whether the tensor may have one row for each sample, on all ranks.
    is_per_sample = all(
        not block.is_scalar and block.num_rows == one.num_samples for block, one in zip(blocks, ranks, strict=True)
    )
    counts = [block.num_rows - is_per_sample * one.num_repeated for block, one in zip(blocks, ranks, strict=True)]
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
