"""ZeRO stages 1 and 2 beside torch's DDP, ZeroRedundancyOptimizer and FSDP2, and DeepSpeed, over two processes.

    python benchmarks/zero.py [--memory] [--save] [--strict] [--quick] [--only bf16] [--size 50m] [--engines zero fsdp]

Goals: at most 1.00 of DDP's step, 0.80 of DeepSpeed's of the same stage and 0.95 of ZeroRedundancyOptimizer's in fp32;
at most 1.00 of DDP under autocast in bf16; resident memory at most 1.10 of the formula. DeepSpeed takes part where it
is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _goals import Goal, print_goals
from _gpt import SIZES
from _pair import Comparison, Engine, RankError, Schedule, World, compare, save
from _zero_deepspeed import ENVIRONMENT
from _zero_engines import BASELINE, engines_of
from _zero_goals import memory_goals, speed_goals
from _zero_memory import MemoryRow, activation_bytes, format_memory, memory_rows

_PRECISIONS = ("fp32", "bf16")
_STEPS = {"tiny": 200, "1m": 100, "10m": 80, "50m": 30}
_DEFAULT_SIZES = ("10m", "50m")
_NUM_RANKS = 2
_WARMUP = 3
_MEMORY_STEPS = 4
_FEWEST_STEPS = 3
_TIMEOUT_SECONDS = 3600.0  # the slowest comparison takes 10 minutes on a quiet machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code: 1 if an engine could not be built, or with --strict a goal missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not _has_engines(options):
        parser.error(f"--engines {' '.join(options.engines)}: no engine has one of these in its name")
    comparisons, memory, goals = [], {}, []
    try:
        for comparison, rows, its_goals in _runs(options):
            comparisons.append(comparison)
            memory[comparison.title] = [asdict(row) for row in rows]
            goals += its_goals
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    all_met = print_goals(goals)
    if options.save:
        sections = {"memory": memory, "goals": [{"verdict": goal.verdict, **asdict(goal)} for goal in goals]}
        print("saved", save("zero", comparisons, vars(options), sections))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=_PRECISIONS, help="one precision; default: both")
    parser.add_argument("--size", choices=list(_STEPS), help=f"of the GPT; default: {' and '.join(_DEFAULT_SIZES)}")
    parser.add_argument("--engines", nargs="+", help="only those with one of these in their names, and the baseline")
    parser.add_argument("--steps", type=int, help="timed ones; default: by the size")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a goal is missed")
    return parser


def _runs(options: argparse.Namespace) -> Iterator[tuple[Comparison, list[MemoryRow], list[Goal]]]:
    for precision in _PRECISIONS:
        for size in _DEFAULT_SIZES if options.size is None else (options.size,):
            if options.only in (None, precision):
                yield _compare(size, precision, options)


def _compare(size: str, precision: str, options: argparse.Namespace) -> tuple[Comparison, list[MemoryRow], list[Goal]]:
    world = World(size=_NUM_RANKS, timeout_seconds=_TIMEOUT_SECONDS, environment=ENVIRONMENT)
    comparison = compare(
        f"{size} GPT in {precision}",
        _chosen(engines_of(size, precision), options.engines),
        _schedule(size, options),
        world,
        memory_steps=_MEMORY_STEPS * options.memory,
        step_tokens=SIZES[size].tokens * world.size,
    )
    print(comparison.table(), end="\n\n", flush=True)
    goals = speed_goals(comparison, precision)
    if not options.memory:
        return comparison, [], goals
    activations = activation_bytes(size, precision, world, _MEMORY_STEPS)
    rows = [] if activations is None else memory_rows(comparison, size, precision, activations)
    print(format_memory(rows), end="\n\n", flush=True)
    return comparison, rows, goals + memory_goals(comparison, rows)


def _schedule(size: str, options: argparse.Namespace) -> Schedule:
    steps = options.steps or _STEPS[size]
    return Schedule(steps=max(_FEWEST_STEPS, steps // 10) if options.quick else steps, warmup=_WARMUP)


def _chosen(engines: Sequence[Engine], parts: Sequence[str] | None) -> list[Engine]:
    """Returns the baseline, and the engines with one of these parts in their names; None: all of them."""
    if parts is None:
        return list(engines)
    wanted = [part.lower() for part in parts]
    return [
        engine for engine in engines if engine.name == BASELINE or any(part in engine.name.lower() for part in wanted)
    ]


def _has_engines(options: argparse.Namespace) -> bool:
    names = {engine.name for engine in engines_of("tiny", "fp32")}
    return all(any(part.lower() in name.lower() for name in names) for part in options.engines or ())


if __name__ == "__main__":
    sys.exit(main())
