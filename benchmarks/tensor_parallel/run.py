"""Tensor parallelism over two processes beside DTensor's, one process, and a rank's share of the work alone.

    python benchmarks/tensor_parallel/run.py [--grids] [--sequence-modes] [--memory] [--save] [--strict] [--quick]

Targets: at most 1.08 of the step that has half of every layer and sends nothing, and 0.85 of DTensor's
`parallelize_module` on the same plan. With --grids, instead: the step on a square of four ranks beside that of four in
a row, and the bytes of every mode for 4 to 64 ranks, counted and as the papers' formulas give them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.llama import LLAMA_SIZES
from _harness.pair import Comparison, RankError, Schedule, World, compare, save
from _harness.targets import Target, at_most, print_targets
from tensor_parallel.engines import DTENSOR, HALF, OURS, engines_of, grid_engines
from tensor_parallel.grid_bytes import grid_bytes, grid_bytes_table

_DEFAULT_SIZE = "50m"
_STEPS = {"tiny": 100, "10m": 80, "50m": 40}
_FEWEST_STEPS = 3
_WARMUP = 3
_MEMORY_STEPS = 4
_NUM_RANKS = 2
_NUM_GRID_RANKS = 4
_TIMEOUT_SECONDS = 3600.0
_WITHOUT_SHARED_MEMORY = {"BOOSTER_SHARED_MEMORY": "off"}
_OVER_HALF = 1.08
_OVER_DTENSOR = 0.85


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    options = _parser().parse_args(arguments)
    try:
        comparison = _compare(options)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print(comparison.table(), end="\n\n", flush=True)
    if options.grids:
        print(grid_bytes_table(), end="\n\n", flush=True)
        if options.save:
            rows = [asdict(row) for row in grid_bytes()]
            print("saved", save("tensor_parallel_grids", [comparison], vars(options), {"bytes": rows}))
        return int(comparison.has_failed)
    targets = speed_targets(comparison)
    all_met = print_targets(targets)
    if options.save:
        sections = {"targets": [{"verdict": target.verdict, **asdict(target)} for target in targets]}
        print("saved", save("tensor_parallel", [comparison], vars(options), sections))
    return int(comparison.has_failed or (options.strict and not all_met))


def speed_targets(comparison: Comparison) -> list[Target]:
    """Returns how much of the others' steps ours may take; one that was not measured is not met."""
    return [at_most(comparison, OURS, HALF, _OVER_HALF), at_most(comparison, OURS, DTENSOR, _OVER_DTENSOR)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=list(_STEPS), default=_DEFAULT_SIZE, help="of the model")
    parser.add_argument("--steps", type=int, help="timed ones; default: by the size")
    parser.add_argument("--grids", action="store_true", help="ours on a square of four ranks, and the modes' bytes")
    parser.add_argument("--sequence-modes", action="store_true", help="also ours with split_gather and ring")
    parser.add_argument("--no-shared-memory", action="store_true", help="our collectives send messages instead")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _compare(options: argparse.Namespace) -> Comparison:
    num_ranks = _NUM_GRID_RANKS if options.grids else _NUM_RANKS
    environment = _WITHOUT_SHARED_MEMORY if options.no_shared_memory else {}
    return compare(
        f"{options.size} Llama in fp32",
        grid_engines(options.size)
        if options.grids
        else engines_of(options.size, has_sequence_modes=options.sequence_modes),
        _schedule(options),
        World(
            size=num_ranks,
            timeout_seconds=_TIMEOUT_SECONDS,
            environment=environment,
        ),
        memory_steps=_MEMORY_STEPS * options.memory,
        step_tokens=LLAMA_SIZES[options.size].tokens,
    )


def _schedule(options: argparse.Namespace) -> Schedule:
    steps = options.steps or _STEPS[options.size]
    return Schedule(steps=max(_FEWEST_STEPS, steps // 10) if options.quick else steps, warmup=_WARMUP)


if __name__ == "__main__":
    sys.exit(main())
