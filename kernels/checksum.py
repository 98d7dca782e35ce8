"""The CRC-32 of zlib, several times as fast where the CPU has instructions for it."""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import TYPE_CHECKING

from .build import load_kernel

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Below it the call of the kernel takes as long as zlib, and building one would not pay.
_FEWEST_BYTES = 16384


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the same number as `zlib.crc32(data, value)`.

    A reader may lack this kernel: the checksum does not depend on how it was computed. Other threads run
    meanwhile, unless the data is short.

    Args:
        data: Any contiguous bytes-like object.
        value: The checksum of what comes before the data.
    """
    native = _native() if memoryview(data).nbytes >= _FEWEST_BYTES else None
    if native is None:
        return zlib.crc32(data, value)
    return int(native.crc32(data, value & 0xFFFFFFFF))


def _native() -> ModuleType | None:
    """Return the kernel, if this CPU has instructions that make it faster than zlib."""
    native = load_kernel("checksum")
    return native if native is not None and native.instruction_sets() else None
