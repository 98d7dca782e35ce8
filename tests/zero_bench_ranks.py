"""What test_zero_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MODULES = ("engine", "gpt", "pair", "samples", "zero_deepspeed", "zero_engines", "zero_goals", "zero_memory")


def import_benchmark():
    """Returns the modules of benchmarks/zero.py by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        parts = {name.removeprefix("zero_"): importlib.import_module(f"_{name}") for name in MODULES}
        return parts | {"script": importlib.import_module("zero")}
    finally:
        sys.path[:] = before


def train(precision, names, steps):
    """Builds some engines of the tiny model on this rank and trains with each; returns their losses by name."""
    modules = import_benchmark()
    engines = [engine for engine in modules["engines"].engines_of("tiny", precision) if engine.name in names]
    losses = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of what it has deprecated
        for engine in engines:
            step, outcome = modules["engine"].build_engine(engine)
            losses[engine.name] = outcome if step is None else [float(step(index)) for index in range(steps)]
    return losses


def probe_gradients(precision):
    """Runs the engine that shows the activations; returns its loss twice."""
    step = import_benchmark()["engines"].probe("tiny", precision).build()
    return float(step(0)), float(step(0))
