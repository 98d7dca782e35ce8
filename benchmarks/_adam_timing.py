"""Times the ways of benchmarks/adam.py in turn, each on fresh gradients that are in no cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

from _adam_ways import Data, Way
from _samples import Samples, order_of_round

__all__ = ["time_ways"]


def time_ways(ways: Mapping[str, Way], data: Data, repeats: int, warmup: int) -> dict[str, Samples]:
    """Runs round after round, every way once a round, and returns how long each took after the warm-up."""
    samples = {name: Samples(seconds=[], losses=[]) for name in ways}
    gc.collect()
    gc.disable()
    try:
        for index in range(warmup + repeats):
            for name in order_of_round(list(ways), index):
                data.renew_gradients()
                start = time.perf_counter()
                ways[name].step(index)
                seconds = time.perf_counter() - start
                if index >= warmup:
                    samples[name].seconds.append(seconds)
    finally:
        gc.enable()
    return samples
