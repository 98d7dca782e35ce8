"""Device of this process: the only module that uses torch.accelerator and names accelerator types."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from .errors import ConfigError

_PROC_STATUS = Path("/proc/self/status")
_CPU_BF16_UNITS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # functions of torch.cpu
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
_GLIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; mallopt accepts no more


def device_type() -> str:
    """Return the device type of this process: "cuda", "xpu", ...; "cpu" without an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def num_devices() -> int:
    """Return the number of accelerators of this host; 1 for the CPU."""
    return 1 if device_type() == "cpu" else torch.accelerator.device_count()


def num_cores() -> int:
    """Return the number of cores available to this process, limited by a container or scheduler."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def current_device() -> torch.device:
    """Return this process's device, with its index for accelerators."""
    kind = device_type()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def is_idle(device: torch.device) -> bool:
    """Return whether an accelerator's current stream has finished its work; True for the CPU. Does not wait."""
    return device.type == "cpu" or bool(torch.accelerator.current_stream(device).query())


def get_current_device() -> torch.device:
    """Return this process's device, by ColossalAI's name; `Booster.device` is the device of its plugin."""
    return current_device()


class Accelerator:
    """This process's kind of device, with methods of ColossalAI's accelerators, over `torch.accelerator`.

    Also for the CPU, which has nothing to wait for and no cache.
    """

    @property
    def name(self) -> str:
        """Device type: "cuda", "xpu", ...; "cpu" without an accelerator."""
        return device_type()

    @property
    def communication_backend(self) -> str:
        """Backend of torch.distributed for the device type."""
        return default_backend(device_type())

    def get_current_device(self) -> torch.device:
        """Return this process's device."""
        return current_device()

    def device_count(self) -> int:
        """Return the number of accelerators of this host; 1 for the CPU."""
        return num_devices()

    def synchronize(self) -> None:
        """Wait for all work of this process's device."""
        synchronize()

    def empty_cache(self) -> None:
        """Return unused memory of torch's allocator to the device, or that of this process to the system on the CPU."""
        if device_type() == "cpu":
            malloc_trim(0)
        else:
            torch.get_device_module(device_type()).empty_cache()

    def memory_allocated(self) -> int:
        """Return the bytes in use: by tensors on the accelerator, or resident in this process on the CPU."""
        return memory_allocated()

    def max_memory_allocated(self) -> int:
        """Return the peak of `memory_allocated` since the start or the last `reset_peak_memory_stats()`."""
        return max_memory_allocated()

    def reset_peak_memory_stats(self) -> None:
        """Start a new peak, where the system can."""
        reset_peak_memory()


def get_accelerator() -> Accelerator:
    """Return this process's kind of device, by ColossalAI's name."""
    return Accelerator()


def set_device(local_rank: int) -> torch.device:
    """Make accelerator `local_rank` this process's device. Does nothing on the CPU.

    Returns:
        The current device.

    Raises:
        ConfigError: The host has too few accelerators.
    """
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    count = num_devices()
    if not 0 <= local_rank < count:
        raise ConfigError(
            f"local_rank={local_rank}, but this host has {count} {kind} device(s), and every rank needs one: start at "
            f"most {count} rank(s) on it, or hide the accelerators to train on the CPU"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether a device has units for bf16. torch emulates bf16 on others, more slowly than fp32."""
    if device.type == "cpu":
        return any(getattr(torch.cpu, name, bool)() for name in _CPU_BF16_UNITS)
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", bool)
    return bool(is_supported())


def has_sync_batch_norm(device: torch.device) -> bool:
    """Return whether torch's `SyncBatchNorm` supports tensors of that device."""
    return device.type == "cuda"


def default_backend(kind: str) -> str:
    """Return the communication backend for a device type: "nccl" for cuda if torch has it, else "gloo"."""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return "nccl" if kind == "cuda" and has_nccl else "gloo"


def synchronize() -> None:
    """Wait for all work of this process's device; returns at once on the CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


# A step on the CPU frees its activations, and the next one allocates as many. By default glibc gives them back to the
# system in between, which hands them out page by page, filled with zeros: 14,000 faults in a step of 10M parameters.
# The allocators of accelerators keep freed memory as well. `malloc_trim` gives back what was freed outside of steps.


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep freed memory for later allocations, unless an environment variable configures its allocator."""
    mallopt = getattr(_GLIBC, "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


malloc_trim: Callable[[int], object] = getattr(_GLIBC, "malloc_trim", bool)
"""Give freed memory back to the system, of which 0 bytes are kept in reserve; nothing without glibc."""


def memory_allocated() -> int:
    """Return the bytes in use: by tensors on the accelerator, or resident in this process on the CPU."""
    if device_type() != "cpu":
        return int(torch.accelerator.memory_allocated())
    return int(psutil.Process().memory_info().rss)


def free_memory(device: torch.device) -> int:
    """Return the available bytes of an accelerator, or of this process's share of host memory."""
    if device.type != "cpu":
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def max_memory_allocated() -> int:
    """Return the peak of `memory_allocated` since the start or the last `reset_peak_memory()`.

    On systems without a resettable peak per process it is the peak since the start.
    """
    if device_type() != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    return _peak_resident_bytes()


def reset_peak_memory() -> bool:
    """Reset `max_memory_allocated()` and return True, or return False if the system cannot."""
    if device_type() != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return True
    try:
        _PROC_CLEAR_REFS.write_text("5")  # Linux: resets the high-water mark (VmHWM) to the resident size
    except OSError:
        return False  # not Linux, or a sandbox that forbids it
    return True


def _peak_resident_bytes() -> int:
    if _PROC_STATUS.is_file():
        for line in _PROC_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not available on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
