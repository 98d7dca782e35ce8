"""Loads of the experts of a model while it trains: tokens per expert, dropped ones, and the entropy of the routers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.comm import all_gather_bytes
from booster.interface import ModelWrapper
from booster.moe.discovery import ExpertsEntry, experts_entry, experts_in
from booster.moe.loss import is_training_forward
from booster.moe.routers import Router


@dataclass(slots=True, eq=False)
class _Layer:
    """Sums over a layer's forwards on this rank's device; None before the first one.

    Attributes:
        tokens: Tokens of each expert.
        dropped: Number of dropped assignments.
        entropy: Sum of the entropies of the router's probabilities, and number of tokens.
    """

    tokens: torch.Tensor | None = None
    dropped: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def add(self, tokens: torch.Tensor, dropped: torch.Tensor) -> None:
        self.tokens = tokens if self.tokens is None else self.tokens + tokens
        self.dropped = dropped if self.dropped is None else self.dropped + dropped

    def add_entropy(self, probabilities: torch.Tensor) -> None:
        entropies = torch.special.entr(probabilities).sum(-1)
        sums = torch.stack([entropies.sum(), entropies.new_tensor(float(len(entropies)))])
        self.entropy = sums if self.entropy is None else self.entropy + sums


class ExpertLoads:
    """Loads of a boosted model's experts on this rank, counted by hooks between `attach` and `detach`.

    A layer is the block with the router and the experts. Forwards that train count, without their recomputation by
    activation checkpointing. The entropy of a router is that of the softmax of its logits, or of the normalized
    sigmoids of a router with a correction bias, as in DeepSeek-V3. It is known for routers of `booster.moe` and those
    whose logits transformers captures.

    Args:
        model: Boosted model.
    """

    def __init__(self, model: ModelWrapper) -> None:
        self._model = model
        self._layers: dict[str, _Layer] = {}
        self._handles: list[Any] = []

    def attach(self) -> bool:
        """Register the hooks; return whether this rank has experts."""
        model = self._model.unwrap()
        modules = dict(model.named_modules())
        observe = getattr(self._model, "observe_expert_loads", None)
        if observe is not None and (handle := observe(self._count_dispatched)) is not None:
            self._handles.append(handle)  # experts that several ranks share
        else:
            for name in modules:
                entry = experts_entry(name, modules)
                if entry is not None:
                    self._hook_experts(entry, modules[name])
        has_experts = bool(self._handles)
        if has_experts:
            self._handles += _hook_routers(modules, self._add_entropy)
        return has_experts

    def detach(self) -> None:
        """Remove the hooks and drop the sums."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._layers = [], {}

    def take(self) -> dict[str, list[float]]:
        """Return the sums of each layer since the last call, and reset them. One read of the device."""
        layers, self._layers = self._layers, {}
        flat = [
            torch.cat([layer.tokens.double(), layer.dropped.double().view(1), _pair(layer.entropy, layer.tokens)])
            for layer in layers.values()
            if layer.tokens is not None and layer.dropped is not None
        ]
        if not flat:
            return {}
        numbers = iter(torch.cat(flat).tolist())
        names = [name for name, layer in layers.items() if layer.tokens is not None]
        return {name: [next(numbers) for _ in range(len(one))] for name, one in zip(names, flat, strict=True)}

    def _layer(self, name: str) -> _Layer:
        return self._layers.setdefault(name.rpartition(".")[0], _Layer())

    def _is_training(self) -> bool:
        return self._model.training and is_training_forward()

    def _hook_experts(self, entry: ExpertsEntry, module: nn.Module) -> None:
        if entry.is_looped:
            for number, (_, expert) in enumerate(experts_in(module)):
                hook = partial(self._count_call, entry, number)
                self._handles.append(expert.register_forward_pre_hook(hook))
        else:
            hook = partial(self._count_routed, entry)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _count_call(self, entry: ExpertsEntry, number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_training():
            tokens = torch.zeros(entry.num_experts, dtype=torch.int64)
            tokens[number] = args[0].shape[:-1].numel()
            self._layer(entry.name).add(tokens, torch.zeros((), dtype=torch.int64))

    def _count_routed(
        self, entry: ExpertsEntry, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if not self._is_training():
            return
        given = [*args, *kwargs.values()]
        if len(given) == 1:  # a block of scaled tokens for each expert, as in Llama 4
            counts = (given[0].detach().flatten(0, -2) != 0).any(-1).view(entry.num_experts, -1).sum(1)
            self._layer(entry.name).add(counts, counts.new_zeros(()))
            return
        index = given[1]
        if index.dim() == 3:  # one-hot, where zeros drop a token
            counts, total = index.flatten(0, -2).long().sum(0), index.shape[:-1].numel()
        else:  # another index drops an assignment
            flat, total = index.flatten(), index.numel()
            flat = torch.where((flat >= 0) & (flat < entry.num_experts), flat, entry.num_experts)
            counts = flat.new_zeros(entry.num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:-1]
        self._layer(entry.name).add(counts, total - counts.sum())

    def _count_dispatched(self, name: str, tokens: torch.Tensor, dropped: torch.Tensor) -> None:
        if self._is_training():
            self._layer(name).add(tokens, dropped)

    def _add_entropy(self, name: str, logits: torch.Tensor, *, is_sigmoid: bool) -> None:
        if not self._is_training():
            return
        logits = logits.detach().flatten(0, -2).float()
        if is_sigmoid:
            scores = logits.sigmoid()
            self._layer(name).add_entropy(scores / scores.sum(-1, keepdim=True))
        else:
            self._layer(name).add_entropy(logits.softmax(-1))


def _pair(entropy: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(2, dtype=torch.float64) if entropy is None else entropy.double().to(like.device)


def _hook_routers(modules: Mapping[str, nn.Module], add: Callable[..., None]) -> Iterator[Any]:
    """Register hooks that pass on the logits of routers."""

    def of_router(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        add(name, args[0], is_sigmoid=False)

    def of_transformers(
        name: str, index: int, is_sigmoid: bool, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        add(name, output[index] if isinstance(output, tuple) else output, is_sigmoid=is_sigmoid)

    for name, module in modules.items():
        if isinstance(module, Router):
            yield module.register_forward_pre_hook(partial(of_router, name))
    for name, module, index in _routers_of_transformers(modules):
        tensors = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        if tensors:  # otherwise it is on another pipeline stage
            is_sigmoid = any(key.endswith("correction_bias") for key in tensors)
            yield module.register_forward_hook(partial(of_transformers, name, index, is_sigmoid))


def _routers_of_transformers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the modules whose outputs transformers captures as router logits, and their index in the output."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for prefix, model in modules.items():
        recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", ())
        for spec in recorded if isinstance(recorded, Sequence) else (recorded,):
            kind: Any = getattr(spec, "target_class", spec)
            layer = getattr(spec, "layer_name", None)
            for own_name, module in model.named_modules() if isinstance(kind, type) else ():
                is_named = layer is None or f".{layer.strip('.')}." in f".{own_name}."
                if isinstance(module, kind) and is_named:
                    name = f"{prefix}.{own_name}" if prefix else own_name
                    found[name] = module, getattr(spec, "index", 0)
    for name, (module, index) in found.items():
        yield name, module, index


def aggregate_loads(
    local: Mapping[str, Sequence[float]], *, num_copies: int, across_ranks: bool
) -> dict[str, dict[str, Any]]:
    """Aggregate the sums of all ranks.

    Args:
        local: Result of `ExpertLoads.take` on this rank.
        num_copies: Number of ranks that compute the same tokens.
        across_ranks: If False, the result describes this rank only and no communication takes place.

    Returns:
        By layer: `tokens` of each expert, `dropped` assignments, and `entropy`, the mean in nats, or None if the
        router's logits are unknown.

    Collective: yes if `across_ranks`.
    """
    rows: list[Mapping[str, Sequence[float]]] = [local]
    if across_ranks:
        payloads, of_rank = all_gather_bytes(json.dumps(local).encode())
        rows = [json.loads(payloads[index]) for index in of_rank]
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        sums = [sum(column) for column in zip(*(row[name] for row in rows if name in row), strict=True)]
        *tokens, dropped, entropy, num_entropies = sums
        found[name] = {
            "tokens": [round(one / num_copies) for one in tokens],
            "dropped": round(dropped / num_copies),
            "entropy": entropy / num_entropies if num_entropies else None,
        }
    return found
