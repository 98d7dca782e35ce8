"""Stored tensors under the names and in the form of the model, by the weight conversions of transformers.

A model of transformers may hold its weights in another form than the files of its release: experts in one tensor that
are stored one by one, or projections under other names. transformers describes that as data, the conversions that
`from_pretrained` and `save_pretrained` apply.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from booster.checkpoint_io.planning.slices import Box, full_box, run_length, run_start
from booster.interface import TensorSlice, TensorSpec

# Note [Weight conversions]
# transformers' own code converts, but on placeholders that record where the elements of each stored tensor go. So each
# rank reads only the elements that it holds, into their place, whether it holds experts, columns or flat ranges, and no
# converted tensor is in memory. This covers stacking, concatenating and splitting, which is what experts need. Other
# operations, such as a transposition, fail on a placeholder: these tensors keep their stored names, and are reported.


@dataclass(frozen=True, slots=True)
class _Placement:
    """Box of a stored tensor, and the box of the converted one with the same elements in the same order."""

    name: str
    spec: TensorSpec
    source: Box
    place: Box

    def moved(self, dim: int, distance: int) -> _Placement:
        """Return the placement farther on in a dimension of the converted tensor."""
        offset, length = self.place[dim]
        return replace(self, place=(*self.place[:dim], (offset + distance, length), *self.place[dim + 1 :]))

    def within(self, dim: int, start: int, stop: int) -> _Placement | None:
        """Return what lies between two indices of a dimension of the converted tensor, or None if nothing does."""
        offset, length = self.place[dim]
        first, last = max(start, offset), min(stop, offset + length)
        if first >= last:
            return None
        place = (*self.place[:dim], (first, last - first), *self.place[dim + 1 :])
        source_dim = _matching_dim(self.place, self.source, dim)
        source = list(self.source)
        if source_dim is not None:
            source[source_dim] = (self.source[source_dim][0] + first - offset, last - first)
        return replace(self, place=place, source=tuple(source))


def _matching_dim(place: Box, source: Box, dim: int) -> int | None:
    """Return the stored dimension that became `dim`, or None if it was added."""
    if place[dim][1] == 1:
        return None
    number = sum(length != 1 for _, length in place[:dim])
    return [index for index, (_, length) in enumerate(source) if length != 1][number]


class _Placeholder:
    """What transformers' conversions get in place of a tensor; see Note [Weight conversions]."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[_Placement]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.placements = tuple(placements)

    def contiguous(self) -> _Placeholder:
        return self

    def size(self, dim: int) -> int:
        return self.shape[dim]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        action = _OPERATIONS.get(function)
        return NotImplemented if action is None else action(*args, **kwargs or {})


def _stack(tensors: Sequence[_Placeholder], dim: int = 0) -> _Placeholder:
    dim %= len(tensors[0].shape) + 1
    added = [
        _Placeholder(
            (*each.shape[:dim], 1, *each.shape[dim:]),
            each.dtype,
            [
                replace(placement, place=(*placement.place[:dim], (0, 1), *placement.place[dim:]))
                for placement in each.placements
            ],
        )
        for each in tensors
    ]
    return _concatenate(added, dim)


def _concatenate(tensors: Sequence[_Placeholder], dim: int = 0) -> _Placeholder:
    first, start, placements = tensors[0], 0, []
    dim %= len(first.shape)
    for each in tensors:
        if each.dtype != first.dtype or len(each.shape) != len(first.shape):
            raise TypeError("the tensors differ in dtype or number of dimensions")
        placements += [placement.moved(dim, start) for placement in each.placements]
        start += each.shape[dim]
    shape = (*first.shape[:dim], start, *first.shape[dim + 1 :])
    if any((*each.shape[:dim], start, *each.shape[dim + 1 :]) != shape for each in tensors):
        raise ValueError("the tensors differ in shape")
    return _Placeholder(shape, first.dtype, placements)


def _split(tensor: _Placeholder, sizes: int | Sequence[int], dim: int = 0) -> list[_Placeholder]:
    dim %= len(tensor.shape)
    if isinstance(sizes, int):
        sizes = [min(sizes, tensor.shape[dim] - start) for start in range(0, tensor.shape[dim], sizes)]
    parts, start = [], 0
    for size in sizes:
        cut = (placement.within(dim, start, start + size) for placement in tensor.placements)
        placements = [placement.moved(dim, -start) for placement in cut if placement is not None]
        shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
        parts.append(_Placeholder(shape, tensor.dtype, placements))
        start += size
    return parts


def _chunk(tensor: _Placeholder, chunks: int, dim: int = 0) -> list[_Placeholder]:
    return _split(tensor, math.ceil(tensor.shape[dim] / chunks), dim)


_OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _concatenate,
    torch.split: _split,
    torch.chunk: _chunk,
}


@dataclass(slots=True)
class ConvertedSpecs:
    """Stored tensors in the model's form.

    Attributes:
        specs: Dtypes and shapes, by the model's names; a tensor that was not converted keeps its stored name.
        optional: Names of the model that need not be stored, such as those of fixed positions.
        failures: Why a conversion was not applied, one line each.
    """

    specs: dict[str, TensorSpec]
    optional: frozenset[str] = frozenset()
    failures: list[str] = field(default_factory=list)
    _placements: dict[str, tuple[_Placement, ...]] = field(default_factory=dict)

    def stored_slices(self, named_slices: Sequence[tuple[str, TensorSlice]]) -> list[tuple[str, TensorSlice]]:
        """Return which slices of stored tensors fill slices of converted ones, in the same memory."""
        found: list[tuple[str, TensorSlice]] = []
        for name, tensor_slice in named_slices:
            placements = self._placements.get(name)
            if placements is None:
                found.append((name, tensor_slice))
            else:
                found += [part for placement in placements for part in _slices_of_placement(placement, tensor_slice)]
        return found


def convert_specs(specs: Mapping[str, TensorSpec], model: Any, names: Collection[str]) -> ConvertedSpecs:
    """Apply the weight conversions of a model to the tensors of a checkpoint.

    Nothing is converted for a model that is not of transformers. The model's own names take precedence. Others get or
    lose the prefix of the base model. What the model's class declares as not needed is left out.

    Args:
        specs: Dtypes and shapes of the stored tensors.
        model: The user's model, or a stage of it.
        names: Names of the model on all ranks.
    """
    converted = ConvertedSpecs(dict(specs))
    conversions = _conversions_of(model)
    if conversions is None:
        return converted
    for sources, tensors in _converted(conversions, specs, model, names, converted.failures):
        if tensors.keys() & specs.keys():
            continue  # stored under both names: the model's own name is used
        for stored_name in sources:
            del converted.specs[stored_name]
        for name, tensor in tensors.items():
            converted.specs[name] = TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))
            converted._placements[name] = tensor.placements
    missing, unexpected = set(names) - converted.specs.keys(), converted.specs.keys() - set(names)
    needed = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    adjust = model._adjust_missing_and_unexpected_keys
    if "missing_keys" in inspect.signature(adjust).parameters:  # transformers 5.0
        needed.missing_keys, needed.unexpected_keys = adjust(missing, unexpected)
    else:
        adjust(needed)
    converted.optional = frozenset(missing - needed.missing_keys)
    for name in unexpected - needed.unexpected_keys:
        del converted.specs[name]
    return converted


def _converted(
    conversions: Sequence[Any], specs: Mapping[str, TensorSpec], model: Any, names: Collection[str], failures: list[str]
) -> Iterator[tuple[Sequence[str], Mapping[str, _Placeholder]]]:
    """Yield the stored names that become tensors of the model, with these by name; append what fails to `failures`."""
    from transformers import core_model_loading as transformers_loading

    renamings = [each for each in conversions if isinstance(each, transformers_loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, transformers_loading.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    in_model = dict.fromkeys(names, True)
    used: dict[str, tuple[Any, list[str]]] = {}
    renamed: set[str] = set()
    # In this order the experts are stacked.
    for stored_name in sorted(specs.keys() - set(names), key=transformers_loading.dot_natural_key):
        name, pattern = transformers_loading.rename_source_key(
            stored_name, renamings, converters, model.base_model_prefix, in_model
        )
        if name not in names or name in renamed:
            continue
        spec, box = specs[stored_name], full_box(specs[stored_name].shape)
        tensor = _Placeholder(spec.shape, spec.dtype, [_Placement(stored_name, spec, box, box)])
        if pattern is None:
            renamed.add(name)
            yield [stored_name], {name: tensor}
            continue
        converter, sources = used.setdefault(name, (copy.deepcopy(of_pattern[pattern]), []))
        sources.append(stored_name)
        converter.add_tensor(name, stored_name, pattern, tensor)
    for name, (converter, sources) in used.items():
        try:
            tensors = converter.convert(name, model=model, config=model.config)
            yield sources, {key: each[0] if isinstance(each, list) else each for key, each in tensors.items()}
        except Exception as error:
            failures.append(f"{name!r} from {sources[0]!r} by {converter.operations}: {error}")


def _conversions_of(model: nn.Module) -> list[Any] | None:
    """Return the conversions that transformers has for a model; None for other models and before transformers 5."""
    if "transformers.modeling_utils" not in sys.modules:  # no model of it exists, so it need not be imported
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else None


def _slices_of_placement(placement: _Placement, tensor_slice: TensorSlice) -> Iterator[tuple[str, TensorSlice]]:
    """Yield what a slice of the converted tensor holds of a stored one, as slices of that."""
    shared: _Placement | None = placement
    for dim, (offset, length) in enumerate(tensor_slice.box):
        shared = None if shared is None else shared.within(dim, offset, offset + length)
    if shared is None:
        return
    lengths = tuple(length for _, length in tensor_slice.box)
    # Relative to the box of the slice.
    inside = tuple(
        (offset - first, length) for (offset, length), (first, _) in zip(shared.place, tensor_slice.box, strict=True)
    )
    numel = math.prod(length for _, length in inside)
    if tuple(tensor_slice.tensor.shape) == lengths:
        memory = tensor_slice.tensor[tuple(slice(offset, offset + length) for offset, length in inside)]
        yield placement.name, _stored_slice(shared, (0, numel), memory, tensor_slice)
    elif run_length(lengths, inside) == numel:
        (start, stop), first = tensor_slice.span, run_start(lengths, inside, 0)
        begin, end = max(start, first), min(stop, first + numel)
        if begin < end:
            memory = tensor_slice.tensor.view(-1)[begin - start : end - start]
            yield placement.name, _stored_slice(shared, (begin - first, end - first), memory, tensor_slice)
    else:
        dim = next(dim for dim, (_, length) in enumerate(inside) if length > 1)
        offset, length = shared.place[dim]
        for index in range(offset, offset + length):
            row = shared.within(dim, index, index + 1)
            assert row is not None
            yield from _slices_of_placement(row, tensor_slice)


def _stored_slice(
    placement: _Placement, span: tuple[int, int], memory: torch.Tensor, tensor_slice: TensorSlice
) -> TensorSlice:
    return replace(
        tensor_slice,
        name=placement.name,
        global_shape=placement.spec.shape,
        box=placement.source,
        span=span,
        tensor=memory,
    )
