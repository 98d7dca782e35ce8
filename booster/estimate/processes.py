"""Estimates in several processes: they are independent, and Python runs one at a time in each."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from booster.device import is_device_in_use

T = TypeVar("T")
R = TypeVar("R")
_inherited: tuple[Callable[[Any], Any], Sequence[Any]] | None = None  # by forked processes; it can't be sent to them


def num_usable_processes() -> int:
    """Return the number of processes that this machine can run estimates in; 1 where a process can't be forked safely.

    A fork copies the calling thread alone: the threads of a launched world or of an accelerator's driver are missing.
    """
    has_threads = threading.active_count() > 1 or dist.is_initialized() or is_device_in_use()
    if sys.platform != "linux" or has_threads:
        return 1
    return len(os.sched_getaffinity(0))


def in_processes(
    function: Callable[[T], R], items: Sequence[T], num_processes: int, on_start: Callable[[T], None]
) -> Iterator[R]:
    """Yield the results of a function for all items, in their order.

    Args:
        function: Function of an item; its result is sent to this process.
        items: Items.
        num_processes: Number of processes, as `num_usable_processes` allows; 1 runs in this one.
        on_start: Called in this process with each item when its turn comes.
    """
    global _inherited
    if min(num_processes, len(items)) <= 1:
        for item in items:
            on_start(item)
            yield function(item)
        return
    _inherited = (function, items)
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(min(num_processes, len(items)), context, _use_one_thread) as pool:
            started = [pool.submit(_call, index) for index in range(len(items))]
            try:
                for item, one in zip(items, started, strict=True):
                    on_start(item)
                    yield one.result()
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        _inherited = None


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _call(index: int) -> Any:
    assert _inherited is not None
    function, items = _inherited
    return function(items[index])
