"""The arguments of a recorded call: what is kept of them, and what they are when the call runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from booster.lazy_init.operators import written_arguments
from booster.lazy_init.record import Call, GeneratorState, Geometry, Record, Reference, map_arguments, replay, view_of
from booster.lazy_init.storage import record_of, settle, storage_of

__all__ = [
    "Arguments",
    "are_ordinary",
    "freeze_generators",
    "make_call",
    "meta_twins",
    "num_real_bytes",
    "tensors_in",
    "with_values",
    "written_tensors",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MOST_READS = 16  # of one lazy value while the model is built: after that it is kept, as every read is a replay


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of nested tuples, lists and dicts."""
    found: list[torch.Tensor] = []
    map_arguments(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, tree)
    return found


def written_tensors(operator: Any, arguments: Arguments) -> Iterator[torch.Tensor]:
    """Yields the tensors that a call writes to."""
    names = set(written_arguments(operator))
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in names:
            given = arguments[0][position] if position < len(arguments[0]) else arguments[1].get(argument.name)
            yield from tensors_in([given])


def num_real_bytes(arguments: Arguments) -> int:
    """Returns the bytes of the tensors that are not lazy: a record keeps copies of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(arguments) if record_of(tensor) is None)


def are_ordinary(arguments: Arguments) -> bool:
    """Returns whether a call is about dense unpinned CPU tensors alone."""
    kwargs = arguments[1]
    device, layout = kwargs.get("device"), kwargs.get("layout")
    if (device is not None and torch.device(device).type != "cpu") or kwargs.get("pin_memory"):
        return False
    if layout is not None and layout is not torch.strided:
        return False
    generators: list[torch.Generator] = []
    map_arguments(lambda leaf: generators.append(leaf) if isinstance(leaf, torch.Generator) else None, arguments)
    if any(generator.device.type != "cpu" for generator in generators):
        return False
    return all(storage_of(tensor) is not None for tensor in tensors_in(arguments))


def freeze_generators(arguments: Arguments) -> Arguments:
    """Returns the arguments with the states of generators, as they are now, in their place."""

    def freeze(leaf: Any) -> Any:
        return GeneratorState(leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf

    frozen: Arguments = map_arguments(freeze, arguments)
    return frozen


def make_call(operator: Any, arguments: Arguments, random_state: torch.Tensor | None) -> Call:
    """Returns a call as it can be run again, whatever is done to its arguments afterwards."""

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        record = record_of(leaf)
        if record is None:
            return _copy(leaf)
        return Reference(record=record, num_writes=len(record.writes), geometry=Geometry.of(leaf))

    return Call(
        function=operator,
        arguments=map_arguments(keep, freeze_generators(arguments)),
        random_state=random_state,
        default_dtype=torch.get_default_dtype(),
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides where its storage is not much larger: kernels are chosen by those."""
    storage = tensor.untyped_storage()
    if tensor.is_conj() or tensor.is_neg() or storage.nbytes() > 4096 + 2 * tensor.numel() * tensor.element_size():
        return tensor.detach().clone()
    return view_of(storage.clone(), Geometry.of(tensor))


def meta_twins(arguments: Arguments) -> Arguments:
    """Returns the arguments with tensors that have the same geometry and no values."""

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")

    twins: Arguments = map_arguments(twin, arguments)
    return twins


def with_values(arguments: Arguments) -> Arguments:
    """Returns the arguments with the values of lazy tensors, for a call that runs now."""
    storages: dict[int, torch.UntypedStorage] = {}

    def value_of(leaf: Any) -> Any:
        record = record_of(leaf) if isinstance(leaf, torch.Tensor) else None
        if record is None:
            return leaf
        if id(record) not in storages:
            if not _count_read(leaf, record):
                return leaf
            storages[id(record)] = replay(record)
        return view_of(storages[id(record)], Geometry.of(leaf))

    real: Arguments = map_arguments(value_of, arguments)
    return real


def _count_read(tensor: torch.Tensor, record: Record) -> bool:
    """Returns whether the tensor is still lazy: after many reads it is not."""
    record.num_reads += 1
    if record.num_reads > _MOST_READS:
        settle(tensor)
    return record_of(tensor) is not None
