"""Measurement of one configuration on one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from booster.benchmark.configurations import Configuration
from booster.benchmark.live_memory import LiveMemory
from booster.benchmark.network import make_batch
from booster.benchmark.settings import BenchmarkSettings
from booster.benchmark.trainee import Workload, make_workload
from booster.comm import all_reduce_numbers, barrier, count_communication
from booster.device import synchronize

__all__ = ["Metrics", "max_over_ranks", "measure"]

# The third loss depends on two updates, enough to reveal a wrong gradient.
_CHECKED_STEPS = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Metrics of one rank, or the maximum of each over ranks.

    Attributes:
        forward_seconds: Median time of forward including the loss.
        backward_seconds: Median time of backward including communication.
        step_seconds: Median time of the optimizer step including communication.
        whole_seconds: Median time of a training step; not exactly the sum of the other medians.
        peak_bytes: Peak memory of live tensors in a step; see `LiveMemory`.
        sent_bytes: Bytes sent by this rank in a step.
        received_bytes: Bytes received by this rank in a step.
        communications: Number of collectives and messages started in a step.
        losses: Losses of the global batch in the first steps.
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
    batch = make_batch(settings)
    losses: list[float] = []
    with LiveMemory() as memory:
        workload = make_workload(configuration, settings, batch)
        memory.begin_steps()
        for _ in range(_CHECKED_STEPS):
            losses.append(_train_once(workload))
    for _ in range(settings.warmup_steps):
        _train_once(workload)
    with count_communication() as count:
        loss_tensor = workload.forward()
        workload.backward(loss_tensor)
        workload.step()
    times = [_time_once(workload) for _ in range(settings.profile_steps)]
    workload.close()
    forward, backward, step = (statistics.median(column) for column in zip(*times, strict=True))
    return Metrics(
        forward_seconds=forward,
        backward_seconds=backward,
        step_seconds=step,
        whole_seconds=statistics.median(sum(one) for one in times),
        peak_bytes=memory.peak_bytes,
        sent_bytes=sum(count.sent.values()),
        received_bytes=sum(count.received.values()),
        communications=sum(count.calls.values()),
        losses=[all_reduce_numbers([loss])[0] for loss in losses],
    )


def max_over_ranks(metrics: list[Metrics]) -> Metrics:
    """Return the maximum of every metric over ranks; the losses are the same on all."""
    return Metrics(
        forward_seconds=max(one.forward_seconds for one in metrics),
        backward_seconds=max(one.backward_seconds for one in metrics),
        step_seconds=max(one.step_seconds for one in metrics),
        whole_seconds=max(one.whole_seconds for one in metrics),
        peak_bytes=max(one.peak_bytes for one in metrics),
        sent_bytes=max(one.sent_bytes for one in metrics),
        received_bytes=max(one.received_bytes for one in metrics),
        communications=max(one.communications for one in metrics),
        losses=metrics[0].losses,
    )


def _train_once(workload: Workload) -> float:
    loss = workload.forward()
    workload.backward(loss)
    workload.step()
    return workload.loss_contribution(loss)


def _time_once(workload: Workload) -> tuple[float, float, float]:
    synchronize()
    barrier()  # else a late rank would lengthen the others' forward
    forward_seconds, loss = _timed(workload.forward)
    backward_seconds, _ = _timed(lambda: workload.backward(loss))
    step_seconds, _ = _timed(workload.step)
    return forward_seconds, backward_seconds, step_seconds


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - start, result
