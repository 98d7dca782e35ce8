"""One logged step: the numbers of all ranks brought together, and how a line of a log holds them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from booster.comm import all_gather_equal, collective_device, group_rank
from booster.errors import DesyncError
from booster.monitor.window import PARTS, UNTRAINED_PARTS, Window

__all__ = ["RESERVED", "joined_record", "numbers_of", "to_line"]

_HEAD = (
    *("last_step", "num_steps", "num_skipped", "loss_sum", "loss_weight", "num_tokens", "memory", "sent_bytes"),
    "seconds",
)
# What a user's own number can't be called.
RESERVED = frozenset(
    (
        *("step", "time", "ranks", "loss", "lr", "seconds", "seconds_in", "tokens_per_second", "samples_per_second"),
        *("memory", "communication_bytes", "steps", "skipped"),
    )
)


def numbers_of(window: Window, *, step: int, memory: int, sent_bytes: int) -> list[float]:
    """Returns what one rank tells the others of its window.

    Args:
        window: This rank's.
        step: Number of its last step.
        memory: Peak bytes in use.
        sent_bytes: Bytes sent in the window.
    """
    parts = window.split()
    head = (step, window.num_steps, window.num_skipped, float(window.loss_sum), window.loss_weight)
    tail = (window.num_tokens, memory, sent_bytes, sum(parts.values()))
    return [float(number) for number in (*head, *tail, *(parts[name] for name in PARTS))]


def joined_record(mine: Sequence[float], *, lr: Sequence[float], unit: str, across_ranks: bool) -> dict[str, Any]:
    """Returns the record of a step, equal on all ranks but for `lr` and `unit`.

    Args:
        mine: This rank's `numbers_of`.
        lr: The learning rate of each group.
        unit: What is counted, "tokens" or "samples".
        across_ranks: False: of this rank alone, without communication.

    Collective where `across_ranks`: every rank must call it after the same step.

    Raises:
        DesyncError: The ranks are at different steps.
    """
    vector = torch.tensor(mine, dtype=torch.float64)
    if across_ranks:
        vector = all_gather_equal(vector.to(collective_device())).cpu()
    rows = [dict(zip((*_HEAD, *PARTS), row, strict=True)) for row in vector.view(-1, len(mine)).tolist()]
    _require_same_step(rows)
    num_steps = rows[0]["num_steps"]
    weight = _sum(rows, "loss_weight")
    in_training = [row["seconds"] - sum(row[name] for name in UNTRAINED_PARTS) for row in rows]
    throughput = _sum(rows, "num_tokens") / max(sum(in_training) / len(rows), 1e-9)
    return {
        "step": int(rows[0]["last_step"]),
        "time": round(time.time(), 3),
        "ranks": len(rows),
        "loss": _sum(rows, "loss_sum") / weight if weight else None,
        "lr": list(lr),
        f"{unit}_per_second": throughput,
        "seconds": _mean(rows, "seconds") / num_steps,
        "seconds_in": {name: _mean(rows, name) / num_steps for name in PARTS},
        "memory": [int(row["memory"]) for row in rows],
        "communication_bytes": round(_mean(rows, "sent_bytes") / num_steps),
        "steps": int(num_steps),
        "skipped": int(rows[0]["num_skipped"]),
    }


def to_line(record: Mapping[str, Any]) -> str:
    """Returns a record as one line of JSON, in which numbers that JSON does not know are "nan", "inf" and "-inf"."""
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.13g}") if math.isfinite(value) else str(value)
    return value


def _require_same_step(rows: Sequence[Mapping[str, float]]) -> None:
    steps = [(int(row["last_step"]), int(row["num_steps"])) for row in rows]
    for rank, (step, num_steps) in enumerate(steps):
        if (step, num_steps) != steps[0]:
            raise DesyncError(
                f"rank {group_rank()} logs with others that are elsewhere: rank 0 has ended step {steps[0][0]}, and"
                f" rank {rank} step {step}: call optimizer.step() equally often on all ranks, and make the Monitor at"
                " the same place, or give Monitor(across_ranks=False)"
            )


def _sum(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows)


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return _sum(rows, name) / len(rows)
