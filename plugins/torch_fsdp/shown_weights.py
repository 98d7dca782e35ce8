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

from booster.plugins.torch_fsdp.outputs import ViewSafeOutputs
from booster.plugins.torch_fsdp.own_format import DtypeBoundary
from booster.plugins.torch_fsdp.units import ParamGroup
from booster.plugins.torch_fsdp.watching import InputGradHook

__all__ = ["DEEPCOPY", "detached_from_fsdp", "summon_full_params"]

DEEPCOPY = "__deepcopy__"  # in the instance's attributes, which `copy` looks up before the class

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_GENERATE_SYNC_FLAG = "_is_fsdp_managed_module"
# Modules of this package whose hooks do not belong into a copy.
_HOOK_MODULES = frozenset(
    {ViewSafeOutputs.__module__, DtypeBoundary.__module__, InputGradHook.__module__, ParamGroup.__module__}
)


@contextmanager
def summon_full_params(param_groups: Sequence[ParamGroup]) -> Iterator[Callable[[], None]]:
    """Expose unsharded weights, in the dtype of the shards, in the FSDP2 state "unsharded".

    Yields a function that writes changes back to the shards; unless it is called, changes are lost.

    Args:
        param_groups: All parameter groups of a model, none of them gathered.

    Collective on entry, over the ranks that the parameters are sharded over.
    """
    with ExitStack() as stack:
        for param_group in param_groups:
            stack.enter_context(_unsharded(param_group))
            stack.enter_context(_without_generate_sync(param_group.module))  # type: ignore[arg-type]
        yield lambda: _write_back(param_groups)


@contextmanager
def _unsharded(param_group: ParamGroup) -> Iterator[None]:
    group, state = param_group.group, param_group.module._get_fsdp_state()
    for member, full_param in param_group.gather().items():
        member.state._setattr_on_modules(nn.Parameter(full_param, requires_grad=member.requires_grad))
        member.state.sharded_state = ShardedState.UNSHARDED
    group._sharded_state = ShardedState.UNSHARDED
    policy, state._mp_policy = state._mp_policy, MixedPrecisionPolicy()
    blocked = ("_to_sharded", "_to_sharded_post_forward")
    for name in blocked:
        setattr(group, name, _skip_reshard)
    try:
        yield
    finally:
        for name in blocked:
            delattr(group, name)
        state._mp_policy = policy
        group._sharded_state = ShardedState.SHARDED
        for member in param_group.params:
            member.state._setattr_on_modules(member.state.sharded_param)
            member.state.sharded_state = ShardedState.SHARDED


@contextmanager
def _without_generate_sync(model: nn.Module) -> Iterator[None]:
    """Clear the flag by which transformers synchronizes the length of `generate` over ranks."""
    marked = [module for module in model.modules() if getattr(module, _GENERATE_SYNC_FLAG, False)]
    for module in marked:
        setattr(module, _GENERATE_SYNC_FLAG, False)
    try:
        yield
    finally:
        for module in marked:
            setattr(module, _GENERATE_SYNC_FLAG, True)


def _skip_reshard() -> None:
    """No-op replacement of FSDP2's resharding methods."""


@torch.no_grad()
def _write_back(param_groups: Sequence[ParamGroup]) -> None:
    for param_group in param_groups:
        for member in param_group.params:
            info = member.state._module_info
            full_param = getattr(info.module, info.param_name).detach()
            start, stop = member.flat_range
            member.shard.copy_(full_param.reshape(-1)[start:stop])


@contextmanager
def detached_from_fsdp(model: nn.Module) -> Iterator[None]:
    """Remove temporarily what `fully_shard` has added to the modules of a model.

    Args:
        model: Model with unsharded weights, see `summon_full_params`.
    """
    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            _detach_module(module, undo)
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _detach_module(module: nn.Module, undo: list[Callable[[], None]]) -> None:
    if isinstance(module, FSDPModule):
        sharded = type(module)
        module.__class__ = sharded.__mro__[2]
        undo.append(lambda: setattr(module, "__class__", sharded))
    for key in (STATE_KEY, REGISTRY_KEY, DEEPCOPY):
        if key in module.__dict__:
            value = module.__dict__.pop(key)
            undo.append(lambda key=key, value=value: module.__dict__.__setitem__(key, value))  # type: ignore[misc]
    for name in _HOOKS:
        hooks = getattr(module, name)
        kept = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_fsdp_hook(hook))
        if len(kept) < len(hooks):
            setattr(module, name, kept)
            undo.append(lambda name=name, hooks=hooks: setattr(module, name, hooks))  # type: ignore[misc]


def _is_fsdp_hook(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps some hooks
    module_name = getattr(function, "__module__", None) or ""
    return module_name.startswith("torch.distributed.fsdp") or module_name in _HOOK_MODULES
