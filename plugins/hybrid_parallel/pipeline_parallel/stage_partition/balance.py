"""Balanced partition of a model's layers into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tp_plan.attention_heads import first_number

from .stage_plan import StagePlan, listed

# Note [Cost of a layer]
# The compute per token of a module is that of its matmuls, proportional to the number of weight elements used by a
# token. Weights of fewer than two dimensions and embedding tables (lookups) cost nothing. Of the experts the share that
# a token is routed to counts. A tied weight counts in each module, as a head tied to the embedding is still a matmul.
# Costs that depend on the sequence length (attention scores) are left out, as they are equal in all layers.


def partition_layers(
    model: nn.Module, plan: StagePlan, num_positions: int, num_layers_per_stage: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the bounds of each chunk of a model, as in `StagePlan.bounds`.

    Minimizes the largest cost of a chunk; see Note [Cost of a layer]. Ties prefer even numbers of layers, then fewer
    layers in the first chunks, since the first stages keep the activations of most microbatches.

    Args:
        model: The user's full model; it may be on the meta device.
        plan: Stage plan of the model.
        num_positions: Number of chunks: stages times chunks per stage.
        num_layers_per_stage: Number of layers of each chunk, by position, instead; checked by `PipelineArguments`.

    Raises:
        ConfigError: There are fewer layers than chunks, or the numbers do not add up to the model's layers.
    """
    num_layers = len(plan.layers)
    if num_layers_per_stage is not None:
        if sum(num_layers_per_stage) != num_layers:
            raise ConfigError(
                f"num_layers_per_stage={num_layers_per_stage!r} adds up to {sum(num_layers_per_stage)} layers, but the"
                f" model has {num_layers} ({listed(plan.layers)}): give {num_positions} numbers whose sum is"
                f" {num_layers}"
            )
        return (0, *accumulate(num_layers_per_stage))
    if plan.bounds is not None:
        return plan.bounds
    if num_layers < num_positions:
        raise ConfigError(
            f"the model has {num_layers} layers to divide ({listed(plan.layers)}), but the pipeline has {num_positions}"
            f" places (pp_size x num_model_chunks), each of which needs at least one: make that product at most"
            f" {num_layers}, or name smaller modules with split= or execution_sequence="
        )
    return _optimal_bounds(_prefix_costs(model, plan), num_layers, num_positions)


def layer_costs(model: nn.Module, plan: StagePlan) -> list[float]:
    """Return the estimated cost of each layer, in weight elements; see Note [Cost of a layer]."""
    share = _share_of_experts(model)
    return [_cost(model.get_submodule(name), share) for name in plan.layers]


def gap_costs(model: nn.Module, plan: StagePlan) -> list[float]:
    """Return the estimated cost of the modules in each gap, including the one after the last layer."""
    share = _share_of_experts(model)
    costs = [0.0] * (len(plan.layers) + 1)
    for name, gap in plan.gaps.items():
        costs[gap] += _cost(model.get_submodule(name), share)
    return costs


def chunk_costs(model: nn.Module, plan: StagePlan, bounds: tuple[int, ...]) -> list[float]:
    """Return the estimated cost of each chunk, with the modules in its gaps."""
    prefix = _prefix_costs(model, plan)
    return [prefix[end] - prefix[start] for start, end in pairwise(bounds)]


def _prefix_costs(model: nn.Module, plan: StagePlan) -> list[float]:
    """Return the prefix sums of the costs of layers and gaps: those up to each layer, from 0."""
    gaps = gap_costs(model, plan)
    own = [layer + gap for layer, gap in zip(layer_costs(model, plan), gaps[:-1], strict=True)]
    own[-1] += gaps[-1]
    return [0.0, *accumulate(own)]


def _optimal_bounds(prefix: list[float], num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Return the optimal partition by dynamic programming, in layers^2 * chunks steps."""
    # Smallest maximum cost of the layers from `start` on, by number of chunks.
    largest = {(num_layers, 0): 0.0}
    for chunks in range(1, num_chunks + 1):
        for start in range(num_layers - chunks, -1, -1):
            largest[start, chunks] = min(
                max(prefix[end] - prefix[start], largest[end, chunks - 1])
                for end in range(start + 1, num_layers + 1)
                if (end, chunks - 1) in largest
            )
    limit = largest[0, num_chunks]
    # Among partitions within that limit: least sum of squared layer counts, then least counts from the first on.
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(num_layers, 0): (0, ())}
    for chunks in range(1, num_chunks + 1):
        for start in range(num_layers - chunks, -1, -1):
            options = [
                (best[end, chunks - 1][0] + (end - start) ** 2, (end - start, *best[end, chunks - 1][1]))
                for end in range(start + 1, num_layers + 1)
                if (end, chunks - 1) in best and prefix[end] - prefix[start] <= limit
            ]
            if options:
                best[start, chunks] = min(options)
    return (0, *accumulate(best[0, num_chunks][1]))


def _cost(module: nn.Module, share_of_experts: float) -> float:
    cost = 0.0
    seen: set[int] = set()
    for name, one in module.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)):
            continue
        is_routed = any("expert" in part and "shared" not in part for part in name.split("."))
        share = share_of_experts if is_routed else 1.0
        for parameter in one.parameters(recurse=False):
            if parameter.dim() >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                cost += parameter.numel() * share
    return cost


def _share_of_experts(model: nn.Module) -> float:
    """Return the share of the experts that a token is routed to, if it is in the model's config."""
    for module in model.modules():
        config = getattr(module, "config", None)
        chosen = first_number(config, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"))
        there = first_number(config, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
        if chosen and there:
            return min(1.0, chosen / there)
    return 1.0
