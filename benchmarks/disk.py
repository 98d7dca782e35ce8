"""Steps of HybridAdam with all of its states on a disk, beside what the disk can do and what the arithmetic needs.

    python benchmarks/disk.py [--directory DISK] [--parameters 24000000] [--rounds 9] [--backends io_uring threads]
        [--save] [--strict]

Every way moves as many bytes in the same file once a round, in turn: 8 bytes a parameter are read, and 8 are written
elsewhere, past the page cache. By default 200 MB are written per way and round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from _checkpoint_disk import file_system
from _disk_report import ByteCounts, counting, format_rows, goals_of, rows_of
from _disk_ways import Ways
from _environment import describe_run
from _goals import print_goals
from _pair import RESULTS, write_json
from _timing import Schedule, time_alternately

_IN_MEMORY = ("tmpfs", "ramfs")
_WARMUP = 3  # the first step reads nothing, and each half of a file is written for the first time once


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code: 1 if results differ, or with --strict a goal was missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    kind = file_system(options.directory)
    if kind in _IN_MEMORY:
        parser.error(f"{options.directory} lies in memory ({kind}): give a --directory on a disk")
    document, has_same_weights, all_met = _measure(options, kind)
    if options.save:
        print("saved", write_json(f"disk-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}", document))
    if not has_same_weights:
        print("steps with states on the disk gave other weights than those without", file=sys.stderr)
    return int(not has_same_weights or (options.strict and not all_met))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=RESULTS, help="on the disk to measure; default: %(default)s")
    parser.add_argument("--parameters", type=_positive, default=24_000_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=_positive, default=9, help="timed ones; default: %(default)s")
    parser.add_argument(
        "--backends", nargs="+", default=[], help="of the queue, to run alone; default: what it chooses"
    )
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a goal is missed")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 1 on")
    return number


def _measure(options: argparse.Namespace, kind: str) -> tuple[dict[str, Any], bool, bool]:
    with tempfile.TemporaryDirectory(prefix="disk-benchmark-", dir=options.directory) as directory:
        ways = Ways(Path(directory), options.parameters, options.backends)
        steps = ways.steps()
        counts = {name: ByteCounts() for name in steps}
        samples = time_alternately(
            {name: counting(step, counts[name]) for name, step in steps.items()},
            Schedule(steps=options.rounds, warmup=_WARMUP),
        )
        has_same_weights = ways.has_same_weights()
        ways.close()
    rows, goals = rows_of(samples, counts), goals_of(samples)
    print(_title(options, ways, kind))
    print(format_rows(rows), end="\n\n")
    document = {
        "benchmark": "disk",
        **describe_run(vars(options)),
        "file_system": kind,
        "is_direct": ways.is_direct,
        "backend": ways.backend,
        "num_parameters": ways.num_parameters,
        "num_threads": torch.get_num_threads(),
        "has_same_weights": has_same_weights,
        "rows": [asdict(row) for row in rows],
        "goals": [{**asdict(goal), "verdict": goal.verdict} for goal in goals],
    }
    return document, has_same_weights, print_goals(goals)


def _title(options: argparse.Namespace, ways: Ways, kind: str) -> str:
    return (
        f"{ways.num_parameters / 1e6:.1f}M parameters, {options.rounds} paired rounds, {torch.get_num_threads()}"
        f" threads, {kind} at {options.directory}, {ways.backend},"
        f" {'O_DIRECT' if ways.is_direct else 'NOT PAST THE PAGE CACHE'}"
    )


if __name__ == "__main__":
    sys.exit(main())
