"""Large models in benchmarks/gpu_suite.py: each engine alone in a process, at one size and at the largest that fits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from _harness.engine import Engine, build_engine
from _harness.gpt import GPT, SIZES, GPTSize, step_flops
from _harness.memory import MemoryMeter
from _harness.pair import RankError, World, on_ranks
from _harness.samples import Spread
from _harness.table import align
from gemini.limit import lacked_memory
from gemini.search import search_largest
from gpu.large_engines import LADDER, LARGE, TINY_LADDER, LargeEngine, large_engine
from gpu.measure import Device

__all__ = [
    "PARTS",
    "PRELOAD",
    "Run",
    "format_large",
    "large_has_failed",
    "measure_large",
    "num_parameters",
    "train_alone",
]

PARTS = ("large", "largest")

_FITS, _TOO_LARGE, _NO_TIME = "fits", "does not fit", "no time was left"
_TOO_MUCH_HOST = "not tried: more than the host's memory"
_SIZE = "1.3b"
_ROUNDS = 2
_WARMUP = 2
_STEPS = 8
_STEP_SECONDS = 8.0  # after which a process takes no further step, if it has timed two
_FEWEST_STEPS = 2
_TRY_SECONDS = 150.0
_HOST_SHARE = 0.85  # of what is available: the kernel kills who asks for more, and maybe not the one who did
# Seconds to import, and imported by every process; the second one by the first optimizer. Neither touches the device.
PRELOAD = ("torch", "torch._dynamo")
_GROWTH = 1.01  # rung by rung
_HEAD = ["engine", "weights", "runs", "ms", "tokens/s", "TFLOP/s", "MFU", "device MiB", "host MiB", "device B/w"]
_HEAD += ["host B/w", "least B/w", "limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine in a process of its own.

    Attributes:
        seconds: Of every timed step.
        build_device_bytes: The most that was allocated there before the first step.
        peak_device_bytes: The same during the steps.
        peak_host_bytes: The most that was resident during them, above the start; None: the system does not tell.
        loss: Of the last step.
    """

    seconds: list[float]
    build_device_bytes: int
    peak_device_bytes: int
    peak_host_bytes: int | None
    loss: float


def num_parameters(size: GPTSize) -> int:
    """Returns the number of weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(size).parameters())


def train_alone(name: str, size: GPTSize, kind: str) -> Run:
    """Builds one engine in this process and times its steps.

    Args:
        name: Of the engine.
        size: Of the model.
        kind: "cuda" or "cpu".

    Raises:
        RuntimeError: It could not be built.
    """
    from booster.device import max_memory_allocated, reset_peak_memory, synchronize

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    engine = large_engine(name)
    host = MemoryMeter()
    reset_peak_memory()
    step, outcome = build_engine(Engine(name=name, build=lambda: engine.build(size, device), requires=("booster",)))
    if step is None:
        raise RuntimeError(outcome)
    built_bytes = max_memory_allocated() if kind == "cuda" else 0
    reset_peak_memory()
    host.restart_peak()
    seconds: list[float] = []
    loss, start = 0.0, time.perf_counter()
    for index in range(_WARMUP + _STEPS):
        before = time.perf_counter()
        loss = float(step(index))
        synchronize()
        if index >= _WARMUP:
            seconds.append(time.perf_counter() - before)
        if len(seconds) >= _FEWEST_STEPS and time.perf_counter() - start > _STEP_SECONDS:
            break
    return Run(
        seconds=seconds,
        build_device_bytes=built_bytes,
        peak_device_bytes=max_memory_allocated() if kind == "cuda" else 0,
        peak_host_bytes=host.peak(),
        loss=loss,
    )


def measure_large(
    part: str, kind: str, deadline: float, device: Device, *, is_tiny: bool, names: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Measures a part; returns its engines for JSON.

    Args:
        part: "large": all engines at 1.3 billion weights, in interleaved rounds; "largest": each of those that climb at
            the largest size of the ladder that it trains.
        kind: "cuda" or "cpu".
        deadline: When to stop, by `time.time()`.
        device: What they run on.
        is_tiny: Tiny models: a dry run.
        names: Only engines with one of these in their names; None: all.
    """
    chosen = [engine for engine in LARGE if _is_named(engine.name, names)]
    if part == "large":
        return _rounds(chosen, SIZES["tiny" if is_tiny else _SIZE], kind, deadline, device)
    ladder = TINY_LADDER if is_tiny else LADDER
    climbers = [engine for engine in chosen if engine.climbs]
    return [
        _climb(engine, ladder, kind, time.time() + (deadline - time.time()) / (len(climbers) - index), device)
        for index, engine in enumerate(climbers)
    ]


def format_large(engines: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table, with what was not measured below it."""
    lines = [
        "B/w: bytes a weight; least: what the method keeps of a weight, device + host; limit: the weights for which",
        "the free memory would do if it held nothing else",
    ]
    notes = [f"{one['name']}, {one['weights'] / 1e9:.3g}B: {one['outcome']}" for one in engines if "runs" not in one]
    notes += [
        f"{one['name']}, {above['weights'] / 1e9:.3g}B: {above['outcome']}"
        for one in engines
        for above in one.get("tried", ())
        if above["outcome"] != _FITS
    ]
    return [*lines, *align([_HEAD, *map(_row, engines)]), *notes]


def large_has_failed(engine: dict[str, Any]) -> bool:
    """Returns True if an error other than of too little memory kept it from being measured."""
    return bool(engine["has_failed"])


def _is_named(name: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part.lower() in name.lower() for part in parts)


def _rounds(
    chosen: Sequence[LargeEngine], size: GPTSize, kind: str, deadline: float, device: Device
) -> list[dict[str, Any]]:
    runs: dict[str, list[Run]] = {engine.name: [] for engine in chosen}
    outcomes: dict[str, str] = {}
    for engine in _in_turn(chosen):
        if outcomes.get(engine.name, _FITS) != _FITS:
            continue
        outcome, run = _try(engine, size, kind, deadline, device)
        if run is not None:
            runs[engine.name].append(run)
        if run is not None or not runs[engine.name]:  # a later round without time takes nothing away
            outcomes[engine.name] = outcome
        print(f"{engine.name}: {outcome}", flush=True)
    return [_document(engine, size, outcomes[engine.name], runs[engine.name], device) for engine in chosen]


def _in_turn(chosen: Sequence[LargeEngine]) -> Iterator[LargeEngine]:
    for index in range(_ROUNDS):
        yield from chosen if index % 2 == 0 else chosen[::-1]


def _climb(
    engine: LargeEngine, ladder: Sequence[GPTSize], kind: str, deadline: float, device: Device
) -> dict[str, Any]:
    tries: list[tuple[GPTSize, str, Run | None]] = []

    def works(number: int) -> bool:
        size = ladder[number - 1]
        outcome, run = _try(engine, size, kind, deadline, device)
        tries.append((size, outcome, run))
        print(f"{engine.name}, {num_parameters(size) / 1e9:.3g}B: {outcome}", flush=True)
        return run is not None

    def may_go_on() -> bool:
        is_broken = any(_is_error(outcome) for _, outcome, _ in tries)
        return not is_broken and (not tries or time.time() < deadline)

    limit = engine.limit(max(device.free_bytes, 1), _free_host_bytes())
    first = sum(num_parameters(size) < limit for size in ladder)
    search_largest(works, first=first, most=len(ladder), growth=_GROWTH, tolerance=0.0, may_go_on=may_go_on)
    trained = [one for one in tries if one[2] is not None]
    size, outcome, run = max(trained or tries, key=lambda one: num_parameters(one[0]) if trained else 0)
    tried = [{"weights": num_parameters(size), "outcome": outcome} for size, outcome, _ in tries]
    return _document(engine, size, outcome, [] if run is None else [run], device) | {"tried": tried}


def _try(engine: LargeEngine, size: GPTSize, kind: str, deadline: float, device: Device) -> tuple[str, Run | None]:
    if engine.host_needed(num_parameters(size), device.free_bytes) > _HOST_SHARE * _free_host_bytes():
        return _TOO_MUCH_HOST, None
    left = deadline - time.time()
    if left <= 0:
        return _NO_TIME, None
    # Gloo too: FSDP2 with CPU offload reduces norms on the host.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    world = World(backend=backend, timeout_seconds=min(left + 1.0, _TRY_SECONDS), num_threads=_num_threads())
    try:
        run: Run = on_ranks(train_alone, world, engine.name, size, kind, preload=PRELOAD)[0]
    except RankError as error:
        text = str(error)
        if "gave no result within" in text:
            return _NO_TIME, None
        return (_TOO_LARGE if lacked_memory(text) else text), None
    return _FITS, run


def _num_threads() -> int:
    """The host's part of the step has the whole host: there is one process."""
    return psutil.cpu_count(logical=False) or 1


def _free_host_bytes() -> int:
    return int(psutil.virtual_memory().available)


def _is_error(outcome: str) -> bool:
    return outcome not in (_FITS, _TOO_LARGE, _NO_TIME, _TOO_MUCH_HOST)


def _document(engine: LargeEngine, size: GPTSize, outcome: str, runs: Sequence[Run], device: Device) -> dict[str, Any]:
    weights = num_parameters(size)
    document: dict[str, Any] = {
        "name": engine.name,
        "size": asdict(size),
        "weights": weights,
        "outcome": outcome,
        "has_failed": _is_error(outcome),
        "least_device_bytes": engine.device_bytes,
        "least_host_bytes": engine.host_bytes,
        "limit_weights": engine.limit(device.free_bytes, _free_host_bytes()),
    }
    if not runs:
        return document
    seconds = Spread.of([second for run in runs for second in run.seconds])
    tflops = step_flops(size) / seconds.median / 1e12
    hosts = [run.peak_host_bytes for run in runs if run.peak_host_bytes is not None]
    return document | {
        "runs": [asdict(run) for run in runs],
        "seconds": asdict(seconds),
        "tokens_per_second": size.tokens / seconds.median,
        "tflops": tflops,
        "mfu": tflops / device.ceiling_tflops,
        "peak_device_bytes": max(run.peak_device_bytes for run in runs),
        "peak_host_bytes": max(hosts, default=None),
    }


def _row(engine: dict[str, Any]) -> list[str]:
    least = f"{engine['least_device_bytes']:g} + {engine['least_host_bytes']:g}"
    end = [least, f"{engine['limit_weights'] / 1e9:.3g}B"]
    start = [engine["name"], f"{engine['weights'] / 1e9:.3g}B"]
    if "runs" not in engine:
        return [*start, *["-"] * (len(_HEAD) - len(start) - len(end)), *end]
    device, host, weights = engine["peak_device_bytes"], engine["peak_host_bytes"], engine["weights"]
    return [
        *start,
        str(len(engine["runs"])),
        f"{engine['seconds']['median'] * 1e3:.1f}",
        f"{engine['tokens_per_second']:.0f}",
        f"{engine['tflops']:.3g}",
        f"{engine['mfu']:.1%}",
        f"{device / 2**20:.0f}",
        "-" if host is None else f"{host / 2**20:.0f}",
        f"{device / weights:.2f}",
        "-" if host is None else f"{host / weights:.2f}",
        *end,
    ]
