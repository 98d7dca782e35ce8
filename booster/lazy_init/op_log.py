"""Op log of a lazy storage: the calls that created it and wrote to it, and their replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from booster.errors import ConfigError

# Note [Replay]: a lazy storage is represented by its op log: the call that created it and all calls that wrote to it,
# in order. These are dispatcher (aten) calls, so a replay runs the same kernels on tensors of the same geometry as an
# eager build and is bit-equal, without operator-specific code. A lazy tensor that a call reads is kept as (log, number
# of its calls at that time), which stays valid as logs are append-only. A random call keeps the state of its generator,
# so logs can be replayed in any order and repeatedly.


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Dtype, size, stride and storage offset of a tensor."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(dtype=tensor.dtype, size=tensor.shape, stride=tensor.stride(), offset=int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyReference:
    """Lazy tensor argument of a call, with its state at the time of the call."""

    op_log: OpLog
    num_writes: int
    geometry: Geometry

    @property
    def prefix(self) -> LogPrefix:
        return self.op_log, self.num_writes


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """Placeholder of a generator argument, with its state before the call."""

    state: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """Dispatcher call.

    Attributes:
        arguments: Positional and keyword arguments; lazy tensors as `LazyReference`, generators as `GeneratorState`,
            other tensors as copies.
        rng_state: State of the default generator before the call, if the call draws from it.
        default_dtype: Default dtype at the time of the call, for factories without a dtype argument.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    rng_state: torch.Tensor | None
    default_dtype: torch.dtype

    def references(self) -> Iterator[LazyReference]:
        return (leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, LazyReference))


@dataclass(slots=True, eq=False)
class OpLog:
    """Op log of one lazy storage.

    Attributes:
        origin: Call that creates the storage, as its output number `output`.
        geometry: Geometry of that output.
        writes: Calls that wrote to the storage; append-only.
        device: Default device of `materialize`.
        dependencies: Transitive dependencies: prefixes of other logs that a replay runs.
        num_reads: Number of times that the value was read while the model was built.
    """

    origin: RecordedCall
    output: int
    geometry: Geometry
    device: torch.device
    writes: list[RecordedCall] = field(default_factory=list)
    dependencies: set[LogPrefix] = field(default_factory=set)
    num_reads: int = 0


LogPrefix = tuple[OpLog, int]  # log and number of its writes


def view_of(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    tensor = torch.empty(0, dtype=geometry.dtype, device=storage.device)
    return tensor.set_(storage, geometry.offset, geometry.size, geometry.stride)


def replay(record: OpLog, num_writes: int | None = None) -> torch.UntypedStorage:
    """Return a new storage with the values of a lazy one. Generators are not changed.

    Args:
        record: Op log of the lazy storage.
        num_writes: Number of writes to run; optional, defaults to all.

    Raises:
        ConfigError: A call draws random numbers without the random tag, or returns another shape than before.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        return _Replay().run((record, len(record.writes) if num_writes is None else num_writes))


class _Replay:
    """Replay of op logs. A value that several calls read is computed once, and freed after the last read."""

    def __init__(self) -> None:
        self._values: dict[LogPrefix, torch.UntypedStorage] = {}
        self._num_uses: Counter[LogPrefix] = Counter()

    def run(self, prefix: LogPrefix) -> torch.UntypedStorage:
        waiting, seen = [prefix], {prefix}
        while waiting:
            for needed in _reads(waiting.pop()):
                self._num_uses[needed] += 1
                if needed not in seen:
                    seen.add(needed)
                    waiting.append(needed)
        return self._build(prefix)

    def _build(self, prefix: LogPrefix) -> torch.UntypedStorage:
        record, num_writes = prefix
        results = self._call(record.origin, None, None)
        made = results[record.output] if isinstance(results, (tuple, list)) else results
        storage = _as_recorded(made, record).untyped_storage()
        del results, made
        for index, call in enumerate(record.writes[:num_writes]):
            self._call(call, (record, index), storage)
        return storage

    def _call(self, call: RecordedCall, own: LogPrefix | None, own_storage: torch.UntypedStorage | None) -> Any:
        """Run a call. Reads of the storage that it writes to (`own`) use that storage itself."""

        def value_of(argument: Any) -> Any:
            if isinstance(argument, GeneratorState):
                return torch.Generator().set_state(argument.state)
            if not isinstance(argument, LazyReference):
                return argument
            if argument.prefix == own:
                assert own_storage is not None
                return view_of(own_storage, argument.geometry)
            return view_of(self._value(argument.prefix), argument.geometry)

        args, kwargs = tree_map(value_of, call.arguments)
        with _call_settings(call):
            return call.function(*args, **kwargs)

    def _value(self, prefix: LogPrefix) -> torch.UntypedStorage:
        storage = self._values.pop(prefix, None)
        if storage is None:
            storage = self._build(prefix)
        self._num_uses[prefix] -= 1
        if self._num_uses[prefix] > 0:
            self._values[prefix] = storage
        return storage


def _reads(prefix: LogPrefix) -> Iterator[LogPrefix]:
    """Yield the prefixes that the calls of a log read, except the storage that they write to, with duplicates."""
    record, num_writes = prefix
    yield from (reference.prefix for reference in record.origin.references())
    for index, call in enumerate(record.writes[:num_writes]):
        own = (record, index)
        yield from (reference.prefix for reference in call.references() if reference.prefix != own)


def _as_recorded(made: torch.Tensor, record: OpLog) -> torch.Tensor:
    """Return a result with the recorded strides, which the model's views rely on."""
    if (made.dtype, made.shape) != (record.geometry.dtype, record.geometry.size):
        raise ConfigError(
            f"{record.origin.function} returned {Geometry.of(made)} in replay and {record.geometry} when the model was"
            f" built: build the module that uses it outside of LazyInitContext"
        )
    if Geometry.of(made) == record.geometry:
        return made
    # The meta kernel returned other strides than the real kernel.
    return torch.empty_strided(record.geometry.size, record.geometry.stride, dtype=made.dtype).copy_(made)


@contextmanager
def _call_settings(call: RecordedCall) -> Iterator[None]:
    """Use the default generator state and dtype of the call inside the block."""
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with ExitStack() as after:
        if dtype != call.default_dtype:
            torch.set_default_dtype(call.default_dtype)
            after.callback(torch.set_default_dtype, dtype)
        if call.rng_state is not None:
            after.callback(torch.set_rng_state, state)
            torch.set_rng_state(call.rng_state)
        yield
    if call.rng_state is None and not torch.equal(torch.get_rng_state(), state):
        torch.set_rng_state(state)
        raise ConfigError(
            f"{call.function} draws random numbers but is not tagged as random, so it cannot be replayed: build the"
            f" module that uses it outside of LazyInitContext"
        )
