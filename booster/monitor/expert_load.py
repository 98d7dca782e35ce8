"""Load of a model's experts while it trains: tokens of each expert, dropped ones, and the entropy of the routers.

Note [Counting experts]
Forward hooks count on the device, and the host reads the sums when a record is written. A token counts once for each of
its experts. What counts are forwards in training, without their recomputation by activation checkpointing. Where ranks
share the experts, the dispatch of tokens counts instead of hooks, because it knows which tokens it drops. A rank counts
the tokens that it routes, so that the sum over ranks is that of all tokens; tensor-parallel ranks route the same ones.
Hooks are traced by torch.compile with the layers that it compiles in the block. They do nothing for a layer that it has
compiled before, which has no load in the records.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from booster.comm import all_reduce_sum, host_group
from booster.interface import ModelWrapper
from booster.moe.discovery import (
    DISPATCH_OBSERVERS,
    DispatchObservers,
    ExpertsEntry,
    RouterEntry,
    experts_entry,
    experts_in,
    find_routers,
    takes_scaled_tokens,
)
from booster.moe.loss import is_training_forward

_NUM_TOTALS = 3  # behind the tokens of each expert: dropped ones, sum of entropies, tokens with an entropy


class ExpertLoad:
    """Load of the experts of this rank's layers since the last record; see Note [Counting experts].

    Args:
        model: Boosted model.

    Attributes:
        num_experts: Number of experts by name of the module of experts; first those of this rank, then set to those of
            all ranks, such as pipeline stages.
    """

    def __init__(self, model: ModelWrapper) -> None:
        self._model = model
        self._modules = dict(model.unwrap().named_modules())
        observed_of = ((module, module.__dict__.get(DISPATCH_OBSERVERS)) for module in self._modules.values())
        # Modules that dispatch tokens to the experts of several ranks, by name of the module of experts.
        self._dispatched: dict[str, tuple[nn.Module, DispatchObservers]] = {
            observed.name: (module, observed) for module, observed in observed_of if observed is not None
        }
        self._hooked: dict[str, ExpertsEntry] = {}
        if not self._dispatched:
            entries = (experts_entry(name, self._modules) for name in self._modules)
            self._hooked = {entry.name: entry for entry in entries if entry is not None}
        self.num_experts = {name: observed.num_experts for name, (_, observed) in self._dispatched.items()}
        self.num_experts |= {name: entry.num_experts for name, entry in self._hooked.items()}
        self._layers = {name: _Layer(number) for name, number in self.num_experts.items()}

    @contextmanager
    def observe(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, (module, observed) in self._dispatched.items():
                observer = partial(_count_dispatched, self._layers[name], module)
                observed.observers.append(observer)
                hooks.callback(observed.observers.remove, observer)
            for name, entry in self._hooked.items():
                for module, hook in _expert_hooks(entry, self._modules[name], self._layers[name]):
                    hooks.callback(module.register_forward_pre_hook(_OwnHook(hook), with_kwargs=True).remove)
            numbers = {name: layer.num_experts for name, layer in self._layers.items()}
            for name, routers in find_routers(self._model.unwrap(), numbers).items():
                for router in routers:
                    module = self._model.get_submodule(router.name)
                    hook = partial(_count_entropy, self._layers[name], router)
                    hooks.callback(module.register_forward_hook(_OwnHook(hook)).remove)
            yield

    def clear(self) -> None:
        for layer in self._layers.values():
            layer.device = None

    def record(self, *, across_ranks: bool) -> dict[str, dict[str, Any]]:
        """Return the load of each layer that had tokens.

        Args:
            across_ranks: If False, the load is that of this rank's tokens and no communication takes place.

        Returns:
            By name of the module of experts: `tokens` of each expert, `dropped` ones, and `entropy`, the mean in nats,
            or None if the router's logits are unknown.

        Collective: yes if `across_ranks`.
        """
        sizes = {name: number + _NUM_TOTALS for name, number in self.num_experts.items()}
        counted = {name: layer for name, layer in self._layers.items() if layer.device is not None}
        device = next((layer.device for layer in counted.values()), None)
        parts = [
            counted[name].totals().to(device) if name in counted else torch.zeros(size, dtype=torch.float64).to(device)
            for name, size in sizes.items()
        ]
        totals = torch.cat(parts).cpu()
        if across_ranks:
            totals = all_reduce_sum(totals, host_group()) / self._model.tensor_parallel_size
        split = totals.split(list(sizes.values()))
        loads = {name: _load(part.tolist()) for name, part in zip(sizes, split, strict=True)}
        return {name: load for name, load in loads.items() if sum(load["tokens"]) + load["dropped"]}


def sort_layers(num_experts: Mapping[str, int]) -> dict[str, int]:
    """Return the number of experts by layer, with the layers in the order of the numbers in their names."""

    def order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return {name: num_experts[name] for name in sorted(num_experts, key=order)}


def _load(totals: Sequence[float]) -> dict[str, Any]:
    *tokens, dropped, entropy, num_tokens = totals
    return {
        "tokens": [round(count) for count in tokens],
        "dropped": round(dropped),
        "entropy": entropy / num_tokens if num_tokens else None,
    }


class _Layer:
    """Sums over the forwards of one module of experts, on the device of its tokens."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.device: torch.device | None = None  # before the first forward

    def totals(self) -> Tensor:
        """Return tokens of each expert, dropped ones, the sum of entropies, and the number of their tokens."""
        return torch.cat([self._counts.double(), self._entropies])

    def add_index(self, index: Tensor) -> None:
        """Add the experts of tokens, of shape (tokens, k); or one-hot, of shape (..., experts)."""
        if index.dim() == 3:  # as in Switch Transformers: a row of zeros is a dropped token
            chosen = (index != 0).flatten(0, -2)
            kept = chosen.sum(0)
            self.add_counts(kept, chosen.shape[0] - kept.sum())
            return
        flat = index.reshape(-1).long()
        flat = torch.where((flat >= 0) & (flat < self.num_experts), flat, self.num_experts)
        self._allocate(flat.device)
        self._counts.scatter_add_(0, flat, torch.ones_like(flat))

    def add_counts(self, tokens: Tensor, dropped: Tensor | None = None) -> None:
        """Add the tokens of each expert, of shape (experts,), and the number of dropped ones."""
        self._allocate(tokens.device)
        self._counts[:-1] += tokens
        if dropped is not None:
            self._counts[-1] += dropped

    def add_call(self, number: int, tokens: Tensor) -> None:
        """Add the tokens that one expert is called with, of shape (..., features)."""
        self._allocate(tokens.device)
        self._counts[number] += tokens.shape[:-1].numel()

    def add_entropy(self, logits: Tensor, *, uses_sigmoid: bool) -> None:
        """Add the entropies of the tokens' probabilities of experts, from logits of shape (..., experts)."""
        logits = logits.float()
        if uses_sigmoid:  # normalized to a sum of one
            logits = nn.functional.logsigmoid(logits)
        self._allocate(logits.device)
        self._entropies[0] += torch.special.entr(logits.softmax(-1)).sum(dtype=torch.float64)
        self._entropies[1] += logits.shape[:-1].numel()

    def _allocate(self, device: torch.device) -> None:
        if self.device is None:
            self.device = device
            self._counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device)  # the last: dropped ones
            self._entropies = torch.zeros(2, dtype=torch.float64, device=device)


class _OwnHook:
    """Hook of this model, which deep copies of the model do not have."""

    def __init__(self, hook: Callable[..., None] | None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if self._hook is not None:
            self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnHook:
        return _OwnHook(None)


def _is_counted(module: nn.Module) -> bool:
    if not module.training:
        return False
    # What a graph recomputes is decided after it was traced.
    return torch.is_grad_enabled() if torch.compiler.is_compiling() else is_training_forward()


def _expert_hooks(
    entry: ExpertsEntry, module: nn.Module, layer: _Layer
) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
    """Yield the modules whose calls count, and their hooks."""
    if entry.is_looped:
        for number, (_, expert) in enumerate(experts_in(module)):
            yield expert, partial(_count_called, layer, number)
    elif takes_scaled_tokens(module):
        yield module, partial(_count_scaled, layer)
    else:
        name = list(inspect.signature(module.forward).parameters)[1]
        yield module, partial(_count_routed, layer, name)


def _count_routed(layer: _Layer, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    if _is_counted(module):
        index: Tensor = args[1] if len(args) > 1 else kwargs[name]
        layer.add_index(index.detach())


def _count_scaled(layer: _Layer, module: nn.Module, args: Any, kwargs: Any) -> None:
    if _is_counted(module):
        tokens: Tensor = next(iter((*args, *kwargs.values())))
        is_routed = (tokens.detach() != 0).any(-1).view(layer.num_experts, -1)
        layer.add_counts(is_routed.sum(1))


def _count_called(layer: _Layer, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    if _is_counted(module):
        layer.add_call(number, next(iter((*args, *kwargs.values()))))


def _count_dispatched(layer: _Layer, module: nn.Module, tokens: Tensor, dropped: Tensor) -> None:
    if _is_counted(module):
        layer.add_counts(tokens, dropped)


def _count_entropy(layer: _Layer, router: RouterEntry, module: nn.Module, args: Any, output: Any) -> None:
    logits = output[router.index] if isinstance(output, (tuple, list)) else output
    if _is_counted(module) and logits.shape[-1] == layer.num_experts:
        layer.add_entropy(logits.detach(), uses_sigmoid=router.uses_sigmoid)
