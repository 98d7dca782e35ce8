"""States of a sharded optimizer: any cut loads into any other, and into an optimizer that is whole, bit for bit.

The cuts are at random places, seeded: several shards of a parameter on one rank, ranks that own nothing.
"""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from sharded_by_hand import ShardedByHand, cut_at_random
from torch import nn

from booster.checkpoint_io import GeneralCheckpointIO
from booster.comm import group_rank
from booster.errors import CheckpointError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.mixed_precision.fp16 import Fp32MasterWeights

pytestmark = pytest.mark.on_device


class Net(nn.Module):
    """Parameters of every kind; computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(7, 13))
        self.vector = nn.Parameter(torch.zeros(5))
        self.single = nn.Parameter(torch.zeros(1))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.deep = nn.Parameter(torch.zeros(2, 3, 4))
        self.frozen = nn.Parameter(torch.zeros(3, 2))
        self.tied = self.wide


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers beside a tensor."""

    def __init__(self, params, lr=0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = 0.1 + 0.7 ** state["count"]
                state["mode"], state["is_warm"], state["nothing"] = "plain", True, None
                state["average"] = state.get("average", 0) + parameter.grad
                parameter.sub_(group["lr"] * state["decay"] * state["average"])


class ByRows(torch.optim.Optimizer):
    """Keeps of a matrix what no rank can tell from its part of it, and the same on all ranks."""

    def __init__(self, params, lr=0.1) -> None:
        super().__init__(params, {"lr": lr})


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.1),
    "counting": Counting,
}
FORMS = {"small shards": {"shard": True, "size_per_shard": 1}, "one file": {}, "bin": {"use_safetensors": False}}
SUFFIX = {"small shards": "", "one file": ".safetensors", "bin": ".bin"}
# How the optimizer is held: "whole" by every rank, or in shards.
PLACES = [("sharded", size) for size in (1, 2, 3, 4)] + [("whole", size) for size in (1, 2)]
PAIRS = [pair for pair in itertools.product(PLACES, PLACES) if "sharded" in (pair[0][0], pair[1][0])]


def param_groups(net: Net):
    """Two groups, in another order than the model's."""
    first = [net.deep, net.wide, net.frozen]
    rest = [net.scalar, net.vector, net.empty, net.single]
    return [{"params": first, "lr": 0.02}, {"params": rest, "note": "mine"}]


def gradient_of(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def reference(kind: str, dtype: torch.dtype = torch.float32):
    """An optimizer that one process made two steps with; one parameter was then frozen, another never had a gradient
    in the second step."""
    net = Net().to(dtype)
    optimizer = OPTIMIZERS[kind](param_groups(net))
    for step in range(2):
        for name, parameter in net.named_parameters():
            parameter.grad = None if (name, step) == ("vector", 1) else gradient_of(name, parameter, step)
        optimizer.step()
        optimizer.zero_grad()
    net.frozen.requires_grad_(False)
    optimizer.param_groups[0]["lr"] = 0.03
    return net, optimizer


def states_of(net, optimizer) -> dict[str, dict]:
    return {name: dict(optimizer.state.get(p, {})) for name, p in net.named_parameters()}


def cut_state(value, shape, span):
    """What a shard has of a state, said once more in the simplest way: by the state's own shape."""
    is_cut = isinstance(value, torch.Tensor) and value.shape == shape and shape != ()
    return value.reshape(-1)[slice(*span)].clone() if is_cut else copy.deepcopy(value)


def shard_state(key, value, shard):
    if shard.global_shape == () and isinstance(value, torch.Tensor) and key not in ("step", "eta", "mu", "mu_product"):
        return value.reshape(1).clone()
    return cut_state(value, torch.Size(shard.global_shape), shard.span)


def make(place: str, kind: str, seed: int, *, is_fresh: bool, dtype=torch.float32, has_masters=False):
    """Returns an optimizer held in a way: with the reference's state, or as it is before the first step."""
    if not is_fresh:
        net, optimizer = reference(kind, dtype)
    else:
        net = Net().to(dtype)
        optimizer = OPTIMIZERS[kind](param_groups(net))
        net.frozen.requires_grad_(False)
    model, states = ModelWrapper(net, is_primary=group_rank() == 0), states_of(net, optimizer)
    if place == "whole":
        wrapped = OptimizerWrapper(optimizer, model)
        if has_masters:
            wrapped.master_weights = Fp32MasterWeights(optimizer)
        return wrapped
    wrapped = ShardedByHand(optimizer, model, seed=seed, has_masters=has_masters)
    for shard in wrapped.shards.parts:
        for key, value in states[shard.name].items():
            optimizer.state[shard.parameter][key] = shard_state(key, value, shard)
    return wrapped


def assert_same(found: dict, expected: dict, where: str) -> None:
    assert found.keys() == expected.keys(), where
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert (type(found[key]), found[key]) == (type(value), value), (where, key)
            continue
        assert found[key].dtype == value.dtype, (where, key)
        assert found[key].shape == value.shape, (where, key)
        assert found[key].device == value.device, (where, key)
        assert torch.equal(found[key], value), (where, key)


def expected_values(kind: str, *, lacks_empty: bool) -> dict:
    """What one process says of its optimizer; in shards no rank has a part of a parameter without elements."""
    net, optimizer = reference(kind)
    values = OptimizerWrapper(optimizer, ModelWrapper(net)).checkpoint_state().values()
    if lacks_empty:
        values["numbers"].pop("empty", None)
    return values


def save(path: str, place: str, kind: str, seed: int, form: str) -> None:
    wrapped = make(place, kind, seed, is_fresh=False)
    assert wrapped.checkpoint_state().values() == expected_values(kind, lacks_empty=place == "sharded")
    GeneralCheckpointIO().save_optimizer(wrapped, path, **FORMS[form])


def load(path: str, place: str, kind: str, seed: int, lacks_empty: bool):
    wrapped = make(place, kind, seed, is_fresh=True)
    GeneralCheckpointIO().load_optimizer(wrapped, path)
    net, optimizer = reference(kind)
    states = states_of(net, optimizer)
    if lacks_empty:
        states["empty"] = {}
    if place == "sharded":
        frozen = dict(wrapped.model.named_parameters())["frozen"]
        for shard in wrapped.shards.parts:
            expected = {key: shard_state(key, value, shard) for key, value in states[shard.name].items()}
            assert_same(dict(wrapped.state.get(shard.parameter, {})), expected, f"{shard.name} {shard.span}")
        assert_same(dict(wrapped.state.get(frozen, {})), states["frozen"], "frozen")
        assert set(wrapped.state) <= {frozen, *(shard.parameter for shard in wrapped.shards.parts)}
    else:
        for name, parameter in wrapped.model.named_parameters():
            assert_same(dict(wrapped.state.get(parameter, {})), states[name], name)
    values = wrapped.checkpoint_state().values()
    assert values == expected_values(kind, lacks_empty=lacks_empty or place == "sharded")
    assert wrapped.param_groups[0]["lr"] == 0.03
    assert wrapped.param_groups[1]["note"] == "mine"
    assert_continues(wrapped, net, optimizer)
    return values


@torch.no_grad()
def assert_continues(wrapped, net, optimizer) -> None:
    """Both make a step from weights of zero: the loaded states are ones that torch's code can use."""
    expected = dict(net.named_parameters())
    for name, parameter in expected.items():
        parameter.zero_()
        parameter.grad = gradient_of(name, parameter, 2)
    held = []  # of the optimizer under test, with the same elements of what is expected
    for name, parameter in wrapped.model.named_parameters():
        if parameter.requires_grad and isinstance(wrapped, ShardedByHand):
            shards = [shard for shard in wrapped.shards.parts if shard.name == name]
            held += [(one.parameter, expected[name], slice(*one.span)) for one in shards]
        else:
            held.append((parameter, expected[name], slice(None)))
    for parameter, whole, part in held:
        parameter.zero_()
        parameter.grad = whole.grad.reshape(-1)[part].view(parameter.shape).clone()
    optimizer.step()
    wrapped.unwrap().step()
    for parameter, whole, part in held:
        # The kernels round vectors and what is left of them differently; a wrong state is off by far more.
        found = parameter.detach().reshape(-1)
        torch.testing.assert_close(found, whole.detach().reshape(-1)[part], rtol=1e-5, atol=1e-7)


def cases() -> list[object]:
    found = []
    for number, (pair, kind) in enumerate(itertools.product(PAIRS, OPTIMIZERS)):
        seed, form = number, list(FORMS)[number % len(FORMS)]
        name = "{0[0]} x{0[1]} to {1[0]} x{1[1]}, ".format(*pair) + kind
        # Every pair once, with the optimizers in turn.
        is_chosen = PAIRS.index(pair) % len(OPTIMIZERS) == list(OPTIMIZERS).index(kind)
        found.append(pytest.param(*pair, kind, seed, form, id=name, marks=() if is_chosen else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("saved", "loaded", "kind", "seed", "form"), cases())
def test_any_cut_loads_into_any_other(tmp_path, saved, loaded, kind, seed, form):
    path = str(tmp_path / f"optimizer{SUFFIX[form]}")
    run_ranks(save, saved[1], path, saved[0], kind, seed, form)
    values = run_ranks(load, loaded[1], path, loaded[0], kind, seed + 1, saved[0] == "sharded")
    assert all(one == values[0] for one in values)


def test_the_random_cuts_are_of_every_kind():
    cuts = [[cut_at_random(numel, 4, f"{seed} {numel}") for numel in (91, 5, 1)] for seed in range(200)]
    of_rank = [[sum(rank == 0 for rank, _ in shards) for shards in one] for one in cuts]
    assert any(counts[0] > 1 for counts in of_rank)
    assert any(sum(counts) == 0 for counts in of_rank)
    assert any(len({rank for rank, _ in one[1]}) > 1 for one in cuts)


# Master weights.


def exact_weights(name: str, shape) -> torch.Tensor:
    """fp32 values that bf16 can't hold."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) + 1


@torch.no_grad()
def with_masters(place: str, seed: int):
    wrapped = make(place, "adamw", seed, is_fresh=False, dtype=torch.bfloat16, has_masters=True)
    for name, parameter in wrapped.model.named_parameters():
        parameter.copy_(exact_weights(name, parameter.shape))
    for name, master, part in masters_of(wrapped):
        master.reshape(-1).copy_(
            exact_weights(name, dict(wrapped.model.named_parameters())[name].shape).reshape(-1)[part]
        )
    return wrapped


def masters_of(wrapped):
    """Yields name, memory and place of what this rank has of the masters."""
    if isinstance(wrapped, ShardedByHand):
        yield from ((one.name, one.parameter.detach(), slice(*one.span)) for one in wrapped.shards.parts)
        return
    for name, parameter in wrapped.checkpoint_state().named_parameters().items():
        yield name, parameter.detach(), slice(None)


def save_masters(path: str, place: str, seed: int) -> None:
    wrapped = with_masters(place, seed)
    io = GeneralCheckpointIO()
    io.save_model(wrapped.model, f"{path}/model", shard=True)
    io.save_optimizer(wrapped, f"{path}/optimizer", shard=True)


def load_masters(path: str, place: str, dtype: torch.dtype, saved_sharded: bool, seed: int) -> None:
    wrapped = make(place, "adamw", seed, is_fresh=True, dtype=dtype, has_masters=True)
    io = GeneralCheckpointIO()
    io.load_model(wrapped.model, f"{path}/model")
    io.load_optimizer(wrapped, f"{path}/optimizer")
    # An optimizer over all of the model keeps fp32 copies of frozen parameters too; one in shards leaves them alone.
    rounded = {"frozen", "empty"} if saved_sharded else {"empty"}
    for name, parameter in wrapped.model.named_parameters():
        expected = exact_weights(name, parameter.shape)
        is_exact = dtype == torch.float32 and name not in rounded
        assert torch.equal(parameter, expected if is_exact else expected.bfloat16().to(dtype)), name
    for name, master, part in masters_of(wrapped):
        shape = dict(wrapped.model.named_parameters())[name].shape
        if name not in rounded:
            assert torch.equal(master.reshape(-1), exact_weights(name, shape).reshape(-1)[part]), name
    for parameter, state in wrapped.state.items():
        assert state["exp_avg"].dtype == parameter.dtype
        assert state["step"].dtype == torch.float32


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("saved", "loaded", "dtype"),
    [
        (("sharded", 3), ("sharded", 2), torch.bfloat16),
        (("sharded", 4), ("whole", 1), torch.bfloat16),
        (("whole", 2), ("sharded", 3), torch.bfloat16),
        (("sharded", 1), ("sharded", 4), torch.bfloat16),
        (("sharded", 2), ("sharded", 4), torch.float32),
        (("sharded", 3), ("whole", 2), torch.float32),
        (("whole", 1), ("sharded", 3), torch.float32),
    ],
)
def test_masters_keep_their_digits(tmp_path, saved, loaded, dtype, seed):
    run_ranks(save_masters, saved[1], str(tmp_path), saved[0], seed)
    run_ranks(load_masters, loaded[1], str(tmp_path), loaded[0], dtype, saved[0] == "sharded", seed + 10)


@distributed(world_size=3)
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_without_a_part_of_a_master_leaves_the_weights_alone(tmp_path, seed):
    io = GeneralCheckpointIO()
    io.save_optimizer(with_masters("sharded", seed), tmp_path / "o", shard=True)
    wrapped = make("sharded", "adamw", seed + 5, is_fresh=True, dtype=torch.bfloat16, has_masters=True)
    io.load_optimizer(wrapped, tmp_path / "o")
    # "scalar" and "single" are on one rank each.
    for name, parameter in wrapped.model.named_parameters():
        assert not parameter.any(), name


@distributed(world_size=3)
@pytest.mark.parametrize("seed", range(2))
def test_masters_that_are_not_stored_follow_the_weights(tmp_path, seed):
    plain = make("sharded", "momentum", seed, is_fresh=False, dtype=torch.bfloat16)
    io = GeneralCheckpointIO()
    io.save_optimizer(plain, tmp_path / "o", shard=True)
    wrapped = make("sharded", "momentum", seed + 5, is_fresh=True, dtype=torch.bfloat16, has_masters=True)
    kept, changed = torch.tensor(1.001), torch.tensor(7.25)
    with torch.no_grad():
        for name, parameter in wrapped.model.named_parameters():
            parameter.fill_(7.25 if name == "wide" else 1.0)
        for shard in wrapped.shards.parts:
            shard.parameter.fill_(1.001)
    io.load_optimizer(wrapped, tmp_path / "o")
    for shard in wrapped.shards.parts:
        expected = changed if shard.name == "wide" else kept  # 1.001 rounds to the weight
        assert bool((shard.parameter == expected).all()), shard.name


# States that are no cut of their parameter.


@distributed(world_size=(1, 3))
@pytest.mark.parametrize("seed", range(4))
def test_states_of_whole_parameters_are_stored_once(tmp_path, seed):
    def build(is_filled: bool):
        net = Net()
        net.frozen.requires_grad_(False)
        wrapped = ShardedByHand(ByRows(param_groups(net)), ModelWrapper(net), seed=f"{seed} {is_filled}")
        for shard in wrapped.shards.parts if is_filled else ():
            rows = torch.arange(float(max(1, *shard.global_shape, 1))).view(1, -1) + len(shard.name)
            ratio = torch.tensor(len(shard.name) / 3)
            average = torch.arange(float(shard.span[0]), float(shard.span[1]))
            wrapped.state[shard.parameter] = {"rows": rows, "ratio": ratio, "average": average}
        return wrapped

    saved, loaded = build(True), build(False)
    io = GeneralCheckpointIO()
    io.save_optimizer(saved, tmp_path / "o", shard=True)
    io.load_optimizer(loaded, tmp_path / "o")
    for shard in loaded.shards.parts:
        state = loaded.state[shard.parameter]
        assert torch.equal(
            state["rows"], torch.arange(float(max(1, *shard.global_shape, 1))).view(1, -1) + len(shard.name)
        )
        assert torch.equal(state["ratio"], torch.tensor(len(shard.name) / 3))
        assert torch.equal(state["average"], torch.arange(float(shard.span[0]), float(shard.span[1])))


# What is refused, and what the plain part says.


@distributed(world_size=2)
def test_a_state_without_a_place_is_refused_on_all_ranks(tmp_path):
    wrapped = make("sharded", "counting", 1, is_fresh=False)
    mine = wrapped.shards.parts[0] if wrapped.shards.parts and dist.get_rank() == 1 else None
    if mine is not None:
        wrapped.state[mine.parameter]["odd"] = [torch.ones(1)]
    elif dist.get_rank() == 1:
        pytest.fail("choose a seed with shards on rank 1")
    with pytest.raises(CheckpointError, match="Counting has a list as state 'odd'"):
        GeneralCheckpointIO().save_optimizer(wrapped, tmp_path / "o", shard=True)
    assert not (tmp_path / "o").exists()


@distributed(world_size=3)
def test_another_model_is_refused_on_all_ranks_and_nothing_changes(tmp_path):
    io = GeneralCheckpointIO()
    io.save_optimizer(make("sharded", "adamw", 1, is_fresh=False), tmp_path / "o", shard=True)
    net = Net()
    net.wide = nn.Parameter(torch.zeros(13, 7))
    wrapped = ShardedByHand(OPTIMIZERS["adamw"](param_groups(net)), ModelWrapper(net), seed=3)
    with pytest.raises(CheckpointError, match=r"'wide' has shape \(7, 13\) in the checkpoint, \(13, 7\) here"):
        io.load_optimizer(wrapped, tmp_path / "o")
    assert not wrapped.state
    assert wrapped.param_groups[0]["lr"] == 0.02


@distributed(world_size=4)
def test_the_groups_say_what_one_process_would(tmp_path):
    GeneralCheckpointIO().save_optimizer(make("sharded", "counting", 2, is_fresh=False), tmp_path / "o", shard=True)
    stored = json.loads((tmp_path / "o" / "optimizer_groups.json").read_text())
    assert [group["params"] for group in stored["param_groups"]] == [
        ["deep", "wide", "frozen"],
        ["scalar", "vector", "empty", "single"],
    ]
    assert stored["numbers"]["wide"]["count"] == 2
    assert stored["numbers"]["vector"]["count"] == 1
    assert stored["shapes"]["scalar"] == []
