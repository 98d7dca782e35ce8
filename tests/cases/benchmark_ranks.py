"""What the tests of benchmarks run on ranks: they import it by this name, as this folder is on pytest's path."""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch
from torch.distributed.tensor import DTensor

from booster import Booster
from booster.comm import count_communication

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def import_benchmark(folder: str) -> dict[str, ModuleType]:
    """Returns a benchmark's modules, and those of `_harness` behind them, by name; sys.path is as before."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        names = sorted(path.stem for path in (BENCHMARKS / folder).glob("*.py"))
        modules = {name: importlib.import_module(f"{folder}.{name}") for name in names}
    finally:
        sys.path[:] = before
    shared = {name.partition(".")[2]: one for name, one in sys.modules.items() if name.startswith("_harness.")}
    return {**shared, **modules, "script": modules["run"]}


def train(folder, steps, *arguments, names=None, part="engines", **options):
    """Builds engines of the tiny model on this rank and trains with each; returns their losses by name.

    Args:
        folder: Of the benchmark.
        names: Of the engines; None: all.
        part: Module of the benchmark with `engines_of`, which takes the other arguments.
    """
    modules = import_benchmark(folder)
    losses = {}
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):  # peft's and torch's own use of what is deprecated
            warnings.simplefilter("ignore", category)
        for engine in modules[part].engines_of("tiny", *arguments, **options):
            if names is None or engine.name in names:
                step, outcome = modules["engine"].build_engine(engine)
                losses[engine.name] = outcome if step is None else [float(step(index)) for index in range(steps)]
    return losses


# Of pipelines.


def pipeline_activations():
    """Returns the peak activations of this rank by engine, in those of a microbatch on a whole stage."""
    modules = import_benchmark("pipeline")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        peaks = modules["live_activations"].peak_activation_bytes(modules["engines"].engines_of("tiny"))
    return {name: peak / peaks[modules["engines"].ALONE] for name, peak in peaks.items()}


# Of Gemini.


def train_gemini(precision, names, steps):
    """As `train`, with a directory for what is offloaded."""
    with tempfile.TemporaryDirectory() as directory:
        return train("gemini", steps, precision, 1, Path(directory), names=names)


def train_systems(names, layers):
    """Trains the systems for the largest model, with no limit; returns what came of them by name."""
    systems = import_benchmark("gemini")["systems"]
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
    limit = import_benchmark("gemini")["limit"]
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


# Of ZeRO.


def probe_gradients(precision):
    """Runs the engine that shows the activations; returns its loss twice."""
    step = import_benchmark("zero")["engines"].probe("tiny", precision).build()
    return float(step(0)), float(step(0))


def count_calls(names, steps):
    """Trains with engines of FSDP2; returns how often each communicated through the booster."""
    engines = {engine.name: engine for engine in import_benchmark("zero")["fsdp"].engines_of("tiny", "fp32")}
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
    modules = import_benchmark("zero")
    size = modules["gpt"].SIZES["tiny"]
    model = modules["gpt"].make_gpt(size)
    if is_plugin:
        model, *_ = Booster(plugin=modules["fsdp"].plugin_of(strategy, "fp32")).boost(model)
    else:
        manual = modules["manual"]
        manual.shard_manual(model, manual.policy_of("fp32"), reshard_after_forward=manual.STRATEGIES[strategy])
    tokens, _ = modules["gpt"].batches(size)(0)
    logits = model(tokens)
    assert logits.requires_grad
    if is_plugin:
        held = {one.name: one.unsharded_param for one in model.sharded_params}
        return sorted(name for name, one in held.items() if one is not None and one.untyped_storage().nbytes() > 0)
    return sorted(name for name, one in model.named_parameters() if not isinstance(one, DTensor))


# Of checkpoints.


def measure_checkpoints(directory, num_bytes, names):
    """Measures some variants on this rank; returns plain dicts."""
    modules = import_benchmark("checkpoint")
    variants = [variant for variant in modules["variants"].WAYS if variant.name in names]
    times = modules["measure"].measure_times(variants, directory, num_bytes, 2)
    peaks = modules["measure"].measure_peaks(variants, directory, num_bytes)
    return {name: asdict(one) for name, one in times.items()}, {name: asdict(one) for name, one in peaks.items()}


def measure_forgetful(directory, num_bytes):
    """Measures a variant whose load does not bring everything back."""
    modules = import_benchmark("checkpoint")

    def build(state):
        actions = modules["peers"].Actions

        def load(folder):
            for tensor in list(state.tensors.values())[1:]:
                tensor.fill_(1.0)

        return actions(save=lambda folder: None, load=load, num_bytes=1)

    variant = modules["variants"].Variant(name="forgetful", build=build)
    modules["measure"].measure_times([variant], directory, num_bytes, 1)
