"""Fingerprint of the training state that ranks share: a checkpoint holds rank 0's only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from booster.interface import OptimizerWrapper

__all__ = ["training_fingerprint"]

# Some mistakes on one rank raise no error at once: another learning rate, or a step that one rank leaves out while no
# rank communicates in it. The training then differs from that of one process. A save compares values that prove it, in
# the message that it sends anyway. States of schedulers are compared by their effects only: one that reads the local
# loss has another state on each rank, which may change nothing.


def training_fingerprint(optimizers: Mapping[str, Any], lr_schedulers: Mapping[str, Any] | None = None) -> list[str]:
    """Return lines of text that must be equal on all ranks.

    Args:
        optimizers: Optimizers by name. Those that are not boosted may differ between ranks and are skipped.
        lr_schedulers: Schedulers by name.
    """
    lines: list[str] = []
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, OptimizerWrapper):
            lines += [f"{_called('optimizer', name)} with {fact}" for fact in _saved_optimizer_fingerprint(optimizer)]
    for name, scheduler in (lr_schedulers or {}).items():
        steps = getattr(scheduler, "last_epoch", None)
        if isinstance(steps, int):
            lines.append(f"{_called('scheduler', name)} after {steps} steps")
    return lines


def _called(kind: str, name: str) -> str:
    return f"the {kind} {name!r}" if name else f"the {kind}"


def _saved_optimizer_fingerprint(optimizer: OptimizerWrapper) -> list[str]:
    rates = [f"lr={_number(group.get('lr'))} in group {index}" for index, group in enumerate(optimizer.param_groups)]
    return [f"{optimizer.num_steps} steps since boost()", f"{optimizer.num_skipped_steps} skipped steps", *rates]


def _number(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
