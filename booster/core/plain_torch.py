"""Checks of torch's clipping functions, plain optimizers, `torch.func` and tracing on boosted models."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from booster.errors import ConfigError
from booster.fault_tolerance.progress import is_any_thread_in_phase

from .model_wrapper import ModelWrapper
from .optimizer_wrapper import OptimizerWrapper

# Note [Plain torch]
# `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` clips nothing if the boosted optimizer stores the gradients,
# and clips incomplete ones inside of `Booster.accumulate`. A plain optimizer steps by local gradients if gradients are
# averaged for boosted optimizers only, or if the parameters are those of a criterion, which no plugin knows. Neither
# raises by itself. torch has a hook for steps of any optimizer. It has none for its clipping functions, so a check
# wraps the function in their closures: scripts import them by name before anything is boosted.

_CLIPPING_FUNCTIONS = (nn.utils.clip_grad_norm_, nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_value_)

_optimizers: weakref.WeakSet[OptimizerWrapper] = weakref.WeakSet()
_refused: weakref.WeakKeyDictionary[ModelWrapper, list[weakref.ref[nn.Parameter]]] = weakref.WeakKeyDictionary()
_refused_of_criteria: weakref.WeakKeyDictionary[ModelWrapper, list[weakref.ref[nn.Parameter]]] = (
    weakref.WeakKeyDictionary()
)

TRAINED_CRITERION_ADVICE = (
    "gradients are averaged over ranks, and unscaled, for parameters of the model only: make the criterion a submodule"
    " of the model, whose forward then returns the loss, and build the optimizer from model.parameters()"
)


def hook_clipping(optimizer: OptimizerWrapper) -> None:
    """Let torch's clipping functions unscale the gradients of a boosted optimizer first."""
    for function in _CLIPPING_FUNCTIONS:
        _wrap(function)
    _optimizers.add(optimizer)


@functools.cache
def _wrap(function: Callable[..., Any]) -> None:
    own = inspect.unwrap(function)

    @functools.wraps(own)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(parameters, *args, **kwargs)
        members = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = frozenset(id(one) for one in members)
        for optimizer in list(_optimizers):
            if optimizer._holds_any(given):
                optimizer._unscale_param_grads(given)
                optimizer._note_clipping(
                    args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value", math.inf))
                )
        # An empty generator is passed on: torch warns about it.
        return own(members or parameters, *args, **kwargs)

    for cell in getattr(function, "__closure__", None) or ():
        if cell.cell_contents is own:
            cell.cell_contents = checked
            return
    for module in (nn.utils, nn.utils.clip_grad):  # without a closure: earlier imports by name are not covered
        for name, value in list(vars(module).items()):
            if value is function:
                setattr(module, name, checked)


def refuse_plain_training(
    model: ModelWrapper, *, untrained: Iterable[nn.Parameter], originals: Iterable[nn.Parameter] = ()
) -> None:
    """Make training by a plain optimizer raise, for models whose gradients are reduced for boosted optimizers only.

    Args:
        model: Boosted model.
        untrained: Its parameters, if it was boosted without an optimizer.
        originals: Parameters from before boost() that were replaced.
    """
    _hook_steps()
    _refused[model] = [weakref.ref(one) for one in originals]
    for one in untrained:
        if one.requires_grad:
            one.register_post_accumulate_grad_hook(refuse_plain_gradient)


def refuse_plain_criterion(criterion: object, model: ModelWrapper) -> None:
    """Make a step of a plain optimizer over parameters that only the criterion has raise.

    Not boost() itself: a perceptual loss has parameters that require gradients and are not trained.

    Args:
        criterion: The user's criterion, with or without parameters.
        model: Boosted model that it was passed with.
    """
    if not isinstance(criterion, nn.Module) or isinstance(criterion, ModelWrapper):
        return
    own = {id(one) for one in model.parameters()}
    theirs = [weakref.ref(one) for one in criterion.parameters() if one.requires_grad and id(one) not in own]
    if theirs:
        _hook_steps()
        _refused_of_criteria[model] = theirs


def refuse_unwrapped_steps(wrapper: OptimizerWrapper, reason: str) -> None:
    """Let the user's optimizer raise if step() is called on it, and not on its wrapper.

    Args:
        wrapper: Wrapper, which sets `_is_stepping` while it calls the optimizer's step().
        reason: What such a step lacks, for the message.
    """
    wrapper._num_own_step_hooks += 1
    hook = functools.partial(_refuse_unwrapped_step, weakref.ref(wrapper), reason)
    wrapper.optim.register_step_pre_hook(hook)


def _refuse_unwrapped_step(wrapper: weakref.ref[OptimizerWrapper], reason: str, optimizer: Optimizer, *_: Any) -> None:
    alive = wrapper()  # None if what boost() returned was thrown away
    if alive is None or not alive._is_stepping:
        raise ConfigError(
            f"step() was called on the {type(optimizer).__name__} that was passed to boost(), which {reason}: write"
            " model, optimizer, *_ = booster.boost(model, optimizer), and call step() and zero_grad() on the optimizer"
            " that it returned"
        )


@functools.cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_plain_step)


def refuse_plain_gradient(*_: Any) -> None:
    """Hook of a gradient of a model that was boosted without an optimizer.

    In the backward of another model's optimizer the gradient is not used, such as that of a teacher's weights.

    Raises:
        ConfigError: It was not computed in a boosted optimizer's backward.
    """
    if not is_any_thread_in_phase("backward", "pipeline"):
        raise ConfigError(
            "loss.backward() computes gradients of a model that was boosted without an optimizer, and gradients are"
            " reduced over ranks for boosted optimizers only: write model, optimizer, *_ = booster.boost(model,"
            " optimizer) and booster.backward(loss, optimizer), or model.requires_grad_(False) if it is not trained"
        )


def _refuse_plain_step(optimizer: Optimizer, *_: Any) -> None:
    if not (_refused or _refused_of_criteria) or any(one._is_stepping for one in list(_optimizers)):
        return
    trained = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    known = {id(one) for model in list(_refused) for one in model.module.parameters()} | _alive(_refused)
    if trained & known:
        raise ConfigError(
            f"step() of a {type(optimizer).__name__} that is not boosted, over parameters of a boosted model: gradients"
            " are reduced over ranks for boosted optimizers only. Write model, optimizer, *_ = booster.boost(model,"
            " optimizer), and call step() of the returned one"
        )
    if trained & _alive(_refused_of_criteria) and all(one.optim is not optimizer for one in list(_optimizers)):
        raise ConfigError(
            f"step() of a {type(optimizer).__name__} that is not boosted, over parameters of the criterion that was"
            f" passed to boost(), and {TRAINED_CRITERION_ADVICE}. To average its gradients yourself, do not pass the"
            " criterion to boost()"
        )


def _alive(refused: Mapping[ModelWrapper, list[weakref.ref[nn.Parameter]]]) -> set[int]:
    return {id(one) for refs in list(refused.values()) for ref in refs if (one := ref()) is not None}


_GATHERED = "write `with model.gathered():` around the call, in which each rank has all weights"


def refuse_tracing() -> None:
    """Check that no forward that gathers weights is traced to a graph, which would replay no communication.

    Raises:
        ConfigError: It runs inside of `torch.jit.trace` or `torch.export.export`.
    """
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_traced or torch.compiler.is_exporting():
        name = "torch.jit.trace" if is_traced else "torch.export"
        raise ConfigError(
            f"the boosted model was called inside of {name}, which can't trace communication of weights: {_GATHERED}"
        )


def refuse_transforms(
    advice: str = _GATHERED,
    *,
    including_vmap: bool = False,
) -> None:
    """Check that no transform of `torch.func` differentiates a forward that communicates, as collectives read memory.

    Args:
        advice: What to write instead.
        including_vmap: If True, `vmap` is refused as well, because activations are communicated, not only weights.

    Raises:
        ConfigError: There is such a transform.
    """
    stack = torch._C._functorch.get_interpreter_stack()
    if stack is None:
        return
    names = [one.key().name.lower() for one in stack]
    refused = [name for name in names if including_vmap or name != "vmap"]
    if refused:
        raise ConfigError(
            f"the boosted model was called inside of a transform of torch.func ({', '.join(names)}), which can't"
            f" differentiate or vectorize communication: {advice}"
        )
