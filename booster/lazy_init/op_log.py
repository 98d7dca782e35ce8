"""What a lazy storage will hold: the call that made it and the calls that wrote to it, ready to be run again."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from booster.errors import ConfigError

# Note [Replay]: a storage is a program. Its value is what its first call returned, changed by every call that wrote to
# it since, in order. Calls are those of the dispatcher (aten), so a replay runs the very kernels, on tensors of the
# same geometry, that an ordinary build runs: bit-equal without a word about what an operator means. Other lazy tensors
# that a call reads are kept as (record, number of its calls at that time): records only grow, so that prefix stays
# what it was. A random call keeps the state of its generator, so records replay in any order and any number of times.


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(dtype=tensor.dtype, size=tensor.shape, stride=tensor.stride(), offset=int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A lazy tensor among a call's arguments, as it was at the time of the call."""

    record: Record
    num_writes: int
    geometry: Geometry

    @property
    def prefix(self) -> Prefix:
        return self.record, self.num_writes


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """Stands for a generator that the caller passed, as it was before the call."""

    state: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the dispatcher.

    Attributes:
        arguments: positional ones and a dict of keywords; lazy tensors are a `Reference`, generators a
            `GeneratorState`, other tensors copies.
        random_state: of the default generator before the call, for a call that draws from it.
        default_dtype: as it was set at the time, for factories that are given no dtype.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    random_state: torch.Tensor | None
    default_dtype: torch.dtype

    def references(self) -> Iterator[Reference]:
        found: list[Reference] = []
        map_arguments(lambda value: found.append(value) if isinstance(value, Reference) else None, self.arguments)
        return iter(found)


@dataclass(slots=True, eq=False)
class Record:
    """The program of one lazy storage.

    Attributes:
        origin: makes the storage, as output number `output` of its results.
        made: geometry of that output.
        writes: calls that changed it since. Only ever appended to.
        device: where `materialize` fills it onto when it is not told.
        needs: prefixes of records that a replay of this one runs too, those that they need included.
        num_reads: how often its value was needed while the model was built.
    """

    origin: Call
    output: int
    made: Geometry
    device: torch.device
    writes: list[Call] = field(default_factory=list)
    needs: set[Prefix] = field(default_factory=set)
    num_reads: int = 0


Prefix = tuple[Record, int]  # with the first so many of its writes


def map_arguments(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns nested tuples, lists and dicts with every leaf replaced by `function(leaf)`."""
    if type(tree) in (tuple, list):
        return type(tree)(map_arguments(function, value) for value in tree)
    if type(tree) is dict:
        return {name: map_arguments(function, value) for name, value in tree.items()}
    return function(tree)


def view_of(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """Returns a tensor over a storage."""
    tensor = torch.empty(0, dtype=geometry.dtype, device=storage.device)
    return tensor.set_(storage, geometry.offset, geometry.size, geometry.stride)


def replay(record: Record, num_writes: int | None = None) -> torch.UntypedStorage:
    """Returns a fresh storage with the values of a lazy one; generators are left as they are.

    Args:
        record: the lazy storage's program.
        num_writes: how many of its writes to run; all without it.

    Raises:
        ConfigError: a call draws random numbers without saying so, or returns another shape than before.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        return _Replay().run((record, len(record.writes) if num_writes is None else num_writes))


class _Replay:
    """Runs programs; a value that several calls read is made once, and freed after the last of them."""

    def __init__(self) -> None:
        self._values: dict[Prefix, torch.UntypedStorage] = {}
        self._num_uses: Counter[Prefix] = Counter()

    def run(self, prefix: Prefix) -> torch.UntypedStorage:
        waiting, seen = [prefix], {prefix}
        while waiting:
            for needed in _reads(waiting.pop()):
                self._num_uses[needed] += 1
                if needed not in seen:
                    seen.add(needed)
                    waiting.append(needed)
        return self._make(prefix)

    def _make(self, prefix: Prefix) -> torch.UntypedStorage:
        record, num_writes = prefix
        results = self._call(record.origin, None, None)
        made = results[record.output] if isinstance(results, (tuple, list)) else results
        storage = _as_recorded(made, record).untyped_storage()
        del results, made
        for index, call in enumerate(record.writes[:num_writes]):
            self._call(call, (record, index), storage)
        return storage

    def _call(self, call: Call, own: Prefix | None, own_storage: torch.UntypedStorage | None) -> Any:
        """Runs a call; what it reads of the storage that it writes to is that storage itself."""

        def value_of(argument: Any) -> Any:
            if isinstance(argument, GeneratorState):
                return torch.Generator().set_state(argument.state)
            if not isinstance(argument, Reference):
                return argument
            if argument.prefix == own:
                assert own_storage is not None
                return view_of(own_storage, argument.geometry)
            return view_of(self._value(argument.prefix), argument.geometry)

        args, kwargs = map_arguments(value_of, call.arguments)
        with _settings_of(call):
            return call.function(*args, **kwargs)

    def _value(self, prefix: Prefix) -> torch.UntypedStorage:
        storage = self._values.pop(prefix, None)
        if storage is None:
            storage = self._make(prefix)
        self._num_uses[prefix] -= 1
        if self._num_uses[prefix] > 0:
            self._values[prefix] = storage
        return storage


def _reads(prefix: Prefix) -> Iterator[Prefix]:
    """Yields what the calls of a program read, besides the storage that they write to; again for every time."""
    record, num_writes = prefix
    yield from (reference.prefix for reference in record.origin.references())
    for index, call in enumerate(record.writes[:num_writes]):
        own = (record, index)
        yield from (reference.prefix for reference in call.references() if reference.prefix != own)


def _as_recorded(made: torch.Tensor, record: Record) -> torch.Tensor:
    """Returns a result as the model's views of it expect it."""
    if (made.dtype, made.shape) != (record.made.dtype, record.made.size):
        raise ConfigError(
            f"{record.origin.function} gave {Geometry.of(made)} now and {record.made} when the model was built: build "
            f"the part that uses it outside of LazyInitContext"
        )
    if Geometry.of(made) == record.made:
        return made
    # A meta kernel told other strides than the real one has.
    return torch.empty_strided(record.made.size, record.made.stride, dtype=made.dtype).copy_(made)


@contextmanager
def _settings_of(call: Call) -> Iterator[None]:
    """The default generator and dtype as they were at the call; afterwards as they are now."""
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with ExitStack() as after:
        if dtype != call.default_dtype:
            torch.set_default_dtype(call.default_dtype)
            after.callback(torch.set_default_dtype, dtype)
        if call.random_state is not None:
            after.callback(torch.set_rng_state, state)
            torch.set_rng_state(call.random_state)
        yield
    if call.random_state is None and not torch.equal(torch.get_rng_state(), state):
        torch.set_rng_state(state)
        raise ConfigError(
            f"{call.function} draws random numbers but is not tagged as random, so its values can't be made again: "
            f"build the part that uses it outside of LazyInitContext"
        )


_ATTRIBUTE = "_booster_lazy_record"  # on the storage object, which torch keeps as long as the storage lives

# Note [Reserved addresses]: a lazy tensor is a plain CPU tensor with its true sizes and strides over shared anonymous
# pages that nothing has touched: they cost no memory, and nothing of a limit on it (RLIMIT_DATA counts private ones).
# So every view, `.data =`, tie and check of device or strides in a model's code does what it always does. (malloc would
# not do: it hands out pages again that were touched before.)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of a dense CPU tensor, None for any other."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        try:
            return tensor.untyped_storage()
        except NotImplementedError:  # a tensor of torch.func's transforms, or of a class without memory
            return None


def record_of(tensor: torch.Tensor) -> Record | None:
    """Returns what a lazy tensor's storage will hold, None for a tensor that has its values."""
    storage = storage_of(tensor)
    return None if storage is None else getattr(storage, _ATTRIBUTE, None)


def reserve(num_bytes: int) -> torch.UntypedStorage:
    """Returns a storage whose pages have no memory until they are written to, and which go when it goes."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8).untyped_storage()


def make_lazy(record: Record, num_bytes: int) -> torch.Tensor:
    """Returns the tensor that a record's first call made, without its memory."""
    storage = reserve(num_bytes)
    setattr(storage, _ATTRIBUTE, record)
    return view_of(storage, record.made)


def settle(tensor: torch.Tensor) -> None:
    """Writes a lazy tensor's values where it lies, with memory for all of its storage: it is an ordinary one then."""
    storage, record = storage_of(tensor), record_of(tensor)
    if storage is None or record is None:
        return
    values = replay(record)
    whole = Geometry(dtype=torch.uint8, size=torch.Size([values.nbytes()]), stride=(1,), offset=0)
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        view_of(storage, whole).copy_(view_of(values, whole))
    delattr(storage, _ATTRIBUTE)
