"""What test_zero_bench.py runs on ranks: they import it by this name, as tests/ is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

from torch.distributed.tensor import DTensor

from booster import Booster
from booster.comm import count_communication

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = (
    "_harness.engine",
    "_harness.gpt",
    "_harness.pair",
    "_harness.samples",
    "zero.manual",
    "zero.deepspeed",
    "zero.engines",
    "zero.fsdp",
    "zero.targets",
    "zero.memory",
    "zero.run",
)


def import_benchmark():
    """Returns the modules of benchmarks/zero by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
        return modules | {"script": modules["run"]}
    finally:
        sys.path[:] = before


def train(precision, names, steps, part="engines"):
    """Builds some engines of the tiny model on this rank and trains with each; returns their losses by name."""
    modules = import_benchmark()
    engines = [engine for engine in modules[part].engines_of("tiny", precision) if engine.name in names]
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


def count_calls(names, steps):
    """Trains with engines of FSDP2; returns how often each communicated through the booster."""
    engines = {engine.name: engine for engine in import_benchmark()["fsdp"].engines_of("tiny", "fp32")}
    counts = {}
    for name in names:
        step = engines[name].build()
        with count_communication() as count:
            for index in range(steps):
                step(index)
        counts[name] = count.calls
    return counts


def gathered_after_forward(strategy, is_plugin):
    """Returns the names of the weights that this strategy keeps whole after a forward."""
    modules = import_benchmark()
    size = modules["gpt"].SIZES["tiny"]
    model, shown = modules["gpt"].make_gpt(size), None
    if is_plugin:
        booster = Booster(plugin=modules["fsdp"].plugin_of(strategy, "fp32"))
        model, *_ = booster.boost(model)
        shown = booster.unwrap_model(model)
    else:
        manual = modules["manual"]
        manual.shard_manual(model, manual.policy_of("fp32"), reshard_after_forward=manual.STRATEGIES[strategy])
    tokens, _ = modules["gpt"].batches(size)(0)
    logits = model(tokens)
    assert logits.requires_grad
    names = [name for name, _ in modules["gpt"].GPT(size).named_parameters()]
    return [name for name in names if not isinstance((shown or model).get_parameter(name), DTensor)]
