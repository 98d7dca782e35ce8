"""What saving and loading a training state costs, beside the disk's own limit and the other variants to do it.

    python benchmarks/checkpoint/run.py [--directory DISK] [--size-mib 1024] [--repeats 5] [--no-peers] [--no-memory]
        [--save] [--strict]

Two ranks under the DDP plugin hold a GPT and its AdamW states, 1 GiB together by default; every variant saves and loads
them once a round, in turn. A save counts until it is durable, a load begins with nothing in the page cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

from _harness.environment import describe_run
from _harness.pair import RankError, World, on_ranks, write_json
from _harness.targets import print_targets
from checkpoint.disk import file_system
from checkpoint.measure import Peaks, measure_peaks, measure_times
from checkpoint.report import format_rows, rows_of, targets_of
from checkpoint.variants import WAYS, Variant

_IN_MEMORY = ("tmpfs", "ramfs")
_WORLD = World(size=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if a variant failed, or with --strict a target was missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    kind = file_system(options.directory)
    if kind in _IN_MEMORY:
        parser.error(f"{options.directory} lies in memory ({kind}): give a --directory on a disk")
    try:
        document, all_met = _measure(options, kind)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    if options.save:
        print("saved", write_json(f"checkpoint-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}", document))
    return int(options.strict and not all_met)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk to measure; default: %(default)s",
    )
    parser.add_argument("--size-mib", type=_positive, default=1024, help="of model and optimizer; default: %(default)s")
    parser.add_argument("--repeats", type=_positive, default=5, help="timed rounds; default: %(default)s")
    parser.add_argument("--no-peers", action="store_true", help="only ours and the limits: to work on ours")
    parser.add_argument("--no-memory", action="store_true", help="only times")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 1 on")
    return number


def _measure(options: argparse.Namespace, kind: str) -> tuple[dict[str, Any], bool]:
    num_bytes = options.size_mib << 20
    variants = [variant for variant in WAYS if not (variant.is_peer and options.no_peers)]
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=options.directory) as directory:
        times = on_ranks(measure_times, _WORLD, variants, directory, num_bytes, options.repeats)
        peaks = [] if options.no_memory else _peaks(variants, directory, num_bytes)
    rows = rows_of(variants, times, peaks)
    saved = rows[0].num_bytes
    print(
        f"{saved / 2**20:.0f} MiB, {_WORLD.size} ranks, {options.repeats} paired rounds, {kind} at {options.directory}"
    )
    for table in format_rows(rows):
        print(table, end="\n\n", flush=True)
    targets = targets_of(times, rows)
    document = {
        "benchmark": "checkpoint",
        **describe_run(vars(options)),
        "file_system": kind,
        "world": asdict(_WORLD),
        "num_bytes": saved,
        "rows": [asdict(row) for row in rows],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in targets],
    }
    return document, print_targets(targets)


def _peaks(variants: Sequence[Variant], directory: str, num_bytes: int) -> list[Mapping[str, Peaks]]:
    return on_ranks(measure_peaks, _WORLD, variants, directory, num_bytes, gives_memory_back=True)


if __name__ == "__main__":
    sys.exit(main())
