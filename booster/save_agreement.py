"""What all ranks share of their training must be alike when it is saved: rank 0's alone goes into the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from booster.interface import OptimizerWrapper

__all__ = ["training_facts"]

# Note [Ranks that went apart]
# Some mistakes on one rank raise nothing where they are made: another learning rate, a step that one rank leaves out
# while nobody communicates in it. From then on ranks train something else than one process would. A save looks at what
# tells it for certain, in the message that it sends in any case. States of schedulers are left out but for what they
# lead to: one that looks at this rank's own loss has another state on each, and may do nothing by it.


def training_facts(optimizers: Mapping[str, Any], lr_schedulers: Mapping[str, Any] | None = None) -> list[str]:
    """Returns lines of text that must be the same on all ranks; see Note [Ranks that went apart].

    Args:
        optimizers: By name; those that were not boosted may be any rank's own.
        lr_schedulers: By name.
    """
    facts: list[str] = []
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, OptimizerWrapper):
            facts += [f"{_called('optimizer', name)} with {fact}" for fact in _optimizer_facts(optimizer)]
    for name, scheduler in (lr_schedulers or {}).items():
        steps = getattr(scheduler, "last_epoch", None)
        if isinstance(steps, int):
            facts.append(f"{_called('scheduler', name)} after {steps} steps")
    return facts


def _called(kind: str, name: str) -> str:
    return f"the {kind} {name!r}" if name else f"the {kind}"


def _optimizer_facts(optimizer: OptimizerWrapper) -> list[str]:
    rates = [f"lr={_number(group.get('lr'))} in group {index}" for index, group in enumerate(optimizer.param_groups)]
    return [f"{optimizer.num_steps} steps since boost()", f"{optimizer.num_skipped_steps} skipped steps", *rates]


def _number(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
