"""Fake process group: one rank of a world without the others and without communication, for memory estimates."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    DebugLevel,
    _unregister_process_group,
    get_debug_level,
    set_debug_level,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import _disable_current_modes

# Note [Fake process group]
# The memory of a rank can be measured by running its program on fake tensors. Data of other ranks has no values either,
# so nothing has to be sent: collectives of CPU tensors return at once and leave their outputs unchanged, and
# consistency checks pass, as all ranks equal this one. Calls and bytes of tensors are counted as usual. `fake_world`
# makes a world of any size, with torch's fake backend, also after a launch; `fake_collectives` uses launched groups.
_is_fake = False
_PAGE_BYTES = 4096
_FIRST_FAKE_NAME = 2**20  # torch names groups by their number


def is_fake_world() -> bool:
    """Return whether collectives are fake now; see Note [Fake process group]."""
    return _is_fake


def host_value(tensor: torch.Tensor, *, fake: float = 1.0) -> float:
    """Return a tensor's only element as a number of the host, which waits for an accelerator.

    Args:
        tensor: Tensor with one element.
        fake: Value in its place on a fake tensor, which has none.
    """
    return fake if _is_fake and isinstance(tensor, FakeTensor) else tensor.item()


def is_seen_by_modes() -> bool:
    """Whether dispatch modes other than the simulation's see operators: the user's, or selective checkpointing."""
    return torch._C._len_torch_dispatch_stack() > 0 and not _is_fake


def unseen_by_modes() -> AbstractContextManager[Any]:
    """Hide operators in the block from these modes, which would record or keep results as if they were the model's."""
    return _disable_current_modes() if is_seen_by_modes() else nullcontext()


# Most buckets of a flat buffer in a simulation, which takes as long as it has operators: a few larger buckets in flight
# add at most a few per cent of a rank's memory. None: as many as on a real rank.
max_buckets: int | None = None

is_offloading = False  # whether new tensors stand for memory of another tier


@contextmanager
def offloaded_memory() -> Iterator[None]:
    """Count fake tensors of the block as memory of another tier: host memory beside an accelerator, or files."""
    global is_offloading
    before, is_offloading = is_offloading, True
    try:
        yield
    finally:
        is_offloading = before


# Threads whose work the simulation now runs one after the other; each of them has its own temporaries.
num_threads = 1


@contextmanager
def as_threads(number: int) -> Iterator[None]:
    """Count memory that is allocated in the block once for each of so many threads."""
    global num_threads
    before, num_threads = num_threads, number
    try:
        yield
    finally:
        num_threads = before


class FakeReplicas:
    """Which of a rank's shards other ranks of a fake world hold too.

    One neighbor along each axis of the mesh is simulated: what it holds too is replicated along that axis.

    Args:
        rank: The rank.
        axis_sizes: Number of ranks along each axis, in row-major order of the ranks.

    Attributes:
        held: What the neighbor along each axis holds.
    """

    def __init__(self, rank: int, axis_sizes: Mapping[str, int]) -> None:
        self._rank = rank
        self._axes: dict[str, tuple[int, int]] = {}  # step between neighbors, and size
        step = 1
        for axis, size in reversed(list(axis_sizes.items())):
            self._axes[axis] = (step, size)
            step *= size
        self.held: dict[str, set[Hashable]] = {axis: set() for axis in axis_sizes}

    def neighbor(self, axis: str) -> int:
        step, size = self._axes[axis]
        index = self._rank // step % size
        return self._rank + ((index + 1) % size - index) * step

    def axes_between(self, other: int) -> tuple[str, ...]:
        """Return the axes along which another rank has another index."""
        return tuple(
            axis for axis, (step, size) in self._axes.items() if self._rank // step % size != other // step % size
        )

    def is_replicated(self, shard: Hashable, axes: Iterable[str]) -> bool:
        """Return whether a shard is replicated along all of these axes."""
        return all(shard in self.held[axis] for axis in axes)


replicas: FakeReplicas | None = None  # set while a save is simulated, which the checkpoint engine thus knows of


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have values, also in a fake world."""
    return _disable_current_modes() if _is_fake else nullcontext()


@contextmanager
def fake_memory() -> Iterator[None]:
    """Let fake tensors behave like real ones in the block where torch leaves gaps.

    They have distinct addresses, so that `data_ptr()` tells which share memory. `tensor.data = other` takes the device
    of the other, and tensors may share a `__dict__`, where torch keeps the device of each.
    """
    devices: dict[int, torch.device] = {}  # by `id`: set whenever a fake tensor is made

    class DeviceOfTensor:
        def __get__(self, tensor: FakeTensor, owner: type) -> torch.device:
            return devices.get(id(tensor)) or tensor.__dict__["_fake_device"]

        def __set__(self, tensor: FakeTensor, device: torch.device) -> None:
            devices[id(tensor)] = device
            tensor.__dict__["_fake_device"] = device  # for tensors that outlive the block, such as uncollected garbage

    find_address = torch.UntypedStorage.data_ptr
    bases: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
    next_base = _PAGE_BYTES

    def address_of_storage(storage: torch.UntypedStorage) -> int:
        nonlocal next_base
        if storage.device.type != "meta" or storage.nbytes() == 0:
            return find_address(storage)
        if storage not in bases:
            bases[storage] = next_base
            next_base += -(-storage.nbytes() // _PAGE_BYTES) * _PAGE_BYTES
        return bases[storage]

    def address(tensor: torch.Tensor) -> int:
        begin = address_of_storage(tensor.untyped_storage())
        return begin and begin + int(tensor.storage_offset()) * tensor.itemsize

    data: Any = torch.Tensor.data

    def set_data(tensor: FakeTensor, other: torch.Tensor) -> None:
        data.__set__(tensor, other)
        tensor.fake_device = other.device

    FakeTensor._fake_device = DeviceOfTensor()  # type: ignore[assignment]
    FakeTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    FakeTensor.data_ptr = address  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.data_ptr = address_of_storage  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del FakeTensor.data_ptr
        del FakeTensor.data
        del FakeTensor._fake_device
        del torch.UntypedStorage.data_ptr


class FakeHeaders:
    """Headers of channels between fake ranks, which are simulated one after another in one process.

    A rank receives what the sender sent when it was simulated. If the sender has not been simulated yet, it receives
    this rank's own last header: stages of a pipeline pass on activations of the same shapes.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all headers, before another model is simulated."""
        self._sent: dict[tuple[int, int], list[bytes]] = {}
        self._last = b""

    def open(self, sender: int, receiver: int) -> None:
        """Forget the headers of an earlier simulation of the sender."""
        self._sent[sender, receiver] = []

    def send(self, sender: int, receiver: int, header: bytes) -> None:
        self._sent[sender, receiver].append(header)
        self._last = header

    def receive(self, sender: int, receiver: int, index: int) -> bytes:
        """Return the header at an index of those from the sender."""
        headers = self._sent.get((sender, receiver), [])
        return headers[index] if index < len(headers) else self._last


fake_headers = FakeHeaders()


@contextmanager
def fake_collectives() -> Iterator[None]:
    """Run collectives of this process in the block without communication."""
    global _is_fake
    before, _is_fake = _is_fake, True
    try:
        yield
    finally:
        _is_fake = before


@contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of a fake world of `num_ranks` ranks in the block.

    After a launch the launched world is set aside for the block, in which no thread may communicate.

    Collective: no.
    """
    # Registers torch's backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)  # TORCH_DISTRIBUTED_DEBUG=DETAIL would wait for real ranks in the store
    try:
        with _without_launched_world():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
            with fake_collectives():
                yield
    finally:
        set_debug_level(level)
        sys.excepthook = hook


@contextmanager
def _without_launched_world() -> Iterator[None]:
    """Set torch's tables of process groups aside in the block, and remove what the block adds to them."""
    launched, num_named = _world.default_pg, _world.group_count
    tables: list[dict[Any, Any]] = [
        _world.pg_map,
        _world.pg_names,
        _world.pg_group_ranks,
        _world.pg_backend_config,
        _world.tags_to_pg,
        _world.pg_to_tag,
    ]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    _world.default_pg = None
    if launched is not None:
        _world.group_count = _FIRST_FAKE_NAME  # torch's registry has the launched groups by their names, still
    try:
        yield
    finally:
        for name in _world.pg_names.values():
            _unregister_process_group(name)
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)
        _world.default_pg, _world.group_count = launched, num_named


class FakeSharedMemory:
    """Shared memory whose collectives leave their outputs unchanged."""

    def _do_nothing(self, *arguments: Any, **options: Any) -> None:
        pass

    all_gather = all_reduce = all_to_all = broadcast = reduce_scatter = abort = _do_nothing
