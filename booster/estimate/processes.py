"""Estimates in several processes: they are independent, and Python runs one at a time in each."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from booster.device import num_cores

A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R")
_WORTHWHILE_SECONDS = 15.0  # of work that is left: another process takes some of them to start
_function: Callable[[Any], Any] | None = None  # of a process of the pool


def in_processes(
    prepare: Callable[[A], Callable[[T], R]],
    argument: A,
    items: Sequence[T],
    on_start: Callable[[T], None],
    *,
    function: Callable[[T], R] | None = None,
    at_once: bool = False,
) -> list[R]:
    """Return the results of a function for all items, in their order.

    This process runs them one by one. When the work that is left would take long, or at once if asked for, new
    processes on the other cores begin with the next items, as this one continues with the last. They start anew: a copy
    of this process would lack its threads.

    Args:
        prepare: Function of a module that returns the function of an item; called once in each new process.
        argument: Its argument, which is sent to the processes, as items and results are.
        items: Items.
        on_start: Called in this process with each item when its turn comes, or when another process has done it.
        function: What `prepare(argument)` returns, if it is known in this process.
        at_once: If True, new processes are started before the first item shows how long it takes.
    """
    function = prepare(argument) if function is None else function
    results: dict[int, R] = {}
    started = time.monotonic()
    if at_once and len(items) > 1 and num_cores() > 1:
        results = _share(prepare, argument, function, dict(enumerate(items)), on_start)
        return [results[index] for index in range(len(items))]
    for index, item in enumerate(items):
        on_start(item)
        results[index] = function(item)
        left = len(items) - len(results)
        seconds = (time.monotonic() - started) / len(results) * left
        if left > 1 and seconds > _WORTHWHILE_SECONDS and num_cores() > 1:
            rest = range(index + 1, len(items))
            results |= _share(prepare, argument, function, {one: items[one] for one in rest}, on_start)
            break
    return [results[index] for index in range(len(items))]


def _share(
    prepare: Callable[[A], Callable[[T], R]],
    argument: A,
    function: Callable[[T], R],
    items: dict[int, T],
    on_start: Callable[[T], None],
) -> dict[int, R]:
    """Return the results by index: new processes take items from the front, this one from the back."""
    context = multiprocessing.get_context("spawn")
    num_processes = min(num_cores() - 1, len(items) - 1)
    results: dict[int, R] = {}
    left, futures = deque(items), dict[int, Future[R]]()
    lock = threading.RLock()  # a future that is done already calls back at once
    with ProcessPoolExecutor(num_processes, context, _prepare, (prepare, argument)) as pool:

        def submit(_: object = None) -> None:  # one item at a time, as the pool can't give others back
            with lock:
                if left:
                    index = left.popleft()
                    futures[index] = pool.submit(_call, items[index])
                    futures[index].add_done_callback(submit)

        for _ in range(num_processes):
            submit()
        try:
            while left:
                with lock:
                    index = left.pop() if left else None
                if index is not None:
                    on_start(items[index])
                    results[index] = function(items[index])
            for index, future in futures.items():
                results[index] = future.result()
                on_start(items[index])
        finally:
            with lock:
                left.clear()
            pool.shutdown(cancel_futures=True)
    return results


def _prepare(prepare: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
    global _function
    torch.set_num_threads(1)
    _function = prepare(argument)


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)
