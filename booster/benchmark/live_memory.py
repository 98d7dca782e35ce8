"""Peak memory of live tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch.profiler import ProfilerActivity, profile, record_function

from booster.device import device_type, max_memory_allocated, memory_allocated, reset_peak_memory

__all__ = ["LiveMemory"]

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
