"""Batches are split into micro-batches, and the outputs of micro-batches are joined to that of the batch."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from booster.errors import ConfigError

__all__ = ["MicroBatch", "batch_size", "join_outputs", "split_batch"]

# Note [Samples]
# The first dimension of the first tensor of a batch is its samples. What has as many entries is cut: tensors along
# their first dimension, and lists without tensors, as a collate function makes of strings. Everything else, such as
# position ids of one row or a scalar, goes to every micro-batch as the very same object. So joined outputs know what
# was never cut: it is one object in all of them, also where a micro-batch has one sample.

# What signatures hold must be the same in every process, and addresses are not.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_REPR = 64
_COMPARABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass
class MicroBatch:
    """A part of a batch.

    Attributes:
        batch: As the whole batch, with fewer samples.
        num_samples: How many.
        signature: Shapes and dtypes of all tensors and what other values are: where two are equal, all that a model
            computes from them has equal shapes, unless values in tensors decide on shapes. The same on all ranks.
    """

    batch: Any
    num_samples: int
    signature: Hashable


def batch_size(batch: Any) -> int:
    """Returns the number of samples of a batch: dimension 0 of the first tensor that has dimensions.

    Raises:
        ConfigError: There is no such tensor.
    """
    for tensor in _tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise ConfigError(
        f"a batch of class {type(batch).__name__} holds no tensor with a dimension, so pipeline parallelism does not"
        " know its samples: let the data loader yield tensors whose first dimension is the batch, alone or in mappings,"
        " sequences and dataclasses"
    )


def split_batch(batch: Any, *, num_micro_batches: int | None, micro_batch_size: int | None) -> list[MicroBatch]:
    """Splits a batch along its samples; see Note [Samples]. Tensors of micro-batches are views.

    Args:
        batch: A tensor, or a mapping, sequence or dataclass of tensors and other values, to any depth.
        num_micro_batches: Into how many, of sizes that differ by one at most; a batch of fewer samples gives one
            micro-batch for each sample.
        micro_batch_size: Or of how many samples each; the last one may have fewer.

    Raises:
        ConfigError: Not one of both numbers is given, it is below 1, or the batch has no samples.
    """
    size = batch_size(batch)
    if size == 0:
        raise ConfigError("a batch without samples can't be split into micro-batches: leave out empty batches")
    bounds = list(itertools.accumulate(_sizes(size, num_micro_batches, micro_batch_size), initial=0))
    if len(bounds) == 2:
        return [MicroBatch(batch, size, _signature(batch))]
    parts = [(_cut(batch, slice(*ends), size), ends[1] - ends[0]) for ends in itertools.pairwise(bounds)]
    return [MicroBatch(part, num_samples, _signature(part)) for part, num_samples in parts]


def join_outputs(outputs: Sequence[Any], num_samples: Sequence[int]) -> Any:
    """Returns the output for the whole batch, made of those for its micro-batches.

    What is one object in all of them stays. Tensors whose first dimension is the samples are concatenated, and so are
    lists without tensors that have one entry for each sample. Floating scalars, as a loss is, become their mean,
    weighted by the samples. What is equal in all stays, and anything else becomes a list of one entry for each
    micro-batch.

    Args:
        outputs: In the order of the micro-batches, at least one.
        num_samples: Of each micro-batch.
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
    children = [_children(output) for output in outputs]
    mappings = [child for child in children if child is not None]
    is_one_class = len(mappings) == len(outputs) and all(type(output) is type(first) for output in outputs)
    if is_one_class and all(mapping.keys() == mappings[0].keys() for mapping in mappings):
        joined = {key: join_outputs([mapping[key] for mapping in mappings], num_samples) for key in mappings[0]}
        return _with_children(first, joined)
    return first if all(_is_equal(output, first) for output in outputs) else list(outputs)


def _sizes(size: int, num_micro_batches: int | None, micro_batch_size: int | None) -> list[int]:
    """Returns the number of samples of each micro-batch."""
    number = num_micro_batches if micro_batch_size is None else micro_batch_size
    if number is None or number < 1 or (num_micro_batches is not None and micro_batch_size is not None):
        raise ConfigError(
            f"num_micro_batches={num_micro_batches} and micro_batch_size={micro_batch_size} don't say how to split a"
            f" batch of {size} samples: give one of them, at least 1"
        )
    if micro_batch_size is not None:
        return [min(number, size - start) for start in range(0, size, number)]
    count = min(number, size)
    return [size // count + (index < size % count) for index in range(count)]


def _cut(tree: Any, samples: slice, size: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree[samples] if tree.dim() and tree.shape[0] == size else tree
    if _is_list_of(tree, size):
        part = copy.copy(tree)  # keeps its class
        part[:] = tree[samples]
        return part
    children = _children(tree)
    if children is None:
        return tree
    return _with_children(tree, {key: _cut(child, samples, size) for key, child in children.items()})


def _joined_tensors(tensors: Sequence[torch.Tensor], num_samples: Sequence[int]) -> Any:
    first = tensors[0]
    is_alike = all(_kind(tensor) == _kind(first) for tensor in tensors)
    if is_alike and all(one.dim() and one.shape[0] == count for one, count in zip(tensors, num_samples, strict=True)):
        return torch.cat(list(tensors))
    if is_alike and all(one.dim() == 0 for one in tensors) and first.is_floating_point():
        dtype = torch.float32 if first.dtype in _HALF_DTYPES else first.dtype
        weights = torch.tensor(num_samples, dtype=dtype, device=first.device) / sum(num_samples)
        return (torch.stack(list(tensors)).to(dtype) * weights).sum().to(first.dtype)
    if is_alike and all(one.shape == first.shape and torch.equal(one, first) for one in tensors[1:]):
        return first
    return list(tensors)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what tensors that are concatenated have in common."""
    return tensor.dtype, tensor.device, tensor.dim(), tensor.shape[1:]


def _signature(tree: Any) -> Hashable:
    if isinstance(tree, torch.Tensor) or (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        return _class_name(tree), tuple(tree.shape), str(tree.dtype)
    children = _children(tree)
    if children is not None:
        return _class_name(tree), tuple((_text(key), _signature(child)) for key, child in children.items())
    if isinstance(tree, (set, frozenset)):
        return _class_name(tree), tuple(sorted(map(_text, tree)))
    return _class_name(tree), _text(tree)


def _text(value: Any) -> str:
    """Returns what tells a value from others in every process; of long ones a digest."""
    text = _ADDRESS.sub("", repr(value))
    return text if len(text) <= _MAX_REPR else hashlib.blake2b(text.encode(errors="replace")).hexdigest()


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_equal(one: Any, other: Any) -> bool:
    # Only what answers == by yes or no.
    return one is other or (type(one) is type(other) and isinstance(one, _COMPARABLE) and one == other)


def _is_list_of(tree: Any, length: int) -> bool:
    """Returns whether it is a list of something for each sample."""
    return isinstance(tree, list) and len(tree) == length and next(_tensors(tree), None) is None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    for child in (_children(tree) or {}).values():
        yield from _tensors(child)


def _children(tree: Any) -> Mapping[Any, Any] | None:
    """Returns what a container holds, by key, place or field; None: it is no container."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, MutableMapping):
        return dict(tree.items())
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {
            field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        }
    return None


def _with_children(tree: Any, children: Mapping[Any, Any]) -> Any:
    """Returns a container of the same class with other children; the same one where none is another."""
    before = _children(tree) or {}
    changed = {key: child for key, child in children.items() if child is not before[key]}
    if not changed:
        return tree
    if isinstance(tree, tuple):
        make = getattr(type(tree), "_make", None)  # a namedtuple's constructor takes its fields one by one
        return make(children.values()) if make is not None else type(tree)(children.values())
    result = copy.copy(tree)  # keeps what the class adds: a default factory, attributes, the order
    for key, child in changed.items():
        if isinstance(tree, (MutableMapping, list)):
            result[key] = child
        else:
            object.__setattr__(result, key, child)  # a frozen one refuses setattr, and the copy is ours
    return result
