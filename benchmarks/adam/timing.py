"""Times the variants of benchmarks/adam/run.py in turn, each on fresh gradients that are in no cache."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

from _harness.samples import Samples, order_of_round
from adam.variants import Data, Variant

__all__ = ["time_variants"]


def time_variants(variants: Mapping[str, Variant], data: Data, repeats: int, warmup: int) -> dict[str, Samples]:
    """Runs round after round, every variant once a round, and returns how long each took after the warm-up."""
    samples = {name: Samples(seconds=[], losses=[]) for name in variants}
    gc.collect()
    gc.disable()
    try:
        for index in range(warmup + repeats):
            for name in order_of_round(list(variants), index):
                data.renew_gradients()
                start = time.perf_counter()
                variants[name].step(index)
                seconds = time.perf_counter() - start
                if index >= warmup:
                    samples[name].seconds.append(seconds)
    finally:
        gc.enable()
    return samples
