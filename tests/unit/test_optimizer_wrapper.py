"""The gradient window in one process: backward, accumulate, clip, norm, step, skip and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from booster.errors import ConfigError
from booster.interface import ModelWrapper, OptimizerWrapper
from booster.mixed_precision.fp16 import Fp32MasterWeights
from booster.mixed_precision.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaleConfig


def make(cls=torch.optim.AdamW, seed=0, scaler=None, **settings):
    """Returns a wrapped optimizer over a small model with two param groups, and its plain torch twin."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.05}]
        pairs.append((model, cls(groups, **settings)))
    model = ModelWrapper(pairs[0][0])
    optimizer = OptimizerWrapper(pairs[0][1], model)
    optimizer.loss_scaler = scaler
    return model, optimizer, *pairs[1]


def data(rows=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def loss_of(model, x, y, reduction="mean"):
    return nn.functional.mse_loss(model(x), y, reduction=reduction)


def assert_same(model, twin, *, exact=True):
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        if exact:
            assert torch.equal(ours, theirs)
        else:  # another order of a few fp32 sums
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def grads(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


SCALERS = [None, 1.0, 2.0**12]


@pytest.mark.parametrize("scale", SCALERS)
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_steps_equal_plain_torch(scale, max_norm):
    model, optimizer, twin, plain = make(scaler=None if scale is None else ConstantLossScaler(scale))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2)
    for seed in range(5):
        optimizer.backward(loss_of(model, *data(seed=seed)))
        loss_of(twin, *data(seed=seed)).backward()
        norm = optimizer.clip_grad_by_norm(max_norm)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(twin.parameters(), max_norm))
        optimizer.step()
        plain.step()
        scheduler.step()
        plain_scheduler.step()
        assert optimizer.get_grad_norm() == norm.item()
        optimizer.zero_grad()
        plain.zero_grad()
        assert optimizer.get_grad_norm() == norm.item()
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in plain.param_groups]
    assert_same(model, twin)
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("scale", SCALERS)
def test_clipping_acts_on_unscaled_gradients(norm_type, scale):
    model, optimizer, twin, _ = make(scaler=None if scale is None else ConstantLossScaler(scale))
    optimizer.backward(loss_of(model, *data()))
    loss_of(twin, *data()).backward()
    assert torch.equal(
        optimizer.clip_grad_by_norm(0.2, norm_type), nn.utils.clip_grad_norm_(twin.parameters(), 0.2, norm_type)
    )
    for ours, theirs in zip(grads(model), grads(twin), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", SCALERS)
def test_clipping_by_value(scale):
    model, optimizer, twin, _ = make(scaler=None if scale is None else ConstantLossScaler(scale))
    optimizer.backward(loss_of(model, *data()))
    loss_of(twin, *data()).backward()
    optimizer.clip_grad_by_value(0.01)
    nn.utils.clip_grad_value_(twin.parameters(), 0.01)
    for ours, theirs in zip(grads(model), grads(twin), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.abs().max() <= 0.01


def test_several_backwards_sum_as_in_torch():
    model, optimizer, twin, plain = make(scaler=ConstantLossScaler(8.0))
    for seed in range(3):
        optimizer.backward(loss_of(model, *data(seed=seed)))
        loss_of(twin, *data(seed=seed)).backward()
    optimizer.step()
    plain.step()
    assert_same(model, twin)


def accumulate(model, optimizer, seeds, *, norm=None, num_items=False):
    """The loop that `Booster.accumulate` runs: clip, step and zero_grad are called in every microbatch."""
    norms = []
    for index, seed in enumerate(seeds):
        with optimizer.microbatch(is_last=index == len(seeds) - 1):
            x, y = data(rows=2 + seed, seed=seed)
            if num_items:
                optimizer.backward(loss_of(model, x, y, "sum"), num_items=y.numel())
            else:
                optimizer.backward(loss_of(model, x, y))
            norms.append(None if norm is None else optimizer.clip_grad_by_norm(norm))
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("scale", SCALERS)
def test_micro_steps_are_averaged(scale):
    model, optimizer, twin, plain = make(scaler=None if scale is None else ConstantLossScaler(scale))
    for _ in range(3):
        norms = accumulate(model, optimizer, range(3), norm=0.3)
        for seed in range(3):
            (loss_of(twin, *data(rows=2 + seed, seed=seed)) / 3).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        plain.step()
        plain.zero_grad()
        assert norms[:2] == [None, None]
        assert torch.allclose(norms[2], expected, rtol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(model, twin, exact=False)


def test_a_micro_step_with_two_backwards_counts_once():
    model, optimizer, twin, plain = make(torch.optim.SGD)
    for index in range(2):
        with optimizer.microbatch(is_last=index == 1):
            optimizer.backward(loss_of(model, *data(seed=index)))
            optimizer.backward(loss_of(model, *data(seed=index + 5)))
            optimizer.step()
            optimizer.zero_grad()
    for seed in (0, 5, 1, 6):
        (loss_of(twin, *data(seed=seed)) / 2).backward()
    plain.step()
    assert_same(model, twin, exact=False)


def test_number_of_micro_steps():
    model, optimizer, _, _ = make()
    assert optimizer.num_microbatches == 0
    for index in range(3):
        with optimizer.microbatch(is_last=index == 2):
            assert optimizer.num_microbatches == index + 1
            optimizer.backward(loss_of(model, *data()))
    assert optimizer.num_microbatches == 0


@pytest.mark.parametrize("is_last", [False, True])
def test_a_micro_step_inside_of_another_is_refused(is_last):
    model, optimizer, *_ = make()
    match = "inside of another accumulate.. block of the same optimizer.*write one block"
    with optimizer.microbatch(is_last=False):
        with refused(match), optimizer.microbatch(is_last=is_last):
            pass
        optimizer.backward(loss_of(model, *data()))
    assert optimizer.num_microbatches == 1
    with optimizer.microbatch(is_last=True):
        with refused(match), optimizer.microbatch(is_last=is_last):
            pass
        optimizer.backward(loss_of(model, *data()))
        optimizer.step()
    assert optimizer.num_steps == 1
    assert optimizer.accumulation.num_averaged == 2


@pytest.mark.parametrize("scale", SCALERS)
def test_num_items_is_the_mean_over_everything(scale):
    model, optimizer, twin, plain = make(scaler=None if scale is None else ConstantLossScaler(scale))
    for _ in range(2):
        accumulate(model, optimizer, range(3), num_items=True)
        batches = [data(rows=2 + seed, seed=seed) for seed in range(3)]
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        loss_of(twin, x, y).backward()
        plain.step()
        plain.zero_grad()
    assert_same(model, twin, exact=False)


def test_num_items_without_accumulation_and_zero_in_one_call():
    model, optimizer, twin, plain = make(torch.optim.SGD)
    x, y = data()
    optimizer.backward(loss_of(model, x, y, "sum"), num_items=y.numel())
    optimizer.backward(loss_of(model, x, y, "sum") * 0, num_items=0)
    optimizer.step()
    loss_of(twin, x, y).backward()
    plain.step()
    assert_same(model, twin, exact=False)


def test_a_skipped_step_changes_nothing_but_the_scale():
    scaler = DynamicLossScaler(LossScaleConfig(2.0**10, 2.0, 0.5, 2))
    model, optimizer, twin, plain = make(scaler=scaler)
    scales = []
    for overflow in (False, True, False, False):
        loss = loss_of(model, *data())
        optimizer.backward(loss * math.inf if overflow else loss)
        optimizer.clip_grad_by_norm(1.0)
        before = grads(model)
        optimizer.step()
        assert optimizer.step_was_skipped == overflow
        assert overflow == any(not gradient.isfinite().all() for gradient in before)
        scales.append(scaler.scale)
        optimizer.zero_grad()
        if not overflow:
            loss_of(twin, *data()).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            plain.step()
            plain.zero_grad()
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    assert optimizer.num_skipped_steps == 1
    assert_same(model, twin)
    assert all(torch.equal(state["step"], torch.tensor(3.0)) for state in optimizer.state.values())


def test_a_step_unscales_by_the_scale_of_its_own_loss():
    scaler = DynamicLossScaler(LossScaleConfig(2.0, 2.0, 0.5, 1))  # grows after every step
    model, optimizer, twin, plain = make(torch.optim.SGD, scaler=scaler)
    for seed in range(4):
        optimizer.backward(loss_of(model, *data(seed=seed)))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(twin, *data(seed=seed)).backward()
        plain.step()
        plain.zero_grad()
    assert scaler.scale == 2.0**5
    assert_same(model, twin)


def test_one_infinite_micro_step_skips_the_whole_step():
    model, optimizer, twin, _ = make(scaler=ConstantLossScaler(4.0))
    for index in range(2):
        with optimizer.microbatch(is_last=index == 1):
            loss = loss_of(model, *data(seed=index))
            optimizer.backward(loss * math.inf if index == 0 else loss)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert_same(model, twin)


def test_without_a_scaler_an_infinite_gradient_is_the_users_own():
    model, optimizer, _, _ = make(torch.optim.SGD)
    optimizer.backward(loss_of(model, *data()) * math.inf)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert any(not parameter.isfinite().all() for parameter in model.parameters())


def test_a_second_step_in_one_window_does_not_move_the_scale_again():
    scaler = DynamicLossScaler(LossScaleConfig(2.0, 2.0, 0.5, 1))
    model, optimizer, _, _ = make(scaler=scaler)
    optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    optimizer.step()
    assert scaler.scale == 4.0


def test_step_without_backward_changes_nothing():
    scaler = DynamicLossScaler(LossScaleConfig(2.0, 2.0, 0.5, 1))
    model, optimizer, twin, _ = make(scaler=scaler)
    optimizer.step()
    assert scaler.scale == 2.0
    assert optimizer.get_grad_norm() is None
    assert_same(model, twin)


def test_backward_after_model_zero_grad_begins_a_new_window():
    model, optimizer, twin, plain = make(scaler=ConstantLossScaler(8.0))
    optimizer.backward(loss_of(model, *data(seed=3)))
    optimizer.clip_grad_by_norm(1.0)
    model.zero_grad()
    optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    loss_of(twin, *data()).backward()
    plain.step()
    assert_same(model, twin)


def test_zero_grad_without_setting_to_none():
    model, optimizer, _, _ = make(scaler=ConstantLossScaler(8.0))
    optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in grads(model))
    optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_backward_by_grad_continues_a_scaled_backward():
    model, optimizer, twin, plain = make(torch.optim.SGD, scaler=ConstantLossScaler(4.0))
    x, y = data()
    hidden = model.unwrap()[0](x)
    cut = hidden.detach().requires_grad_()
    optimizer.backward(nn.functional.mse_loss(model.unwrap()[2](cut.tanh()), y))
    optimizer.backward_by_grad(hidden, cut.grad)
    optimizer.step()
    loss_of(twin, x, y).backward()
    plain.step()
    assert_same(model, twin)


def test_backward_for_some_inputs_only():
    model, optimizer, _, _ = make()
    last = model.unwrap()[2]
    optimizer.backward(loss_of(model, *data()), inputs=list(last.parameters()), retain_graph=True)
    assert model.unwrap()[0].weight.grad is None
    assert last.weight.grad is not None


def test_gradient_hooks_see_true_gradients_once_a_window():
    model, optimizer, twin, _ = make(scaler=ConstantLossScaler(2.0**8))
    seen = []
    optimizer.register_gradient_hook(lambda gradients: seen.append([gradient.clone() for gradient in gradients]))
    optimizer.backward(loss_of(model, *data()))
    optimizer.clip_grad_by_norm(1e-3)
    optimizer.get_grad_norm()
    optimizer.step()
    loss_of(twin, *data()).backward()
    assert len(seen) == 1
    for ours, theirs in zip(seen[0], grads(twin), strict=True):
        assert torch.equal(ours, theirs)


def test_state_dict_holds_the_scaler_and_loads_back():
    scaler = DynamicLossScaler(LossScaleConfig(2.0**10, 2.0, 0.5, 2))
    model, optimizer, _, _ = make(scaler=scaler)
    optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    state = optimizer.state_dict()
    assert state["loss_scaler"] == scaler.state_dict()
    _, other, _, _ = make(scaler=DynamicLossScaler(LossScaleConfig(8.0, 2.0, 0.5, 2)))
    other.load_state_dict(state)
    assert other.loss_scaler.state_dict() == scaler.state_dict()
    assert "loss_scaler" in state, "what was given is not changed"
    assert other.state_dict()["state"].keys() == state["state"].keys()


def test_a_closure_works_in_fp32_and_is_refused_with_a_scaler():
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    model = ModelWrapper(module)
    optimizer = OptimizerWrapper(torch.optim.LBFGS(module.parameters(), max_iter=20), model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *data())
        optimizer.backward(loss)
        return loss

    first = optimizer.step(closure).item()
    assert loss_of(model, *data()).item() < first
    with refused("num_items=6 inside of step.closure.*write a mean"):
        optimizer.step(lambda: optimizer.backward(loss_of(model, *data(), "sum"), num_items=6))
    optimizer.loss_scaler = ConstantLossScaler(2.0)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(closure)


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_bad_losses():
    model, optimizer, _, _ = make()
    with refused("float, not a tensor"):
        optimizer.backward(1.0)
    with refused(r"shape \(6, 2\)"):
        optimizer.backward(model(data()[0]))
    with refused("does not depend on any parameter"):
        optimizer.backward(torch.ones(()))
    optimizer.backward(loss_of(model, *data()).reshape(1))
    assert optimizer.get_grad_norm() > 0


def test_backward_after_unscaling_is_refused():
    model, optimizer, _, _ = make(scaler=ConstantLossScaler(8.0))
    optimizer.backward(loss_of(model, *data()))
    optimizer.clip_grad_by_norm(1.0)
    with refused("cannot be added to them"):
        optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    with refused("cannot be added to them"):
        optimizer.backward(loss_of(model, *data()))
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, *data()))
    assert optimizer.get_grad_norm() > 0


def test_fp32_gradients_add_up_over_steps_as_in_torch():
    model, optimizer, twin, plain = make(torch.optim.SGD)
    for seed in range(3):
        optimizer.backward(loss_of(model, *data(seed=seed)))
        optimizer.step()
        loss_of(twin, *data(seed=seed)).backward()
        plain.step()
    assert_same(model, twin)


def test_mixing_backwards_with_and_without_num_items_is_refused():
    model, optimizer, _, _ = make()
    optimizer.backward(loss_of(model, *data()))
    with refused("num_items"):
        optimizer.backward(loss_of(model, *data()), num_items=3)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, *data()), num_items=3)
    with refused("num_items"):
        optimizer.backward(loss_of(model, *data()))
    with refused("is not a number of items"):
        optimizer.backward(loss_of(model, *data()), num_items=-1)


def test_no_items_at_all_is_refused():
    model, optimizer, _, _ = make()
    optimizer.backward(loss_of(model, *data()), num_items=0)
    with refused("num_items is 0"):
        optimizer.step()


def test_gradients_that_bypassed_backward_are_refused_with_a_scaler():
    model, optimizer, _, _ = make(scaler=ConstantLossScaler(8.0))
    loss_of(model, *data()).backward()
    for call in (optimizer.step, lambda: optimizer.clip_grad_by_norm(1.0)):
        with refused("lack the loss scale"):
            call()
    model, optimizer, twin, plain = make()
    loss_of(model, *data()).backward()
    loss_of(twin, *data()).backward()
    optimizer.step()
    plain.step()
    assert_same(model, twin)


def test_error_if_nonfinite():
    model, optimizer, _, _ = make()
    optimizer.backward(loss_of(model, *data()) * math.inf)
    with pytest.raises(RuntimeError, match="norm of order"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def test_add_param_group():
    _, optimizer, _, _ = make()
    extra = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.param_groups[2]["lr"] == 0.5
    optimizer.master_weights = Fp32MasterWeights(optimizer.unwrap())
    with refused("add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_what_passes_through():
    model, optimizer, _, _ = make(torch.optim.SGD, momentum=0.9)
    inner = optimizer.unwrap()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    calls = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.backward(loss_of(model, *data()))
    optimizer.step()
    handle.remove()
    assert calls == ["step"]
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_attribute
