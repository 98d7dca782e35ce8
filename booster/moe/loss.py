"""Load-balancing loss of routers, and the criterion that adds it to the loss of a model.

Note [Auxiliary losses in the graph]: a layer leaves its auxiliary loss on a node of the autograd graph through which
its output is computed, and `MoeLoss` collects what the graph of its loss contains. So there is no registry: forwards
without a loss, other models, other threads and evaluation leave nothing behind, a layer that runs twice counts twice,
and what activation checkpointing recomputes is not part of the graph.
The gradient takes the same way: the backward of `MoeLoss`, the first of all, leaves it on the nodes, and each node
passes it to its auxiliary loss when the gradient of the layer's output arrives. So all gradients of a layer come
through its output, where hooks of sharding plugins gather its weights.
A reentrant checkpoint computes its forward without a graph. There the values lie on the node of the checkpoint, from
which the layers that it recomputes take the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from booster.core.compiling import attach_to_output, not_compiled
from booster.errors import ConfigError
from booster.validation import is_non_nan_number

_ATTRIBUTE = "moe_auxiliary_loss"


def load_balance_loss(
    probabilities: Tensor,
    first_choice: Tensor,
    num_experts: int,
    sum_over_batch: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the load-balancing loss of a router, 1 if all experts are used alike (arXiv:2101.03961, equation 4).

    It is `num_experts` times the sum over experts of the mean probability of an expert and the share of tokens whose
    first choice it is. The shares have no gradient.

    Args:
        probabilities: Probabilities of a router, of shape (tokens, experts), in fp32.
        first_choice: Expert with the highest probability for each token, of shape (tokens,).
        num_experts: Number of experts.
        sum_over_batch: Reduction of a vector of sums over tokens: probabilities and tokens per expert, and the number
            of tokens. Optional; by default the means are those of the tokens given.
    """
    tokens_per_expert = probabilities.new_zeros(num_experts)
    tokens_per_expert.scatter_add_(0, first_choice, torch.ones_like(first_choice, dtype=probabilities.dtype))
    num_tokens = probabilities.new_full((1,), len(probabilities))
    sums = torch.cat([probabilities.sum(0), tokens_per_expert, num_tokens])
    if sum_over_batch is not None:
        sums = sum_over_batch(sums)
    mean_probability, share = (sums[:-1] / sums[-1].clamp(min=1)).chunk(2)
    return num_experts * (mean_probability * share.detach()).sum()


class _CarriedLoss:
    """Auxiliary losses of one node of an autograd graph.

    Attributes:
        value: Their sum.
        gradient: Gradient of each of them, during a backward; None if no `MoeLoss` depends on the node.
    """

    __slots__ = ("gradient", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.gradient: Tensor | None = None


class _Attach(torch.autograd.Function):
    """Identity of a tensor whose node carries an auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, auxiliary_loss: Tensor, carried: _CarriedLoss) -> Tensor:
        setattr(ctx, _ATTRIBUTE, carried)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient = getattr(ctx, _ATTRIBUTE).gradient
        return gradients[0], None if gradient is None else gradient.to(gradients[0].device), None


def attach_auxiliary_loss(tensor: Tensor, auxiliary_loss: Tensor) -> Tensor:
    """Return a copy of a tensor, with an auxiliary loss that `MoeLoss` adds to a loss computed from the copy.

    See Note [Auxiliary losses in the graph]. In a graph of torch.compile it is attached to the output of the layer.

    Args:
        tensor: Tensor that the layer's output depends on.
        auxiliary_loss: 0-dim tensor in fp32.
    """
    if torch.compiler.is_compiling():
        has_node = tensor.requires_grad or auxiliary_loss.requires_grad or not torch.is_grad_enabled()
        if not has_node or attach_to_output(_attach_first, auxiliary_loss):
            return tensor
    return _attach(tensor, auxiliary_loss)


def _attach_first(auxiliary_loss: Tensor, tensor: Tensor) -> Tensor:
    return _attach(tensor, auxiliary_loss)


@not_compiled
def _attach(tensor: Tensor, auxiliary_loss: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        _, recomputed = _reentrant_checkpoints()
        carried = getattr(recomputed, _ATTRIBUTE, None) or _CarriedLoss(auxiliary_loss.detach())
        return _Attach.apply(tensor, auxiliary_loss, carried)  # type: ignore[no-any-return, no-untyped-call]
    running, recomputed = _reentrant_checkpoints()
    if running is not None:
        carried = getattr(running, _ATTRIBUTE, None)
        if recomputed is not None:  # a checkpoint inside of a checkpoint, whose values are counted already
            setattr(running, _ATTRIBUTE, getattr(recomputed, _ATTRIBUTE, None))
        elif carried is None:
            setattr(running, _ATTRIBUTE, _CarriedLoss(auxiliary_loss.detach()))
        else:
            carried.value = carried.value + auxiliary_loss.detach()
    return tensor


@not_compiled
def detach_auxiliary_losses(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor for another process, such as a pipeline stage, and the auxiliary losses that it depends on.

    There `attach_auxiliary_loss` adds them to what is computed from the tensor; the gradients of both come back.

    Args:
        tensor: Tensor with an autograd graph.

    Returns:
        The tensor, and the sum of the losses in its graph, or None if there are none.
    """
    carried = _carried_losses(tensor)
    if not carried:
        return tensor, None
    total = torch.stack([one.value.to(tensor.device) for one in carried]).sum()
    return _Detach.apply(tensor, total, carried)  # type: ignore[no-any-return, no-untyped-call]


def _reentrant_checkpoints() -> tuple[Any, Any]:
    """Return the nodes of the reentrant checkpoints that this thread runs, and recomputes; None where there is none.

    torch gives no access to them but through their frames: `ctx` is the node.
    """
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        return None, None  # the usual case: neither a forward without a graph nor a backward
    running, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return running, frame.f_locals["ctx"]
        if frame.f_code is CheckpointFunction.forward.__code__:  # of nested ones, the outermost is in the graph
            running = frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
    return running, None


@not_compiled
def is_training_forward() -> bool:
    """Return whether a forward with a later backward runs, and not its recomputation by activation checkpointing."""
    running, recomputed = _reentrant_checkpoints()
    if recomputed is not None or torch._C._current_graph_task_id() != -1:
        return False
    return torch.is_grad_enabled() or running is not None


def _carried_losses(loss: Tensor) -> list[_CarriedLoss]:
    """Return what the nodes of a loss's graph carry. About a microsecond per node."""
    found, pending, seen = [], [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        carried = getattr(node, _ATTRIBUTE, None)
        if carried is not None:
            found.append(carried)
        pending.extend(next_node for next_node, _ in node.next_functions)
    return found


def _give_gradient(carried: Sequence[_CarriedLoss], gradient: Tensor) -> None:
    """Set the gradient of carried losses until the end of the backward that runs."""
    for one in carried:
        one.gradient = gradient if one.gradient is None else one.gradient + gradient

    def clear() -> None:
        for one in carried:
            one.gradient = None

    torch.autograd.Variable._execution_engine.queue_callback(clear)  # type: ignore[attr-defined]


class _Detach(torch.autograd.Function):
    """Identity of a tensor and of the sum of the auxiliary losses in its graph, which get the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: Tensor, carried: Sequence[_CarriedLoss]) -> tuple[Tensor, Tensor]:
        ctx.carried = carried
        return tensor.view_as(tensor), total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        _give_gradient(ctx.carried, gradients[1])
        return gradients[0], None, None


class _AddAuxiliaryLosses(torch.autograd.Function):
    """Sum of a loss and weighted auxiliary losses, which get their gradient through the nodes that carry them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, total: Tensor, weight: float, carried: Sequence[_CarriedLoss]) -> Tensor:
        ctx.weight, ctx.carried = weight, carried
        return loss + weight * total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _give_gradient(ctx.carried, (gradients[0].float() * ctx.weight).sum())
        return gradients[0], None, None, None


class MoeLoss(nn.Module):
    """Criterion: a loss, plus the weighted sum of the auxiliary losses of the MoE layers that it depends on.

    The layers are those in the autograd graph of the loss; see Note [Auxiliary losses in the graph]. Without a graph,
    as in evaluation under `torch.no_grad()`, the loss is returned as it is.

    Attributes:
        auxiliary_loss: Unweighted sum of the auxiliary losses in the latest call, detached; None before one.

    Args:
        aux_weight: Weight of the auxiliary losses; the papers use 0.01.
        loss_fn: Class of a criterion, or a callable.
        *args: Positional arguments of the class.
        **kwargs: Keyword arguments of the class.

    Raises:
        ConfigError: An argument is invalid.
    """

    auxiliary_loss: Tensor | None = None

    def __init__(self, aux_weight: float, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if not is_non_nan_number(aux_weight) or aux_weight < 0:
            raise ConfigError(f"aux_weight={aux_weight!r} is not a weight: give a non-negative number, such as 0.01")
        if not callable(loss_fn) or (not isinstance(loss_fn, type) and (args or kwargs)):
            raise ConfigError(
                f"loss_fn={loss_fn!r} is not a class that takes the arguments {(*args, *kwargs)!r}: give a class,"
                " such as nn.CrossEntropyLoss, and its arguments, or a callable alone"
            )
        self.aux_weight = aux_weight
        self.loss_fn = loss_fn(*args, **kwargs) if isinstance(loss_fn, type) else loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss with the auxiliary losses.

        Args:
            *args: Positional arguments of the criterion.
            **kwargs: Keyword arguments of the criterion.

        Raises:
            ConfigError: The loss is not a tensor, or was computed from the output of no MoE layer.
        """
        loss = self.loss_fn(*args, **kwargs)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"loss_fn of MoeLoss returned {type(loss).__name__}, to which no auxiliary loss can be added: let it"
                " return a tensor"
            )
        if not loss.requires_grad:
            return loss
        carried = _carried_losses(loss)
        if not carried:
            raise ConfigError(
                "MoeLoss got a loss that does not depend on an MoE layer, so that there is no auxiliary loss to add:"
                " compute it from the output of a model with MoeLayer or MoeModule, not detached, or use the criterion"
                " without MoeLoss. Checkpoints other than those of torch.utils.checkpoint hide their layers"
            )
        total = torch.stack([one.value.to(loss.device) for one in carried]).sum()
        self.auxiliary_loss = total
        return _AddAuxiliaryLosses.apply(loss, total, self.aux_weight, carried)  # type: ignore[no-any-return, no-untyped-call]
