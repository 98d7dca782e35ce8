"""What optimizers have to see at once, found out without touching them; those that have to see all are refused."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from oracles import made_up_optimizers as made_up
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn, optim

from booster import ConfigError
from booster.plugins.sharding.elementwise import find_coupling
from booster.plugins.torch_fsdp.config import OptimizerKind, kind_of


def make_parameters(shapes=((5, 3), (3,), (2, 2), (4, 2, 3, 3))):
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def matrices():
    return make_parameters(((8, 6), (6, 8), (40, 30)))


def lookahead_of(inner):
    return made_up.Lookahead(inner)


class SharesOneAverage(made_up.Simple):
    """All parameters of a group move by one number."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            average = sum(parameter.grad.mean() for parameter in group["params"]) / len(group["params"])
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * average)


class FirstGroupTells(made_up.Simple):
    """All groups take their rate from how many parameters the first has."""

    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]["params"]
        factor = 1.0 + len(first)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * factor * parameter.grad / parameter.grad.norm())


class NeedsParameters(made_up.Simple):
    """Can't step on a rank that owns nothing."""

    def step(self, closure=None):
        _ = self.param_groups[0]["params"][0].device
        super().step()

    def update(self, parameter, gradient, group):
        return gradient / gradient.norm()


class MatricesOnly(made_up.Simple):
    """A Muon of somebody else: refuses what has not two dimensions, and makes updates orthogonal."""

    def update(self, parameter, gradient, group):
        if parameter.dim() != 2:
            raise ValueError(f"only matrices, not {tuple(parameter.shape)}")
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return left @ right


class MuonAndAdam(made_up.Simple):
    """One class for all: `use_muon` of each group says how its parameters move."""

    def update(self, parameter, gradient, group):
        if group["use_muon"]:
            return MatricesOnly.update(self, parameter, gradient, group)
        return gradient.sign()


class GoesByName(made_up.Simple):
    """Treats parameters by their names in the group, as many as there are parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                is_matrix = name.endswith("weight")
                assert is_matrix == (parameter.dim() == 2), f"{name} has shape {tuple(parameter.shape)}"
                scale = parameter.grad.norm() if is_matrix else 1.0
                parameter.sub_(group["lr"] * parameter.grad / scale)


class SometimesByNorm(made_up.Simple):
    """Each group has its own way."""

    def update(self, parameter, gradient, group):
        return gradient / gradient.norm() if group["by_norm"] else gradient


class MyAdafactor(optim.Adafactor):
    """A subclass may clip by the norm of everything."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1.0)
        return super().step(closure)


ELEMENTWISE_CLASSES = {
    "Adam": optim.Adam,
    "SGD": partial(optim.SGD, lr=0.1),
    "AdamW fused": partial(optim.AdamW, fused=True),
    "Lion": partial(made_up.Lion, decay=0.1),
    "ShardAwareLamb": ShardAwareLamb,
    "Lookahead of Adam": lambda parameters: lookahead_of(optim.Adam(parameters)),
}
WHOLES = {
    "Adafactor": optim.Adafactor,
    "subclass of Adafactor": type("Plain", (optim.Adafactor,), {}),
    "Muon": lambda parameters: optim.Muon(matrices()),
    "subclass of Muon": lambda parameters: type("Plain", (optim.Muon,), {})(matrices()),
    "MatricesOnly": lambda parameters: MatricesOnly(matrices()),
    "TrustRatio": made_up.TrustRatio,
    "RowFactored": made_up.RowFactored,
    "CentralizesConvolutions": made_up.CentralizesConvolutions,
    "DecaysMatricesOnly": made_up.DecaysMatricesOnly,
    "Shampoo": made_up.Shampoo,
    "SwitchesLater": made_up.SwitchesLater,
    "QuantizesBlocks": made_up.QuantizesBlocks,
    "Lookahead of TrustRatio": lambda parameters: lookahead_of(made_up.TrustRatio(parameters)),
    "Lookahead of Muon": lambda parameters: lookahead_of(optim.Muon(matrices())),
    "one parameter": lambda parameters: made_up.TrustRatio(parameters[:1]),
}
TOGETHER = {
    "LBFGS": (optim.LBFGS, "it needs dot products over all parameters"),  # by class
    "MyLBFGS": (type("MyLBFGS", (optim.LBFGS,), {}), "it needs dot products over all parameters"),
    "MyAdafactor": (MyAdafactor, "came out different without the others"),
    "ClipsGlobally": (partial(made_up.ClipsGlobally, max_norm=1.0), "came out different without the others"),
    "ClipsGlobally seldom": (partial(made_up.ClipsGlobally, max_norm=1e4), "came out different without the others"),
    "SharesOneAverage": (SharesOneAverage, "came out different without the others"),
    "FirstGroupTells": (FirstGroupTells, "came out different without the others"),
    "FirstIsSpecial": (made_up.FirstIsSpecial, "came out different without the others"),
    "CountsParameters": (made_up.CountsParameters, r"param_groups\[0\]\['num_seen'\] came out different without some"),
    "Noisy": (made_up.Noisy, "came out different without the others"),
    "NeedsParameters": (NeedsParameters, "on 0 of 4 full parameters its step.. raised IndexError"),
    "NeedsClosure": (made_up.NeedsClosure, "raised TypeError"),
    "Raises": (made_up.Raises, "raised RuntimeError: the model is not compiled"),
    "HoldsTensor": (partial(made_up.HoldsTensor, numel=2**20 + 1), "so it could not be tried out"),
    "HoldsGenerator": (made_up.HoldsGenerator, "so it could not be tried out"),
    "NeverMoves": (made_up.NeverMoves, "so it could not be tried out"),
    "Explodes": (made_up.Explodes, "so it could not be tried out"),
}


@pytest.mark.parametrize("name", ELEMENTWISE_CLASSES)
def test_what_may_see_rows(name):
    assert kind_of(ELEMENTWISE_CLASSES[name](make_parameters())) is OptimizerKind.ELEMENTWISE


@pytest.mark.parametrize("name", WHOLES)
def test_what_has_to_see_whole_parameters(name):
    optimizer = WHOLES[name](make_parameters())
    assert kind_of(optimizer) is OptimizerKind.PER_PARAM
    assert find_coupling(optimizer) is None  # also where the class is known by name


@pytest.mark.parametrize("name", TOGETHER)
def test_what_has_to_see_everything(name):
    make, seen = TOGETHER[name]
    optimizer = make(make_parameters())
    cls = type(optimizer).__name__
    with pytest.raises(ConfigError, match=f"{cls} needs all parameters at once.*: .*{seen}.* or TorchDDPPlugin"):
        kind_of(optimizer)


def test_the_largest_kind_serves_all():
    assert max(OptimizerKind) is OptimizerKind.PER_PARAM
    assert min(OptimizerKind) is OptimizerKind.ELEMENTWISE


def test_sparse_gradients_are_refused():
    with pytest.raises(ConfigError, match=r"SparseAdam takes sparse gradients, .* use torch\.optim\.AdamW"):
        kind_of(optim.SparseAdam(make_parameters()))


@pytest.mark.parametrize("make", [optim.Adam, optim.Adadelta])
def test_differentiable_steps_are_refused(make):
    with pytest.raises(ConfigError, match="differentiable=True"):
        kind_of(make(make_parameters(), differentiable=True))


def test_parameters_that_are_kept_elsewhere_are_refused():
    """In silence they would never be trained."""
    with pytest.raises(ConfigError, match=r"KeepsItsOwnList does not follow its param_groups.* self\.param_groups"):
        kind_of(made_up.KeepsItsOwnList(make_parameters()))


def test_every_torch_optimizer_has_a_kind():
    every = {thing for thing in vars(optim).values() if isinstance(thing, type) and issubclass(thing, optim.Optimizer)}
    kinds = {}
    for cls in every - {optim.Optimizer, optim.SparseAdam, optim.LBFGS}:
        kinds.setdefault(kind_of(cls(matrices())), set()).add(cls)
    assert kinds[OptimizerKind.PER_PARAM] == {optim.Adafactor, optim.Muon}


def test_groups_keep_their_hyperparameters():
    first, second, third, fourth = make_parameters()
    optimizer = MuonAndAdam(
        [
            {"params": [first, third], "use_muon": True},
            {"params": []},
            {"params": [second, fourth], "use_muon": False, "lr": 1e-3},
        ],
        use_muon=False,
    )
    assert kind_of(optimizer) is OptimizerKind.PER_PARAM
    optimizer.param_groups[2]["use_muon"] = True  # now it gets a vector
    assert "ValueError: only matrices" in find_coupling(optimizer)


def test_groups_that_differ_in_a_way():
    first, second, third, _ = make_parameters()
    settings = [{"params": [first]}, {"params": [second, third], "by_norm": True}]
    optimizer = SometimesByNorm(settings, by_norm=False)
    assert kind_of(optimizer) is OptimizerKind.PER_PARAM
    optimizer.param_groups[1]["by_norm"] = False
    assert kind_of(optimizer) is OptimizerKind.ELEMENTWISE


@pytest.mark.parametrize("num_layers", [1, 3, 20])
def test_names_stay_with_their_parameters(num_layers):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(num_layers)])
    optimizer = GoesByName(list(model.named_parameters()))
    assert len(optimizer.param_groups[0]["param_names"]) == 2 * num_layers
    before = list(optimizer.param_groups[0]["param_names"])
    assert kind_of(optimizer) is OptimizerKind.PER_PARAM
    assert optimizer.param_groups[0]["param_names"] == before
    assert kind_of(optim.Adafactor(list(model.named_parameters()))) is OptimizerKind.PER_PARAM


def test_hundreds_of_parameters_cost_no_more_than_a_few():
    steps = []

    class Counts(made_up.TrustRatio):
        def update(self, parameter, gradient, group):
            steps.append(parameter.numel())
            return super().update(parameter, gradient, group)

    optimizer = Counts(make_parameters([(4, 4), (4,)] * 300))
    assert find_coupling(optimizer) is None
    assert max(steps) <= 128 * 160
    assert len(steps) < 4 * 8 * 8


def test_large_and_empty_shapes_are_tried_small():
    seen = set()

    class Notes(made_up.TrustRatio):
        def update(self, parameter, gradient, group):
            seen.add(tuple(parameter.shape))
            return super().update(parameter, gradient, group)

    with torch.device("meta"):
        parameters = [nn.Parameter(torch.empty(shape)) for shape in ((50_000, 768), (0, 3), (), (64, 64, 7, 7))]
    assert kind_of(Notes(parameters)) is OptimizerKind.PER_PARAM
    wholes = {shape for shape in seen if len(shape) in (0, 2, 4)}
    assert {len(shape) for shape in wholes} == {0, 2, 4}
    assert (1, 3) in wholes
    assert all(torch.Size(shape).numel() <= 128 * 160 for shape in wholes)


def test_states_from_steps_before_are_taken_along():
    for make in (made_up.TrustRatio, made_up.Shampoo, optim.Adafactor, made_up.RowFactored):
        optimizer = make(make_parameters())
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert kind_of(optimizer) is OptimizerKind.PER_PARAM


ANY = ELEMENTWISE_CLASSES | WHOLES | {name: make for name, (make, _) in TOGETHER.items()}


@pytest.mark.parametrize("name", ANY)
def test_the_optimizer_is_left_as_it_was(name):
    optimizer = ANY[name](make_parameters())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if name not in ("NeedsClosure", "Raises", "LBFGS", "MyLBFGS", "ShardAwareLamb", "HoldsGenerator"):
        optimizer.step()
    before = copy.deepcopy([optimizer.state.get(parameter) for parameter in parameters])
    weights = [parameter.detach().clone() for parameter in parameters]
    gradients = {id(parameter): parameter.grad.clone() for parameter in parameters}  # some clip them
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    settings = copy.deepcopy(groups)
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    find_coupling(optimizer)
    if name in TOGETHER:
        with pytest.raises(ConfigError):
            kind_of(optimizer)
    else:
        kind_of(optimizer)
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert np.array_equal(np.random.get_state()[1], numbers[2])
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in after] == [id(parameter) for parameter in parameters]
    for parameter, weight in zip(parameters, weights, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(parameter.grad, gradients[id(parameter)])
    found = [optimizer.state.get(parameter) for parameter in parameters]
    torch.testing.assert_close(found, before, rtol=0, atol=0, equal_nan=True)
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert kept == settings
