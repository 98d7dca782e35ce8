"""Unsharded weights in an FSDP2 module, and a temporary removal of FSDP2 from a module while it is copied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from booster.plugins.torch_fsdp.outputs import SafeOutputs
from booster.plugins.torch_fsdp.own_format import OwnFormat
from booster.plugins.torch_fsdp.units import Unit
from booster.plugins.torch_fsdp.watching import InputWatch

__all__ = ["COPYING", "shown_whole", "without_fsdp"]

COPYING = "__deepcopy__"  # in the instance's attributes, which `copy` looks up before the class

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MARK = "_is_fsdp_managed_module"
# Modules of this package whose hooks do not belong into a copy.
_OUR_OWN = frozenset({SafeOutputs.__module__, OwnFormat.__module__, InputWatch.__module__, Unit.__module__})


@contextmanager
def shown_whole(units: Sequence[Unit]) -> Iterator[Callable[[], None]]:
    """Expose unsharded weights, in the dtype of the shards, in the FSDP2 state "unsharded".

    Yields a function that writes changes back to the shards; unless it is called, changes are lost.

    Args:
        units: All parameter groups of a model, none of them gathered.

    Collective on entry, over the ranks that the parameters are sharded over.
    """
    with ExitStack() as shown:
        for unit in units:
            shown.enter_context(_shown(unit))
            shown.enter_context(_unmarked(unit.module))  # type: ignore[arg-type]
        yield lambda: _take_back(units)


@contextmanager
def _shown(unit: Unit) -> Iterator[None]:
    group, state = unit.group, unit.module._get_fsdp_state()
    for member, whole in unit.gather().items():
        member.state._setattr_on_modules(nn.Parameter(whole, requires_grad=member.trains))
        member.state.sharded_state = ShardedState.UNSHARDED
    group._sharded_state = ShardedState.UNSHARDED
    policy, state._mp_policy = state._mp_policy, MixedPrecisionPolicy()
    blocked = ("_to_sharded", "_to_sharded_post_forward")
    for name in blocked:
        setattr(group, name, _stay)
    try:
        yield
    finally:
        for name in blocked:
            delattr(group, name)
        state._mp_policy = policy
        group._sharded_state = ShardedState.SHARDED
        for member in unit.members:
            member.state._setattr_on_modules(member.state.sharded_param)
            member.state.sharded_state = ShardedState.SHARDED


@contextmanager
def _unmarked(model: nn.Module) -> Iterator[None]:
    """Clear the flag by which transformers synchronizes the length of `generate` over ranks."""
    marked = [module for module in model.modules() if getattr(module, _MARK, False)]
    for module in marked:
        setattr(module, _MARK, False)
    try:
        yield
    finally:
        for module in marked:
            setattr(module, _MARK, True)


def _stay() -> None:
    """No-op replacement of FSDP2's resharding methods."""


@torch.no_grad()
def _take_back(units: Sequence[Unit]) -> None:
    for unit in units:
        for member in unit.members:
            info = member.state._module_info
            whole = getattr(info.module, info.param_name).detach()
            start, stop = member.span
            member.piece.copy_(whole.reshape(-1)[start:stop])


@contextmanager
def without_fsdp(model: nn.Module) -> Iterator[None]:
    """Remove temporarily what `fully_shard` has added to the modules of a model.

    Args:
        model: Model with unsharded weights, see `shown_whole`.
    """
    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            _take_off(module, undo)
        yield
    finally:
        for back in reversed(undo):
            back()


def _take_off(module: nn.Module, undo: list[Callable[[], None]]) -> None:
    if isinstance(module, FSDPModule):
        sharded = type(module)
        module.__class__ = sharded.__mro__[2]
        undo.append(lambda: setattr(module, "__class__", sharded))
    for key in (STATE_KEY, REGISTRY_KEY, COPYING):
        if key in module.__dict__:
            value = module.__dict__.pop(key)
            undo.append(lambda key=key, value=value: module.__dict__.__setitem__(key, value))  # type: ignore[misc]
    for name in _HOOKS:
        hooks = getattr(module, name)
        kept = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_of_fsdp(hook))
        if len(kept) < len(hooks):
            setattr(module, name, kept)
            undo.append(lambda name=name, hooks=hooks: setattr(module, name, hooks))  # type: ignore[misc]


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps some hooks
    where = getattr(function, "__module__", None) or ""
    return where.startswith("torch.distributed.fsdp") or where in _OUR_OWN
