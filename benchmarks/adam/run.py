"""Steps of Adam on the CPU beside torch's and DeepSpeed's, and beside what the memory can do.

    python benchmarks/adam/run.py [--numel 10 50 200] [--threads 1 2] [--tensors 1] [--repeats 30] [--only fp32]
        [--no-peers] [--save] [--strict]

All variants update the same tensors in turn. fp32: parameters, gradients and moments, 28 bytes a parameter. Mixed: bf16
gradients, fp32 masters and moments, bf16 working copies, with norm, unscaling, clipping and zeroing, 32 bytes a
parameter. DeepSpeed takes part where it is installed; its path leaves out norm, unscaling, clipping and zeroing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

import torch
from _harness.environment import describe_run
from _harness.pair import write_json
from _harness.targets import Target, print_targets
from adam.check import wrong_variants
from adam.report import Case, Row, format_rows, rows_of, targets_of
from adam.timing import time_variants
from adam.variants import DEEPSPEED, Data, variants_of

_PRECISIONS = ("fp32", "mixed")
_MILLION = 1_000_000
_WARMUP = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if a variant is wrong, or with --strict a target was missed."""
    options = _parser().parse_args(arguments)
    precisions = _PRECISIONS if options.only is None else (options.only,)
    wrong = {precision: wrong_variants(precision, with_peers=options.peers) for precision in precisions}
    if any(wrong.values()):
        print(f"other results than the baseline's: {wrong}", file=sys.stderr)
        return 1
    targets: list[Target] = []
    cases = []
    for case, rows, its_targets in _measured(precisions, options):
        print(format_rows(case, rows), end="\n\n", flush=True)
        cases.append({**asdict(case), "rows": [asdict(row) for row in rows]})
        targets += its_targets
    all_met = print_targets(targets)
    if options.save:
        sections = {"cases": cases, "targets": [{"verdict": target.verdict, **asdict(target)} for target in targets]}
        document = {"benchmark": "adam", **describe_run(vars(options)), **sections}
        print("saved", write_json(f"adam-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}", document))
    return int(options.strict and not all_met)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--numel", type=float, nargs="+", default=[10, 50], help="millions; default: 10 50")
    parser.add_argument("--threads", type=_positive, nargs="+", default=_default_threads(), help="default: %(default)s")
    parser.add_argument("--tensors", type=_positive, default=1, help="that the parameters are split into; default: 1")
    parser.add_argument("--repeats", type=_positive, default=30, help="timed steps of each variant; default: 30")
    parser.add_argument("--only", choices=_PRECISIONS, help="default: both")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without foreach and DeepSpeed")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _default_threads() -> list[int]:
    return sorted({1, min(2, os.cpu_count() or 1)})


def _measured(precisions: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[Case, list[Row], list[Target]]]:
    for numel in options.numel:
        for precision in precisions:
            for num_threads in options.threads:
                torch.set_num_threads(num_threads)
                case = Case(precision=precision, numel=round(numel * _MILLION), num_threads=num_threads)
                data = Data(case.numel, options.tensors)
                variants = variants_of(precision, data, with_peers=options.peers)
                if options.peers and DEEPSPEED[precision] not in variants:
                    print("DeepSpeed is not installed here and takes no part")
                samples = time_variants(variants, data, options.repeats, _WARMUP)
                rows = rows_of(case, variants, samples)
                yield case, rows, targets_of(case, rows, samples)


if __name__ == "__main__":
    sys.exit(main())
