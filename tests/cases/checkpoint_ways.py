"""What test_checkpoint_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "gpt",
    "checkpoint_disk",
    "checkpoint_measure",
    "checkpoint_peers",
    "checkpoint_report",
    "checkpoint_state",
    "checkpoint_ways",
)


def import_benchmark():
    """Returns the modules of benchmarks/checkpoint.py by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        parts = {name.removeprefix("checkpoint_"): importlib.import_module(f"_{name}") for name in MODULES}
        return parts | {"script": importlib.import_module("checkpoint")}
    finally:
        sys.path[:] = before


def measure(directory, num_bytes, names):
    """Measures some ways on this rank; returns plain dicts."""
    modules = import_benchmark()
    ways = [way for way in modules["ways"].WAYS if way.name in names]
    times = modules["measure"].measure_times(ways, directory, num_bytes, 2)
    peaks = modules["measure"].measure_peaks(ways, directory, num_bytes)
    return {name: asdict(one) for name, one in times.items()}, {name: asdict(one) for name, one in peaks.items()}


def measure_forgetful(directory, num_bytes):
    """Measures a way whose load does not bring everything back."""
    modules = import_benchmark()

    def build(state):
        actions = modules["peers"].Actions

        def load(folder):
            for tensor in list(state.tensors.values())[1:]:
                tensor.fill_(1.0)

        return actions(save=lambda folder: None, load=load, num_bytes=1)

    way = modules["ways"].Way(name="forgetful", build=build)
    modules["measure"].measure_times([way], directory, num_bytes, 1)
