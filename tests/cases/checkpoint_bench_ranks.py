"""What test_checkpoint_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "_harness.gpt",
    "checkpoint.disk",
    "checkpoint.measure",
    "checkpoint.peers",
    "checkpoint.report",
    "checkpoint.state",
    "checkpoint.variants",
    "checkpoint.run",
)


def import_benchmark():
    """Returns the modules of benchmarks/checkpoint by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
        return modules | {"script": modules["run"]}
    finally:
        sys.path[:] = before


def measure(directory, num_bytes, names):
    """Measures some variants on this rank; returns plain dicts."""
    modules = import_benchmark()
    variants = [variant for variant in modules["variants"].WAYS if variant.name in names]
    times = modules["measure"].measure_times(variants, directory, num_bytes, 2)
    peaks = modules["measure"].measure_peaks(variants, directory, num_bytes)
    return {name: asdict(one) for name, one in times.items()}, {name: asdict(one) for name, one in peaks.items()}


def measure_forgetful(directory, num_bytes):
    """Measures a variant whose load does not bring everything back."""
    modules = import_benchmark()

    def build(state):
        actions = modules["peers"].Actions

        def load(folder):
            for tensor in list(state.tensors.values())[1:]:
                tensor.fill_(1.0)

        return actions(save=lambda folder: None, load=load, num_bytes=1)

    variant = modules["variants"].Variant(name="forgetful", build=build)
    modules["measure"].measure_times([variant], directory, num_bytes, 1)
