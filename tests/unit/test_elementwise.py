"""Which optimizers may update parts of parameters, found out without touching them."""

from __future__ import annotations

import copy
import random
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from oracles import made_up_optimizers as made_up
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from booster import ConfigError
from booster.plugins.sharding.elementwise import find_obstacle, require_elementwise, sharding_obstacle

TORCH = {
    "adam": partial(optim.Adam, lr=1e-2),
    "adam amsgrad": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "adam foreach": partial(optim.Adam, foreach=True),
    "adam fused": partial(optim.Adam, fused=True),
    "adam tensor rate": partial(optim.Adam, lr=torch.tensor(1e-3)),
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adamw fused maximize": partial(optim.AdamW, fused=True, maximize=True),
    "sgd": partial(optim.SGD, lr=1e-2),
    "sgd nesterov": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd fused": partial(optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "radam foreach": partial(optim.RAdam, foreach=True),
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
    "adagrad": partial(optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    "adagrad fused": partial(optim.Adagrad, fused=True),
    "rmsprop": optim.RMSprop,
    "rmsprop centered": partial(optim.RMSprop, centered=True, momentum=0.5),
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
}
ELEMENTWISE = {
    "Lion": partial(made_up.Lion, decay=0.1),
    "CautiousAdamW": made_up.CautiousAdamW,
    "GlobalCount": made_up.GlobalCount,
    "StateFromTheStart": made_up.StateFromTheStart,
    "PastGradients": made_up.PastGradients,
    "TensorAsState": made_up.TensorAsState,
    "Lookahead": lambda parameters: made_up.Lookahead(optim.Adam(parameters)),
}
REFUSED = {
    "TrustRatio": (made_up.TrustRatio, r"shape \(40,\)|shape \(128, 160\) came out different"),
    "RowFactored": (made_up.RowFactored, r"a state 'rows' of shape \(128,\)"),
    "FactorsLargeMatricesOnly": (made_up.FactorsLargeMatricesOnly, r"a state 'rows' of shape \(128,\)"),
    "ClipsGlobally": (partial(made_up.ClipsGlobally, max_norm=1.0), r"shape \(40,\) came out different"),
    "ClipsGlobally seldom": (partial(made_up.ClipsGlobally, max_norm=1e4), r"shape \(40,\) came out different"),
    "CentralizesConvolutions": (made_up.CentralizesConvolutions, r"shape \(4, 3, 3, 3\) came out different"),
    "DecaysMatricesOnly": (made_up.DecaysMatricesOnly, r"shape \(128, 160\) came out different"),
    "QuantizesBlocks": (made_up.QuantizesBlocks, r"shape \(128, 160\) came out different"),
    "FirstIsSpecial": (made_up.FirstIsSpecial, r"shape \(128, 160\) came out different"),
    "CountsParameters": (made_up.CountsParameters, r"param_groups\[0\]\['num_seen'\] came out different"),
    "SwitchesLater": (made_up.SwitchesLater, r"state 'norm' came out different for a shard"),
    "Shampoo": (made_up.Shampoo, r"a state 'factor0' of shape \(40, 40\)"),
    "KeepsItsOwnList": (made_up.KeepsItsOwnList, "came out different"),
    "Noisy": (made_up.Noisy, "draws random numbers"),
    "StepsTwice": (made_up.StepsTwice, r"shape \(40,\) came out different"),
    "NeedsClosure": (made_up.NeedsClosure, "on full parameters its step.. raised TypeError"),
    "Raises": (made_up.Raises, "on full parameters its step.. raised RuntimeError: the model is not compiled"),
    "RaisesOnLongVectors": (made_up.RaisesOnLongVectors, "on one-dimensional shards of parameters its step.. raised V"),
    "HoldsTensor": (partial(made_up.HoldsTensor, numel=2**20 + 1), r"keeps a tensor of shape \(1048577,\) outside"),
    "HoldsGenerator": (made_up.HoldsGenerator, "attribute 'stream', a generator, can't be copied"),
    "NeverMoves": (made_up.NeverMoves, "did not change any weight, so it could not be tried out"),
    "Explodes": (made_up.Explodes, "non-finite weights, so it could not be tried out"),
}


def make_parameters():
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (3,), (2, 2))]


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_are_accepted_and_pass_the_trial_too(name):
    optimizer = TORCH[name](make_parameters())
    require_elementwise(optimizer)
    assert find_obstacle(optimizer) is None


def test_every_torch_optimizer_is_accepted_or_refused_by_name():
    from booster.plugins.sharding import elementwise

    known = {*elementwise._ELEMENTWISE, *elementwise._REFUSED, optim.Optimizer}
    every = {thing for thing in vars(optim).values() if isinstance(thing, type) and issubclass(thing, optim.Optimizer)}
    assert every == known
    assert {type(TORCH[name](make_parameters())) for name in TORCH} == set(elementwise._ELEMENTWISE)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_classes_of_others_are_accepted(name):
    assert sharding_obstacle(ELEMENTWISE[name](make_parameters())) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused(name):
    make, seen = REFUSED[name]
    optimizer = make(make_parameters())
    with pytest.raises(ConfigError, match=seen) as refused:
        require_elementwise(optimizer)
    assert str(refused.value).startswith(f"{type(optimizer).__name__} can't update shards of parameters: ")
    assert "booster.interface.ShardAware" in str(refused.value)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (optim.LBFGS, "dot products"),
        (optim.Adafactor, "rows and columns"),
        (lambda parameters: optim.Muon(parameters[:1]), "orthogonal"),
        (lambda parameters: optim.SparseAdam(parameters), "sparse gradients"),
        (type("MyLBFGS", (optim.LBFGS,), {}), "MyLBFGS can't update .* dot products"),
    ],
)
def test_torchs_other_optimizers_are_refused_without_a_trial(make, why):
    with pytest.raises(ConfigError, match=why):
        require_elementwise(make(make_parameters()))


def test_differentiable_steps_are_refused():
    with pytest.raises(ConfigError, match="differentiable=True"):
        require_elementwise(optim.Adam(make_parameters(), differentiable=True))


def test_the_protocol_is_taken_at_its_word():
    assert sharding_obstacle(ShardAwareLamb(make_parameters())) is None
    declared = type("Declared", (made_up.Noisy,), {"use_shards": lambda self, shards: None})
    assert sharding_obstacle(made_up.Noisy(make_parameters())) is not None
    assert sharding_obstacle(declared(make_parameters())) is None


# Nothing is touched.


def snapshot(optimizer):
    return copy.deepcopy(
        (
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
            [[parameter.detach() for parameter in group["params"]] for group in optimizer.param_groups],
            [[parameter.grad for parameter in group["params"]] for group in optimizer.param_groups],
            [[optimizer.state.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
            len(optimizer.state),
            getattr(optimizer, "num_steps", None),
            getattr(optimizer, "buffer", None),
        )
    )


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


ANY = ELEMENTWISE | {name: make for name, (make, _) in REFUSED.items()}


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("steps_before", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_optimizer_is_left_as_it_was(name, steps_before):
    optimizer = ANY[name](make_parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    if name not in ("NeedsClosure", "Raises"):
        for _ in range(steps_before):
            optimizer.step()
    identities = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    versions = [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
    before = snapshot(optimizer) if name != "HoldsGenerator" else None
    torch_numbers, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    find_obstacle(optimizer)
    assert torch.equal(torch.get_rng_state(), torch_numbers)
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy)
    assert identities == [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert versions == [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
    if before is not None:
        assert_same(snapshot(optimizer), before)


def test_attributes_of_the_class_are_put_back():
    optimizer = made_up.GlobalCount(make_parameters())
    made_up.GlobalCount.num_steps_of_all = 7
    log, before = made_up.GlobalCount.log, list(made_up.GlobalCount.log)
    assert find_obstacle(optimizer) is None
    assert made_up.GlobalCount.num_steps_of_all == 7
    assert made_up.GlobalCount.log is log
    assert log == before


def test_hooks_are_not_called():
    called = []
    optimizer = made_up.Lion(make_parameters(), decay=0.0)
    handles = [
        register_optimizer_step_pre_hook(lambda *args: called.append("all, before")),
        register_optimizer_step_post_hook(lambda *args: called.append("all, after")),
        optimizer.register_step_pre_hook(lambda *args: called.append("before")),
        optimizer.register_step_post_hook(lambda *args: called.append("after")),
    ]
    try:
        assert find_obstacle(optimizer) is None
        assert called == []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert called == ["all, before", "before", "after", "all, after"]
    finally:
        for handle in handles:
            handle.remove()


def test_an_lr_scheduler_does_not_notice():
    optimizer = made_up.CautiousAdamW(make_parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 10)
    patched = optimizer.step
    assert find_obstacle(optimizer) is None
    assert optimizer.step is patched
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # it has not seen a step yet
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_warm_up_that_starts_at_zero_hides_nothing(wrapped):
    optimizer = made_up.TrustRatio(make_parameters(), lr=0.1)
    if wrapped:
        optimizer = made_up.Lookahead(optimizer)
    optim.lr_scheduler.LambdaLR(getattr(optimizer, "inner", optimizer), lambda epoch: epoch / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert "came out different" in find_obstacle(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_a_rate_that_is_a_tensor_keeps_its_value():
    rate = torch.tensor(0.0)
    optimizer = made_up.CautiousAdamW(make_parameters(), lr=rate)
    assert find_obstacle(optimizer) is None
    assert float(rate) == 0.0
    assert optimizer.param_groups[0]["lr"] is rate


def test_warnings_of_the_trial_are_not_shown():
    class Warns(made_up.Simple):
        def update(self, parameter, gradient, group):
            warnings.warn("an old kind of update", stacklevel=2)
            return gradient

    assert find_obstacle(Warns(make_parameters())) is None


def test_an_optimizer_whose_end_frees_something_is_not_copied():
    optimizer = made_up.FreesMemory(make_parameters())
    assert "FreesMemory has a __del__" in find_obstacle(optimizer)
    assert made_up.FreesMemory.freed == []
    del optimizer
    made_up.FreesMemory.freed.clear()


def test_small_tensors_among_the_attributes_are_copied():
    optimizer = made_up.HoldsTensor(make_parameters(), numel=4)
    assert find_obstacle(optimizer) is None
    assert torch.equal(optimizer.buffer, torch.zeros(4))


def test_tensors_of_the_models_size_are_not_copied():
    class SeesNumbers(torch.overrides.TorchFunctionMode):
        largest = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.Tensor.clone, torch.Tensor.__deepcopy__, torch.Tensor.to, torch.zeros_like):
                self.largest = max(self.largest, out.numel())
            return out

    parameter = nn.Parameter(torch.zeros(300, 1000))
    optimizer = made_up.StateFromTheStart([parameter])
    optimizer.model = nn.Linear(2, 2)
    optimizer.model.weight = parameter
    optimizer.everything = {"named": [("weight", parameter)], "of": {parameter: "weight"}}
    with SeesNumbers() as seen:
        assert find_obstacle(optimizer) is None
    assert 0 < seen.largest <= 128 * 160


def test_every_group_is_tried_with_its_own_settings():
    first, second, third = make_parameters()

    class SometimesByNorm(made_up.Simple):
        def update(self, parameter, gradient, group):
            return gradient / gradient.norm() if group["by_norm"] else gradient

    settings = [{"params": [first], "by_norm": False}, {"params": []}, {"params": [second, third], "by_norm": True}]
    optimizer = SometimesByNorm(settings, by_norm=False)
    assert "param_groups[2]" in find_obstacle(optimizer)
    optimizer.param_groups[2]["by_norm"] = False
    assert find_obstacle(optimizer) is None


def test_an_optimizer_inside_of_another_is_copied_too():
    inner = optim.Adam(make_parameters(), lr=0.1)
    outer = made_up.Lookahead(inner)
    optim.lr_scheduler.StepLR(inner, 1)  # patches the inner one's step
    assert find_obstacle(outer) is None
    assert len(inner.state) == 0


def test_low_precision_and_double_parameters():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        parameters = [nn.Parameter(parameter.detach().to(dtype)) for parameter in make_parameters()]
        optimizer = made_up.StateFromTheStart(parameters)
        assert find_obstacle(optimizer) is None
        assert "came out different" in find_obstacle(made_up.TrustRatio(parameters))


def test_default_dtype_and_grad_mode_do_not_matter():
    optimizer = made_up.Lion(make_parameters(), decay=0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert find_obstacle(optimizer) is None
        with torch.inference_mode():
            assert find_obstacle(optimizer) is None
            assert "came out different" in find_obstacle(made_up.TrustRatio(make_parameters()))
    finally:
        torch.set_default_dtype(before)


def test_the_cause_of_an_error_is_named_in_full():
    with pytest.raises(ConfigError, match=re.escape("Raises can't update shards of parameters: on full parameters")):
        require_elementwise(made_up.Raises(make_parameters()))
