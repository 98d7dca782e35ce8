"""TorchFSDPPlugin: ranks that run different branches of a model train as one process."""

from __future__ import annotations

import pytest
import torch
from fsdp_model_cases import Routes, _go, _own_branch, grid, slow
from fsdp_twins import STRATEGIES, FSDPTwins, small_units
from gemini_models import (
    square_loss,
)
from harness import distributed, run_ranks

pytestmark = pytest.mark.on_device


def _one_branch(rank, step):
    return [[0], []][min(rank, 1)]


def _early_exit(rank, step):
    return list(range(1 + (rank + step) % 5))


def _layer_drop(rank, step):
    kept = torch.rand(6, generator=torch.Generator().manual_seed(10 * step + rank)) < 0.6
    return [number for number in range(6) if kept[number]]


def _own_order(rank, step):
    return torch.randperm(6, generator=torch.Generator().manual_seed(10 * step + rank)).tolist()


def _several_times(rank, step):
    return [rank % 6] * (1 + (rank + step) % 3)


def _alike_at_first(rank, step):
    return [0, 1, 2] if step == 0 else _layer_drop(rank, step)


WAYS = {
    way.__name__.strip("_"): way
    for way in (_one_branch, _own_branch, _early_exit, _layer_drop, _own_order, _several_times, _alike_at_first)
}


def go_own_ways(way, variant, arguments, has_plain_backward=False):
    twins = FSDPTwins(
        lambda: Routes(variant == "checkpointed"),
        _go(WAYS[way], variant),
        build_plain=Routes,
        calls_plain_backward=has_plain_backward,
        **arguments,
    )
    twins.train(range(5)).assert_equal()


@pytest.mark.parametrize(
    ("way", "strategy", "world_size"),
    grid(
        WAYS,
        ["full", "grad op", "none"],
        [2, 3, 4],
        # Every way once; two of them elsewhere too.
        fast=lambda way, strategy, world_size: (
            (strategy, world_size) == ("full", 2)
            or ((strategy, world_size) in (("grad op", 3), ("full", 4)) and way in ("layer_drop", "own_order"))
        ),
    ),
)
def test_each_rank_goes_its_own_way(way, strategy, world_size):
    run_ranks(go_own_ways, world_size, way, "simple", STRATEGIES[strategy])


@pytest.mark.parametrize("way", [way if way in ("one_branch", "layer_drop") else slow(way) for way in WAYS])
def test_each_rank_goes_its_own_way_over_replicas(way):
    run_ranks(go_own_ways, 4, way, "simple", STRATEGIES["hybrid"])


@pytest.mark.parametrize(
    ("way", "variant", "backward"),
    grid(
        ["own_branch", "layer_drop", "own_order"],
        ["accumulated", "extra", "checkpointed", "evaluated", "two forwards"],
        ["booster", "plain"],
        fast=lambda way, variant, backward: (
            (way, backward) == ("layer_drop", "plain")
            or ((way, backward) == ("own_order", "booster") and variant in ("accumulated", "extra"))
        ),
    ),
)
def test_each_rank_goes_its_own_way_in_other_loops(way, variant, backward):
    run_ranks(go_own_ways, 2, way, variant, {}, backward == "plain")


@pytest.mark.parametrize("policy", [1, 600])
def test_each_rank_goes_its_own_way_through_other_units(policy):
    run_ranks(go_own_ways, 3, "layer_drop", "two forwards", {"auto_wrap_policy": small_units(policy)})


def _without_some(model, x, backward, rank, step):
    with torch.set_grad_enabled(rank == step % 2):
        hidden = (model.unwrap() if hasattr(model, "unwrap") else model).blocks[2](x)
    backward(square_loss(model(hidden, [1])))


@distributed(world_size=[slow(2), 3])
def test_a_rank_that_calls_a_block_by_itself_without_gradients():
    FSDPTwins(Routes, _without_some).train().assert_equal()
