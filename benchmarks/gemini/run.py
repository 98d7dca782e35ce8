"""ZeRO-3 with chunks (Gemini) beside torch's DDP and FSDP2, and DeepSpeed's stage 3, over two processes.

    python benchmarks/gemini/run.py [--memory] [--save] [--strict] [--quick] [--only bf16] [--size 10m]
        [--engines gemini]
    python benchmarks/gemini/run.py --largest [--limit-mib 2048] [--cgroup /sys/fs/cgroup/...] [--save] [--strict]

Targets in fp32: at most 0.97 of DDP's step, 0.85 of FSDP2's and 0.80 of DeepSpeed's; 1.02 of DDP's with all chunks kept
gathered, 1.25 with all optimizer states on the disk; resident memory at most 1.05 of the formula, and no more than
FSDP2's. With --largest: a model 8 times as large as the largest that DDP trains in as much memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.gpt import SIZES
from _harness.pair import Comparison, Engine, RankError, Schedule, World, compare, save
from _harness.targets import Target, print_targets
from checkpoint.disk import file_system
from gemini.engines import BASELINE, engines_of
from gemini.largest import Conditions, format_records, measure_largest, weights_of
from gemini.limit import is_memory_group
from gemini.memory import memory_rows
from gemini.systems import OURS, SYSTEMS
from gemini.targets import largest_target, memory_targets, speed_targets
from zero.deepspeed import ENVIRONMENT
from zero.memory import MemoryRow, activation_bytes, format_memory

_PRECISIONS = ("fp32", "bf16")
_STEPS = {"tiny": 200, "10m": 60, "50m": 20}
_DEFAULT_SIZE = "50m"
_NUM_RANKS = 2
_WARMUP = 3
_MEMORY_STEPS = 4
_FEWEST_STEPS = 3
_TIMEOUT_SECONDS = 3600.0
_IN_MEMORY = ("tmpfs", "ramfs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built, or with --strict a target missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        has_failed, targets = _run_largest(options) if options.largest else _run_comparisons(options)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    all_met = all(target.is_met for target in targets)
    return int(has_failed or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=_PRECISIONS, default="fp32", help="the precision; default: fp32")
    parser.add_argument("--size", choices=list(_STEPS), default=_DEFAULT_SIZE, help="of the GPT; default: 50m")
    parser.add_argument("--engines", nargs="+", help="only those with one of these in their names, and the baseline")
    parser.add_argument("--steps", type=_positive, help="timed ones; default: by the size")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: for a look, not for a figure")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--chunk-size-m", type=_positive, default=2, help="least elements of a chunk, in 2**20")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on a disk; for offload")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    largest = parser.add_argument_group("the largest trainable model, in place of the comparison")
    largest.add_argument("--largest", action="store_true", help="search for it")
    largest.add_argument("--limit-mib", type=_positive, default=2048, help="memory of a process")
    largest.add_argument("--width", type=_positive, default=768, help="of the models, whose layers are searched for")
    largest.add_argument("--cgroup", type=Path, help="memory cgroup to limit processes in; default: RLIMIT_DATA")
    largest.add_argument("--seconds", type=_positive, default=600, help="for the search")
    largest.add_argument("--try-seconds", type=_positive, default=240, help="for one model")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with exit code 2 where the options can't work."""
    names = [system.name for system in SYSTEMS] if options.largest else _names()
    if not all(any(part.lower() in name.lower() for name in names) for part in options.engines or ()):
        parser.error(f"--engines {' '.join(options.engines)}: no engine has one of these in its name")
    if not options.directory.is_dir():
        parser.error(f"--directory {options.directory} is not a directory: make it, or name another one")
    kind = file_system(options.directory)
    if kind in _IN_MEMORY:
        parser.error(f"{options.directory} lies in memory ({kind}): give a --directory on a disk")
    if options.cgroup is not None and not is_memory_group(options.cgroup):
        parser.error(f"--cgroup {options.cgroup}: not a memory cgroup that this user may make groups in; leave it out")


def _names() -> list[str]:
    return [engine.name for engine in engines_of("tiny", "fp32", 1, Path())]


def _run_comparisons(options: argparse.Namespace) -> tuple[bool, list[Target]]:
    with tempfile.TemporaryDirectory(prefix="gemini-", dir=options.directory) as directory:
        comparison, rows, targets = _compare(options, Path(directory))
    print_targets(targets)
    if options.save:
        sections = {"memory": {comparison.title: [asdict(row) for row in rows]}, "targets": _documents(targets)}
        print("saved", save("gemini", [comparison], vars(options), sections))
    return comparison.has_failed, targets


def _compare(options: argparse.Namespace, directory: Path) -> tuple[Comparison, list[MemoryRow], list[Target]]:
    size, precision = options.size, options.only
    world = World(size=_NUM_RANKS, timeout_seconds=_TIMEOUT_SECONDS, environment=ENVIRONMENT)
    comparison = compare(
        f"{size} GPT in {precision}",
        _chosen(engines_of(size, precision, options.chunk_size_m, directory), options.engines),
        _schedule(options),
        world,
        memory_steps=_MEMORY_STEPS * options.memory,
        step_tokens=SIZES[size].tokens * world.size,
    )
    print(comparison.table(), end="\n\n", flush=True)
    targets = speed_targets(comparison, precision)
    if not options.memory:
        return comparison, [], targets
    activations = activation_bytes(size, precision, world, _MEMORY_STEPS)
    rows = []
    if activations is not None:
        rows = memory_rows(comparison, size, precision, activations, options.chunk_size_m)
    print(format_memory(rows), end="\n\n", flush=True)
    return comparison, rows, targets + memory_targets(comparison, rows)


def _schedule(options: argparse.Namespace) -> Schedule:
    steps = options.steps or _STEPS[options.size]
    return Schedule(steps=max(_FEWEST_STEPS, steps // 10) if options.quick else steps, warmup=_WARMUP)


def _chosen(engines: Sequence[Engine], parts: Sequence[str] | None) -> list[Engine]:
    """Returns the baseline, and the engines with one of these parts in their names; None: all of them."""
    return [engine for engine in engines if engine.name == BASELINE or _is_named(engine.name, parts)]


def _is_named(name: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part.lower() in name.lower() for part in parts)


def _run_largest(options: argparse.Namespace) -> tuple[bool, list[Target]]:
    conditions = Conditions(
        world=World(size=_NUM_RANKS, timeout_seconds=options.try_seconds),
        limit_bytes=options.limit_mib * 2**20,
        width=options.width,
        directory=options.directory,
        cgroup=options.cgroup,
        seconds=options.seconds,
    )
    systems = [one for one in SYSTEMS if one.name == BASELINE or _is_named(one.name, options.engines)]
    records = []
    for record in measure_largest(conditions, systems):
        print(f"{record.name}: {len(record.tries)} tries", flush=True)
        records.append(record)
    print(format_records(records, conditions), end="\n\n")
    weights = {record.name: weights_of(record) for record in records}
    targets = [largest_target(weights[OURS], weights[BASELINE], conditions.limit_bytes)] if OURS in weights else []
    print_targets(targets)
    if options.save:
        sections = {"largest": [asdict(record) for record in records], "targets": _documents(targets)}
        print("saved", save("gemini-largest", [], vars(options), sections))
    return any(record.error is not None for record in records), targets


def _documents(targets: Sequence[Target]) -> list[dict[str, object]]:
    return [{"verdict": target.verdict, **asdict(target)} for target in targets]


if __name__ == "__main__":
    sys.exit(main())
