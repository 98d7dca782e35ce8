"""State that an optimizer has before its parameters are cut goes with the parts."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
import torch
from oracles.made_up_optimizers import PastGradients
from torch import nn, optim

from booster.core.shard_aware import shard_state
from booster.interface import Shard

OPTIMIZERS = [
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
    PastGradients,
]


def make_shard(whole, span, *, dtype=None):
    part = whole.detach().reshape(-1)[slice(*span)].clone()
    return Shard(
        name="weight",
        global_shape=tuple(whole.shape),
        span=span,
        parameter=nn.Parameter(part if dtype is None else part.to(dtype)),
        model_param=whole,
        group_index=0,
        has_master=dtype is not None,
        is_primary=True,
    )


def gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def make(cls, parameter):
    if cls is optim.SGD:
        return optim.SGD([parameter], lr=0.1, momentum=0.9)
    return cls([parameter], lr=0.1)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(4, 3), (6,), (1,), ()])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_steps_go_on_as_with_the_whole_parameter(cls, shape, num_parts):
    generator = torch.Generator().manual_seed(5)
    whole = nn.Parameter(torch.randn(shape, generator=generator))
    reference = nn.Parameter(whole.detach().clone())
    optimizer, serial = make(cls, whole), make(cls, reference)
    for step in range(3):
        whole.grad, reference.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        serial.step()
    bounds = [index * whole.numel() // num_parts for index in range(num_parts + 1)]
    spans = [(start, stop) for start, stop in pairwise(bounds) if start < stop]
    shards = [make_shard(whole, span) for span in spans]
    shard_state(optimizer, whole, shards)
    optimizer.param_groups[0]["params"][:] = [shard.parameter for shard in shards]
    for step in range(3, 6):
        for shard in shards:
            shard.parameter.grad = gradient(shape, step).reshape(-1)[slice(*shard.span)].clone()
        reference.grad = gradient(shape, step)
        optimizer.step()
        serial.step()
    joined = torch.cat([shard.parameter.detach() for shard in shards]).view(shape)
    torch.testing.assert_close(joined, reference.detach(), rtol=1e-6, atol=1e-7)
    assert whole not in optimizer.state


def whole_with_state(state, dtype=torch.float32, shape=(4, 3)):
    whole = nn.Parameter(torch.arange(12.0, dtype=dtype).view(shape))
    optimizer = optim.SGD([whole], lr=0.1)
    optimizer.state[whole] = state
    return whole, optimizer


def test_what_has_the_parameters_shape_is_cut_and_the_rest_copied():
    moment, step, history = torch.arange(12.0).view(4, 3), torch.tensor(7.0), ["a"]
    whole, optimizer = whole_with_state({"moment": moment, "step": step, "history": history, "rate": 0.5})
    shards = [make_shard(whole, (2, 5)), make_shard(whole, (9, 12))]
    shard_state(optimizer, whole, shards)
    first, second = (optimizer.state[shard.parameter] for shard in shards)
    assert first["moment"].tolist() == [2.0, 3.0, 4.0]
    assert second["moment"].tolist() == [9.0, 10.0, 11.0]
    assert first["rate"] == second["rate"] == 0.5
    assert float(first["step"]) == float(second["step"]) == 7.0
    first["step"] += 1
    first["history"].append("b")
    assert (float(second["step"]), second["history"]) == (7.0, ["a"])
    assert list(optimizer.state) == [shard.parameter for shard in shards]


def test_nothing_of_the_whole_state_is_kept():
    moment = torch.arange(12.0).view(4, 3)
    whole, optimizer = whole_with_state({"moment": moment, "past": deque([moment])})
    shard = make_shard(whole, (0, 4))
    shard_state(optimizer, whole, [shard])
    own = optimizer.state[shard.parameter]
    for tensor in (own["moment"], own["past"][0]):
        assert tensor.untyped_storage().nbytes() == 4 * 4
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_rank_without_shards_drops_the_state():
    whole, optimizer = whole_with_state({"moment": torch.zeros(4, 3)})
    shard_state(optimizer, whole, [])
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("state", [None, {}])
def test_without_a_state_nothing_is_made(state):
    whole, optimizer = whole_with_state(state)
    if state is None:
        del optimizer.state[whole]
    shard_state(optimizer, whole, [make_shard(whole, (0, 12))])
    assert len(optimizer.state) == 0


def test_states_take_the_format_of_fp32_masters():
    moment = torch.arange(12.0).view(4, 3).to(torch.bfloat16)
    mask, step = torch.ones(4, 3, dtype=torch.bool), torch.tensor(3.0)
    whole, optimizer = whole_with_state({"moment": moment, "mask": mask, "step": step}, torch.bfloat16)
    shard = make_shard(whole, (1, 6), dtype=torch.float32)
    shard_state(optimizer, whole, [shard])
    own = optimizer.state[shard.parameter]
    assert own["moment"].dtype == torch.float32
    assert own["moment"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert own["mask"].dtype == torch.bool
    assert own["mask"].shape == (5,)
    assert own["step"].dtype == torch.float32


def test_the_order_is_that_of_rows_whatever_the_memory_format():
    shape = (2, 3, 2, 2)
    whole = nn.Parameter(torch.arange(24.0).view(shape).contiguous(memory_format=torch.channels_last))
    optimizer = optim.SGD([whole], lr=0.1)
    optimizer.state[whole] = {"moment": whole.detach().clone()}
    assert not optimizer.state[whole]["moment"].is_contiguous()
    shard = make_shard(whole, (5, 11))
    shard_state(optimizer, whole, [shard])
    assert optimizer.state[shard.parameter]["moment"].tolist() == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]


def test_a_state_that_is_no_table_is_cut_as_well():
    whole, optimizer = whole_with_state(torch.arange(12.0).view(4, 3))
    shard = make_shard(whole, (10, 12))
    shard_state(optimizer, whole, [shard])
    assert optimizer.state[shard.parameter].tolist() == [10.0, 11.0]


def test_other_parameters_keep_theirs():
    whole, optimizer = whole_with_state({"moment": torch.zeros(4, 3)})
    other = nn.Parameter(torch.zeros(2))
    optimizer.state[other] = {"moment": torch.ones(2)}
    shard_state(optimizer, whole, [make_shard(whole, (0, 3))])
    assert optimizer.state[other]["moment"].tolist() == [1.0, 1.0]
