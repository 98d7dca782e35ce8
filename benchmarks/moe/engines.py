"""What benchmarks/moe/run.py compares: a training step, the dispatch alone, and a layer, each beside its rival."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _harness.pair import Engine, Step
from torch import nn

__all__ = [
    "ALIKE",
    "DEEPSPEED",
    "DISPATCH",
    "EP",
    "LAYER",
    "MESSAGES",
    "dispatch_engines",
    "layer_engines",
    "step_engines",
]

ALIKE = "HybridParallel, dp 2"
EP = "HybridParallel, ep 2"
MESSAGES = "its copies and messages"
DISPATCH = "dispatch and return"
DEEPSPEED = "DeepSpeed MoE"
LAYER = "booster.moe, ep 2"

_NUM_BATCHES = 8
# Experts are about half of the weights.
_VOCABULARY, _WIDTH, _INNER, _LAYERS, _EXPERTS, _TOP_K = 16384, 256, 512, 4, 8, 2
_SAMPLES, _LENGTH = 4, 128
# Of one layer: tokens of a rank, and features.
_TOKENS, _FEATURES, _FEATURES_INSIDE = 2048, 512, 1024
_CAPACITY_FACTOR = 1.0


def step_engines() -> list[Engine]:
    """Returns the training step with all experts on each rank, and with half of them."""
    return [
        Engine(name=ALIKE, build=partial(_build_step, 1), requires=("booster", "transformers")),
        Engine(name=EP, build=partial(_build_step, 2), requires=("booster", "transformers")),
    ]


def dispatch_engines() -> list[Engine]:
    """Returns the dispatch with nothing computed between, and only what it has to copy and to send."""
    return [
        Engine(name=MESSAGES, build=_build_messages, requires=("booster",)),
        Engine(name=DISPATCH, build=_build_dispatch, requires=("booster",)),
    ]


def layer_engines() -> list[Engine]:
    """Returns forward and backward of a layer with DeepSpeed's, and with ours."""
    return [
        Engine(name=DEEPSPEED, build=_build_deepspeed, requires=("deepspeed",)),
        Engine(name=LAYER, build=_build_layer, requires=("booster",)),
    ]


def _build_step(ep_size: int) -> Step:
    import transformers

    from booster import Booster
    from booster.plugins import HybridParallelPlugin

    config = transformers.MixtralConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=_EXPERTS,
        num_experts_per_tok=_TOP_K,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", ep_size=ep_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, *_ = booster.boost(model, optimizer)
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = torch.randint(_VOCABULARY, (_NUM_BATCHES, _SAMPLES, _LENGTH), generator=draw)

    def step(index: int) -> torch.Tensor:
        tokens = batches[index % _NUM_BATCHES]
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a rank's tokens, the experts of each, and their weights."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randn(_TOKENS, _FEATURES, generator=draw)
    weights, index = torch.rand(_TOKENS, _EXPERTS, generator=draw).softmax(-1).topk(_TOP_K)
    return tokens, index, weights


def _bounds() -> list[int]:
    return [rank * _EXPERTS // dist.get_world_size() for rank in range(dist.get_world_size() + 1)]


def _build_dispatch() -> Step:
    from booster.plugins.hybrid_parallel.expert_parallel.dispatch import (
        plan_dispatch,
        start_return_tokens,
        start_send_tokens,
    )

    tokens, index, weights = _routing()
    tokens.requires_grad_()
    weights.requires_grad_()
    bounds = _bounds()

    def step(_: int) -> float:
        dispatch = plan_dispatch(index, bounds, None)
        rows, row_weights = start_send_tokens(tokens, weights, dispatch).wait()
        output = start_return_tokens(rows * row_weights[:, None], dispatch).wait()
        output.backward(torch.ones_like(output))
        tokens.grad = weights.grad = None
        return 0.0

    return step


def _build_messages() -> Step:
    """Two gathers of rows and two sums of a token's rows, with the messages between, all planned before.

    And the product with the weights in between with its gradient, which the dispatch has to carry.
    """
    from booster.comm import all_to_all_single
    from booster.plugins.hybrid_parallel.expert_parallel.dispatch import plan_dispatch

    tokens, index, weights = _routing()
    dispatch = plan_dispatch(index, _bounds(), None)
    source, order = dispatch.order // _TOP_K, dispatch.order
    sent, received, largest = dispatch.sent, dispatch.received, dispatch.largest

    def exchange(rows: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
        width = rows.shape[1]
        output = rows.new_empty(sum(incoming), width)
        all_to_all_single(
            output.view(-1),
            rows.view(-1),
            None,
            output_sizes=[width * count for count in incoming],
            payload_sizes=[width * count for count in outgoing],
            largest_size=width * largest,
        )
        return output

    def sum_rows(rows: torch.Tensor) -> torch.Tensor:
        placed = torch.empty(_TOKENS * _TOP_K, rows.shape[1]).index_copy_(0, order, rows)
        return placed.view(_TOKENS, _TOP_K, -1).sum(1)

    def step(_: int) -> float:
        rows = exchange(tokens[source], sent, received)
        row_weights = exchange(weights.view(-1)[order].view(-1, 1), sent, received)
        output = sum_rows(exchange(rows * row_weights, received, sent))
        gradient = exchange(torch.ones_like(output)[source], sent, received)
        weight_gradient = (gradient * rows).sum(1, keepdim=True)
        exchange(weight_gradient, received, sent)
        sum_rows(exchange(gradient * row_weights, received, sent))
        return 0.0

    return step


def _feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(_FEATURES, _FEATURES_INSIDE), nn.GELU(), nn.Linear(_FEATURES_INSIDE, _FEATURES))


def _layer_step(run: Callable[[torch.Tensor], torch.Tensor], parameters: Any) -> Step:
    tokens, _, _ = _routing()
    tokens = tokens.view(_NUM_BATCHES, -1, _FEATURES).requires_grad_()
    owned = list(parameters)

    def step(_: int) -> float:
        run(tokens).square().mean().backward()
        tokens.grad = None
        for parameter in owned:
            parameter.grad = None
        return 0.0

    return step


def _build_layer() -> Step:
    from booster.core.shard_spec import ShardSpec
    from booster.moe import FFNExperts, MoeLayer, Top2Router
    from booster.plugins.hybrid_parallel.expert_parallel.dispatch import Capacity
    from booster.plugins.hybrid_parallel.expert_parallel.experts import ExpertParallelGroup, make_expert_parallel

    torch.manual_seed(0)
    router = Top2Router(capacity_factor_train=_CAPACITY_FACTOR, drop_tks=False)
    layer = MoeLayer(_FEATURES, _EXPERTS, router, FFNExperts(_EXPERTS, _FEATURES, _FEATURES_INSIDE))
    group = ExpertParallelGroup.of(None, Capacity(factor=_CAPACITY_FACTOR, minimum=4, drops=True))
    bounds = _bounds()
    for parameter in layer.experts.parameters():
        spec = ShardSpec.unsharded(parameter.shape).experts(*bounds[group.rank : group.rank + 2])
        parameter.data = spec.shard(parameter.data)
    make_expert_parallel(layer.experts, "experts", group, bounds, is_stacked=True)
    return _layer_step(layer, layer.parameters())


def _build_deepspeed() -> Step:
    import deepspeed
    from deepspeed.moe.layer import MoE

    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        layer = MoE(
            hidden_size=_FEATURES,
            expert=_feed_forward(),
            num_experts=_EXPERTS,
            ep_size=dist.get_world_size(),
            k=_TOP_K,
            capacity_factor=_CAPACITY_FACTOR,
            min_capacity=4,
        )
        layer.set_deepspeed_parallelism()
    return _layer_step(lambda tokens: layer(tokens)[0], layer.parameters())
