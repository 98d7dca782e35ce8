"""Lazy storages: reserved addresses without memory, which carry the record of what they will hold."""

from __future__ import annotations

import mmap

import torch
from torch.utils._python_dispatch import _disable_current_modes

from booster.lazy_init.record import Geometry, Record, replay, view_of

__all__ = ["make_lazy", "record_of", "reserve", "settle", "storage_of"]

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
