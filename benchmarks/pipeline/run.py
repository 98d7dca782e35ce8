"""Pipeline schedules: simulated beside their formulas, and on two processes beside torch.distributed.pipelining.

    python benchmarks/pipeline/run.py [--part simulated] [--styles 1f1b zbv] [--memory] [--save] [--strict] [--quick]

With t the time that a stage needs for a microbatch's forward and backward while the other does the same, p stages, m
microbatches and v chunks a stage, the targets are: at most 1.02 (m + p - 1) t for 1f1b, 1.03 of it for gpipe, 1.03
(m + (p - 1) / v) t for interleaved, 1.05 m t for zbv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.live_activations import peak_activation_bytes
from _harness.memory import measure_memory
from _harness.pair import Comparison, RankError, Schedule, World, compare, on_ranks, save
from _harness.targets import print_targets
from pipeline.engines import STYLES, engines_of
from pipeline.model import NUM_STAGES, PIPELINE_SIZES
from pipeline.report import kept_table, pipeline_targets, theory_table
from pipeline.simulated import simulate_all, simulated_table

_DEFAULT_SIZE = "512"
_STEPS = {"tiny": 50, "512": 20}
_FEWEST_STEPS = 3
_WARMUP = 2
_MEMORY_STEPS = 3
_TIMEOUT_SECONDS = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code.

    It is 1 if an engine could not be built, a simulated bubble differs from its formula, or with --strict a target is
    missed.
    """
    options = _parser().parse_args(arguments)
    simulated = simulate_all() if options.part != "real" else []
    if simulated:
        print(simulated_table(simulated), end="\n\n", flush=True)
    sections = {"simulated": [asdict(one) for one in simulated]}
    comparisons, are_met = [], True
    if options.part != "simulated":
        try:
            comparison, kept = _measure(options)
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        targets = pipeline_targets(comparison, options.styles, PIPELINE_SIZES[options.size].samples)
        are_met = print_targets(targets)
        comparisons.append(comparison)
        sections |= {"targets": [{"verdict": target.verdict, **asdict(target)} for target in targets], "kept": kept}
    if options.save:
        print("saved", save("pipeline", comparisons, vars(options), sections))
    has_failed = any(one.has_failed for one in comparisons) or not all(one.agrees for one in simulated)
    return int(has_failed or (options.strict and not are_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=["all", "simulated", "real"], default="all")
    parser.add_argument("--size", choices=list(_STEPS), default=_DEFAULT_SIZE, help="of the model: its width")
    parser.add_argument("--styles", nargs="+", choices=list(STYLES), default=list(STYLES), help="which schedules")
    parser.add_argument("--steps", type=int, help="timed ones; default: by the size")
    parser.add_argument("--no-shared-memory", action="store_true", help="our messages go through gloo instead")
    parser.add_argument("--quick", action="store_true", help="a few steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also live activations and resident memory of each rank")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _measure(options: argparse.Namespace) -> tuple[Comparison, dict[str, list[dict[str, int | None]]]]:
    """Prints the tables as they come; returns the times, and by engine what each rank keeps."""
    size, engines = PIPELINE_SIZES[options.size], engines_of(options.size, options.styles)
    environment = {"BOOSTER_SHARED_MEMORY": "off"} if options.no_shared_memory else {}
    world = World(size=NUM_STAGES, timeout_seconds=_TIMEOUT_SECONDS, environment=environment)
    title = f"{size.layers} blocks of {size.width}, {size.samples} microbatches of {size.sequence} tokens"
    comparison = compare(title, engines, _schedule(options), world, step_tokens=size.tokens)
    print(comparison.table(), end="\n\n", flush=True)
    print(theory_table(comparison, options.styles, size.samples), end="\n\n", flush=True)
    kept: dict[str, list[dict[str, int | None]]] = {}
    if options.memory:
        activations = on_ranks(peak_activation_bytes, world, engines)
        for engine in engines:
            memories = on_ranks(measure_memory, world, engine, _MEMORY_STEPS, gives_memory_back=True)
            kept[engine.name] = [
                {
                    "activations": activations[rank].get(engine.name),
                    "resting": None if memory is None else memory.after_steps,
                    "peak": None if memory is None else memory.step_peak,
                }
                for rank, memory in enumerate(memories)
            ]
        print(kept_table(kept), end="\n\n", flush=True)
    return comparison, kept


def _schedule(options: argparse.Namespace) -> Schedule:
    steps = options.steps or _STEPS[options.size]
    return Schedule(steps=max(_FEWEST_STEPS, steps // 10) if options.quick else steps, warmup=_WARMUP)


if __name__ == "__main__":
    sys.exit(main())
