"""LowLevelZeroPlugin: loss scales, param groups, schedulers, freezing, and state from before boost()."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from zero_twins import Twins, adamw, mlp, sgd, trained

from booster import Booster, ConfigError
from booster.device import current_device
from booster.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.on_device

STAGES = pytest.mark.parametrize("stage", [1, 2])


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# Loss scale.


@STAGES
@distributed(world_size=[2, pytest.param(3, marks=pytest.mark.slow)])
def test_overflow_on_one_rank_skips_the_step_on_all(stage):
    booster = Booster(plugin=LowLevelZeroPlugin(stage, "fp16", initial_scale=2**10, hysteresis=1))
    model, optimizer, *_ = booster.boost(model := nn.Linear(4, 1), adamw(model))
    skipped = []
    for step in range(4):
        before, scale = weights_of(model), optimizer.loss_scaler.scale
        states = [state["step"].clone() for state in optimizer.state.values()]
        x = torch.ones(2, 4, device=current_device())
        if step in (1, 2) and dist.get_rank() == 1:
            x[0, 0] = float("inf") if step == 1 else float("nan")
        booster.backward(model(x).mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        if optimizer.step_was_skipped:
            assert same(before, weights_of(model))
            assert [state["step"] for state in optimizer.state.values()] == states
            assert optimizer.loss_scaler.scale == scale / 2
        else:
            assert not same(before, weights_of(model))
    assert skipped == [False, True, True, False]
    assert optimizer.num_skipped_steps == 2


@STAGES
@distributed(world_size=2, device="cpu")  # accelerators add up in the dtype that travels
def test_an_overflow_of_the_sum_over_ranks_is_none(stage):
    # Each rank's gradient is the largest of fp16 or close to it; their sum in fp16 would not be finite.
    booster = Booster(plugin=LowLevelZeroPlugin(stage, "fp16", initial_scale=1))
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=2.0**-16))
    booster.backward(model(torch.full((1, 1), 60000.0, device=current_device())).sum(), optimizer)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert float(model.state_dict()["weight"]) == float(torch.tensor(-60000.0 * 2**-16).half())


def _scaled_run(stage, overflow_steps=(), **scaler):
    """Returns the gradients of every step that was taken, with weights and data whose fp16 products never underflow."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-8, 9, (3, 6)) / 8)
        model.bias.zero_()
    plugin = LowLevelZeroPlugin(stage, "fp16", hysteresis=1, reduce_bucket_size_in_m=1e-6, **scaler)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=2.0**-5))
    gradients, scales = [], []
    optimizer.register_gradient_hook(lambda parts: gradients.append([part.clone() for part in parts]))
    step = 0
    while step < 6:
        generator = torch.Generator().manual_seed(10 * step + plugin.dp_rank)
        x = torch.randint(-3, 4, (4, 6), generator=generator).to(current_device()).float()
        overflows = step in overflow_steps and plugin.dp_rank == 1
        overflow_steps = tuple(other for other in overflow_steps if other != step)
        booster.backward((model(x * float("inf") if overflows else x) - 1).square().mean(), optimizer)
        scales.append(optimizer.loss_scaler.scale)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.step_was_skipped:
            gradients.pop()
        else:
            step += 1
    return gradients, scales


@STAGES
@distributed(world_size=2)
def test_growth_and_backoff_give_the_gradients_of_an_unscaled_run(stage):
    plain, ones = _scaled_run(stage, initial_scale=1, max_scale=1)
    assert set(ones) == {1.0}
    # Multiplying by a power of two is exact as long as nothing falls below fp16's normal numbers or above its largest.
    for gradient in (gradient for step in plain for gradient in step):
        assert gradient.eq(0).logical_or(gradient.abs() > 2.0**-10).all()
    found, scales = _scaled_run(stage, overflow_steps=(1, 4), initial_scale=2**4, growth_interval=2)
    assert scales == [16, 16, 8, 8, 16, 16, 8, 8]
    assert len(found) == len(plain) == 6
    for step, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), step


# Gradients.


@STAGES
@pytest.mark.parametrize("extra_dp_size", [1, 2])
@distributed(world_size=4)
def test_num_items_divides_by_the_global_count(stage, extra_dp_size):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # Unequal parts, two microbatches a rank.
    tokens = [torch.randn(3 + 5 * part, 4).to(current_device()) for part in range(2 * size)]
    reference, ours = nn.Linear(4, 1).to(current_device()), nn.Linear(4, 1)
    ours.load_state_dict(reference.state_dict())
    reference(torch.cat(tokens)).square().mean().backward()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32", extra_dp_size=extra_dp_size))
    model, optimizer, *_ = booster.boost(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for index, part in enumerate([tokens[2 * rank], tokens[2 * rank + 1]]):
        with booster.accumulate(model, optimizer, steps=2):
            booster.backward(model(part).square().sum(), optimizer, num_items=len(part))
            norm = booster.clip_grad_norm_(optimizer, float("inf"))
            assert (norm is None) == (index == 0)
            optimizer.step()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


@STAGES
@distributed(world_size=[1, 3])
def test_clipping_by_value_equals_one_process(stage):
    twins = Twins(stage=stage).boost()
    for step in range(3):
        twins.backward(step)
        nn.utils.clip_grad_value_(twins.plain.parameters(), 0.02)
        twins.optimizer.clip_grad_by_value(0.02)
        twins.step()
    twins.assert_equal()


@STAGES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(
    world_size=[pytest.param(2, marks=pytest.mark.slow), 3], device="cpu"
)  # an accelerator rounds the sums, too
def test_communication_dtype_rounds_each_ranks_gradient_once(stage, dtype):
    twins = Twins(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, communication_dtype=dtype
    ).boost()
    total = [torch.zeros_like(parameter) for parameter in twins.plain.parameters()]
    for rank in range(twins.size):
        part = twins.batch(0)[0][4 * rank : 4 * (rank + 1)]
        gradients = torch.autograd.grad(twins.loss(twins.plain, part), list(twins.plain.parameters()))
        for one, gradient in zip(total, gradients, strict=True):
            one += gradient.to(dtype).float()
    twins.booster.backward(twins.loss(twins.model, twins.batch(0)[1]), twins.optimizer)
    twins.optimizer.step()
    for parameter, one in zip(twins.plain.parameters(), total, strict=True):
        parameter.data -= one / twins.size
    twins.assert_equal(rtol=1e-6, atol=1e-7)  # far below the rounding of one gradient, 2**-9 or 2**-12


@STAGES
@distributed(world_size=2)
def test_get_grad_norm_without_clipping_and_after_the_step(stage):
    twins = Twins(stage=stage).boost()
    assert twins.optimizer.get_grad_norm() is None
    twins.backward(0)
    expected = float(nn.utils.get_total_norm([parameter.grad for parameter in twins.plain.parameters()]))
    assert twins.optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-5)
    twins.step()
    assert twins.optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-5)
    twins.assert_equal()


# Param groups.


def _three_groups(model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return torch.optim.AdamW(
        [
            {"params": matrices[:1], "lr": 0.02, "weight_decay": 0.3},
            {"params": [parameter for parameter in model.parameters() if parameter.dim() == 1], "betas": (0.5, 0.9)},
            {"params": matrices[1:], "eps": 1e-2},
        ],
        lr=0.01,
        eps=1e-3,
    )


@STAGES
@distributed(world_size=[2, pytest.param(3, marks=pytest.mark.slow)])
def test_hyperparameters_of_groups_are_live(stage):
    twins = Twins(optimizer=_three_groups, stage=stage).boost()
    for step in range(4):
        for optimizer in (twins.plain_optimizer, twins.user_optimizer if step % 2 else twins.optimizer):
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
            optimizer.param_groups[2]["betas"] = (0.9 - 0.1 * step, 0.99)
        twins.train([step])
    twins.assert_equal()


def _step_lr(optimizer):
    return StepLR(optimizer, 2, 0.3)


def _one_cycle(optimizer):
    return OneCycleLR(optimizer, [0.1, 0.05, 0.2], 6)  # moves the betas too


@pytest.mark.parametrize("on_boosted", [True, False])
@pytest.mark.parametrize("make", [_step_lr, _one_cycle])
@STAGES
@distributed(world_size=2)
def test_schedulers_made_before_and_after_boost(stage, make, on_boosted):
    twins = Twins(optimizer=_three_groups, stage=stage)
    plain_scheduler = make(twins.plain_optimizer)
    scheduler = None if on_boosted else make(twins.user_optimizer)
    if on_boosted:
        scheduler = make(twins.boost().optimizer)
    else:
        twins.model, twins.optimizer, _, _, scheduler = twins.booster.boost(
            twins.raw, twins.user_optimizer, lr_scheduler=scheduler
        )
    for step in range(5):
        twins.train([step])
        plain_scheduler.step()
        scheduler.step()
    assert scheduler.get_last_lr() == plain_scheduler.get_last_lr()
    twins.assert_equal()


@STAGES
@distributed(world_size=2)
def test_add_param_group_after_boost(stage):
    twins = Twins(optimizer=lambda model: torch.optim.AdamW(model[0].parameters(), eps=1e-3), stage=stage).boost()
    twins.train()
    added = [
        {"params": list(twins.plain[2].parameters()), "lr": 0.02},
        {"params": twins.plain[4].weight},
    ]
    ours = [{"params": twins.raw[2].parameters(), "lr": 0.02}, {"params": twins.raw[4].weight}]
    for group, our_group in zip(added, ours, strict=True):
        twins.plain.zero_grad()  # gradients from before they were optimized
        twins.model.zero_grad()
        twins.plain_optimizer.add_param_group(group)
        twins.optimizer.add_param_group(our_group)
        twins.train(range(3, 6))
    twins.assert_equal()
    assert len(twins.optimizer.param_groups) == 3
    twins.backward(7)
    with pytest.raises(ConfigError, match="with accumulated gradients"):
        twins.optimizer.add_param_group({"params": [twins.raw[4].bias]})
    twins.step()
    with pytest.raises(ConfigError, match="not the model's"):
        twins.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


# Freezing.


@STAGES
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@distributed(world_size=2)
def test_freezing_and_unfreezing_after_boost(stage, optimizer):
    twins = Twins(optimizer=optimizer, stage=stage).boost().train()
    for flag in (False, True):
        for model in (twins.plain, twins.raw):
            model[2].requires_grad_(flag)
        before = twins.plain[2].weight.clone()
        twins.train(range(3, 6))
        assert torch.equal(before, twins.plain[2].weight) == (not flag)
        twins.assert_equal()


def _frozen_first(model):
    """All parameters are in the groups, those of the first layer frozen."""
    model[0].requires_grad_(False)
    return torch.optim.AdamW(
        [{"params": model[:3].parameters()}, {"params": model[4].parameters(), "lr": 0.02}], eps=1e-3
    )


@STAGES
@distributed(world_size=[2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_that_came_frozen_train_later(stage):
    twins = Twins(optimizer=_frozen_first, stage=stage).boost().train()
    twins.assert_equal()
    for model in (twins.plain, twins.raw):
        model[0].requires_grad_(True)
    twins.train(range(3, 6))
    assert not torch.equal(twins.plain[0].weight, twins.initial["0.weight"])
    twins.assert_equal()


@STAGES
@distributed(world_size=2)
def test_unfreezing_while_gradients_wait_is_refused(stage):
    twins = Twins(optimizer=_frozen_first, stage=stage).boost()
    twins.backward(0)
    twins.raw[0].requires_grad_(True)
    with pytest.raises(ConfigError, match="unfreezing a parameter with accumulated gradients"):
        twins.booster.backward(twins.loss(twins.model, twins.batch(0)[1]), twins.optimizer)


# State from before boost().


@STAGES
@pytest.mark.parametrize("optimizer", [sgd, adamw, _three_groups])
@distributed(world_size=[pytest.param(2, marks=pytest.mark.slow), 3])
def test_steps_before_boost_are_remembered(stage, optimizer):
    twins = Twins(optimizer=optimizer, stage=stage)
    for step in range(3):
        for model, made in ((twins.plain, twins.plain_optimizer), (twins.raw, twins.user_optimizer)):
            twins.loss(model, twins.batch(step)[0]).backward()
            made.step()
            made.zero_grad()
    twins.boost().train(range(3, 6)).assert_equal()


@STAGES
@distributed(world_size=2)
def test_gradients_from_before_boost_are_gone(stage):
    twins = Twins(stage=stage)
    twins.loss(twins.raw, twins.batch(9)[0]).backward()
    twins.boost().train().assert_equal()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@STAGES
@distributed(world_size=2)
def test_weights_loaded_after_boost_are_those_that_train(stage, precision):
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision=precision, initial_scale=2**4))
    raw, source = mlp(), mlp()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(trained(raw), lr=2.0**-4))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(0.5)  # exact in every format, but for bits that the format lacks
    model.load_state_dict(source.state_dict())
    loaded = weights_of(model)
    booster.backward(
        model(torch.ones(4, 7, device=current_device())).sum() * 0.0, optimizer
    )  # moves nothing, but writes all weights
    optimizer.step()
    optimizer.zero_grad()
    assert same(loaded, weights_of(model))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    source.to(current_device())
    assert same(loaded, {name: tensor.to(dtype) for name, tensor in source.state_dict().items()})


@STAGES
@distributed(world_size=2)
def test_an_error_behind_the_update_leaves_equal_weights(stage):
    booster, model = Booster(plugin=LowLevelZeroPlugin(stage, "fp32")), nn.Linear(4, 3)
    optimizer = sgd(model)
    numbers = []

    def fail_once(*_):
        numbers.append(1)
        if len(numbers) == 2:
            raise ValueError("by the user's hook")

    optimizer.register_step_post_hook(fail_once)
    model, optimizer, *_ = booster.boost(model, optimizer)
    reference = nn.Linear(4, 3).to(current_device())
    reference.load_state_dict(model.state_dict())
    expected = sgd(reference)
    x = torch.ones(2, 4, device=current_device())
    for step in range(3):
        booster.backward(model(x).square().mean(), optimizer)
        reference(x).square().mean().backward()
        if step == 1:
            with pytest.raises(ValueError, match="by the user's hook"):
                optimizer.step()
        else:
            optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        torch.testing.assert_close(model.state_dict(), reference.state_dict())
