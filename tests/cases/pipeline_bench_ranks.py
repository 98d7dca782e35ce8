"""What test_pipeline_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "engine",
    "live_activations",
    "pair",
    "pipeline_engines",
    "pipeline_model",
    "pipeline_report",
    "pipeline_simulated",
    "samples",
)


def import_benchmark():
    """Returns the modules of benchmarks/pipeline.py by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        parts = {name.removeprefix("pipeline_"): importlib.import_module(f"_{name}") for name in MODULES}
        return parts | {"script": importlib.import_module("pipeline")}
    finally:
        sys.path[:] = before


def train(steps):
    """Builds all engines of the tiny model on this rank and steps with each; returns their losses by name."""
    modules = import_benchmark()
    losses = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of what it has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        for engine in modules["engines"].engines_of("tiny"):
            step, outcome = modules["engine"].build_engine(engine)
            losses[engine.name] = outcome if step is None else [float(step(index)) for index in range(steps)]
    return losses


def keep():
    """Returns the peak activations of this rank by engine, in those of a micro-batch on a whole stage."""
    modules = import_benchmark()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        peaks = modules["live_activations"].peak_activation_bytes(modules["engines"].engines_of("tiny"))
    return {name: peak / peaks[modules["engines"].ALONE] for name, peak in peaks.items()}
