"""What a refused call must leave as it was: models, optimizers, groups, files, and the memory of tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster import ModelWrapper

__all__ = ["Watched"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Watched:
    """The state of a process and of what a prepared call holds, to be compared later.

    Args:
        call: The prepared call: what its closure holds is looked at, two levels deep.
        directory: Where nothing may be written.
    """

    def __init__(self, call: Callable[[], Any], directory: Path) -> None:
        self._directory = directory
        held = list(_held(call))
        self._modules = [one for one in held if isinstance(one, nn.Module)]
        self._optimizers = [one for one in held if isinstance(one, Optimizer)]
        self._before = dict(self._facts())
        # Of a boosted model versions tell enough, and its memory may be given away meanwhile.
        self._has_boosted = any(isinstance(one, ModelWrapper) for one in held)
        self._values = [_value(tensor) for tensor in self._tensors()]

    def changes(self) -> list[str]:
        """Returns what is no longer as it was, in words."""
        after = dict(self._facts())
        changed = [
            f"{name}: {self._before.get(name)} became {after.get(name)}"
            for name in {**self._before, **after}
            if self._before.get(name) != after.get(name)
        ]
        now = [_value(tensor) for tensor in self._tensors()]
        if len(now) == len(self._values) and any(
            was is not None and (value is None or not torch.equal(was, value))
            for was, value in zip(self._values, now, strict=True)
        ):
            changed.append("a parameter or buffer has other values")
        return changed

    def _tensors(self) -> Iterator[torch.Tensor]:
        for module in [] if self._has_boosted else self._modules:
            yield from module.parameters()
            yield from module.buffers()

    def _facts(self) -> Iterator[tuple[str, Any]]:
        yield "process groups", dist.distributed_c10d.get_pg_count() if dist.is_initialized() else None
        yield "threads", len([thread for thread in threading.enumerate() if not thread.daemon])
        yield "files", sorted(os.listdir(self._directory))
        for index, module in enumerate(self._modules):
            for name, inner in module.named_modules():
                hooks = [len(getattr(inner, hook)) for hook in _HOOKS]
                yield f"module {index} {name}", (id(inner), type(inner).__name__, inner.training, hooks)
            for name, parameter in module.named_parameters():
                facts = (id(parameter), parameter.requires_grad, parameter.grad is None, parameter._version)
                yield f"parameter {index} {name}", facts
        for index, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                options = sorted((name, repr(value)) for name, value in group.items() if name != "params")
                facts = (options, [id(parameter) for parameter in group["params"]])
                yield f"group {number} of optimizer {index}", facts
            yield f"states of optimizer {index}", len(optimizer.state)


def _held(call: Callable[[], Any]) -> Iterator[Any]:
    for cell in getattr(call, "__closure__", None) or ():
        value = cell.cell_contents
        yield value
        if isinstance(value, (list, tuple)):
            yield from value
        elif hasattr(value, "__dict__"):
            yield from vars(value).values()


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a plain tensor's values; of others the version says whether they were written to."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    if tensor.untyped_storage().nbytes() == 0:
        return None
    return tensor.detach().clone()
