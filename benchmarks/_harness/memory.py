"""True resident memory of one engine, in processes of its own."""

from __future__ import annotations

import gc
import importlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _harness.engine import MEASURED, Engine, build_engine

__all__ = ["Memory", "MemoryMeter", "measure_memory", "worst"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes above what was resident before the engine was built; None where the system does not tell.

    Attributes:
        after_build: Resident once it is built.
        build_peak: The most while it was built.
        after_steps: Resident after the last step.
        step_peak: The most during the steps.
    """

    after_build: int | None
    build_peak: int | None
    after_steps: int | None
    step_peak: int | None


class MemoryMeter:
    """Reads this process's resident memory as Linux counts it, relative to when the meter was made."""

    def __init__(self) -> None:
        gc.collect()
        self._start = _status_bytes("VmRSS")
        self._can_reset = False
        self.restart_peak()

    def restart_peak(self) -> None:
        """Lets `peak()` count from now on."""
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:  # not Linux, or forbidden: peak() says None
            self._can_reset = False
        else:
            self._can_reset = True

    def resident(self) -> int | None:
        """Returns the bytes resident now."""
        return self._above_start("VmRSS")

    def peak(self) -> int | None:
        """Returns the most bytes that were resident since `restart_peak()`."""
        return self._above_start("VmHWM") if self._can_reset else None

    def _above_start(self, field: str) -> int | None:
        now = _status_bytes(field)
        return None if now is None or self._start is None else now - self._start


def measure_memory(engine: Engine, steps: int) -> Memory | None:
    """Builds the engine and runs some steps of it; call it first in a fresh process.

    Collective.

    Returns:
        This rank's figures; None where the engine can't be built, which the timing run reports.
    """
    _import_available(engine)
    _use_torch_once()
    meter = MemoryMeter()
    step, outcome = build_engine(engine)
    if step is None or outcome != MEASURED:
        return None
    after_build, build_peak = meter.resident(), meter.peak()
    meter.restart_peak()
    for index in range(steps):
        float(step(index))
    return Memory(after_build=after_build, build_peak=build_peak, after_steps=meter.resident(), step_peak=meter.peak())


def worst(memories: list[Memory | None]) -> Memory | None:
    """Returns the largest of every figure over the ranks."""
    found = [memory for memory in memories if memory is not None]
    if not found:
        return None
    return Memory(
        after_build=_largest([memory.after_build for memory in found]),
        build_peak=_largest([memory.build_peak for memory in found]),
        after_steps=_largest([memory.after_steps for memory in found]),
        step_peak=_largest([memory.step_peak for memory in found]),
    )


def _largest(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _import_available(engine: Engine) -> None:
    """Imports what the engine needs, so that its memory does not count the code of its library."""
    for module in engine.requires:
        try:
            importlib.import_module(module)
        except ImportError:  # build_engine meets it again and says what it means
            return


def _use_torch_once() -> None:
    """Loads what torch loads on first use, 85 MiB with the first optimizer: no engine's own."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(2, 8)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    if dist.is_initialized():
        dist.barrier()


def _status_bytes(field: str) -> int | None:
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * _KIB
    return None
