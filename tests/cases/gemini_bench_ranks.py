"""What test_gemini_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "_harness.engine",
    "_harness.gpt",
    "_harness.pair",
    "_harness.samples",
    "gemini.engines",
    "gemini.targets",
    "gemini.largest",
    "gemini.limit",
    "gemini.memory",
    "gemini.search",
    "gemini.systems",
    "gemini.run",
)


def import_benchmark():
    """Returns the modules of benchmarks/gemini by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
        return modules | {"script": modules["run"]}
    finally:
        sys.path[:] = before


def train(precision, names, steps):
    """Builds some engines of the tiny model on this rank and trains with each; returns their losses by name."""
    modules = import_benchmark()
    losses = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore", FutureWarning)  # torch's own use of what it has deprecated
        for engine in modules["engines"].engines_of("tiny", precision, 1, Path(directory)):
            if engine.name in names:
                step, outcome = modules["engine"].build_engine(engine)
                losses[engine.name] = outcome if step is None else [float(step(index)) for index in range(steps)]
    return losses


def train_systems(names, layers):
    """Trains the systems for the largest model, with no limit; returns what came of them by name."""
    systems = import_benchmark()["systems"]
    shape = systems.shape_of(64, layers)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore", FutureWarning)
        return {
            one.name: systems.train_confined(one.build, shape, Path(directory), None, [None, None], 2).loss
            for one in systems.SYSTEMS
            if one.name in names
        }


def allocate_confined(limit_bytes, num_bytes):
    """Allocates in a process with a limit, and again without; returns what the first said and whether both came."""
    import torch

    limit = import_benchmark()["limit"]
    limit.confine(limit_bytes, None)
    try:
        torch.zeros(num_bytes, dtype=torch.uint8)
        said = ""
    except RuntimeError as error:
        said = str(error)
    limit.release(None)
    with limit.HeldMeter() as meter:
        held = torch.ones(num_bytes, dtype=torch.uint8)
        return said, held.numel(), meter.peak_bytes
