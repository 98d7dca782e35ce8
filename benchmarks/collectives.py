"""Reduce-scatter and all-gather of flat buffers on the CPU: booster.comm beside torch's own calls.

    python benchmarks/collectives.py [--only reduce_scatter|all_gather] [--world 2|4] [--dtype fp32|bf16|fp16]
        [--quick] [--save] [--strict]

Two ranks of one thread each, with whole buffers of 1 to 256 MiB, and four ranks with up to 64 MiB. Both ways work on
memory that is there already, as the plugins' buffers are. Goals, on two ranks from 4 MiB up: reduce-scatter 2.3 times
and all-gather 2.5 times as fast as torch's. The column `loss` is a sum over a few of the results: a check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from _engine import with_control
from _goals import Goal, print_goals
from _pair import Comparison, Engine, RankError, Schedule, Step, World, on_ranks, report_engines, save, time_engines

from booster.comm import start_all_gather, start_reduce_scatter

_MIB = 2**20
_SIZES_MIB = {2: (1, 4, 16, 64, 256), 4: (1, 4, 16, 64)}
_LEAST_SPEEDUP = {"reduce_scatter": 2.3, "all_gather": 2.5}
_GOALS_WORLD = 2
_GOALS_FROM_MIB = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BYTES_TIMED = 12 * 2**30  # of each engine, over all its steps: some seconds
_FEWEST_STEPS, _MOST_STEPS = 40, 400
_NUM_CHECKED = 1024

# torch 2.13 renamed both and warns at each call of the old names.
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on buffers of one size."""

    operation: str
    size_mib: int
    dtype: str
    num_ranks: int

    @property
    def title(self) -> str:
        """Heads the table."""
        return f"{self.operation} of {self.size_mib} MiB {self.dtype}"

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.size_mib * _MIB // _DTYPES[self.dtype].itemsize

    def engines(self) -> list[Engine]:
        """Returns torch's own call and ours."""
        torch_build, our_build = _BUILDS[self.operation]
        return with_control(
            [
                Engine(name="torch", build=partial(torch_build, self)),
                Engine(name="booster.comm", build=partial(our_build, self)),
            ]
        )

    def schedule(self, is_quick: bool) -> Schedule:
        """Returns how many steps."""
        steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _BYTES_TIMED // (self.size_mib * _MIB * self.num_ranks)))
        return Schedule(steps=steps // 8 if is_quick else steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code: 1 if an engine could not be built, or with --strict a goal missed."""
    options = _parser().parse_args(arguments)
    comparisons, goals = [], []
    try:
        for case, comparison in _runs(options):
            print(comparison.table(), end="\n\n", flush=True)
            comparisons.append(comparison)
            goals += _goals(case, comparison)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    all_met = print_goals(goals)
    if options.save:
        print("saved", save("collectives", comparisons, vars(options)))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=sorted(_BUILDS), help="one operation; default: both")
    parser.add_argument("--world", type=int, choices=sorted(_SIZES_MIB), help="one number of ranks; default: all")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32", help="of the buffers")
    parser.add_argument("--quick", action="store_true", help="an eighth of the steps: for a look, not for a figure")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a goal is missed")
    return parser


def _runs(options: argparse.Namespace) -> Iterator[tuple[Case, Comparison]]:
    operations = [options.only] if options.only else sorted(_BUILDS, reverse=True)
    for num_ranks in [options.world] if options.world else sorted(_SIZES_MIB):
        world = World(size=num_ranks)
        cases = [
            Case(operation=operation, size_mib=size_mib, dtype=options.dtype, num_ranks=num_ranks)
            for operation in operations
            for size_mib in _SIZES_MIB[num_ranks]
        ]
        ranks = on_ranks(measure, world, cases, options.quick)
        for index, case in enumerate(cases):
            reports = report_engines(case.engines(), [of_rank[index] for of_rank in ranks], {})
            schedule = case.schedule(options.quick)
            yield case, Comparison(title=case.title, world=world, schedule=schedule, engines=reports)


def measure(cases: Sequence[Case], is_quick: bool) -> list[tuple]:
    """Returns this rank's outcomes and samples of every case. Collective."""
    return [time_engines(case.engines(), case.schedule(is_quick)) for case in cases]


def _build_torch_reduce_scatter(case: Case) -> Step:
    payload = _filled(case)
    output = torch.zeros(case.numel // case.num_ranks, dtype=payload.dtype)

    def step(index: int) -> float:
        _torch_reduce_scatter(output, payload)
        return _checked(output)

    return step


def _build_our_reduce_scatter(case: Case) -> Step:
    payload = _filled(case)
    output = torch.zeros(case.numel // case.num_ranks, dtype=payload.dtype)
    received = torch.zeros(output.numel() * (case.num_ranks - 1), dtype=payload.dtype)

    def step(index: int) -> float:
        start_reduce_scatter(payload, received=received).finish(output, accumulate=False)
        return _checked(output)

    return step


def _build_torch_all_gather(case: Case) -> Step:
    own = _own_piece(_filled(case)).clone()
    buffer = torch.zeros(case.numel, dtype=own.dtype)

    def step(index: int) -> float:
        _torch_all_gather(buffer, own)
        return _checked(buffer)

    return step


def _build_our_all_gather(case: Case) -> Step:
    own = _own_piece(_filled(case))
    buffer = torch.zeros(case.numel, dtype=own.dtype)
    _own_piece(buffer).copy_(own)

    def step(index: int) -> float:
        start_all_gather(buffer).wait()
        return _checked(buffer)

    return step


_BUILDS = {
    "reduce_scatter": (_build_torch_reduce_scatter, _build_our_reduce_scatter),
    "all_gather": (_build_torch_all_gather, _build_our_all_gather),
}


def _filled(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(case.numel, generator=generator).to(_DTYPES[case.dtype])


def _own_piece(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.chunk(dist.get_world_size())[dist.get_rank()]


def _checked(result: torch.Tensor) -> float:
    return float(result[:: max(1, result.numel() // _NUM_CHECKED)].float().sum())


def _goals(case: Case, comparison: Comparison) -> list[Goal]:
    if case.num_ranks != _GOALS_WORLD or case.size_mib < _GOALS_FROM_MIB:
        return []
    ours, control = comparison.engine("booster.comm").figures, comparison.control.figures
    ratio = None if ours is None else ours.ratio
    return [
        Goal(
            what=f"speed over torch's, {case.title} on {case.num_ranks} ranks",
            value=None if ratio is None else 1 / ratio.median,
            low=_LEAST_SPEEDUP[case.operation],
            unit="x",
            interval=None if ratio is None else (1 / ratio.high, 1 / ratio.low),
            control=None if control is None else 1 / control.ratio.median,
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
