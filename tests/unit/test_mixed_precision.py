"""Every precision, without the facade, equals a plain torch loop that does the same by hand, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from oracles.precision_training import (
    OVERFLOW_STEPS,
    STEPS,
    assert_same_records,
    assert_same_states,
    assert_same_weights,
    batches,
    boost,
    make_net,
    make_optimizer,
    train_autocast,
    train_boosted,
    train_half_by_hand,
)
from torch import nn

from booster import Booster
from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    mixed_precision_from_name,
)

NAMES = ["fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]


def test_fp16_equals_autocast_with_grad_scaler():
    settings = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    model, optimizer, record = train_boosted(FP16TorchMixedPrecision(**settings))
    reference, plain, expected = train_autocast(torch.float16, **settings)
    assert_same_records(record, expected)
    assert_same_weights(model, reference)
    assert_same_states(optimizer.unwrap(), plain)
    assert [skipped for *_, skipped in record] == [step in OVERFLOW_STEPS for step in range(STEPS)]
    assert optimizer.num_skipped_steps == len(OVERFLOW_STEPS)
    assert {scale for _, _, scale, _ in record} > {2.0**16, 2.0**14}


def test_bf16_equals_autocast():
    model, optimizer, record = train_boosted(BF16MixedPrecision())
    reference, plain, expected = train_autocast(torch.bfloat16)
    assert_same_records(record, expected)
    assert_same_weights(model, reference)
    assert_same_states(optimizer.unwrap(), plain)
    assert optimizer.loss_scaler is None


def test_fp16_naive_equals_masters_by_hand():
    precision = FP16NaiveMixedPrecision(initial_scale=2.0**10, growth_interval=3)
    model, optimizer, record = train_boosted(precision)
    reference, masters, expected = train_half_by_hand(2.0**10, 3, hysteresis=2)
    assert_same_records(record, expected)
    assert_same_weights(model, reference)
    assert [skipped for *_, skipped in record].count(True) == len(OVERFLOW_STEPS)
    named = optimizer.checkpoint_state().named_parameters()
    assert named.keys() == {name for name, master in masters.items() if master.requires_grad}
    for name, master in named.items():
        assert torch.equal(master, masters[name]), name
        assert master.dtype == torch.float32


def test_fp16_naive_casts_everything_and_keeps_parameter_objects():
    model = make_net()
    before = dict(model.named_parameters())
    exact = copy.deepcopy(model.state_dict())
    precision = FP16NaiveMixedPrecision()
    prepared = precision.prepare(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert parameter.dtype == torch.float16
        assert torch.equal(parameter, exact[name].half())
    assert model.norm.running_mean.dtype == torch.float16
    assert model.norm.num_batches_tracked.dtype == torch.int64
    boosted = ModelWrapper(model)
    optimizer = OptimizerWrapper(make_optimizer(model), boosted)
    precision.configure(boosted, optimizer, None, prepared)
    for group in optimizer.param_groups:
        for master in group["params"]:
            name = next(key for key, value in before.items() if value is optimizer.model_parameter(master))
            assert torch.equal(master, exact[name]), "masters begin at the values before the cast"


def test_a_dynamic_scale_finds_its_way_from_the_default():
    model = make_net()
    model, optimizer, criterion = boost(FP16NaiveMixedPrecision(), model, make_optimizer(model), nn.CrossEntropyLoss())
    batch, target = next(batches())
    for _ in range(30):
        optimizer.backward(criterion(model(batch)["logits"], target))
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.step_was_skipped:
            break
    assert 5 < optimizer.num_skipped_steps < 30
    assert optimizer.loss_scaler.scale == 2.0 ** (32 - optimizer.num_skipped_steps + 1)  # hysteresis 2 forgives one


def test_values_from_before_the_cast_are_freed():
    for makes_optimizer in (True, False):
        model = make_net()
        memory = weakref.ref(model.frozen.weight.untyped_storage())
        boost(FP16NaiveMixedPrecision(), model, make_optimizer(model) if makes_optimizer else None)
        gc.collect()
        assert memory() is None


def test_one_precision_object_serves_several_models():
    precision = FP16NaiveMixedPrecision(initial_scale=64)
    models = [make_net(seed) for seed in (0, 1)]
    exact = [copy.deepcopy(model.state_dict()) for model in models]
    prepared = [precision.prepare(model) for model in models]
    optimizers = [boost_rest(precision, *one) for one in zip(models, prepared, strict=True)]
    for optimizer, values in zip(optimizers, exact, strict=True):
        for name, master in optimizer.checkpoint_state().named_parameters().items():
            assert torch.equal(master, values[name])
    assert optimizers[0].loss_scaler is not optimizers[1].loss_scaler


def boost_rest(precision, model, prepared):
    boosted = ModelWrapper(model)
    return precision.configure(boosted, OptimizerWrapper(make_optimizer(model), boosted), None, prepared)[1]


def test_masters_that_would_begin_at_rounded_values_are_refused():
    class Forgetful(FP16NaiveMixedPrecision):
        def prepare(self, model):
            super().prepare(model)

    model = make_net()
    with pytest.raises(ConfigError, match=r"pass what prepare\(\) returned"):
        Booster(mixed_precision=Forgetful()).boost(model, make_optimizer(model))


def test_loading_weights_refreshes_masters_but_keeps_digits_that_still_fit():
    model = make_net()
    boosted, optimizer, _ = boost(FP16NaiveMixedPrecision(), model, make_optimizer(model))
    masters = optimizer.checkpoint_state().named_parameters()
    before = {name: master.detach().clone() for name, master in masters.items()}
    boosted.load_state_dict(boosted.state_dict())
    for name, master in masters.items():
        assert torch.equal(master, before[name]), "the same rounded weights: the extra digits stay"
    changed = {name: value.clone() for name, value in boosted.state_dict().items()}
    changed["first.weight"][0, 0] = 3.0
    boosted.load_state_dict(changed)
    first = masters["first.weight"]
    assert first[0, 0] == 3.0
    assert torch.equal(first.flatten()[1:], before["first.weight"].flatten()[1:])


def test_states_that_the_optimizer_has_already_move_to_the_masters():
    model = make_net()
    optim = make_optimizer(model)
    model({"x": torch.randn(6, 5), "index": None})["logits"].sum().backward()
    optim.step()
    exp_avg = optim.state[model.first.weight]["exp_avg"].clone()
    _, optimizer, _ = boost(FP16NaiveMixedPrecision(), model, optim)
    assert model.first.weight not in optim.state
    master = optimizer.checkpoint_state().named_parameters()["first.weight"]
    assert torch.equal(optim.state[master]["exp_avg"], exp_avg)
    assert model.first.weight.grad.dtype == torch.float16


def test_gradient_buffers_are_reused_and_missing_gradients_stay_none():
    model = make_net()
    boosted, optimizer, criterion = boost(
        FP16NaiveMixedPrecision(initial_scale=8), model, make_optimizer(model), nn.CrossEntropyLoss()
    )
    master = optimizer.checkpoint_state().named_parameters()["first.weight"]
    addresses = set()
    for batch, target in [next(batches())] * 2:
        optimizer.backward(criterion(boosted(batch)["logits"], target))
        optimizer.step()
        addresses.add(master.grad.data_ptr())
        optimizer.zero_grad()
        assert master.grad is None
        assert model.first.weight.grad is None
    assert len(addresses) == 1
    optimizer.backward(boosted({"x": torch.randn(6, 5), "index": None})["logits"].sum() * 0 + model.last.bias.sum())
    model.first.weight.grad = None
    optimizer.get_grad_norm()
    assert master.grad is None


def test_sparse_gradients_reach_the_masters():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    exact = model[0].weight.detach().clone()
    boosted, optimizer, _ = boost(
        FP16NaiveMixedPrecision(initial_scale=8), model, torch.optim.SGD(model.parameters(), lr=0.5)
    )
    optimizer.backward(boosted(torch.tensor([1, 1, 3])).sum())
    optimizer.step()
    expected = exact.clone()
    expected[1] = expected[1] - 0.5 - 0.5
    expected[3] -= 0.5
    assert torch.equal(optimizer.param_groups[0]["params"][0], expected)
    assert torch.equal(model[0].weight, expected.half())


def test_zeros_in_the_gradients_are_counted_and_logged(capsys):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    nn.init.constant_(model[0].bias, -100.0)  # no unit is on: every gradient but the last bias's is zero
    precision = FP16NaiveMixedPrecision(initial_scale=8, log_num_zeros_in_grad=True, verbose=True)
    boosted, optimizer, _ = boost(precision, model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.backward(boosted(torch.ones(2, 2)).sum())
    optimizer.step()
    assert precision.num_zeros_in_grad == 6 + 3 + 3
    optimizer.zero_grad()
    optimizer.backward(boosted(torch.ones(2, 2)).sum() * torch.inf)
    optimizer.step()
    assert optimizer.step_was_skipped
    lines = capsys.readouterr().err
    assert "zeros in the gradients: 12" in lines
    assert "the loss scale stays at 8: a gradient overflowed and the step was skipped; 1 more overflow" in lines


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    precision = mixed_precision_from_name(name)
    assert isinstance(precision, MixedPrecision)
    model, optimizer, criterion = boost(precision, model := make_net(), make_optimizer(model), nn.CrossEntropyLoss())
    batch, target = next(batches())
    output = model(batch)
    assert output["logits"].dtype == torch.float32
    assert output["index"] is batch["index"]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(40):  # fp16_naive begins at 2**32
        optimizer.backward(criterion(model(batch)["logits"], target))
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.step_was_skipped:
            break
    assert not optimizer.step_was_skipped
    assert not torch.equal(before["first.weight"], model.state_dict()["first.weight"])
    assert torch.equal(before["frozen.weight"], model.state_dict()["frozen.weight"])


@pytest.mark.parametrize(
    ("name", "hint"), [("FP16", "Did you mean 'fp16'"), ("fp16-naive", "Did you mean 'fp16_naive'"), ("int4", "Known")]
)
def test_unknown_names(name, hint):
    with pytest.raises(ConfigError, match=hint) as error:
        mixed_precision_from_name(name)
    for known in NAMES:
        assert known in str(error.value)


def test_without_optimizer_and_criterion():
    for name in NAMES:
        model, optimizer, criterion = boost(mixed_precision_from_name(name), make_net())
        assert (optimizer, criterion) == (None, None)
        with torch.no_grad():
            assert model(next(batches())[0])["logits"].dtype == torch.float32


class FormatLoss(nn.Module):
    """A criterion that multiplies matrices: its format shows whether autocast reached it."""

    weight = 3

    def forward(self, logits):
        product = logits @ logits.t()
        self.seen = product.dtype
        return product.mean()


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)]
)
def test_criterion_runs_under_autocast(name, dtype):
    inner = FormatLoss()
    model, _, criterion = boost(mixed_precision_from_name(name), make_net(), None, inner)
    assert isinstance(criterion, nn.Module)
    loss = criterion(model(next(batches())[0])["logits"])
    assert inner.seen == dtype
    assert loss.dtype == torch.float32
    assert criterion.weight == 3
    with pytest.raises(AttributeError):
        _ = criterion.missing

    def function(logits):
        return (logits @ logits.t()).mean()

    wrapped = boost(mixed_precision_from_name(name), make_net(), None, function)[2]
    assert wrapped.__name__ == "function"
    assert torch.equal(wrapped(model(next(batches())[0])["logits"]), loss)


def test_float16_weights_are_refused_where_fp32_weights_are_kept():
    for name in ("fp16", "fp16_apex", "fp8"):
        with pytest.raises(ConfigError, match="float16"):
            mixed_precision_from_name(name).prepare(make_net().half())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FP16TorchMixedPrecision(init_scale=0), "initial_scale=0"),
        (lambda: FP16TorchMixedPrecision(growth_interval=0), "growth_interval"),
        (lambda: FP16NaiveMixedPrecision(min_scale=2.0**33), "not between"),
        (lambda: FP16NaiveMixedPrecision(verbose=1), "verbose must be a bool, got 1"),
        (lambda: FP16NaiveMixedPrecision(log_num_zeros_in_grad="yes"), "log_num_zeros_in_grad"),
        (lambda: FP8MixedPrecision(recipe="delayed"), "recipe='delayed'"),
        (lambda: FP8MixedPrecision(module_filter="lm_head"), "module_filter"),
        (lambda: FP8MixedPrecision(emulate=1), "emulate=1"),
        (lambda: FP16ApexMixedPrecision("o1"), "opt_level='o1'"),
        (lambda: FP16ApexMixedPrecision(keep_batchnorm_fp32=True), "keep_batchnorm_fp32=True with opt_level='O1'"),
        (lambda: FP16ApexMixedPrecision(keep_batchnorm_fp32="False"), "O1"),
        (lambda: FP16ApexMixedPrecision(master_weights=False), "master_weights=False with opt_level='O1'"),
        (lambda: FP16ApexMixedPrecision(cast_model_type=torch.float16), "O1"),
        (lambda: FP16ApexMixedPrecision("O2", patch_torch_functions=True), "patch_torch_functions"),
        (lambda: FP16ApexMixedPrecision("O2", keep_batchnorm_fp32="yes"), "must be a bool, got 'yes'"),
        (lambda: FP16ApexMixedPrecision("O2", cast_model_type=torch.int8), "cast_model_type"),
        (lambda: FP16ApexMixedPrecision(cast_model_outputs=False), "cast_model_outputs"),
        (lambda: FP16ApexMixedPrecision(loss_scale="high"), "loss_scale='high'"),
        (lambda: FP16ApexMixedPrecision(loss_scale=-1), "loss_scale"),
        (lambda: FP16ApexMixedPrecision(loss_scale=8, min_loss_scale=1), "min_loss_scale"),
        (lambda: FP16ApexMixedPrecision(min_loss_scale=2.0**30), "not between"),
        (lambda: FP16ApexMixedPrecision(max_loss_scale=0), "max_loss_scale"),
        (lambda: FP16ApexMixedPrecision(num_losses=2), "num_losses"),
    ],
)
def test_bad_arguments_are_refused_at_once(make, named):
    with pytest.raises(ConfigError, match=named):
        make()


def test_rnn_weights_are_cast():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    net = Recurrent()
    model, optimizer, _ = boost(FP16NaiveMixedPrecision(initial_scale=8), net, make_optimizer(net, torch.optim.SGD))
    optimizer.backward(model(torch.randn(2, 5, 3)).square().mean())
    before = net.rnn.weight_ih_l0.detach().clone()
    optimizer.step()
    assert net.rnn.weight_ih_l0.dtype == torch.float16
    assert not torch.equal(before, net.rnn.weight_ih_l0)
