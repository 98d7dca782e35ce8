"""Collectives on the CPU: booster.comm through shared memory and by messages, beside torch's own calls.

    python benchmarks/collectives/run.py [--only reduce_scatter|all_gather|all_reduce|all_to_all|broadcast]
        [--world 2|4] [--dtype fp32|bf16|fp16] [--quick] [--save] [--strict]

Two ranks of one thread each, with whole buffers of 64 KiB to 256 MiB, and four ranks with up to 64 MiB. All variants
work on memory that is there already, as the plugins' buffers are. Targets, on two ranks: through shared memory, from 1
MiB up, 5 times as fast as torch's calls; by messages, from 4 MiB up, reduce-scatter 2.3 and all-gather 2.5 times. The
column `loss` is a sum over a few of the results: a check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.engine import with_control
from _harness.pair import Comparison, Engine, RankError, Schedule, World, on_ranks, report_engines, save, time_engines
from _harness.targets import Target, print_targets
from collectives.variants import DTYPES, MEMORY, MESSAGES, OPERATIONS, calls_a_step, variants

_KIB, _MIB = 2**10, 2**20
_SIZES = {
    2: (64 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    4: (64 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB),
}
# By variant and operation: how many times as fast as torch's call, on how many bytes and more.
_LEAST_SPEEDUP = {
    **{(MEMORY, operation): (5.0, _MIB) for operation in OPERATIONS},
    (MESSAGES, "reduce_scatter"): (2.3, 4 * _MIB),
    (MESSAGES, "all_gather"): (2.5, 4 * _MIB),
}
_GOALS_WORLD = 2
_BYTES_TIMED = 12 * 2**30  # of each engine, over all its steps: some seconds
_FEWEST_STEPS, _MOST_STEPS = 40, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on buffers of one size."""

    operation: str
    num_bytes: int
    dtype: str
    num_ranks: int

    @property
    def title(self) -> str:
        """Heads the table."""
        size = f"{self.num_bytes // _MIB} MiB" if self.num_bytes >= _MIB else f"{self.num_bytes // _KIB} KiB"
        num_calls = calls_a_step(self.num_bytes)
        return f"{self.operation} of {size} {self.dtype}" + (f", {num_calls} calls a step" if num_calls > 1 else "")

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.num_bytes // DTYPES[self.dtype].itemsize

    def engines(self) -> list[Engine]:
        """Returns torch's own call and ours."""
        return with_control(variants(self))

    def schedule(self, is_quick: bool) -> Schedule:
        """Returns how many steps."""
        steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _BYTES_TIMED // (self.num_bytes * self.num_ranks)))
        return Schedule(steps=steps // 8 if is_quick else steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    options = _parser().parse_args(arguments)
    comparisons, targets = [], []
    try:
        for case, comparison in _runs(options):
            print(comparison.table(), end="\n\n", flush=True)
            comparisons.append(comparison)
            targets += _targets(case, comparison)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    all_met = print_targets(targets)
    if options.save:
        print("saved", save("collectives", comparisons, vars(options)))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=OPERATIONS, help="one operation; default: all")
    parser.add_argument("--world", type=int, choices=sorted(_SIZES), help="one number of ranks; default: all")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the buffers")
    parser.add_argument("--quick", action="store_true", help="an eighth of the steps: for a look, not for a figure")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _runs(options: argparse.Namespace) -> Iterator[tuple[Case, Comparison]]:
    operations = [options.only] if options.only else OPERATIONS
    for num_ranks in [options.world] if options.world else sorted(_SIZES):
        world = World(size=num_ranks)
        cases = [
            Case(operation=operation, num_bytes=num_bytes, dtype=options.dtype, num_ranks=num_ranks)
            for operation in operations
            for num_bytes in _SIZES[num_ranks]
        ]
        ranks = on_ranks(measure, world, cases, options.quick)
        for index, case in enumerate(cases):
            reports = report_engines(case.engines(), [of_rank[index] for of_rank in ranks], {})
            schedule = case.schedule(options.quick)
            yield case, Comparison(title=case.title, world=world, schedule=schedule, engines=reports)


def measure(cases: Sequence[Case], is_quick: bool) -> list[tuple]:
    """Returns this rank's outcomes and samples of every case. Collective."""
    return [time_engines(case.engines(), case.schedule(is_quick)) for case in cases]


def _targets(case: Case, comparison: Comparison) -> list[Target]:
    if case.num_ranks != _GOALS_WORLD:
        return []
    return [
        _target(case, comparison, variant, least)
        for (variant, operation), (least, from_bytes) in _LEAST_SPEEDUP.items()
        if operation == case.operation and case.num_bytes >= from_bytes
    ]


def _target(case: Case, comparison: Comparison, variant: str, least: float) -> Target:
    ours, control = comparison.engine(variant).figures, comparison.control.figures
    ratio = None if ours is None else ours.ratio
    return Target(
        what=f"speed over torch's by {variant}, {case.title} on {case.num_ranks} ranks",
        value=None if ratio is None else 1 / ratio.median,
        low=least,
        unit="x",
        interval=None if ratio is None else (1 / ratio.high, 1 / ratio.low),
        control=None if control is None else 1 / control.ratio.median,
    )


if __name__ == "__main__":
    sys.exit(main())
