"""What test_tensor_parallel_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "_harness.engine",
    "_harness.llama",
    "_harness.pair",
    "_harness.samples",
    "tensor_parallel.engines",
    "tensor_parallel.grid_bytes",
    "tensor_parallel.run",
)


def import_benchmark():
    """Returns the modules of benchmarks/tensor_parallel by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
        return modules | {"script": modules["run"]}
    finally:
        sys.path[:] = before


def train(steps):
    """Builds all engines of the tiny model on this rank and trains with each; returns their losses by name."""
    modules = import_benchmark()
    losses = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of what it has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        for engine in modules["engines"].engines_of("tiny", has_sequence_modes=True):
            step, outcome = modules["engine"].build_engine(engine)
            losses[engine.name] = outcome if step is None else [float(step(index)) for index in range(steps)]
    return losses
