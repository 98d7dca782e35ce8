"""Splitting of batches into microbatches, and merging of their outputs."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from booster.comm import LOW_PRECISION, all_gather_numbers, raise_on_all_ranks
from booster.errors import ConfigError, DesyncError
from booster.kernels.checksum import crc32, tensor_crc32
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import even_sizes
from booster.pytree import children_of, iter_tensors, with_children

from .config import without_addresses

# Note [Batch dimension]
# The size of dim 0 of the first tensor of a batch is its number of samples. Values with as many entries are split:
# tensors on dim 0, and lists without tensors, as a collate function makes of strings. All else, such as position ids of
# one row or a scalar, is passed to every microbatch as the same object. So when outputs are merged, values that were
# never split are identified by object identity, also where a microbatch has one sample.

_MAX_REPR = 64
_COMPARABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass
class Microbatch:
    """A microbatch.

    Attributes:
        batch: Value of the structure of the full batch, with fewer samples.
        num_samples: Number of samples.
        signature: Shapes and dtypes of all tensors, and descriptions of other values, equal on all ranks. Microbatches
            with equal signatures have activations of equal shapes, unless shapes depend on values in tensors.
    """

    batch: Any
    num_samples: int
    signature: Hashable


def batch_size(batch: Any) -> int:
    """Return the number of samples of a batch: dim 0 of the first tensor that has dimensions.

    Raises:
        ConfigError: There is no such tensor.
    """
    for tensor in iter_tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise ConfigError(
        f"a batch of class {type(batch).__name__} holds no tensor with a dimension, so its number of samples is"
        " undefined: let the data loader yield tensors whose first dimension is the batch, alone or in mappings,"
        " sequences and dataclasses"
    )


def split_batch(batch: Any, *, num_microbatches: int | None, microbatch_size: int | None) -> list[Microbatch]:
    """Split a batch along its samples; see Note [Batch dimension]. Tensors of microbatches are views.

    Args:
        batch: Tensor, or mapping, sequence or dataclass of tensors and other values, nested to any depth.
        num_microbatches: Number of microbatches, whose sizes differ by at most one; a batch of fewer samples makes one
            microbatch per sample.
        microbatch_size: Samples per microbatch, instead; the last one may have fewer. `PipelineArguments` checks both.

    Raises:
        ConfigError: The batch has no samples.
    """
    size = batch_size(batch)
    if size == 0:
        raise ConfigError("a batch without samples can't be split into microbatches: leave out empty batches")
    if microbatch_size is not None:
        sizes = [min(microbatch_size, size - start) for start in range(0, size, microbatch_size)]
    else:
        assert num_microbatches is not None
        sizes = even_sizes(size, min(num_microbatches, size))
    bounds = list(itertools.accumulate(sizes, initial=0))
    if len(bounds) == 2:
        return [Microbatch(batch, size, _signature(batch))]
    microbatches = [(_split(batch, slice(*ends), size), ends[1] - ends[0]) for ends in itertools.pairwise(bounds)]
    return [Microbatch(part, num_samples, _signature(part)) for part, num_samples in microbatches]


def join_outputs(outputs: Sequence[Any], num_samples: Sequence[int]) -> Any:
    """Return the output of the full batch, merged from those of its microbatches.

    Values that are one object in all outputs are kept. Tensors whose dim 0 is the samples are concatenated, and so are
    lists without tensors with one entry per sample. Floating-point scalars, such as a loss, are averaged, weighted by
    samples. Equal values are kept, and anything else becomes a list with one entry per microbatch.

    Args:
        outputs: Outputs in the order of the microbatches, at least one.
        num_samples: Number of samples of each microbatch.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if all(output is first for output in outputs):
        return first
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _joined_tensors(outputs, num_samples)
    if all(_is_list_of(output, count) for output, count in zip(outputs, num_samples, strict=True)):
        return list(itertools.chain.from_iterable(outputs))
    children = [children_of(output) for output in outputs]
    mappings = [child for child in children if child is not None]
    is_one_class = len(mappings) == len(outputs) and all(type(output) is type(first) for output in outputs)
    if is_one_class and all(mapping.keys() == mappings[0].keys() for mapping in mappings):
        joined = {key: join_outputs([mapping[key] for mapping in mappings], num_samples) for key in mappings[0]}
        return with_children(first, joined)
    # Only types whose == returns a bool.
    if isinstance(first, _COMPARABLE) and all(type(output) is type(first) and output == first for output in outputs):
        return first
    return list(outputs)


def _split(tree: Any, samples: slice, size: int) -> Any:
    if isinstance(tree, torch.Tensor):
        if not (tree.dim() and tree.shape[0] == size):
            return tree
        # A forward may change its inputs in place, which autograd counts for all views of a tensor together: not here.
        return tree[samples] if tree.requires_grad else tree[samples].data
    if _is_list_of(tree, size):
        part = copy.copy(tree)  # keeps its class
        part[:] = tree[samples]
        return part
    children = children_of(tree)
    if children is None:
        return tree
    return with_children(tree, {key: _split(child, samples, size) for key, child in children.items()})


def _joined_tensors(tensors: Sequence[torch.Tensor], num_samples: Sequence[int]) -> Any:
    first = tensors[0]
    is_alike = len({(one.dtype, one.device, one.dim(), one.shape[1:]) for one in tensors}) == 1
    if is_alike and all(one.dim() and one.shape[0] == count for one, count in zip(tensors, num_samples, strict=True)):
        return torch.cat(list(tensors))
    if is_alike and all(one.dim() == 0 for one in tensors) and first.is_floating_point():
        dtype = torch.float32 if first.dtype in LOW_PRECISION else first.dtype
        weights = torch.tensor(num_samples, dtype=dtype, device=first.device) / sum(num_samples)
        return (torch.stack(list(tensors)).to(dtype) * weights).sum().to(first.dtype)
    if is_alike and all(one.shape == first.shape and torch.equal(one, first) for one in tensors[1:]):
        return first
    return list(tensors)


def _signature(tree: Any) -> Hashable:
    if isinstance(tree, torch.Tensor) or (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        return _class_name(tree), tuple(tree.shape), str(tree.dtype)
    children = children_of(tree)
    if children is not None:
        return _class_name(tree), tuple((_text(key), _signature(child)) for key, child in children.items())
    if isinstance(tree, (set, frozenset)):
        return _class_name(tree), tuple(sorted(map(_text, tree)))
    return _class_name(tree), _text(tree)


def _text(value: Any) -> str:
    """Return a process-independent text of a value, or its digest if long."""
    text = without_addresses(value)
    return text if len(text) <= _MAX_REPR else hashlib.blake2b(text.encode(errors="replace")).hexdigest()


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_list_of(tree: Any, length: int) -> bool:
    """Return whether it is a list of `length` values without tensors."""
    return isinstance(tree, list) and len(tree) == length and next(iter_tensors(tree), None) is None


_HAS_BATCH, _ENDED, _FAILED = range(3)
_COMPARED_BATCHES = 3  # batches of which also tensors on an accelerator are compared, which costs a device sync


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Result of a rank's iterator: a batch, an error, or its end."""

    batch: Any = None
    error: Exception | None = None
    has_ended: bool = False


def fetch(data_iter: Iterator[Any]) -> NextBatch:
    """Return the next result of an iterator."""
    try:
        return NextBatch(batch=next(data_iter))
    except StopIteration:
        return NextBatch(has_ended=True)
    except Exception as error:  # raised on all ranks, see `BatchConsistency.check`
        return NextBatch(error=error)


class BatchConsistency:
    """Compares batches and options over the ranks.

    Args:
        group: CPU group of all ranks; optional, defaults to the world group.
        data_rank: Data-parallel rank; ranks with the same one must have equal batches.
    """

    def __init__(self, group: dist.ProcessGroup | None, data_rank: int) -> None:
        self._group = group
        self._data_rank = data_rank
        self._num_compared = 0

    def check(
        self, next_batch: NextBatch, signatures: Sequence[Any], options: Sequence[bool], *, changed: bool
    ) -> bool:
        """Check that all ranks have consistent batches and options; return whether `changed` is True on any rank.

        Args:
            next_batch: This rank's result of the iterator.
            signatures: Signatures of its microbatches.
            options: Options of the call.
            changed: Flag of this rank.

        Collective over all ranks.

        Raises:
            StopIteration: The iterators of all ranks are exhausted.
            DesyncError: Only the iterators of some ranks are exhausted, or batches or options differ.
        """
        compares = self._num_compared < _COMPARED_BATCHES
        self._num_compared += 1
        own = [
            _ENDED if next_batch.has_ended else _HAS_BATCH if next_batch.error is None else _FAILED,
            self._data_rank,
            crc32(repr(signatures).encode()),
            _checksum(next_batch.batch, everywhere=compares),
            sum(option << place for place, option in enumerate(options)),
            int(changed),
        ]
        table = all_gather_numbers(own, self._group)
        statuses = [row[0] for row in table]
        if any(status != _HAS_BATCH for status in statuses):
            self._raise_without_batch(next_batch, statuses)
        for column, what in (
            (4, "another call (training or evaluation, with or without an optimizer, return_loss, return_outputs)"),
            (2, "batches of other shapes"),
            (3, "batches with other contents"),
        ):
            self._require_equal(table, column, what)
        return any(row[5] for row in table)

    def _raise_without_batch(self, next_batch: NextBatch, statuses: Sequence[int]) -> None:
        if all(status == _ENDED for status in statuses):
            raise StopIteration
        if any(status == _FAILED for status in statuses):
            raise_on_all_ranks(next_batch.error, self._group)
        ended = [rank for rank, status in enumerate(statuses) if status == _ENDED]
        others = [rank for rank, status in enumerate(statuses) if status == _HAS_BATCH]
        raise DesyncError(
            f"the data iterator has ended on the ranks {ended} and not on the ranks {others}, but a pipeline's stages"
            " process a batch together: give every rank the same number of batches, as the loaders of boost() and"
            " plugin.prepare_dataloader() do"
        )

    def _require_equal(self, table: Sequence[Sequence[int]], column: int, what: str) -> None:
        for data_rank in sorted({row[1] for row in table}):
            ranks = [rank for rank, row in enumerate(table) if row[1] == data_rank]
            differing = [rank for rank in ranks if table[rank][column] != table[ranks[0]][column]]
            if differing:
                raise DesyncError(
                    f"execute_pipeline() got {what} on the ranks {differing} than on rank {ranks[0]} of the same"
                    " pipeline: call it alike on all ranks, and shard the data by plugin.dp_rank and plugin.dp_size, as"
                    " the loaders of boost() and plugin.prepare_dataloader() do"
                )


def _checksum(batch: Any, *, everywhere: bool) -> int:
    """Return a checksum of the batch's tensors in host memory, or of all of them if `everywhere`."""
    sums = [tensor_crc32(tensor) for tensor in iter_tensors(batch) if everywhere or tensor.device.type == "cpu"]
    return crc32(repr(sums).encode())


@dataclass
class PipelineRun:
    """Results of a stage for the last batch.

    Attributes:
        num_microbatches: Number of microbatches.
        peak_live: Largest number of chunk forwards whose activations were kept at a time.
        losses: Contributions of the microbatches to the batch's loss, on the stage with the last chunk.
        outputs: Outputs of the microbatches by index, if requested, on the stage with the last chunk.
    """

    num_microbatches: int
    peak_live: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)
