"""Lamb, Lars, FusedLAMB, FusedSGD, Adafactor and CAME in one process: the papers' arithmetic, states and mistakes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from oracles.reference_optimizers import (
    ReferenceAdafactor,
    ReferenceCame,
    ReferenceFusedLamb,
    ReferenceLamb,
    ReferenceLars,
    ReferenceSgd,
)
from torch import nn

from booster import Booster, ConfigError
from booster.core.shard_aware import NeedsFullStep
from booster.interface import ShardAware, StateAllocator
from booster.optim import CAME, Adafactor, FusedLAMB, FusedSGD, Lamb, Lars
from booster.plugins.sharding.elementwise import require_elementwise

SHAPES = [(33, 17), (7,), (), (1,), (5, 2, 3), (9, 1), (1, 6), (4, 3, 1, 1), (2, 3, 4, 5)]
LAMB = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
LARS = {"lr": 0.5, "momentum": 0.9, "eeta": 0.01, "weight_decay": 0.1, "eps": 1e-8}
FUSED_LAMB = {**LAMB, "max_grad_norm": 1.0}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
CAME_ = {"lr": 0.01, "weight_decay": 0.1}
FIXED = {"lr": 0.01, "relative_step": False}
CASES = [
    (Lamb, ReferenceLamb, LAMB),
    (Lamb, ReferenceLamb, {**LAMB, "weight_decay": 0.0}),
    (Lamb, ReferenceLamb, {**LAMB, "adam": True}),
    (Lars, ReferenceLars, LARS),
    (Lars, ReferenceLars, {**LARS, "momentum": 0, "weight_decay": 0, "eps": 0.0}),
    (FusedLAMB, ReferenceFusedLamb, FUSED_LAMB),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "max_grad_norm": 0}),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "max_grad_norm": 1e6}),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "bias_correction": False}),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "adam_w_mode": False}),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "grad_averaging": False}),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "weight_decay": 0.0}),
    (FusedLAMB, ReferenceFusedLamb, {**FUSED_LAMB, "weight_decay": 0.0, "use_nvlamb": True}),
    (FusedSGD, ReferenceSgd, SGD),
    (FusedSGD, ReferenceSgd, {**SGD, "momentum": 0.0}),
    (FusedSGD, ReferenceSgd, {**SGD, "nesterov": True}),
    (FusedSGD, ReferenceSgd, {**SGD, "dampening": 0.3}),
    (FusedSGD, ReferenceSgd, {**SGD, "wd_after_momentum": True}),
    (FusedSGD, ReferenceSgd, {**SGD, "wd_after_momentum": True, "nesterov": True}),
    (Adafactor, ReferenceAdafactor, {}),
    (Adafactor, ReferenceAdafactor, {"warmup_init": True, "weight_decay": 0.1}),
    (Adafactor, ReferenceAdafactor, {**FIXED, "weight_decay": 0.1, "beta1": 0.9}),
    (Adafactor, ReferenceAdafactor, {**FIXED, "scale_parameter": False, "clip_threshold": 0.5, "decay_rate": -0.5}),
    (Adafactor, ReferenceAdafactor, {"eps": (0.5, 0.3), "beta1": 0.5}),
    (CAME, ReferenceCame, CAME_),
    (CAME, ReferenceCame, {"lr": 0.02, "eps": (1e-3, 1e-2), "clip_threshold": 0.5, "betas": (0.5, 0.9, 0.95)}),
]
ONE_EACH = [
    (Lamb, LAMB),
    (Lars, LARS),
    (FusedLAMB, FUSED_LAMB),
    (FusedSGD, SGD),
    (Adafactor, {"beta1": 0.9}),
    (CAME, CAME_),
]
EACH = pytest.mark.parametrize(("cls", "settings"), ONE_EACH, ids=[cls.__name__ for cls, _ in ONE_EACH])


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(*lists, step=0):
    """Gives all lists of parameters the same gradients, of which every other step leaves the second out."""
    generator = torch.Generator().manual_seed(1000 + step)
    for number, members in enumerate(zip(*lists, strict=True)):
        gradient = torch.randn(members[0].shape, generator=generator)
        for parameter in members:
            parameter.grad = None if number == 1 and step % 2 else gradient.to(parameter.dtype)


def train(optimizer, params, steps=range(4)):
    for step in steps:
        give_gradients(params, step=step)
        optimizer.step()


def params_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def assert_equal(one, other):
    """Weights and states, bit for bit."""
    for p, q in zip(params_of(one), params_of(other), strict=True):
        assert torch.equal(p, q)
        assert one.state[p].keys() == other.state[q].keys()
        for key, value in one.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state[q][key])), key
            assert getattr(value, "dtype", int) == getattr(other.state[q][key], "dtype", int), key


# Arithmetic.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("cls", "reference", "settings"), CASES)
def test_steps_are_those_of_the_paper(cls, reference, settings, dtype):
    ours = parameters(dtype=dtype)
    theirs = reference(ours, **settings)
    optimizer = cls(ours, **settings)
    for step in range(7):
        give_gradients(ours, step=step)
        before = [None if one.grad is None else one.grad.clone() for one in ours]
        optimizer.step()
        theirs.step(before)
        for parameter, gradient in zip(ours, before, strict=True):
            assert gradient is None or torch.equal(parameter.grad, gradient)  # left as they were
    # Roundings of seven steps, each of them of a few numbers of the size of the weights.
    allowed = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 2e-6}
    for one, other in zip(ours, theirs.weights, strict=True):
        torch.testing.assert_close(one.detach().double(), other, **allowed)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}])
def test_fused_sgd_is_torchs(settings):
    ours, theirs = parameters(), parameters()
    optimizer, reference = FusedSGD(ours, lr=0.1, weight_decay=0.1, **settings), None
    reference = torch.optim.SGD(theirs, lr=0.1, weight_decay=0.1, fused=True, **settings)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("settings", [{}, {**FIXED, "beta1": 0.9, "weight_decay": 0.1}])
def test_adafactor_is_that_of_transformers(settings):
    from transformers.optimization import Adafactor as Theirs

    ours, theirs = parameters(), parameters()
    optimizer, reference = Adafactor(ours, **settings), Theirs(theirs, **settings)
    for step in range(5):
        give_gradients(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@EACH
def test_weights_and_gradients_of_zero_stay_finite(cls, settings):
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.zeros(0, 3))]
    optimizer = cls(params, **settings)
    for step in range(3):
        params[0].grad = torch.ones(4, 3) if step else torch.zeros(4, 3)
        params[1].grad, params[2].grad = torch.zeros(4, 3), torch.zeros(0, 3)
        optimizer.step()
    assert all(torch.isfinite(one).all() for one in params)
    assert params[0].abs().sum() > 0


@EACH
def test_groups_have_their_own_hyperparameters(cls, settings):
    torch.manual_seed(0)
    fixed = {"relative_step": False} if cls is Adafactor else {}
    split = parameters()
    optimizer = cls([{"params": split[:4], "lr": 0.0, **fixed, "weight_decay": 0.0}, {"params": split[4:]}], **settings)
    train(optimizer, split)
    initial = parameters()
    for number, (one, other) in enumerate(zip(split, initial, strict=True)):
        assert torch.equal(one, other) == (number < 4)


@EACH
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01), torch.tensor([0.01])])
def test_rates_may_be_tensors_and_change(cls, settings, lr):
    more = {"relative_step": False} if cls is Adafactor else {}
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr  # schedulers write into a tensor
    ours, theirs = parameters(), parameters()
    optimizer = cls(ours, **{**settings, **more, "lr": lr})
    reference = cls(theirs, **{**settings, **more, "lr": 0.01})
    for one, other in ((optimizer, ours), (reference, theirs)):
        scheduler = torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5)
        for step in range(4):
            train(one, other, [step])
            scheduler.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@EACH
def test_any_order_of_memory_gives_the_same(cls, settings):
    shape = (4, 3, 5, 2)
    plain = parameters([shape])
    last = [nn.Parameter(plain[0].detach().clone(memory_format=torch.channels_last))]
    gaps = [nn.Parameter(torch.zeros(4, 3, 5, 4)[..., ::2].copy_(plain[0].detach()))]
    optimizers = [cls(one, **settings) for one in (plain, last, gaps)]
    for step in range(3):
        give_gradients(plain, last, gaps, step=2 * step)
        for optimizer in optimizers:
            optimizer.step()
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    for other in (last, gaps):
        torch.testing.assert_close(plain[0], other[0], rtol=1e-6, atol=1e-6)


# Formats and states.


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(cls, settings, dtype):
    ours = parameters(dtype=dtype)
    exact = [nn.Parameter(one.detach().float()) for one in ours]
    optimizer, reference = cls(ours, **settings), cls(exact, **settings)
    give_gradients(ours, exact)
    for one, other in zip(ours, exact, strict=True):
        other.grad = one.grad.float()
    optimizer.step()
    reference.step()
    for one, other in zip(ours, exact, strict=True):
        assert torch.equal(one, other.to(dtype))
        for key, value in optimizer.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(reference.state[other][key]))
            assert key == "step" or value.dtype is torch.float32


def test_adafactor_has_a_number_per_row_and_column():
    big = nn.Parameter(torch.randn(300, 200))
    optimizer = Adafactor([big])
    train(optimizer, [big], [0])
    assert sum(one.numel() for one in optimizer.state[big].values() if isinstance(one, torch.Tensor)) == 500


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_round_exactly(cls, settings, dtype):
    params = parameters(dtype=dtype)
    optimizer = cls(params, **settings)
    train(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = parameters(dtype=dtype, seed=5)
    for one, other in zip(others, params, strict=True):
        one.data.copy_(other.data)
    resumed = cls(others, **{**settings, "weight_decay": 0.7})
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state)
    copy.deepcopy(resumed).load_state_dict(state)  # a load and a copy leave torch's own defaults behind
    resumed.load_state_dict(state)
    assert_equal(optimizer, resumed)
    assert resumed.param_groups[0]["weight_decay"] == settings.get("weight_decay", 0.0)
    for one in (optimizer, resumed):
        train(one, params_of(one), range(3, 6))
    assert_equal(optimizer, resumed)


@EACH
def test_a_copy_goes_on_as_the_original(cls, settings):
    params = parameters()
    optimizer = cls(params, **settings)
    train(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    for one in (optimizer, twin):
        train(one, params_of(one), range(2, 4))
    assert_equal(optimizer, twin)


@EACH
def test_other_states_are_refused(cls, settings):
    params = parameters()
    optimizer = cls(params, **settings)
    train(optimizer, params)
    before = copy.deepcopy(optimizer)
    adam = torch.optim.Adagrad(params)
    train(adam, parameters(), [0])
    with pytest.raises(ConfigError, match=f"an optimizer other than {cls.__name__}"):
        optimizer.load_state_dict(adam.state_dict())
    smaller = [nn.Parameter(torch.randn(3, 2)) for _ in SHAPES]
    other = cls(smaller, **settings)
    train(other, smaller)
    with pytest.raises(ConfigError, match=r"of shape \(3.*for the same model, with the parameters in the same order"):
        optimizer.load_state_dict(other.state_dict())
    for p, q in zip(params, params_of(before), strict=True):
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(before.state[q][k])) for k, v in optimizer.state[p].items()
        )


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_round_exactly(cls, settings, dtype, tmp_path):
    def run():
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1)).to(dtype)
        with torch.no_grad():
            for number, one in enumerate(model.parameters()):
                one.copy_(torch.linspace(-1, 1 + number, one.numel()).view_as(one))
        booster = Booster()
        model, optimizer, *_ = booster.boost(model, cls(model.parameters(), **settings))
        return booster, model, optimizer

    def go(booster, model, optimizer, steps):
        for step in steps:
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
            booster.backward(model(x).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    first, second = run(), run()
    go(*first, range(3))
    first[0].save(tmp_path / "c", *first[1:])
    go(*second, [9])
    second[0].load(tmp_path / "c", *second[1:])
    for one in (first, second):
        go(*one, range(3, 5))
    assert_equal(first[2].unwrap(), second[2].unwrap())


@EACH
def test_a_closure_is_called_once_before_the_step(cls, settings):
    params = parameters([(3, 2)])
    optimizer, calls = cls(params, **settings), []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(params[0].detach().clone())
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == pytest.approx(float(calls[0].square().sum()))
    assert len(calls) == 1
    assert not torch.equal(params[0], calls[0])


@EACH
def test_a_group_may_join_later(cls, settings):
    params = parameters()
    optimizer = cls(params[:3], **settings)
    train(optimizer, params[:3], [0])
    optimizer.add_param_group({"params": params[3:], "lr": 0.02} if cls is not Adafactor else {"params": params[3:]})
    train(optimizer, params, [0])
    assert [optimizer.state[one]["step"] for one in params if "step" in optimizer.state[one]][:3] in ([2, 2, 2], [])
    assert not any(torch.equal(one, other) for one, other in zip(params, parameters(), strict=True))


def test_fused_lamb_clears_gradients_as_it_was_told():
    for keeps in (True, False):
        params = parameters()
        optimizer = copy.deepcopy(FusedLAMB(params, set_grad_none=not keeps))
        train(optimizer, params_of(optimizer), [0])
        optimizer.zero_grad()
        assert all((one.grad is not None) == keeps for one in params_of(optimizer))
        optimizer.zero_grad(set_to_none=True)
        assert all(one.grad is None for one in params_of(optimizer))


def test_parts_of_one_step_share_the_norm_of_all_gradients():
    ours, theirs = parameters(), parameters()
    optimizer, reference = FusedLAMB(ours, **FUSED_LAMB), FusedLAMB(theirs, **FUSED_LAMB)
    for step in range(3):
        give_gradients(ours, theirs, step=step)
        gradients = [one.grad for one in ours]
        with optimizer.full_step():
            for shown in (range(4), range(4, len(ours))):
                for number, one in enumerate(ours):
                    one.grad = gradients[number] if number in shown else None
                optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_hook_of_the_user_may_change_gradients_of_a_whole_step():
    ours, theirs = parameters(), parameters()
    optimizer, reference = FusedLAMB(ours, **FUSED_LAMB), FusedLAMB(theirs, **FUSED_LAMB)

    def replace(optimizer, *_):
        for one in params_of(optimizer):
            if one.grad is not None:
                one.grad = one.grad * 0.01

    for one in (optimizer, reference):
        one.register_step_pre_hook(replace)
    give_gradients(ours, theirs)
    with optimizer.full_step():
        optimizer.step()
    reference.step()
    assert all(map(torch.equal, ours, theirs))


@EACH
def test_what_plugins_ask_of_them(cls, settings):
    optimizer = cls(parameters(), **settings)
    assert isinstance(optimizer, ShardAware)
    assert isinstance(optimizer, StateAllocator)
    assert isinstance(optimizer, NeedsFullStep) == (cls is FusedLAMB)
    require_elementwise(optimizer)


# Mistakes.


WRONG = [
    (Lamb, {"lr": -1.0}, "lr=-1.0"),
    (Lamb, {"lr": float("nan")}, "lr=nan"),
    (Lamb, {"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\)"),
    (Lamb, {"lr": None}, "lr=None, and this optimizer computes no learning rate itself"),
    (Lamb, {"betas": (0.9, 1.0)}, r"give 2 numbers in \[0, 1\)"),
    (Lamb, {"betas": 0.9}, "betas=0.9"),
    (Lamb, {"betas": (0.9, 0.99, 0.999)}, "give 2 numbers"),
    (Lamb, {"eps": 0.0}, "eps=0.0 divides 0 by 0"),
    (Lamb, {"weight_decay": "0.1"}, "weight_decay='0.1'"),
    (Lamb, {"adam": 1}, "adam must be a bool, got 1"),
    (Lars, {"momentum": 1.0}, "momentum=1.0 .* less than 1"),
    (Lars, {"eeta": 0.0}, "eeta=0.0 would make every step zero"),
    (Lars, {"eps": -1.0}, "eps=-1.0"),
    (FusedLAMB, {"amsgrad": True}, "amsgrad=True has no meaning in LAMB"),
    (FusedLAMB, {"bias_correction": (0.9, 0.99)}, "positional arguments may be in the wrong order"),
    (FusedLAMB, {"set_grad_none": 0}, "set_grad_none must be a bool, got 0"),
    (FusedLAMB, {"max_grad_norm": -1}, "max_grad_norm=-1"),
    (FusedLAMB, {"max_grad_norm": None}, "max_grad_norm=None"),
    (FusedSGD, {"nesterov": True}, "nesterov=True needs momentum and no dampening, .* give momentum=0.9"),
    (FusedSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
    (FusedSGD, {"momentum": -0.9}, "momentum=-0.9"),
    (Adafactor, {"lr": 1e-3}, "lr=0.001 would not be used, .* pass relative_step=False"),
    (Adafactor, {"relative_step": False}, "lr=None, and this optimizer computes no learning rate itself"),
    (Adafactor, {"lr": 1e-3, "relative_step": False, "warmup_init": True}, "LinearWarmupLR"),
    (Adafactor, {"eps": 1e-30}, r"eps=1e-30 is not the pair .* such as \(1e-30, 0.001\)"),
    (Adafactor, {"eps": (0.0, 1e-3)}, "two positive floats"),
    (Adafactor, {"decay_rate": 0.8}, "decay_rate=0.8 .* such as -0.8"),
    (Adafactor, {"beta1": 1.5}, "beta1"),
    (Adafactor, {"clip_threshold": 0.0}, "clip_threshold=0.0 would clip every update to nothing"),
    (CAME, {}, "lr=None, and this optimizer computes no learning rate itself"),
    (CAME, {"lr": 1e-3, "betas": (0.9, 0.999)}, "give 3 numbers"),
    (CAME, {"lr": 1e-3, "eps": (1e-30, 0.0)}, "two positive floats"),
]


@pytest.mark.parametrize(("cls", "settings", "said"), WRONG)
def test_mistakes_are_told(cls, settings, said):
    with pytest.raises(ConfigError, match=said):
        cls(parameters(), **settings)
    if "amsgrad" not in settings and "set_grad_none" not in settings:
        good = {CAME: {"lr": 0.1}}.get(cls, {})
        optimizer = cls(parameters(), **good)
        if settings:
            with pytest.raises(ConfigError, match=said):
                optimizer.add_param_group({"params": parameters(), **good, **settings})
            assert len(optimizer.param_groups) == 1


def test_every_group_of_came_may_have_its_own_rate():
    first, second = parameters([(2, 2)]), parameters([(3,)])
    CAME([{"params": first, "lr": 1e-3}, {"params": second, "lr": 1e-4}])
    with pytest.raises(ConfigError, match="lr=None"):
        CAME([{"params": first, "lr": 1e-3}, {"params": second}])


@EACH
def test_gradients_and_parameters_that_can_not_work(cls, settings):
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = cls(embedding.parameters(), **settings)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"is sparse, and .* use an embedding with sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    with pytest.raises(ConfigError, match="view_as_real"):
        cls([nn.Parameter(torch.ones(2, dtype=torch.complex64))], **settings)
