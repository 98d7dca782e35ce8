"""ZeRO stages 1 and 2 beside torch's DDP, ZeroRedundancyOptimizer and FSDP2, and DeepSpeed, over two processes.

    python benchmarks/zero/run.py [--memory] [--save] [--strict] [--quick] [--only bf16] [--size 50m]
        [--engines zero fsdp]
    python benchmarks/zero/run.py --part fsdp [--no-shared-memory] [--memory] [--save] [--strict] [--quick] ...

The part `stages` has these targets: at most 1.00 of DDP's step (0.95 with 50M parameters), 0.80 of DeepSpeed's of the
same stage and 0.95 of ZeroRedundancyOptimizer's in fp32; at most 1.00 (0.85) of DDP under autocast in bf16; resident
memory at most 1.05 of the formula. DeepSpeed takes part where it is installed. The part `fsdp` is the TorchFSDPPlugin
beside FSDP2 set up by hand in the same way: at most 1.02 (0.75) of its step, and 1.02 with our collectives in both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.gpt import SIZES
from _harness.pair import Comparison, Engine, RankError, Schedule, World, compare, save
from _harness.targets import Target, print_targets
from zero.deepspeed import ENVIRONMENT
from zero.engines import engines_of
from zero.fsdp import engines_of as fsdp_engines_of
from zero.memory import MemoryRow, activation_bytes, format_memory, memory_rows
from zero.targets import memory_targets, speed_targets, wrapper_targets

_PRECISIONS = ("fp32", "bf16")
_STEPS = {"tiny": 200, "1m": 100, "10m": 80, "50m": 30}
_DEFAULT_SIZES = ("10m", "50m")
_NUM_RANKS = 2
_WARMUP = 3
_MEMORY_STEPS = 4
_FEWEST_STEPS = 3
_TIMEOUT_SECONDS = 3600.0  # the slowest comparison takes 10 minutes on a quiet machine
_WITHOUT_SHARED_MEMORY = {"BOOSTER_SHARED_MEMORY": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonKind:
    """Comparisons of one kind.

    Attributes:
        title: Follows model and precision at the head of a table.
        engines: For a size and a precision, the baseline first.
        targets: Of a comparison of a size in a precision.
        memory_targets: Of a comparison and its rows; None: there are none.
    """

    title: str
    engines: Callable[[str, str], list[Engine]]
    targets: Callable[[Comparison, str, str], list[Target]]
    memory_targets: Callable[[Comparison, Sequence[MemoryRow]], list[Target]] | None = None


_PARTS = {
    "stages": ComparisonKind(title="", engines=engines_of, targets=speed_targets, memory_targets=memory_targets),
    "fsdp": ComparisonKind(title=", FSDP2", engines=fsdp_engines_of, targets=wrapper_targets),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not _has_engines(options):
        parser.error(f"--engines {' '.join(options.engines)}: no engine has one of these in its name")
    comparisons, memory, targets = [], {}, []
    try:
        for comparison, rows, its_targets in _runs(options):
            comparisons.append(comparison)
            memory[comparison.title] = [asdict(row) for row in rows]
            targets += its_targets
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    all_met = print_targets(targets)
    if options.save:
        sections = {"memory": memory, "targets": [{"verdict": target.verdict, **asdict(target)} for target in targets]}
        print("saved", save("zero", comparisons, vars(options), sections))
    has_failed = any(comparison.has_failed for comparison in comparisons)
    return int(has_failed or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=list(_PARTS), help="of the comparisons; default: all")
    parser.add_argument("--only", choices=_PRECISIONS, help="one precision; default: both")
    parser.add_argument("--size", choices=list(_STEPS), help=f"of the GPT; default: {' and '.join(_DEFAULT_SIZES)}")
    parser.add_argument("--engines", nargs="+", help="only those with one of these in their names, and the baseline")
    parser.add_argument("--steps", type=int, help="timed ones; default: by the size")
    parser.add_argument("--no-shared-memory", action="store_true", help="our collectives send messages instead")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _runs(options: argparse.Namespace) -> Iterator[tuple[Comparison, list[MemoryRow], list[Target]]]:
    for part in _parts(options):
        for precision in _PRECISIONS if options.only is None else (options.only,):
            for size in _DEFAULT_SIZES if options.size is None else (options.size,):
                yield _compare(part, size, precision, options)


def _parts(options: argparse.Namespace) -> list[ComparisonKind]:
    """Returns the parts that were asked for, less those of which no engine was."""
    return [part for part in _asked(options) if options.engines is None or _has_engine(part, options.engines)]


def _asked(options: argparse.Namespace) -> list[ComparisonKind]:
    return list(_PARTS.values()) if options.part is None else [_PARTS[options.part]]


def _compare(
    part: ComparisonKind, size: str, precision: str, options: argparse.Namespace
) -> tuple[Comparison, list[MemoryRow], list[Target]]:
    environment = ENVIRONMENT | (_WITHOUT_SHARED_MEMORY if options.no_shared_memory else {})
    world = World(size=_NUM_RANKS, timeout_seconds=_TIMEOUT_SECONDS, environment=environment)
    comparison = compare(
        f"{size} GPT in {precision}{part.title}",
        _chosen(part.engines(size, precision), options.engines),
        _schedule(size, options),
        world,
        memory_steps=_MEMORY_STEPS * options.memory,
        step_tokens=SIZES[size].tokens * world.size,
    )
    print(comparison.table(), end="\n\n", flush=True)
    targets = part.targets(comparison, size, precision)
    if not options.memory:
        return comparison, [], targets
    activations = activation_bytes(size, precision, world, _MEMORY_STEPS)
    rows = [] if activations is None else memory_rows(comparison, size, precision, activations)
    print(format_memory(rows), end="\n\n", flush=True)
    return comparison, rows, targets + ([] if part.memory_targets is None else part.memory_targets(comparison, rows))


def _schedule(size: str, options: argparse.Namespace) -> Schedule:
    steps = options.steps or _STEPS[size]
    return Schedule(steps=max(_FEWEST_STEPS, steps // 10) if options.quick else steps, warmup=_WARMUP)


def _chosen(engines: Sequence[Engine], parts: Sequence[str] | None) -> list[Engine]:
    """Returns the baseline, which is the first, and the engines with one of these parts in their names; None: all."""
    if parts is None:
        return list(engines)
    return [engine for index, engine in enumerate(engines) if index == 0 or _is_named(engine.name, parts)]


def _has_engines(options: argparse.Namespace) -> bool:
    return all(any(_has_engine(part, [name]) for part in _asked(options)) for name in options.engines or ())


def _has_engine(part: ComparisonKind, parts: Sequence[str]) -> bool:
    return any(_is_named(engine.name, parts) for engine in part.engines("tiny", "fp32"))


def _is_named(name: str, parts: Sequence[str]) -> bool:
    return any(part.lower() in name.lower() for part in parts)


if __name__ == "__main__":
    sys.exit(main())
