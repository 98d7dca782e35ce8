"""What the booster costs: a plain loop in one process, and the DDP plugin beside torch's own DDP over two.

    python benchmarks/facade/run.py [--quick] [--memory] [--save] [--strict]

Targets: at most 50 us a step more than raw torch on a tiny model of 8 layers; at most 1.01 of raw DDP, with the same
bits of loss. Compare them with the control: a figure can't be truer than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.pair import Comparison, RankError, Schedule, World, compare, save
from _harness.targets import Target, print_targets
from facade.engines import ddp_engines, loop_engines

_MOST_EXTRA_US = 50.0
_LARGEST_RATIO = 1.01


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    options = _parser().parse_args(arguments)
    comparisons, targets = [], []
    try:
        for comparison, its_targets in _runs(options):
            print(comparison.table(), end="\n\n", flush=True)
            comparisons.append(comparison)
            targets += its_targets
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    all_met = print_targets(targets)
    if options.save:
        print("saved", save("facade", comparisons, vars(options)))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=["loop", "ddp"], help="one half; default: both")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _runs(options: argparse.Namespace):
    if options.only != "ddp":
        for clips in (False, True):
            yield _compare_loops(clips, options)
    if options.only != "loop":
        yield _compare_ddp("tiny", _schedule(1500, 50, options), options)
        yield _compare_ddp("10m", _schedule(150, 5, options), options)


def _schedule(steps: int, warmup: int, options: argparse.Namespace) -> Schedule:
    return Schedule(steps=steps // 10 if options.quick else steps, warmup=warmup)


def _compare_loops(clips: bool, options: argparse.Namespace) -> tuple[Comparison, list[Target]]:
    title = f"plain loop on the tiny model, {'clipped' if clips else 'not clipped'}"
    schedule = _schedule(4000, 200, options)
    comparison = compare(title, loop_engines(clips), schedule, memory_steps=4 * options.memory)
    return comparison, [_few_extra(comparison, "booster"), _same_bits(comparison, "booster")]


def _compare_ddp(size: str, schedule: Schedule, options: argparse.Namespace) -> tuple[Comparison, list[Target]]:
    title = f"data parallel, {'tiny model' if size == 'tiny' else f'{size} GPT'}"
    comparison = compare(title, ddp_engines(size), schedule, World(size=2), memory_steps=4 * options.memory)
    return comparison, [_same_speed(comparison, "TorchDDPPlugin"), _same_bits(comparison, "TorchDDPPlugin")]


def _few_extra(comparison: Comparison, name: str) -> Target:
    ours, control = comparison.engine(name).figures, comparison.control.figures
    extra = None if ours is None else ours.extra_seconds
    return Target(
        what=f"extra time per step, {comparison.title}",
        value=None if extra is None else extra.median * 1e6,
        high=_MOST_EXTRA_US,
        unit=" us",
        interval=None if extra is None else (extra.low * 1e6, extra.high * 1e6),
        control=None if control is None else control.extra_seconds.median * 1e6,
    )


def _same_speed(comparison: Comparison, name: str) -> Target:
    ours, control = comparison.engine(name).figures, comparison.control.figures
    ratio = None if ours is None else ours.ratio
    return Target(
        what=f"{name} over torch DDP, {comparison.title}",
        value=None if ratio is None else ratio.median,
        high=_LARGEST_RATIO,
        interval=None if ratio is None else (ratio.low, ratio.high),
        control=None if control is None else control.ratio.median,
    )


def _same_bits(comparison: Comparison, name: str) -> Target:
    figures = comparison.engine(name).figures
    difference = None if figures is None else figures.largest_loss_difference
    return Target(what=f"largest loss difference, {comparison.title}", value=difference, high=0.0)


if __name__ == "__main__":
    sys.exit(main())
