"""Every precision, without the facade, equals a plain torch loop that does the same by hand, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
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
from booster.mixed_precision.float8_linear import Float8Linear
from torch import nn

NAMES = ["fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]
STEPS = 10
OVERFLOW_STEPS = (2, 3, 7)


class Net(nn.Module):
    """Odd sizes, a batch norm, a tied weight, a frozen weight, several outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.middle = nn.Linear(7, 7)
        self.again = self.middle
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, batch, scale=1.0):
        hidden = self.norm(self.first(batch["x"]) * scale).relu()
        hidden = self.again(self.middle(hidden)) + self.frozen(hidden)
        return {"logits": self.last(hidden), "index": batch["index"]}


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net()


def make_optimizer(model, cls=torch.optim.AdamW):
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return cls([{"params": trainable[:3], "lr": 0.02}, {"params": trainable[3:], "lr": 0.01}], weight_decay=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(6, 5, generator=generator)
        # 60000 is finite in float16, its products are not.
        yield (
            {"x": x * 60000 if step in OVERFLOW_STEPS else x, "index": torch.arange(6)},
            torch.randint(3, (6,), generator=generator),
        )


def boost(precision, model, optimizer=None, criterion=None):
    precision.prepare(model)
    boosted = ModelWrapper(model)
    wrapped = None if optimizer is None else OptimizerWrapper(optimizer, boosted)
    return precision.configure(boosted, wrapped, criterion)


def train_boosted(precision, *, clip=1.0, model=None):
    model = make_net() if model is None else model
    model, optimizer, criterion = boost(precision, model, make_optimizer(model), nn.CrossEntropyLoss())
    record = []
    for batch, target in batches():
        output = model(batch)
        loss = criterion(output["logits"], target)
        optimizer.backward(loss)
        norm = optimizer.clip_grad_by_norm(clip)
        optimizer.step()
        scale = None if optimizer.loss_scaler is None else optimizer.loss_scaler.scale
        record.append((loss.item(), norm.item(), scale, optimizer.step_was_skipped))
        optimizer.zero_grad()
    return model, optimizer, record


def assert_same_records(found, expected):
    assert len(found) == len(expected) == STEPS
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert repr(ours) == repr(theirs), f"step {step}"  # repr: nan equals nan


def assert_same_weights(model, reference):
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0, equal_nan=True)


def train_autocast(dtype, **scaler_settings):
    """Plain torch: autocast and GradScaler, as the torch documentation writes it."""
    model = make_net()
    optimizer, criterion = make_optimizer(model), nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, **scaler_settings)
    record = []
    for batch, target in batches():
        with torch.autocast("cpu", dtype):
            logits = model(batch)["logits"].float()
            loss = criterion(logits, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        record.append((loss.item(), norm.item(), scaler.get_scale() if scaler.is_enabled() else None, skipped))
        optimizer.zero_grad()
    return model, optimizer, record


def assert_same_states(ours, theirs):
    ours, theirs = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[index][name], value), (index, name)


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


def cast_by_hand(model, keeps_norm):
    for module in model.modules():
        if keeps_norm and isinstance(module, nn.BatchNorm1d):
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()


def train_half_by_hand(scale, growth_interval, hysteresis, *, keeps_norm=False, clip=1.0):
    """float16 weights, a list of fp32 masters, a loss scale: with nothing but torch operations."""
    model = make_net()
    masters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    cast_by_hand(model, keeps_norm)
    holder = nn.ParameterList(masters.values())
    optimizer, criterion = make_optimizer(holder), nn.CrossEntropyLoss()
    clean = overflows = 0
    record = []
    for batch, target in batches():
        loss = criterion(model({"x": batch["x"].half(), "index": batch["index"]})["logits"].float(), target)
        (loss * scale).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                masters[name].grad = parameter.grad.float() * (1.0 / scale)
        grads = [master.grad for master in masters.values() if master.grad is not None]
        is_finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        norm = torch.stack([torch.linalg.vector_norm(grad) for grad in grads]).norm()
        if is_finite:
            nn.utils.clip_grad_norm_(holder, clip)
            optimizer.step()
            for name, parameter in model.named_parameters():
                parameter.data.copy_(masters[name].data)
            clean += 1
            if clean == growth_interval:
                scale, clean, overflows = scale * 2, 0, 0
        else:
            clean, overflows = 0, overflows + 1
            scale = scale / 2 if overflows >= hysteresis else scale
        record.append((loss.item(), norm.item(), scale, not is_finite))
        optimizer.zero_grad()
        model.zero_grad()
    return model, masters, record


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
    precision.prepare(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert parameter.dtype == torch.float16
        assert torch.equal(parameter, exact[name].half())
    assert model.norm.running_mean.dtype == torch.float16
    assert model.norm.num_batches_tracked.dtype == torch.int64
    boosted = ModelWrapper(model)
    optimizer = OptimizerWrapper(make_optimizer(model), boosted)
    precision.configure(boosted, optimizer, None)
    for group in optimizer.param_groups:
        for master in group["params"]:
            name = next(key for key, value in before.items() if value is optimizer.working_parameter(master))
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
    for model in models:
        precision.prepare(model)
    optimizers = [boost_rest(precision, model) for model in models]
    for optimizer, values in zip(optimizers, exact, strict=True):
        for name, master in optimizer.checkpoint_state().named_parameters().items():
            assert torch.equal(master, values[name])
    assert optimizers[0].loss_scaler is not optimizers[1].loss_scaler


def boost_rest(precision, model):
    boosted = ModelWrapper(model)
    return precision.configure(boosted, OptimizerWrapper(make_optimizer(model), boosted), None)[1]


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
    assert "loss scale 8 -> 8" in lines


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
        (lambda: FP16NaiveMixedPrecision(verbose=1), "verbose=1"),
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
        (lambda: FP16ApexMixedPrecision("O2", keep_batchnorm_fp32="yes"), "truth value"),
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


def formats(model):
    return {name: value.dtype for name, value in model.state_dict().items() if value.is_floating_point()}


def test_apex_o0_is_fp32():
    record = train_boosted(FP16ApexMixedPrecision("O0"))[2]
    reference = make_net()
    optimizer, criterion = make_optimizer(reference), nn.CrossEntropyLoss()
    for (batch, target), (loss, _, scale, skipped) in zip(batches(), record, strict=True):
        expected = criterion(reference(batch)["logits"], target)
        expected.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (loss, scale, skipped) == (expected.item(), None, False)
    assert set(formats(boost(FP16ApexMixedPrecision("O0"), make_net().half())[0]).values()) == {torch.float32}


def test_apex_o1_equals_autocast():
    model, optimizer, record = train_boosted(FP16ApexMixedPrecision("O1", verbosity=0))
    reference, plain, expected = train_autocast(torch.float16, init_scale=2.0**16)
    assert_same_records(record, expected)
    assert_same_weights(model, reference)
    assert_same_states(optimizer.unwrap(), plain)


def test_apex_o2_keeps_batch_norms_and_masters_in_fp32():
    model, optimizer, record = train_boosted(FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10, verbosity=0))
    reference, masters, expected = train_half_by_hand(2.0**10, 2000, hysteresis=1, keeps_norm=True)
    assert_same_records(record, expected)
    for name, dtype in formats(model).items():
        assert dtype == (torch.float32 if name.startswith("norm.") else torch.float16), name
    for name, master in optimizer.checkpoint_state().named_parameters().items():
        assert torch.equal(master, masters[name]), name
    assert_same_weights(model, reference)
    norm = dict(model.named_parameters())["norm.weight"]
    assert any(parameter is norm for group in optimizer.param_groups for parameter in group["params"])


def test_apex_o3_is_all_float16_without_masters():
    model, optimizer, criterion = boost(
        FP16ApexMixedPrecision("O3"), net := make_net(), make_optimizer(net), nn.CrossEntropyLoss()
    )
    assert set(formats(model).values()) == {torch.float16}
    assert optimizer.loss_scaler is None
    assert optimizer.master_weights is None
    reference = make_net().half()
    plain = make_optimizer(reference)
    batch, target = next(batches())
    optimizer.backward(criterion(model(batch)["logits"], target))
    criterion(reference({"x": batch["x"].half(), "index": None})["logits"].float(), target).backward()
    optimizer.step()
    plain.step()
    assert_same_weights(model, reference)


def test_apex_overrides():
    o2 = FP16ApexMixedPrecision("O2", keep_batchnorm_fp32="False", master_weights=False, loss_scale="128")
    model, optimizer, _ = boost(o2, net := make_net(), make_optimizer(net))
    assert set(formats(model).values()) == {torch.float16}
    assert optimizer.master_weights is None
    assert optimizer.loss_scaler.scale == 128
    o3 = FP16ApexMixedPrecision("O3", keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic")
    model, optimizer, _ = boost(o3, net := make_net(), make_optimizer(net))
    assert formats(model)["norm.weight"] == torch.float32
    assert len(optimizer.master_weights) == len([p for p in net.parameters() if p.requires_grad]) - 2
    assert optimizer.loss_scaler.scale == 2.0**16
    low = FP16ApexMixedPrecision("O1", min_loss_scale=2.0**18, cast_model_outputs=torch.bfloat16, verbosity=0)
    model, optimizer, _ = boost(low, net := make_net(), make_optimizer(net))
    assert optimizer.loss_scaler.scale == 2.0**18
    assert model(next(batches())[0])["logits"].dtype == torch.bfloat16


def test_apex_bfloat16_and_no_cast():
    model, optimizer, _ = boost(
        FP16ApexMixedPrecision("O2", cast_model_type=torch.bfloat16), net := make_net(), make_optimizer(net)
    )
    assert formats(model)["first.weight"] == torch.bfloat16
    half = nn.Linear(3, 3).half()
    _, optimizer, _ = boost(FP16ApexMixedPrecision("O2", cast_model_type=False), half, make_optimizer(half))
    assert len(optimizer.master_weights) == 2, "weights that came in float16 get masters too"


def test_apex_logs_skipped_steps(capsys):
    model, optimizer, _ = boost(
        FP16ApexMixedPrecision("O2", loss_scale="dynamic"), net := make_net(), make_optimizer(net)
    )
    optimizer.backward(model(next(batches())[0])["logits"].sum() * torch.inf)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert "loss scale 65536 -> 32768" in capsys.readouterr().err


def test_constant_scale_skips_overflows_and_unscales():
    precision = FP16ApexMixedPrecision("O2", loss_scale=2.0**10)
    record = train_boosted(precision)[2]
    assert [skipped for *_, skipped in record] == [step in OVERFLOW_STEPS for step in range(STEPS)]
    assert {scale for _, _, scale, _ in record} == {2.0**10}


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


# fp8


def test_fp8_changes_linear_layers_in_place():
    model = make_net()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    boosted, _, _ = boost(FP8MixedPrecision(), model)
    assert type(model.first) is type(model.middle) is type(model.last) is Float8Linear
    assert model.again is model.middle
    assert isinstance(model.first, nn.Linear)
    assert list(boosted.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    boosted(next(batches())[0])
    assert calls == [1]
    root = nn.Linear(3, 3)
    FP8MixedPrecision().prepare(root)
    assert type(root) is Float8Linear


def test_fp8_filter_and_subclasses():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Own(3, 3), nn.Linear(3, 3))
    FP8MixedPrecision(module_filter=lambda name, module: name != "2").prepare(model)
    assert [type(module) for module in model] == [Float8Linear, Own, nn.Linear]
    with pytest.raises(ConfigError, match="no nn.Linear"):
        FP8MixedPrecision().prepare(nn.Conv1d(2, 2, 1))
    with pytest.raises(ConfigError, match="module_filter took no"):
        FP8MixedPrecision(module_filter=lambda name, module: False).prepare(nn.Linear(2, 2))


def train_classifier(precision):
    """Returns the losses of 60 steps of a small classifier."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 5))
    x = torch.randn(40, 9)
    target = x[:, :5].argmax(1)
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    if precision is None:
        boosted = ModelWrapper(net)
        model, optimizer, criterion = boosted, OptimizerWrapper(optim, boosted), nn.CrossEntropyLoss()
    else:
        model, optimizer, criterion = boost(precision, net, optim, nn.CrossEntropyLoss())
    losses = []
    for _ in range(60):
        loss = criterion(model(x), target)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("emulate", [None, False])
def test_fp8_learns_as_fp32_does(emulate):
    expected = train_classifier(None)
    losses = train_classifier(FP8MixedPrecision(emulate=emulate))
    assert expected[-1] < 0.1 * expected[0]
    # e4m3 rounds each factor by up to 2**-4; over sums of tens of terms the errors average out to a few percent of a
    # logit, which moves the loss by a few hundredths.
    assert losses != expected
    assert losses[0] == pytest.approx(expected[0], abs=0.03)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 0.1
    assert losses[-1] < 0.15 * losses[0]


def test_fp8_demands_what_the_device_has(monkeypatch):
    monkeypatch.setattr("booster.mixed_precision.fp8.native_problem", lambda *_: "no such instruction")
    with pytest.raises(ConfigError, match="no such instruction"):
        boost(FP8MixedPrecision(emulate=False), make_net())
