"""TorchDDPPlugin: training over ranks gives what one process gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload
from oracles.serial_training import make_optimizer
from parity import assert_parallel_equals_serial
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, model_names, split_batch

from booster import Booster, ConfigError, DesyncError, FP16TorchMixedPrecision
from booster.device import current_device
from booster.plugins import TorchDDPPlugin
from booster.pytree import map_tensors

preload(*TRANSFORMERS_MODULES)
CUSTOM = ["mlp_odd", "convnet_batchnorm", "byte_gpt", "tied_lm", "frozen_unused_conditional", "multi_output_groups"]
PRECISIONS = ["bf16", "fp16", "fp16_naive", "fp16_apex_o1", "fp16_apex_o2", "fp8"]


@pytest.mark.parametrize("model", model_names())
def test_fp32_equals_serial(model):
    assert_parallel_equals_serial("torch_ddp", model, world_size=2, max_norm=0.5)


@pytest.mark.parametrize(
    ("model", "world_size"),
    [
        pytest.param(model, size, marks=() if number % 2 == index else pytest.mark.slow)
        for number, model in enumerate(CUSTOM)
        for index, size in enumerate([3, 4])
    ],
)
def test_other_world_sizes_equal_serial(model, world_size):
    assert_parallel_equals_serial("torch_ddp", model, world_size=world_size)


def models_and_precisions():
    """Every pair; by default every precision with some models of ours, and every other model with one or the other."""
    for number, model in enumerate(model_names()):
        for precision in PRECISIONS:
            is_default = model in CUSTOM[:4] or precision == PRECISIONS[number % len(PRECISIONS)]
            yield pytest.param(model, precision, marks=() if is_default else pytest.mark.slow)


@pytest.mark.parametrize(("model", "precision"), list(models_and_precisions()))
def test_every_precision_equals_serial(model, precision):
    # SGD: its update is linear in the gradient, so that an error is the gradient's own. AdamW in low precision is
    # compared bit for bit with loops written out by hand, in one process, by tests/unit/test_mixed_precision.py.
    assert_parallel_equals_serial("torch_ddp", model, world_size=2, precision=precision, optimizer="sgd")


@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize("model", ["mlp_odd", "tied_lm", "frozen_unused_conditional", "multi_output_groups"])
def test_accumulation_equals_serial(model, synchronize):
    assert_parallel_equals_serial(
        "torch_ddp", model, world_size=2, accumulation=3, synchronize=synchronize, max_norm=0.1
    )


@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulation_over_a_static_graph_equals_serial(synchronize, world_size):
    assert_parallel_equals_serial(
        "torch_ddp",
        "tied_lm",
        world_size=world_size,
        accumulation=3,
        synchronize=synchronize,
        max_norm=0.1,
        plugin_arguments={"static_graph": True},
    )


def test_float8_by_rows_equals_serial():
    for model in ("byte_gpt", "mlp_odd"):
        assert_parallel_equals_serial("torch_ddp", model, precision="fp8_rowwise", max_norm=0.5, optimizer="sgd")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accumulation_in_low_precision_equals_serial(precision):
    assert_parallel_equals_serial(
        "torch_ddp",
        "byte_gpt",
        precision=precision,
        accumulation=2,
        synchronize="accumulate",
        max_norm=0.5,
        optimizer="sgd",
    )


@pytest.mark.parametrize(
    "arguments", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.01}]
)
def test_arguments_of_ddp(arguments):
    assert_parallel_equals_serial("torch_ddp", "byte_gpt", world_size=2, optimizer="sgd", plugin_arguments=arguments)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("precision", [None, *PRECISIONS])
@pytest.mark.parametrize("model", model_names())
def test_whole_grid_equals_serial(model, precision, world_size):
    assert_parallel_equals_serial(
        "torch_ddp",
        model,
        world_size=world_size,
        precision=precision,
        accumulation=2,
        synchronize="no_sync",
        max_norm=0.5,
        optimizer="adamw" if precision is None else "sgd",
    )


@pytest.mark.on_device
@distributed(world_size=2)
def test_world_two_and_raw_ddp_have_the_same_bits():
    entry, rank = get_model("byte_gpt"), dist.get_rank()
    ours, theirs = entry.build(), nn.parallel.DistributedDataParallel(entry.build().to(current_device()))
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(ours, make_optimizer("adamw", entry.param_groups(ours)))
    raw_optimizer = make_optimizer("adamw", [p for p in theirs.parameters() if p.requires_grad])
    for step in range(4):
        batch = map_tensors(lambda tensor: tensor.to(current_device()), split_batch(entry.make_batch(step, 4), rank, 2))
        loss, raw_loss = entry.loss(model, batch), entry.loss(theirs, batch)
        booster.backward(loss, optimizer)
        raw_loss.backward()
        booster.clip_grad_norm_(optimizer, 0.5)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for one in (optimizer, raw_optimizer):
            one.step()
            one.zero_grad()
        assert torch.equal(loss, raw_loss)
    for mine, raw in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, raw)


@pytest.mark.on_device
@distributed(world_size=[2, 4])
def test_num_items_divides_by_the_global_count():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # Unequal parts, two microbatches a rank.
    tokens = [torch.randn(3 + 5 * part, 4).to(current_device()) for part in range(2 * size)]
    reference, ours = nn.Linear(4, 1).to(current_device()), nn.Linear(4, 1)
    ours.load_state_dict(reference.state_dict())
    reference(torch.cat(tokens)).square().mean().backward()

    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for index, part in enumerate([tokens[2 * rank], tokens[2 * rank + 1]]):
        with booster.accumulate(model, optimizer, steps=2):
            booster.backward(model(part).square().sum(), optimizer, num_items=len(part))
            norm = booster.clip_grad_norm_(optimizer, float("inf"))
            assert (norm is None) == (index == 0)
    expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    torch.testing.assert_close(norm, expected)
    for mine, whole in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)


@pytest.mark.on_device
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("returns", ["tensor", "float"])
@distributed(world_size=[2, 3])
def test_lbfgs_equals_one_process(line_search, returns):
    """Its line search and its tolerances go by the loss, which must be that of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, targets = torch.randn(4 * size, 3, dtype=torch.float64), torch.randn(4 * size, 1, dtype=torch.float64)
    inputs, targets = inputs.to(current_device()), targets.to(current_device())
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().to(current_device())
    ours = copy.deepcopy(reference)
    settings = {"lr": 0.5, "max_iter": 8, "line_search_fn": line_search}
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(ours, torch.optim.LBFGS(ours.parameters(), **settings))
    serial = torch.optim.LBFGS(reference.parameters(), **settings)

    def closure(net, own, backward, rows):
        own.zero_grad()
        loss = nn.functional.mse_loss(net(inputs[rows]), targets[rows])
        backward(loss)
        return loss if returns == "tensor" else loss.item()

    part = slice(4 * rank, 4 * rank + 4)
    for _ in range(3):
        whole = serial.step(lambda: closure(reference, serial, torch.Tensor.backward, slice(None)))
        mean = optimizer.step(lambda: closure(model, optimizer, lambda loss: booster.backward(loss, optimizer), part))
        assert type(mean) is type(whole)
        torch.testing.assert_close(float(mean), float(whole))
    for mine, one in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, one)
        first = mine.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first)


@pytest.mark.on_device
@distributed(world_size=2)
def test_overflow_on_one_rank_skips_the_step_on_all():
    model = nn.Linear(4, 1)
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision=FP16TorchMixedPrecision(init_scale=2**10))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    scale = optimizer.loss_scaler.scale
    for step in range(3):
        inputs = torch.ones(2, 4, device=current_device())
        if step == 1 and dist.get_rank() == 1:
            inputs = inputs * float("inf")
        booster.backward(model(inputs).mean(), optimizer)
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
        optimizer.zero_grad()
        if step == 0:
            before = [p.detach().clone() for p in model.parameters()]
        elif step == 1:
            assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            assert optimizer.loss_scaler.scale == scale / 2
    assert optimizer.num_skipped_steps == 1
    assert next(iter(optimizer.state.values()))["step"] == 2


@pytest.mark.on_device
@distributed(world_size=2)
def test_replicas_start_equal_in_full_precision():
    torch.manual_seed(dist.get_rank())  # every rank builds another model
    model = nn.Linear(3, 3)
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16_naive")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]:
        ranks = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(ranks, parameter.detach())
        assert torch.equal(ranks[0], ranks[1])


@pytest.mark.on_device
@distributed(world_size=2)
def test_models_that_differ_between_ranks_are_an_error_on_all():
    model = nn.Linear(3 + dist.get_rank(), 2)
    with pytest.raises(DesyncError, match=r"rank 0 has weight: \(2, 3\).*rank 1 has weight: \(2, 4\)"):
        Booster(plugin=TorchDDPPlugin()).boost(model)


@pytest.mark.on_device
@distributed(world_size=2)
def test_a_gan_and_a_frozen_teacher():
    booster = Booster(plugin="torch_ddp")
    generator, discriminator, teacher = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 2).requires_grad_(False)
    generator, g_optimizer, *_ = booster.boost(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    discriminator, d_optimizer, *_ = booster.boost(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1))
    teacher, none, *_ = booster.boost(teacher)
    assert none is None
    torch.manual_seed(dist.get_rank())
    noise = torch.randn(4, 2).to(current_device())
    booster.backward(discriminator(generator(noise).detach()).mean(), d_optimizer)
    d_optimizer.step()
    loss = discriminator(generator(noise)).mean() + (generator(noise) - teacher(noise)).square().mean()
    booster.backward(loss, g_optimizer)
    g_optimizer.step()
    for parameter in [*generator.parameters(), *discriminator.parameters(), *teacher.parameters()]:
        ranks = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(ranks, parameter.detach())
        assert torch.equal(ranks[0], ranks[1])


@pytest.mark.on_device
@distributed(world_size=2)
def test_no_sync_leaves_each_rank_its_own_gradient():
    model = nn.Linear(2, 1)
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.full((1, 2), float(dist.get_rank()), device=current_device())
    with booster.no_sync(model, optimizer):
        booster.backward(model(inputs).sum(), optimizer)
    assert torch.equal(model.module.weight.grad, inputs)
    booster.backward(model(inputs).sum(), optimizer)
    assert torch.equal(model.module.weight.grad, torch.ones_like(inputs))  # the mean of 2 * 0 and 2 * 1
    with pytest.raises(ConfigError, match=r"booster\.no_sync\(model, optimizer\)"):
        booster.no_sync()


@pytest.mark.on_device
@distributed(world_size=[2, 3])
def test_gather_for_metrics_gives_each_sample_once():
    booster = Booster(plugin=TorchDDPPlugin())
    loader = booster.prepare_dataloader(torch.arange(11), batch_size=2)
    seen = [booster.gather_for_metrics({"ids": batch, "size": torch.tensor(len(batch))}) for batch in loader]
    assert torch.cat([part["ids"] for part in seen]).tolist() == list(range(11))
    assert all(part["size"].shape == (booster.plugin.dp_size,) for part in seen)
