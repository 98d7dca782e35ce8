"""What the booster costs: a plain loop in one process, and every plugin beside torch's own DDP over two.

    python benchmarks/facade/run.py [--only plugins] [--quick] [--memory] [--save] [--strict]

Targets: at most 1.06 of raw torch's step on a tiny model of 8 layers; the DDP plugin at most 1.01 of torch's DDP on it,
and 0.95 with 50M parameters, with the same bits of loss; with 1M parameters every plugin at most 1.15 of torch's DDP.
Compare them with the control: a figure can't be truer than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.pair import Comparison, RankError, Schedule, World, compare, save
from _harness.targets import Target, at_most, print_targets
from facade.engines import BOOSTER, DDP_PLUGIN, PLUGINS, RAW, RAW_DDP, ddp_engines, loop_engines, plugin_engines

_OVER_RAW = 1.06
_OVER_DDP = {"tiny": 1.01, "10m": 1.00, "50m": 0.95}
_PLUGINS_OVER_DDP = 1.15


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
    parser.add_argument("--only", choices=["loop", "ddp", "plugins"], help="one part; default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _runs(options: argparse.Namespace) -> Iterator[tuple[Comparison, list[Target]]]:
    if options.only in (None, "loop"):
        for clips in (False, True):
            yield _compare_loops(clips, options)
    if options.only in (None, "ddp"):
        for size, steps, warmup in (("tiny", 1500, 50), ("10m", 150, 5), ("50m", 40, 3)):
            yield _compare_ddp(size, _schedule(steps, warmup, options), options)
    if options.only in (None, "plugins"):
        yield _compare_plugins(options)


def _schedule(steps: int, warmup: int, options: argparse.Namespace) -> Schedule:
    return Schedule(steps=steps // 10 if options.quick else steps, warmup=warmup)


def _compare_loops(clips: bool, options: argparse.Namespace) -> tuple[Comparison, list[Target]]:
    title = f"plain loop on the tiny model, {'clipped' if clips else 'not clipped'}"
    schedule = _schedule(4000, 200, options)
    comparison = compare(title, loop_engines(clips), schedule, memory_steps=4 * options.memory)
    return comparison, [at_most(comparison, BOOSTER, RAW, _OVER_RAW), _same_bits(comparison, BOOSTER)]


def _compare_ddp(size: str, schedule: Schedule, options: argparse.Namespace) -> tuple[Comparison, list[Target]]:
    title = f"data parallel, {'tiny model' if size == 'tiny' else f'{size} GPT'}"
    comparison = compare(title, ddp_engines(size), schedule, World(size=2), memory_steps=4 * options.memory)
    speed = at_most(comparison, DDP_PLUGIN, RAW_DDP, _OVER_DDP[size])
    return comparison, [speed, _same_bits(comparison, DDP_PLUGIN)]


def _compare_plugins(options: argparse.Namespace) -> tuple[Comparison, list[Target]]:
    schedule, memory_steps = _schedule(200, 5, options), 4 * options.memory
    comparison = compare(
        "every plugin, 1m GPT", plugin_engines("1m"), schedule, World(size=2), memory_steps=memory_steps
    )
    return comparison, [at_most(comparison, name, RAW_DDP, _PLUGINS_OVER_DDP) for name in PLUGINS]


def _same_bits(comparison: Comparison, name: str) -> Target:
    figures = comparison.engine(name).figures
    difference = None if figures is None else figures.largest_loss_difference
    return Target(what=f"largest loss difference, {comparison.title}", value=difference, high=0.0)


if __name__ == "__main__":
    sys.exit(main())
