"""Steps several engines in turn inside of the same processes and times every step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _harness.engine import Step
from _harness.samples import Samples, order_of_round

__all__ = ["Schedule", "time_alternately"]

_ROUNDS_BETWEEN_COLLECTIONS = 16
_FEWEST_STEPS = 3  # a median over fewer says nothing, whatever the time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many steps every engine does.

    Attributes:
        steps: Timed ones.
        warmup: Before them, not timed.
        seconds: Stop earlier once this time is over, after three timed steps at least; None: no limit.
    """

    steps: int
    warmup: int = 3
    seconds: float | None = None


def time_alternately(steps: Mapping[str, Step], schedule: Schedule) -> dict[str, Samples]:
    """Runs round after round, every engine once a round, and returns what each did on this rank.

    Collective: every rank must call it with the same engines.

    Raises:
        RuntimeError: A step raised; the message names the engine.
    """
    samples = {name: Samples(seconds=[], losses=[]) for name in steps}
    start = time.perf_counter()
    with _no_collections():
        for index in range(schedule.warmup + schedule.steps):
            for name in order_of_round(list(steps), index):
                seconds, loss = _timed(name, steps[name], index)
                samples[name].losses.append(loss)
                if index >= schedule.warmup:
                    samples[name].seconds.append(seconds)
            if index % _ROUNDS_BETWEEN_COLLECTIONS == 0:
                gc.collect()
            if index >= schedule.warmup + _FEWEST_STEPS - 1 and _is_over(start, schedule.seconds):
                break
    return samples


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keeps Python's garbage collector out of the steps; a collection would hit one engine for all of them."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _timed(name: str, step: Step, index: int) -> tuple[float, float]:
    # Between two barriers, so that no rank's time holds the wait for another one's previous engine.
    wait_for_device, wait_for_ranks = _waits()
    wait_for_device()
    wait_for_ranks()
    start = time.perf_counter()
    try:
        loss = step(index)
    except Exception as error:
        raise RuntimeError(f"engine {name!r} failed in step {index}: {error}") from error
    wait_for_device()
    wait_for_ranks()
    return time.perf_counter() - start, float(loss)


def _waits() -> tuple[Callable[[], None], Callable[[], None]]:
    has_device = torch.accelerator.is_available()
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    return torch.accelerator.synchronize if has_device else _nothing, dist.barrier if has_ranks else _nothing


def _nothing() -> None:
    return


def _is_over(start: float, seconds: float | None) -> bool:
    """Returns rank 0's answer on every rank: all of them must stop in the same round."""
    if seconds is None:
        return False
    is_over = time.perf_counter() - start > seconds
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return is_over
    answer = [is_over]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]
