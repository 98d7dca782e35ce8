"""What really is allocated on the CPU, as torch's allocator reports it to the profiler."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Bytes of the CPU's allocator while the block ran, in the order of time; made by `recorded`."""

    marks: dict[str, int] = field(default_factory=dict)
    events: list[tuple[int, int]] = field(default_factory=list)
    _profile: profile | None = None

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        found = self._profile.profiler.kineto_results.events()
        self.events = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")

    def mark(self, name):
        """Gives the present moment a name."""
        gc.collect()
        self.marks[name] = time.time_ns()

    def at(self, name):
        """Returns the bytes at a moment, less what was there when the block began."""
        return sum(size for moment, size in self.events if moment <= self.marks[name])

    def peak(self, start, stop):
        """Returns the most bytes between two moments."""
        held = peak = self.at(start)
        for moment, size in self.events:
            if self.marks[start] < moment <= self.marks[stop]:
                held += size
                peak = max(peak, held)
        return peak
