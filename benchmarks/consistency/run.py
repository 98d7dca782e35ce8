"""What it costs that all ranks agree, before boost() changes anything, on what they gave it.

    python benchmarks/consistency/run.py [--parameters 300] [--repeats 200] [--world 2|4] [--save] [--strict]

Every rank describes its versions, plugin, model and optimizer, and compares a digest with the others' in one
all-gather; measured from a barrier to the end on the slowest rank. Shown beside it: making the plugin, the first time
that the ranks communicate, when they also choose their transport; and the first agreement. Target: a median below 5 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

import torch
from _harness.environment import describe_run
from _harness.pair import RankError, World, on_ranks, write_json
from _harness.table import align
from _harness.targets import Target, print_targets
from torch import nn

from booster.boost_checks import verify_same_across_ranks
from booster.comm import barrier
from booster.plugins import TorchDDPPlugin

_WORLDS = (2, 4)
_TRANSPORTS = {"shared memory": "on", "gloo": "off"}
_WARMUP = 10
_MOST_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of the slowest rank.

    Attributes:
        making_plugin: The first communication of the ranks.
        first: The first agreement.
        repeats: Those after the warm-up.
    """

    making_plugin: float
    first: float
    repeats: list[float]

    @property
    def median(self) -> float:
        """Of the repeats."""
        return statistics.median(self.repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if a rank failed, or with --strict a target was missed."""
    options = _parser().parse_args(arguments)
    cases, targets = [], []
    rows = [["ranks, transport", "making the plugin ms", "first ms", "best ms", "median ms", "90% below ms"]]
    try:
        for num_ranks in [options.world] if options.world else _WORLDS:
            for transport in _TRANSPORTS:
                times = _measured(num_ranks, transport, options)
                rows.append(_row(f"{num_ranks}, {transport}", times))
                what = f"agreement on {options.parameters} parameters, {num_ranks} ranks, {transport}"
                targets.append(Target(what=what, value=1000 * times.median, high=1000 * _MOST_SECONDS, unit=" ms"))
                cases.append({"ranks": num_ranks, "transport": transport, "median": times.median, **asdict(times)})
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(align(rows)))
    all_met = print_targets(targets)
    if options.save:
        sections = {"cases": cases, "targets": [{"verdict": target.verdict, **asdict(target)} for target in targets]}
        document = {"benchmark": "agreement", **describe_run(vars(options)), **sections}
        print("saved", write_json(f"agreement-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}", document))
    return int(options.strict and not all_met)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=300, help="of the model, an even number")
    parser.add_argument("--repeats", type=int, default=200, help="timed agreements")
    parser.add_argument("--world", type=int, choices=_WORLDS, help="one number of ranks; default: all")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser


def _measured(num_ranks: int, transport: str, options: argparse.Namespace) -> Times:
    world = World(size=num_ranks, environment={"BOOSTER_SHARED_MEMORY": _TRANSPORTS[transport]})
    ranks: list[list[float]] = on_ranks(measure, world, options.parameters, options.repeats)
    making_plugin, first, *repeats = (max(of_ranks) for of_ranks in zip(*ranks, strict=True))
    return Times(making_plugin=making_plugin, first=first, repeats=repeats[_WARMUP:])


def measure(num_parameters: int, repeats: int) -> list[float]:
    """Returns this rank's seconds: making the plugin, and each agreement. Collective."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_parameters // 2)))
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    started = time.perf_counter()
    plugin = TorchDDPPlugin()
    seconds = [time.perf_counter() - started]
    for _ in range(1 + _WARMUP + repeats):
        barrier()
        started = time.perf_counter()
        verify_same_across_ranks(plugin, None, model, optimizer, None, None, None)
        seconds.append(time.perf_counter() - started)
    return seconds


def _row(name: str, times: Times) -> list[str]:
    ninetieth = statistics.quantiles(times.repeats, n=10)[-1]
    shown = (times.making_plugin, times.first, min(times.repeats), times.median, ninetieth)
    return [name, *(f"{1000 * seconds:.2f}" for seconds in shown)]


if __name__ == "__main__":
    sys.exit(main())
