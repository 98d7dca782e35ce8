"""An optimizer that needs whole parameters, on shards cut by hand: what the protocol gives it is enough."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, run_ranks
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn

from booster.comm import group_rank, group_size
from booster.core.shard_aware import shard_state
from booster.device import current_device
from booster.interface import Shard, Shards

pytestmark = pytest.mark.on_device

SHAPES = {"embedding": (7, 5), "weight": (6, 4), "bias": (6,), "scale": ()}
# What each of two ranks has: several spans of one parameter, whole ones, none. The scale is one rank's alone.
TWO_RANKS = [
    {"embedding": [(0, 3), (9, 20)], "weight": [(0, 24)], "bias": []},
    {"embedding": [(3, 9), (20, 35)], "bias": [(0, 6)], "scale": [(0, 1)]},
]
ALL_ON_THE_FIRST = [{name: [(0, torch.Size(shape).numel())] for name, shape in SHAPES.items()}, {}]
LAYOUTS = {"mixed": TWO_RANKS, "all on the first": ALL_ON_THE_FIRST}


def make_parameters():
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(one.to(current_device())) for name, one in drawn.items()}


def groups_of(parameters):
    return [
        {"params": [parameters["embedding"], parameters["bias"]], "lr": 0.02},
        {"params": [parameters["weight"], parameters["scale"]], "weight_decay": 0.1},
    ]


def set_gradients(parameters, step, unused):
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.grad = None if name == unused else gradient


def cut(optimizer, parameters, spans):
    """Re-points the param groups to a rank's shards, as the plugin does."""
    parts = []
    for index, group in enumerate(optimizer.param_groups):
        for name, parameter in parameters.items():
            if not any(parameter is one for one in group["params"]):
                continue
            own = [make_shard(name, parameter, span, index) for span in spans.get(name, [])]
            shard_state(optimizer, parameter, own)
            parts += own
        group["params"][:] = [part.parameter for part in parts if part.group_index == index]
    return parts


def make_shard(name, working, span, group_index):
    return Shard(
        name=name,
        global_shape=tuple(working.shape),
        span=span,
        parameter=nn.Parameter(working.detach().reshape(-1)[slice(*span)].clone()),
        model_param=working,
        group_index=group_index,
        has_master=False,
        is_primary=True,
    )


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unused", [None, "weight", "embedding"])
@distributed(2)
def test_lamb_on_shards_equals_lamb_on_whole_parameters(layout, unused, steps_before):
    parameters, serial = make_parameters(), make_parameters()
    optimizer, reference = ShardAwareLamb(groups_of(parameters)), ShardAwareLamb(groups_of(serial))
    for step in range(steps_before):
        for some, one in ((parameters, optimizer), (serial, reference)):
            set_gradients(some, step, None)
            one.step()
    parts = cut(optimizer, parameters, LAYOUTS[layout][group_rank()])
    optimizer.use_shards(Shards(parts, [*SHAPES], None, shapes=SHAPES))
    for step in range(steps_before, steps_before + 4):
        set_gradients(serial, step, unused)
        for part in parts:
            whole = serial[part.name].grad
            part.parameter.grad = None if whole is None else whole.reshape(-1)[slice(*part.span)].clone()
        optimizer.step()
        reference.step()
    # Squares are summed in another order: a few units of 2**-24 in the ratio of every step.
    torch.testing.assert_close(values_of(parts), expected_of(parts, serial), rtol=1e-5, atol=1e-6)


def values_of(parts):
    return {(part.name, part.span): part.parameter.detach() for part in parts}


def expected_of(parts, serial):
    return {(part.name, part.span): serial[part.name].detach().reshape(-1)[slice(*part.span)].clone() for part in parts}


@distributed(2)
def test_lamb_that_is_not_told_of_its_shards_goes_elsewhere():
    parameters, serial = make_parameters(), make_parameters()
    optimizer, reference = ShardAwareLamb(groups_of(parameters)), ShardAwareLamb(groups_of(serial))
    parts = cut(optimizer, parameters, TWO_RANKS[group_rank()])
    set_gradients(serial, 0, None)
    for part in parts:
        part.parameter.grad = serial[part.name].grad.reshape(-1)[slice(*part.span)].clone()
    optimizer.step()
    reference.step()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(values_of(parts), expected_of(parts, serial), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_over_all_ranks_and_equal_on_all(world_size):
    sums = run_ranks(sums_of_rank, world_size)
    assert all(torch.equal(mine[name], sums[0][name]) for mine in sums for name in ("a", "b", "c"))
    assert sums[0]["a"].tolist() == [float(sum(range(1, world_size + 1))), float(world_size)]
    assert sums[0]["b"].tolist() == [0.5, 0.25]  # of the last rank alone
    assert sums[0]["c"].tolist() == [0.0, 0.0]  # of no rank


def sums_of_rank():
    rank = group_rank()
    values = {"a": torch.tensor([rank + 1.0, 1.0], device=current_device())}
    if rank == group_size() - 1:
        values["b"] = torch.tensor([0.5, 0.25], dtype=torch.float64, device=current_device())
    return Shards([], ["a", "b", "c"], None).sum_over_ranks(values, lengths=2)


@distributed(3)
def test_sums_stay_inside_of_the_group():
    group = torch.distributed.new_group([0, 2])
    if group_rank() == 1:
        return
    sums = Shards([], ["a"], group).sum_over_ranks(
        {"a": torch.tensor([float(group_rank() + 1)], device=current_device())}
    )
    assert sums["a"].tolist() == [4.0]
