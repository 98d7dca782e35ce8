"""What test_finetune_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "_harness.engine",
    "_harness.memory",
    "_harness.pair",
    "_harness.samples",
    "finetune.engines",
    "finetune.run",
)


def import_benchmark():
    """Returns the modules of benchmarks/finetune by name; sys.path is as before."""
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
        warnings.simplefilter("ignore", FutureWarning)  # peft's and torch's own use of what is deprecated
        for engine in modules["engines"].engines_of("tiny"):
            step, outcome = modules["engine"].build_engine(engine)
            losses[engine.name] = outcome if step is None else [float(step(index)) for index in range(steps)]
    return losses
