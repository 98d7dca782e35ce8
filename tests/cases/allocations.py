"""What really is allocated: on the CPU as torch's allocator tells the profiler, else as the device counts it."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

from torch.profiler import ProfilerActivity, profile

from booster.device import device_type, max_memory_allocated, memory_allocated, reset_peak_memory


class Allocations:
    """Bytes of this process's device while the block ran, between moments that were given names."""

    def __init__(self) -> None:
        self._recorder = _OfTheHost() if device_type() == "cpu" else _OfTheDevice()

    def __enter__(self):
        self._recorder.__enter__()
        return self

    def __exit__(self, *error):
        self._recorder.__exit__(*error)

    def mark(self, name):
        """Gives the present moment a name."""
        gc.collect()
        self._recorder.mark(name)

    def at(self, name):
        """Returns the bytes at a moment, less what was there when the block began."""
        return self._recorder.at(name)

    def peak(self, start, stop):
        """Returns the most bytes between two moments."""
        return self._recorder.peak(start, stop)


@dataclass
class _OfTheHost:
    marks: dict[str, int] = field(default_factory=dict)
    events: list[tuple[int, int]] = field(default_factory=list)
    _profile: profile | None = None

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        found = self._profile.profiler.kineto_results.events()
        self.events = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")

    def mark(self, name):
        self.marks[name] = time.time_ns()

    def at(self, name):
        return sum(size for moment, size in self.events if moment <= self.marks[name])

    def peak(self, start, stop):
        held = peak = self.at(start)
        for moment, size in self.events:
            if self.marks[start] < moment <= self.marks[stop]:
                held += size
                peak = max(peak, held)
        return peak


@dataclass
class _OfTheDevice:
    marks: dict[str, tuple[int, int]] = field(default_factory=dict)  # in order: bytes then, and the most since the last
    _start: int = 0

    def __enter__(self):
        gc.collect()
        self._start = memory_allocated()
        reset_peak_memory()

    def __exit__(self, *error):
        pass

    def mark(self, name):
        self.marks[name] = memory_allocated() - self._start, max_memory_allocated() - self._start
        reset_peak_memory()

    def at(self, name):
        return self.marks[name][0]

    def peak(self, start, stop):
        names = list(self.marks)
        later = names[names.index(start) + 1 : names.index(stop) + 1]
        return max([self.at(start), *(self.marks[name][1] for name in later)])
