"""The LoRA step under every plugin over two processes, beside peft with torch's DDP and with Accelerate's FSDP2.

    python benchmarks/finetune/run.py [--size 10m] [--memory] [--save] [--strict] [--quick]

Targets: DDP and ZeRO at most 1.05 of the step and of the peak memory of torch's DDP, FSDP and Gemini at most 1.05 of
those of Accelerate's FSDP2.
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
from finetune.engines import (
    ACCELERATE_FSDP2,
    DDP,
    GEMINI,
    OUR_DDP,
    OUR_FSDP,
    ZERO_1,
    ZERO_2,
    engines_of,
)

_STEPS = {"tiny": 100, "10m": 40, "50m": 20}
_FEWEST_STEPS = 3
_WARMUP = 3
_MEMORY_STEPS = 4
_NUM_RANKS = 2
_TIMEOUT_SECONDS = 3600.0
_OVER_PEER = 1.05
_PEERS = {OUR_DDP: DDP, ZERO_1: DDP, ZERO_2: DDP, GEMINI: ACCELERATE_FSDP2, OUR_FSDP: ACCELERATE_FSDP2}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    options = _parser().parse_args(arguments)
    comparisons, targets = [], []
    for size in options.size:
        try:
            comparison = _compare(size, options)
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        print(comparison.table(), end="\n\n", flush=True)
        comparisons.append(comparison)
        targets += speed_targets(comparison) + (memory_targets(comparison) if options.memory else [])
    all_met = print_targets(targets)
    if options.save:
        sections = {"targets": [{"verdict": target.verdict, **asdict(target)} for target in targets]}
        print("saved", save("finetune", comparisons, vars(options), sections))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def speed_targets(comparison: Comparison) -> list[Target]:
    """Returns how much of its peer's step a plugin may take; one that was not measured is not met."""
    return [at_most(comparison, name, peer, _OVER_PEER) for name, peer in _PEERS.items()]


def memory_targets(comparison: Comparison) -> list[Target]:
    """Returns how much of its peer's peak memory a plugin may take."""
    peaks = {engine.name: engine.memory.step_peak for engine in comparison.engines if engine.memory is not None}
    targets = []
    for name, peer in _PEERS.items():
        ours, theirs = peaks.get(name), peaks.get(peer)
        what = f"peak memory of {name} over {peer}, {comparison.title}"
        targets.append(Target(what=what, value=ours / theirs if ours and theirs else None, high=_OVER_PEER))
    return targets


def _compare(size: str, options: argparse.Namespace) -> Comparison:
    steps = options.steps or _STEPS[size]
    return compare(
        f"LoRA of a {size} Llama in fp32",
        engines_of(size),
        Schedule(steps=max(_FEWEST_STEPS, steps // 10) if options.quick else steps, warmup=_WARMUP),
        World(size=_NUM_RANKS, timeout_seconds=_TIMEOUT_SECONDS),
        memory_steps=_MEMORY_STEPS * options.memory,
        step_tokens=_NUM_RANKS * LLAMA_SIZES[size].tokens,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", nargs="+", choices=list(_STEPS), default=["10m", "50m"], help="of the model")
    parser.add_argument("--steps", type=int, help="timed ones; default: by the size")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
