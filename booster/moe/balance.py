"""Load balancing over the global batch: by auxiliary losses of all ranks' tokens, or by biases.

An auxiliary loss is a product of means over tokens, so the mean over ranks of their losses is not the loss of the
global batch. Here every rank computes the loss of all ranks' tokens, with the gradient of its own times the number of
ranks, because the gradients of ranks are averaged.

A bias of each expert that only decides which ones are chosen balances without a loss: Wang et al., "Auxiliary-Loss-Free
Load Balancing Strategy for Mixture-of-Experts", 2024 (arXiv:2408.15664), as in DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.comm import all_gather_equal, all_gather_numbers, all_reduce_sum, group_rank, group_size
from booster.core.opaque_operator import opaque
from booster.errors import ConfigError
from booster.validation import is_non_nan_number

from .loss import is_training_forward
from .routers import Router

_LOSS = "load_balancing_loss_func"  # of transformers' modules; every model file has its own


def global_load_balancing(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make the auxiliary losses of a model those of the global batch while it trains, in place.

    The losses of routers of `booster.moe`, and those that models of transformers compute with
    `output_router_logits=True`. A second call replaces the group.

    Args:
        model: The user's model, boosted or not.
        group: Ranks that read different data; optional, defaults to the world. With a plugin that has several axes it
            is `plugin.data_group`.

    Raises:
        ConfigError: The model has neither.

    Collective: no; every forward in training mode is, over the group, on all its ranks equally often.
    """
    if not balance_globally(model, group):
        raise ConfigError(
            f"global_load_balancing() found no auxiliary loss in {type(model).__name__}: no router of booster.moe and"
            f" no model of transformers with a {_LOSS}. Give the model that has them, or leave the call out"
        )


def balance_globally(model: nn.Module, group: dist.ProcessGroup | None) -> bool:
    """Do what `global_load_balancing` does; return whether the model has auxiliary losses."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.sum_over_batch = functools.partial(_sum_over_group, _number_of(group))
    computing = _outermost(model)
    for module, file in computing:
        _balance_globally(module, file, group)
    return bool(routers or computing)


def _outermost(module: nn.Module) -> list[tuple[nn.Module, ModuleType]]:
    """Return the outermost modules whose model file has a loss function, with the files."""
    file = _file_of(module)
    if file is not None:
        return [(module, file)]
    return [one for child in module.children() for one in _outermost(child)]


class _Sum(torch.autograd.Function):
    """Sum over ranks, with the gradient of this rank's part times their number."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, sums: Tensor) -> Tensor:
        ctx.num_ranks = group_size(group)
        return all_reduce_sum(sums.clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0] * ctx.num_ranks


_groups: list[dist.ProcessGroup | None] = []  # operators of graphs take their numbers


def _number_of(group: dist.ProcessGroup | None) -> int:
    if not any(group is one for one in _groups):
        _groups.append(group)
    return next(number for number, one in enumerate(_groups) if one is group)


_sum_over_group = opaque(
    lambda number, sums: _Sum.apply(_groups[number], sums),  # type: ignore[no-untyped-call]
    lambda number, sums: torch.empty_like(sums),
)

# Losses of transformers: the function gets the router logits of all ranks.


class _Running(threading.local):
    """Forwards that run in this thread, the innermost last: whether the model trains, and its group."""

    def __init__(self) -> None:
        self.forwards: list[tuple[bool, dist.ProcessGroup | None]] = []


_running = _Running()


def _file_of(module: nn.Module) -> ModuleType | None:
    """Return the model file of transformers, with a loss function, that a module's class comes from."""
    files = (sys.modules.get(one.__module__) for one in type(module).__mro__)  # plugins derive classes
    return next((file for file in files if hasattr(file, _LOSS)), None)


def _balance_globally(module: nn.Module, file: ModuleType, group: dist.ProcessGroup | None) -> None:
    original = getattr(file, _LOSS)
    if not isinstance(original, _GlobalLoss):
        setattr(file, _LOSS, _GlobalLoss(original))
    hooks = getattr(module, "_global_load_balancing", None)
    for hook in hooks or ():
        hook.remove()
    module._global_load_balancing = (  # type: ignore[assignment]
        module.register_forward_pre_hook(_Enter(group)),
        module.register_forward_hook(_leave, always_call=True),
    )


class _Enter:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, module: nn.Module, args: Any) -> None:
        _running.forwards.append((module.training, self._group))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Enter:
        return self


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _running.forwards.pop()


class _GlobalLoss:
    """A loss function of transformers that gets all ranks' tokens in forwards of models that balance globally."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._signature.bind(*args, **kwargs).arguments
        logits, mask = arguments.get("gate_logits"), arguments.get("attention_mask")
        trains, group = _running.forwards[-1] if _running.forwards else (False, None)
        # Switch Transformers' and NLLB-MoE's have other arguments: a product of means in each sequence, whose mean over
        # ranks is that of the global batch.
        if not trains or not torch.is_grad_enabled() or not isinstance(logits, tuple):
            return self._original(*args, **kwargs)
        arguments["gate_logits"] = tuple(_gather(logits, group))
        if mask is not None:
            (flat,) = _gather([mask.reshape(-1)], group)
            arguments["attention_mask"] = flat.view(1, -1)
        return self._original(**arguments)


def _gather(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> Iterator[Tensor]:
    lengths = all_gather_numbers([len(tensor) for tensor in tensors], group)
    for number, tensor in enumerate(tensors):
        yield _Gather.apply(tensor, group, [row[number] for row in lengths])  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """All ranks' tensors along dim 0, with the gradient of this rank's part times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, lengths: Sequence[int]) -> Tensor:
        longest, rank = max(lengths), group_rank(group)
        ctx.num_ranks, ctx.own = len(lengths), slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        joined = all_gather_equal(padded, group).view(len(lengths), longest, *tensor.shape[1:])
        return torch.cat([block[:length] for block, length in zip(joined, lengths, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own] * ctx.num_ranks, None, None


# Balance without a loss.

_BIAS = "e_score_correction_bias"  # of transformers' routers, which add it to the scores that they choose by


@dataclass(slots=True, eq=False)
class _Balanced:
    """A router with a bias.

    Attributes:
        gate: Module with the bias.
        bias: The bias in fp32: steps are too small for a buffer in low precision.
        counts: Tokens of each expert since the last step, on this rank; None before the first forward.
    """

    gate: nn.Module
    bias: Tensor
    counts: Tensor | None = None

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not module.training or not is_training_forward():
            return
        index = [*args, *kwargs.values()][1].reshape(-1).clamp(max=len(self.bias))  # a larger one is a dropped token
        if self.counts is None:
            self.counts = index.new_zeros(len(self.bias) + 1)
        self.counts.scatter_add_(0, index, torch.ones_like(index))


class LossFreeBalancing:
    """Updates the routers' biases of a model so that all experts get equally many tokens of the global batch.

    The bias of an expert with fewer tokens than the mean grows by `rate`, that of one with more shrinks by it. It has
    no gradient and is part of the model's state.

    Args:
        model: The user's model, boosted or not, with routers of transformers that have an `e_score_correction_bias`.
        rate: Size of an update.
        group: Ranks that read different data; optional, defaults to the world. With a plugin that has several axes it
            is `plugin.data_group`.

    Raises:
        ConfigError: The model has no such routers, or the rate is invalid.
    """

    def __init__(self, model: nn.Module, rate: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
        if not is_non_nan_number(rate) or not 0 < rate < 1:
            raise ConfigError(f"rate={rate!r} is not a size of updates: give a number between 0 and 1, such as 1e-3")
        self._rate, self._group = rate, group
        self._routers: list[_Balanced] = []
        for gate, experts in _routers_of(model):
            bias: Tensor = getattr(gate, _BIAS)
            router = _Balanced(gate, bias.detach().float().clone())
            experts.register_forward_pre_hook(router.count, with_kwargs=True)
            self._routers.append(router)
        if not self._routers:
            raise ConfigError(
                f"LossFreeBalancing() found no router with an {_BIAS} beside a module `experts` in"
                f" {type(model).__name__}: give a model that has them, such as DeepSeek-V3, or use an auxiliary loss"
            )

    @torch.no_grad()
    def step(self) -> None:
        """Update the biases by the tokens since the last call; call it once a step, after the optimizer's.

        Collective: over the group.
        """
        for router in self._routers:
            counts = torch.zeros_like(router.bias) if router.counts is None else router.counts[:-1].float()
            counts, router.counts = all_reduce_sum(counts.contiguous(), self._group), None
            current: Tensor = getattr(router.gate, _BIAS)
            if not torch.equal(current, router.bias.to(current)):  # loaded, or changed by the user
                router.bias = current.detach().float().clone()
            router.bias = router.bias.to(current.device) + self._rate * (counts.mean() - counts).sign()
            current.copy_(router.bias)


def _routers_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules with a bias, and the experts beside them."""
    for block in model.modules():
        experts = getattr(block, "experts", None)
        for _, gate in block.named_children() if isinstance(experts, nn.Module) else ():
            if isinstance(getattr(gate, _BIAS, None), Tensor) and isinstance(experts, nn.Module):
                yield gate, experts
