"""Runs foreign code so that nothing of it shows afterwards in what the process shares."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from booster.random_state import get_rng_state, set_rng_state

__all__ = ["nothing_changed"]


@contextmanager
def nothing_changed(optimizer: Optimizer) -> Iterator[None]:
    """Within it, copies of an optimizer may step: random numbers, warnings and the class's counts stay as they were.

    Hooks that were registered on all optimizers of the process are not called.
    """
    devices = [group["params"][0].device for group in optimizer.param_groups if group["params"]]
    device = devices[0] if devices else torch.device("cpu")
    random_state = get_rng_state(device)
    with ExitStack() as stack:
        stack.callback(set_rng_state, random_state, device)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_without_global_hooks())
        stack.enter_context(_class_attributes_kept(type(optimizer)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Sets aside what `register_optimizer_step_pre_hook` and its like have put on all optimizers of the process."""
    tables: list[dict[int, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


@contextmanager
def _class_attributes_kept(cls: type) -> Iterator[None]:
    """Puts back numbers, texts and containers that are attributes of the user's classes, such as a count of calls."""
    kinds = (bool, int, float, str, list, dict, set)
    before: list[tuple[type, str, Any, Any]] = [
        (owner, name, value, copy.copy(value))
        for owner in cls.__mro__
        if owner.__module__.split(".")[0] not in ("torch", "builtins")
        for name, value in vars(owner).items()
        if isinstance(value, kinds) and not name.startswith("__")
    ]
    try:
        yield
    finally:
        for owner, name, value, content in before:
            if isinstance(value, list):
                value[:] = content
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
