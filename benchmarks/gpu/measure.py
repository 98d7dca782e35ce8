"""What one process of benchmarks/gpu_suite.py does: looks at the device, or measures one case on it."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _harness.engine import Engine, build_engine, with_control
from _harness.gpt import SIZES, GPTSize, step_flops
from _harness.memory import MemoryMeter
from _harness.pair import EngineReport, Schedule, report_engines, time_engines
from gpu.cases import case_named

__all__ = ["Device", "engine_figures", "measure_case", "probe_device"]

_MEMORY_STEPS = 3
_WARMUP = 5
_MANY_STEPS = 10_000  # the time limit ends a case
_CEILING_RUNS = 20
_CEILING_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the figures are measured on.

    Attributes:
        name: As the driver calls it.
        free_bytes: Memory that a case may use.
        ceiling_tflops: Of a bf16 product of two square matrices of normal random numbers.
        ceiling_side: Their side.
    """

    name: str
    free_bytes: int
    ceiling_tflops: float
    ceiling_side: int


def probe_device(kind: str, side: int) -> Device:
    """Measures the ceiling that MFU is a share of.

    Args:
        kind: "cuda" or "cpu".
        side: Of the matrices.
    """
    a, b = (torch.randn(side, side, device=kind, dtype=torch.bfloat16) for _ in range(2))
    tflops = [2 * side**3 * _CEILING_REPEATS / _matmul_seconds(a, b) / 1e12 for _ in range(_CEILING_RUNS)]
    name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    free = torch.cuda.mem_get_info()[0] if kind == "cuda" else 0
    # The first runs warm the device up.
    ceiling = statistics.median(tflops[_CEILING_RUNS // 2 :])
    return Device(name=name, free_bytes=free, ceiling_tflops=ceiling, ceiling_side=side)


def _matmul_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    from booster.device import synchronize

    synchronize()
    start = time.perf_counter()
    for _ in range(_CEILING_REPEATS):
        a @ b
    synchronize()
    return time.perf_counter() - start


def measure_case(name: str, size_name: str, kind: str, deadline: float, ceiling_tflops: float) -> dict[str, Any]:
    """Measures peak memory of each engine alone, then the step times of all in turn; returns the case for JSON.

    Args:
        name: Of the case.
        size_name: Of the model.
        kind: "cuda" or "cpu".
        deadline: When to stop, by `time.time()`; three steps of every engine are done in any case.
        ceiling_tflops: What MFU is a share of.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 means fp32
    case = case_named(name)
    size = case.size(SIZES[size_name])
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    engines = case.engines(size, device)
    gc.freeze()  # what was imported stays: collections between the engines need not look at it
    for engine in engines:
        _peaks(engine)  # libraries and workspaces that come with the first use are no engine's own
    memory = {engine.name: _peaks(engine) for engine in engines}
    schedule = Schedule(steps=_MANY_STEPS, warmup=_WARMUP, seconds=max(0.0, deadline - time.time()))
    all_engines = with_control(engines)
    reports = report_engines(all_engines, [time_engines(all_engines, schedule)], {})
    return {
        "name": name,
        "engines": [engine_figures(report, size, ceiling_tflops) | memory.get(report.name, {}) for report in reports],
    }


def engine_figures(report: EngineReport, size: GPTSize, ceiling_tflops: float) -> dict[str, Any]:
    """Returns an engine's times and losses with what they mean for the device."""
    figures: dict[str, Any] = {"name": report.name, "outcome": report.outcome, "has_failed": report.has_failed}
    if report.figures is None:
        return figures
    tflops = step_flops(size) / report.figures.seconds.median / 1e12
    return figures | asdict(report.figures) | {"tflops": tflops, "mfu": tflops / ceiling_tflops}


def _peaks(engine: Engine) -> dict[str, int | None]:
    """Returns the engine's peak memory above what was in use, with no other engine there."""
    from booster.device import max_memory_allocated, memory_allocated, reset_peak_memory

    _release()
    host, before = MemoryMeter(), memory_allocated()
    reset_peak_memory()
    step, _ = build_engine(engine)
    if step is None:
        return {}
    for index in range(_MEMORY_STEPS):
        float(step(index))
    peaks = {"peak_device_bytes": max_memory_allocated() - before, "peak_host_bytes": host.peak()}
    del step
    _release()
    return peaks | {"left_device_bytes": memory_allocated() - before}


def _release() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
