"""The device this process computes on: the one module that asks torch.accelerator and names a kind of accelerator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import torch

from booster.errors import ConfigError

__all__ = [
    "current_device",
    "default_backend",
    "device_type",
    "free_memory",
    "has_sync_batch_norm",
    "max_memory_allocated",
    "memory_allocated",
    "num_devices",
    "reset_peak_memory",
    "set_device",
    "synchronize",
]

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")


def device_type() -> str:
    """Returns the kind of device that this process computes on: "cuda", "xpu", ...; "cpu" without an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def num_devices() -> int:
    """Returns how many devices one process per device could use: the accelerators of this machine; 1 for the CPU."""
    return 1 if device_type() == "cpu" else torch.accelerator.device_count()


def current_device() -> torch.device:
    """Returns this process's device, with its index where there may be several."""
    kind = device_type()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def set_device(local_rank: int) -> torch.device:
    """Makes the accelerator number `local_rank` this process's device; nothing to do on the CPU.

    Returns:
        The device that is current from now on.

    Raises:
        ConfigError: The machine has fewer accelerators than that.
    """
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    count = num_devices()
    if not 0 <= local_rank < count:
        raise ConfigError(
            f"local_rank={local_rank}, but this machine shows {count} {kind} device(s), and every rank needs its own: "
            f"start at most {count} rank(s) on it, or hide the accelerators to train on the CPU"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def has_sync_batch_norm(device: torch.device) -> bool:
    """Returns whether torch's own `SyncBatchNorm` takes tensors of that device."""
    return device.type == "cuda"


def default_backend(kind: str) -> str:
    """Returns the communication backend for a kind of device: "nccl" for cuda where torch has it, else "gloo"."""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return "nccl" if kind == "cuda" and has_nccl else "gloo"


def synchronize() -> None:
    """Waits until this process's device has done all the work given to it; returns at once on the CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def memory_allocated() -> int:
    """Returns the bytes in use: by tensors on the accelerator, or resident in this process on the CPU."""
    if device_type() != "cpu":
        return int(torch.accelerator.memory_allocated())
    return int(psutil.Process().memory_info().rss)


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this process may still take: of an accelerator, or its share of the host's memory."""
    if device.type != "cpu":
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def max_memory_allocated() -> int:
    """Returns the most bytes that were in use since the start or the last `reset_peak_memory()`, as `memory_allocated`.

    On a CPU whose system keeps no such mark per process it is the mark since the start.
    """
    if device_type() != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    return _peak_resident_bytes()


def reset_peak_memory() -> bool:
    """Starts `max_memory_allocated()` anew and returns True, or returns False where the system can't do it."""
    if device_type() != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return True
    try:
        _PROC_CLEAR_REFS.write_text("5")  # Linux: puts the high-water mark (VmHWM) down to what is resident now
    except OSError:
        return False  # not Linux, or a sandbox that forbids it: the caller sees the False
    return True


def _peak_resident_bytes() -> int:
    if _PROC_STATUS.is_file():
        for line in _PROC_STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on every system, so not at the top

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
