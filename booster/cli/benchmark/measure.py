"""Measurement of one configuration on one rank."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from booster import plugins
from booster.booster import Booster
from booster.comm import all_reduce_numbers, barrier, count_communication, group_size
from booster.device import (
    current_device,
    device_type,
    max_memory_allocated,
    memory_allocated,
    reset_peak_memory,
    synchronize,
)
from booster.interface import Plugin
from booster.plugins.hybrid_parallel.config import TENSOR_MODES

from .config import INNER_FACTOR, SERIAL, BenchmarkSettings, Configuration

_MARK = "booster: the steps begin"
_ALLOCATION = "[memory]"


class LiveMemory:
    """Context that measures the peak memory of live tensors.

    On the CPU, resident memory is meaningless for a small network: libraries load code on first use, and malloc keeps
    freed memory. So torch's profiler records every allocation and release of a tensor, on this thread and its children,
    and their running sum is the live memory, identical in every run. Buffers of transports are not included. On an
    accelerator the allocator's statistics are used.

    Attributes:
        peak_bytes: Peak since `begin_steps()`; set at the exit of the context.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_on_host = device_type() == "cpu"
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._initial_bytes = 0

    def __enter__(self) -> LiveMemory:
        if self._is_on_host:
            with _silent_profiler():
                self._profile.__enter__()
        else:
            self._initial_bytes = memory_allocated()
        return self

    def begin_steps(self) -> None:
        """Reset the peak; tensors allocated earlier count as long as they live."""
        if self._is_on_host:
            with record_function(_MARK):
                pass
        else:
            reset_peak_memory()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on_host:
            with _silent_profiler():
                self._profile.__exit__(kind, error, trace)
            self.peak_bytes = self._peak_of_events() if error is None else 0
        else:
            self.peak_bytes = max_memory_allocated() - self._initial_bytes

    def _peak_of_events(self) -> int:
        # Raw events: the public ones hold only the net allocation of each operator.
        results = self._profile.profiler
        if results is None or results.kineto_results is None:
            raise AssertionError("torch's profiler kept no events")
        events = results.kineto_results.events()
        start = min((event.start_ns() for event in events if event.name() == _MARK), default=0)
        changes = sorted(
            (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]  # torch's stubs lack it
            for event in events
            if event.name() == _ALLOCATION
        )
        live = peak = 0
        for nanoseconds, change in changes:
            if nanoseconds >= start:
                peak = max(peak, live)
            live += change
        return max(peak, live)


@contextmanager
def _silent_profiler() -> Iterator[None]:
    """Suppress a line that torch 2.13 writes to stderr whenever a profile starts or stops."""
    saved_stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        os.close(devnull)


_SEED = 1024


class PerceptronLayer(nn.Module):
    """MLP block of a transformer, with residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(hidden, INNER_FACTOR * hidden)
        self.down: nn.Module = nn.Linear(INNER_FACTOR * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations of the shape of x; elementwise except for the linear layers, so any sharding works."""
        inner: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + inner


def make_network(settings: BenchmarkSettings) -> nn.Sequential:
    """Return the unsharded network with the same weights on every rank, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return nn.Sequential(*(PerceptronLayer(settings.hidden) for _ in range(settings.layers)))


_LEARNING_RATE = 1e-3
_PLAN = {"*.up": "colwise", "*.down": "rowwise"}
_MEBI = 2**20


def make_step(
    configuration: Configuration, settings: BenchmarkSettings, batch: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, tuple[float, float, float]]]:
    """Return a training step of the network: its loss, and the seconds of forward, backward and step.

    Collective: over the world, as the step is.

    Args:
        configuration: Parallel configuration.
        settings: Sizes of the network.
        batch: Global batch: inputs and targets, each (batch * sequence, hidden), on the CPU and the same on every rank.
            This rank's shard is copied to its device.
    """
    plugin = None if configuration.mode == SERIAL else _plugin_of(configuration, settings)
    num_shards, index = (1, 0) if plugin is None else (plugin.dp_size, plugin.dp_rank)
    inputs, targets = (one.chunk(num_shards)[index].clone().to(current_device()) for one in batch)
    network = make_network(settings)
    adam = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, fused=True)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(network, adam, nn.MSELoss())

    def step() -> tuple[torch.Tensor, tuple[float, float, float]]:
        start = time.perf_counter()
        loss = criterion(model(inputs), targets)
        synchronize()
        forward_end = time.perf_counter()
        booster.backward(loss, optimizer)
        synchronize()
        backward_end = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds = (forward_end - start, backward_end - forward_end, time.perf_counter() - backward_end)
        return loss.detach(), seconds

    return step


def _plugin_of(configuration: Configuration, settings: BenchmarkSettings) -> Plugin:
    # One chunk or bucket per layer: the default sizes are for models larger by orders of magnitude.
    layer_size_m = sum(parameter.numel() for parameter in PerceptronLayer(settings.hidden).parameters()) / _MEBI
    if configuration.mode in TENSOR_MODES:
        sizes = configuration.sizes
        return plugins.HybridParallelPlugin(
            tp_size=sizes.get("tp", group_size()),
            tp_mode=configuration.mode,
            tp_depth=sizes.get("depth"),
            precision="fp32",
            plan=_PLAN,
        )
    if configuration.mode == "dp":
        return plugins.TorchDDPPlugin()
    if configuration.mode == "gemini":
        return plugins.GeminiPlugin(precision="fp32", min_chunk_size_m=layer_size_m, search_range_m=0)
    stage = int(configuration.mode[-1])
    return plugins.LowLevelZeroPlugin(stage=stage, precision="fp32", reduce_bucket_size_in_m=layer_size_m)


# The third loss depends on two updates, enough to reveal a wrong gradient.
_CHECKED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Metrics of one rank, or the maximum of each over ranks: medians of times with communication, and those of a step.

    `whole_seconds` is not exactly the sum of the other medians, `peak_bytes` that of `LiveMemory`. The losses are those
    of the global batch in the first steps.
    """

    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    whole_seconds: float
    peak_bytes: int
    sent_bytes: int
    received_bytes: int
    communications: int
    losses: list[float]


def measure(configuration: Configuration, settings: BenchmarkSettings) -> Metrics:
    """Measure this rank's metrics. Collective over the world, with the same arguments."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    batch = torch.randn(2, settings.batch * settings.sequence, settings.hidden, generator=generator)
    with LiveMemory() as memory:
        step = make_step(configuration, settings, batch)
        memory.begin_steps()
        losses = [float(step()[0]) for _ in range(_CHECKED_STEPS)]
    for _ in range(settings.warmup_steps):
        step()
    with count_communication() as count:
        step()
    times = []
    for _ in range(settings.profile_steps):
        barrier()  # else a late rank would lengthen the others' forward
        times.append(step()[1])
    forward, backward, update = (statistics.median(column) for column in zip(*times, strict=True))
    return Metrics(
        forward_seconds=forward,
        backward_seconds=backward,
        step_seconds=update,
        whole_seconds=statistics.median(sum(one) for one in times),
        peak_bytes=memory.peak_bytes,
        sent_bytes=sum(count.sent.values()),
        received_bytes=sum(count.received.values()),
        communications=sum(count.calls.values()),
        # Of equal shards, each replicated equally often.
        losses=[all_reduce_numbers([loss / group_size()])[0] for loss in losses],
    )


def max_over_ranks(metrics: list[Metrics]) -> Metrics:
    """Return the maximum of every metric over ranks; the losses are the same on all."""
    names = [one.name for one in fields(Metrics) if one.name != "losses"]
    return Metrics(**{name: max(getattr(one, name) for one in metrics) for name in names}, losses=metrics[0].losses)
