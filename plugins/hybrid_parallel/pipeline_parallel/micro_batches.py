"""Splitting of batches into microbatches, and merging of their outputs."""

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

__all__ = ["Microbatch", "batch_size", "join_outputs", "split_batch"]

# Note [Batch dimension]
# The size of dim 0 of the first tensor of a batch is its number of samples. Values with as many entries are split:
# tensors on dim 0, and lists without tensors, as a collate function makes of strings. All else, such as position ids of
# one row or a scalar, is passed to every microbatch as the same object. So when outputs are merged, values that were
# never split are identified by object identity, also where a microbatch has one sample.

# Signatures must be equal in every process, and addresses are not.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_REPR = 64
_COMPARABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_HALF_DTYPES = (torch.float16, torch.bfloat16)


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
    for tensor in _tensors(batch):
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
        microbatch_size: Samples per microbatch, instead; the last one may have fewer.

    Raises:
        ConfigError: Not exactly one of both numbers is given, it is below 1, or the batch has no samples.
    """
    size = batch_size(batch)
    if size == 0:
        raise ConfigError("a batch without samples can't be split into microbatches: leave out empty batches")
    bounds = list(itertools.accumulate(_sizes(size, num_microbatches, microbatch_size), initial=0))
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
    children = [_children(output) for output in outputs]
    mappings = [child for child in children if child is not None]
    is_one_class = len(mappings) == len(outputs) and all(type(output) is type(first) for output in outputs)
    if is_one_class and all(mapping.keys() == mappings[0].keys() for mapping in mappings):
        joined = {key: join_outputs([mapping[key] for mapping in mappings], num_samples) for key in mappings[0]}
        return _with_children(first, joined)
    return first if all(_is_equal(output, first) for output in outputs) else list(outputs)


def _sizes(size: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """Return the number of samples of each microbatch."""
    number = num_microbatches if microbatch_size is None else microbatch_size
    if number is None or number < 1 or (num_microbatches is not None and microbatch_size is not None):
        raise ConfigError(
            f"num_micro_batches={num_microbatches} and micro_batch_size={microbatch_size} don't say how to split a"
            f" batch of {size} samples: give one of them, at least 1"
        )
    if microbatch_size is not None:
        return [min(number, size - start) for start in range(0, size, number)]
    count = min(number, size)
    return [size // count + (index < size % count) for index in range(count)]


def _split(tree: Any, samples: slice, size: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree[samples] if tree.dim() and tree.shape[0] == size else tree
    if _is_list_of(tree, size):
        part = copy.copy(tree)  # keeps its class
        part[:] = tree[samples]
        return part
    children = _children(tree)
    if children is None:
        return tree
    return _with_children(tree, {key: _split(child, samples, size) for key, child in children.items()})


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
    """Return the properties that tensors must share to be concatenated."""
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
    """Return a process-independent text of a value, or its digest if long."""
    text = _ADDRESS.sub("", repr(value))
    return text if len(text) <= _MAX_REPR else hashlib.blake2b(text.encode(errors="replace")).hexdigest()


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_equal(one: Any, other: Any) -> bool:
    # Only types whose == returns a bool.
    return one is other or (type(one) is type(other) and isinstance(one, _COMPARABLE) and one == other)


def _is_list_of(tree: Any, length: int) -> bool:
    """Return whether it is a list of `length` values without tensors."""
    return isinstance(tree, list) and len(tree) == length and next(_tensors(tree), None) is None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    for child in (_children(tree) or {}).values():
        yield from _tensors(child)


def _children(tree: Any) -> Mapping[Any, Any] | None:
    """Return the children of a container by key, index or field name, or None."""
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
    """Return a container of the same class with these children; the same object if none has changed."""
    before = _children(tree) or {}
    changed = {key: child for key, child in children.items() if child is not before[key]}
    if not changed:
        return tree
    if isinstance(tree, tuple):
        make = getattr(type(tree), "_make", None)  # a namedtuple's constructor takes its fields one by one
        return make(children.values()) if make is not None else type(tree)(children.values())
    result = copy.copy(tree)  # keeps a default factory, attributes and the order
    for key, child in changed.items():
        if isinstance(tree, (MutableMapping, list)):
            result[key] = child
        else:
            object.__setattr__(result, key, child)  # frozen dataclasses raise in setattr
    return result
