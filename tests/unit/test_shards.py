"""Shards in one process: look-up, sums, mistakes. On several ranks: tests/multi/test_shard_aware.py."""

from __future__ import annotations

import pytest
import torch
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn

from booster import ConfigError
from booster.interface import Shard, ShardAware, Shards


def make_shard(name="weight", shape=(4, 3), span=(2, 7), **facts):
    working = nn.Parameter(torch.arange(12.0).view(shape))
    parameter = nn.Parameter(working.detach().reshape(-1)[slice(*span)].clone())
    facts = {"group_index": 0, "has_master": False, "is_primary": True, **facts}
    return Shard(name=name, global_shape=shape, span=span, parameter=parameter, model_param=working, **facts)


def test_a_shard_is_found_by_identity():
    first, second = make_shard(), make_shard(span=(0, 2))
    shards = Shards([first, second], ["weight"], None)
    assert shards.shard_of(first.parameter) is first
    assert shards.shard_of(second.parameter) is second
    assert shards.shard_of(nn.Parameter(first.parameter.detach().clone())) is None
    assert shards.shard_of(first.model_param) is None


def test_shards_are_compared_by_identity_and_hashable():
    first, second = make_shard(), make_shard()
    assert first != second
    assert len({first, second}) == 2


def test_a_shard_is_shown_without_its_elements():
    assert "tensor" not in repr(make_shard())
    assert "span=(2, 7)" in repr(make_shard())


def test_every_name_gets_a_sum_in_the_order_of_the_names():
    shards = Shards([make_shard("b")], ["c", "b", "a"], None)
    sums = shards.sum_over_ranks({"b": torch.tensor([1.0, 2.0])}, lengths=2)
    assert list(sums) == ["c", "b", "a"]
    assert torch.equal(sums["b"], torch.tensor([1.0, 2.0]))
    assert torch.equal(sums["a"], torch.zeros(2))


def test_a_number_without_dimensions_counts_as_one():
    shards = Shards([make_shard()], ["weight"], None)
    sums = shards.sum_over_ranks({"weight": torch.tensor(3, dtype=torch.float64)})
    assert torch.equal(sums["weight"], torch.tensor([3.0]))
    assert sums["weight"].dtype == torch.float32


def test_lengths_may_differ_by_name():
    shards = Shards([make_shard()], ["weight", "bias"], None, shapes={"weight": torch.Size((4, 3)), "bias": (3,)})
    lengths = {name: sum(shape) for name, shape in shards.shapes.items()}
    sums = shards.sum_over_ranks({"weight": torch.arange(7.0)}, lengths)
    assert {name: tuple(value.shape) for name, value in sums.items()} == {"weight": (7,), "bias": (3,)}
    assert torch.equal(sums["weight"], torch.arange(7.0))


def test_sums_do_not_share_memory_with_the_values():
    shards = Shards([make_shard()], ["weight"], None)
    value = torch.ones(1)
    shards.sum_over_ranks({"weight": value})["weight"].add_(1)
    assert torch.equal(value, torch.ones(1))


def test_values_that_need_a_gradient_are_taken_as_they_are():
    shards = Shards([make_shard()], ["weight"], None)
    assert not shards.sum_over_ranks({"weight": torch.ones(1, requires_grad=True)})["weight"].requires_grad


def test_without_parameters_there_are_no_sums():
    assert Shards([], [], None).sum_over_ranks({}) == {}


def test_shapes_come_from_the_parts_where_no_others_are_given():
    assert Shards([make_shard()], ["weight", "bias"], None).shapes == {"weight": (4, 3)}


def test_a_value_of_no_sharded_parameter_is_refused():
    with pytest.raises(ConfigError, match=r"'norm\.bias', which is not a sharded parameter"):
        Shards([make_shard()], ["weight"], None).sum_over_ranks({"norm.bias": torch.ones(1)})


def test_a_value_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="got 2 numbers for 'weight' where 1 are summed: pass lengths="):
        Shards([make_shard()], ["weight"], None).sum_over_ranks({"weight": torch.ones(2)})


def test_a_class_is_shard_aware_by_its_method():
    parameter = nn.Parameter(torch.ones(2))
    assert isinstance(ShardAwareLamb([parameter]), ShardAware)
    assert not isinstance(torch.optim.AdamW([parameter]), ShardAware)
