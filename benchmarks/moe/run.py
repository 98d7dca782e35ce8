"""Expert parallelism over two processes: a step beside data parallelism, the dispatch, a layer beside DeepSpeed's.

    python benchmarks/moe/run.py [--part step] [--save] [--strict] [--quick]

Targets: at most 1.05 of the step with all experts on each rank, where they are half of the weights; the dispatch at
most 1.3 of its own copies and messages; the layer at most 0.8 of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.pair import Comparison, Engine, RankError, Schedule, World, compare, save
from _harness.targets import at_most, print_targets
from moe.engines import (
    ALIKE,
    DEEPSPEED,
    DISPATCH,
    EP,
    LAYER,
    MESSAGES,
    dispatch_engines,
    layer_engines,
    step_engines,
)

_NUM_RANKS = 2
_TIMEOUT_SECONDS = 1800.0
_WARMUP = 3
# By part: engines, timed steps, what is compared with what, and the most it may be.
_PARTS: dict[str, tuple[Callable[[], list[Engine]], int, str, str, float]] = {
    "step": (step_engines, 40, EP, ALIKE, 1.05),
    "dispatch": (dispatch_engines, 120, DISPATCH, MESSAGES, 1.3),
    "layer": (layer_engines, 60, LAYER, DEEPSPEED, 0.8),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    options = _parser().parse_args(arguments)
    comparisons, targets = [], []
    for part in options.part or _PARTS:
        try:
            comparison = _measure(part, is_quick=options.quick)
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        print(comparison.table(), end="\n\n", flush=True)
        comparisons.append(comparison)
        targets.append(at_most(comparison, *_PARTS[part][2:]))
    all_met = print_targets(targets)
    if options.save:
        sections = {"targets": [{"verdict": target.verdict, **asdict(target)} for target in targets]}
        print("saved", save("moe", comparisons, vars(options), sections))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def _measure(part: str, *, is_quick: bool) -> Comparison:
    engines, steps, *_ = _PARTS[part]
    return compare(
        f"{part} in fp32",
        engines(),
        Schedule(steps=max(3, steps // 10) if is_quick else steps, warmup=_WARMUP),
        World(size=_NUM_RANKS, timeout_seconds=_TIMEOUT_SECONDS, environment={"DS_ACCELERATOR": "cpu"}),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=list(_PARTS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
