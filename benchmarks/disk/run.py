"""Steps of HybridAdam with all of its states on a disk, beside what the disk can do and what the arithmetic needs.

    python benchmarks/disk/run.py [--directory DISK] [--parameters 24000000] [--rounds 9] [--save]
        [--strict]

Every variant moves as many bytes in the same file once a round, in turn: 8 bytes a parameter are read, and 8 are
written elsewhere, past the page cache. By default 200 MB are written per variant and round.
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

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

import torch
from _harness.environment import describe_run
from _harness.pair import RESULTS, write_json
from _harness.targets import print_targets
from _harness.timing import Schedule, time_alternately
from checkpoint.disk import file_system
from disk.report import ByteCounts, counting, format_rows, rows_of, targets_of
from disk.variants import Variants

_IN_MEMORY = ("tmpfs", "ramfs")
_WARMUP = 3  # the first step reads nothing, and each half of a file is written for the first time once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if results differ, or with --strict a target was missed."""
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
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 1 on")
    return number


def _measure(options: argparse.Namespace, kind: str) -> tuple[dict[str, Any], bool, bool]:
    with tempfile.TemporaryDirectory(prefix="disk-benchmark-", dir=options.directory) as directory:
        variants = Variants(Path(directory), options.parameters)
        steps = variants.steps()
        counts = {name: ByteCounts() for name in steps}
        samples = time_alternately(
            {name: counting(step, counts[name]) for name, step in steps.items()},
            Schedule(steps=options.rounds, warmup=_WARMUP),
        )
        has_same_weights = variants.has_same_weights()
        variants.close()
    rows, targets = rows_of(samples, counts), targets_of(samples)
    print(_title(options, variants, kind))
    print(format_rows(rows), end="\n\n")
    document = {
        "benchmark": "disk",
        **describe_run(vars(options)),
        "file_system": kind,
        "is_direct": variants.is_direct,
        "num_parameters": variants.num_parameters,
        "num_threads": torch.get_num_threads(),
        "has_same_weights": has_same_weights,
        "rows": [asdict(row) for row in rows],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in targets],
    }
    return document, has_same_weights, print_targets(targets)


def _title(options: argparse.Namespace, variants: Variants, kind: str) -> str:
    return (
        f"{variants.num_parameters / 1e6:.1f}M parameters, {options.rounds} paired rounds, {torch.get_num_threads()}"
        f" threads, {kind} at {options.directory},"
        f" {'O_DIRECT' if variants.is_direct else 'NOT PAST THE PAGE CACHE'}"
    )


if __name__ == "__main__":
    sys.exit(main())
