"""torch's own clipping, reads of `p.grad` and plain optimizers on boosted models: right, or an error that says why."""

from __future__ import annotations

import contextlib
import gc
import re

import pytest
import torch
from harness import distributed
from strategies import FP32, HALF, Pair, batch, perceptron
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from booster import Booster
from booster.errors import ConfigError
from booster.plugins import TorchDDPPlugin

pytestmark = pytest.mark.on_device

AVERAGED = ("ddp", "hybrid_tp")  # whose backward leaves the true gradients in `p.grad` of any model
SHARDED = [name for name in FP32 if name not in AVERAGED]
CLIPPING = {
    "norm": lambda parameters: clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: clip_grad_value_(parameters, 0.1),
    "given norm": lambda parameters: clip_grads_with_norm_(parameters, 0.1, torch.tensor(1.0)),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_model_boosted_alone_with_a_plain_optimizer(strategy):
    pair = Pair(FP32[strategy]())
    optimizers = [sgd(model.parameters()) for model in (pair.model, pair.plain)]
    if strategy not in AVERAGED:
        with pytest.raises(ConfigError, match=r"boosted without an optimizer.*booster.boost\(model, optimizer\)"):
            pair.losses(0)[0].backward()
        return
    for step in range(3):
        for loss, optimizer in zip(pair.losses(step), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_equal()


@pytest.mark.parametrize("strategy", SHARDED)
@distributed(2)
def test_what_boost_returned_may_not_be_thrown_away(strategy):
    booster, model = FP32[strategy](), perceptron()
    optimizer = sgd(model.parameters())
    booster.boost(model, optimizer)
    gc.collect()
    with pytest.raises(ConfigError, match=r"step\(\) was called on the SGD that was passed to boost\(\)"):
        optimizer.step()


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_model_boosted_alone_may_be_a_part_of_another_ones_loss(strategy):
    pair = Pair(FP32[strategy](), sgd)
    torch.manual_seed(5)
    teacher = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    plain_teacher = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    plain_teacher.load_state_dict(teacher.state_dict())
    plain_teacher.to(pair.booster.device)
    boosted_teacher, *_ = pair.booster.boost(teacher)  # its weights require gradients, which are not used
    for step in range(2):
        outputs = pair.model(pair.part(step))
        pair.booster.backward(boosted_teacher(outputs).square().mean(), pair.optimizer)
        plain_teacher(pair.plain(batch(step))).square().mean().backward()
        pair.on_both("step")
        pair.on_both("zero_grad")
    pair.assert_equal()
    if strategy in SHARDED:
        with pytest.raises(ConfigError, match="SGD that is not boosted, over parameters of a boosted model"):
            sgd(boosted_teacher.parameters()).step()


@pytest.mark.parametrize("strategy", SHARDED)
@distributed(2)
def test_a_plain_optimizer_from_before_boost_that_was_kept_from_it(strategy):
    model = perceptron()
    optimizer = sgd(model.parameters())
    FP32[strategy]().boost(model, sgd(model.parameters()))
    with pytest.raises(ConfigError, match="that is not boosted"):
        optimizer.step()


class Scaled(torch.nn.Module):
    """Criterion with a parameter that trains."""

    def __init__(self):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs):
        return ((outputs - 1) * self.temperature).square().mean()


class WithLoss(torch.nn.Module):
    """Model whose forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.model, self.criterion = perceptron(), Scaled()

    def forward(self, inputs):
        return self.criterion(self.model(inputs))


@pytest.mark.parametrize("strategy", [name for name in FP32 if name != "hybrid_tp"])
@distributed(2)
def test_a_plain_optimizer_of_the_parameters_of_the_criterion_is_an_error(strategy):
    booster, model, criterion = FP32[strategy](), perceptron(), Scaled().to(FP32[strategy]().device)
    plain = sgd(criterion.parameters())
    model, optimizer, criterion, *_ = booster.boost(model, sgd(model.parameters()), criterion)
    booster.backward(criterion(model(batch(0))), optimizer)
    optimizer.step()
    with pytest.raises(
        ConfigError, match=r"parameters of the criterion .* make the criterion a submodule of the model"
    ):
        plain.step()
    sgd(Scaled().parameters()).step()  # one that was not passed to boost()


@distributed(2)
def test_a_criterion_that_is_boosted_itself():
    booster, model, criterion = Booster(plugin=TorchDDPPlugin()), perceptron(), Scaled()
    plain = criterion.to(booster.device)
    optimizers = [sgd(model.parameters()), sgd(plain.parameters())]
    criterion, optimizers[1], *_ = booster.boost(plain, optimizers[1])
    model, optimizers[0], *_ = booster.boost(model, optimizers[0], plain)
    booster.backward(criterion(model(batch(0))), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    assert plain.temperature.item() != 2.0


@distributed(2)
def test_a_criterion_that_is_a_submodule_trains_as_in_one_process():
    booster, model = Booster(plugin=TorchDDPPlugin()), WithLoss()
    serial = WithLoss().to(booster.device)
    serial_optimizer = sgd(serial.parameters())
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    for step in range(3):
        booster.backward(model(batch(step).chunk(2)[booster.rank]), optimizer)
        serial(batch(step)).backward()
        for one in (optimizer, serial_optimizer):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(model.get_parameter("criterion.temperature"), serial.criterion.temperature)


def test_the_parameters_of_a_criterion_on_one_device():
    model, criterion = perceptron(), Scaled()
    optimizer = sgd([*model.parameters(), *criterion.parameters()])
    with pytest.raises(ConfigError, match=r"are the criterion's, not the model's .* make the criterion a submodule"):
        Booster(device="cpu").boost(model, optimizer, criterion)
    booster = Booster(device="cpu")
    plain = sgd(criterion.parameters())
    model, optimizer, boosted, *_ = booster.boost(model, sgd(model.parameters()), criterion)
    booster.backward(boosted(model(batch(0))), optimizer)
    plain.step()  # right without averaging and loss scale
    assert criterion.temperature.item() != 2.0


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("strategy", [*SHARDED, "hybrid_tp"])
@distributed(2)
def test_clipping_by_torch_where_gradients_are_elsewhere_is_an_error(strategy, clipping):
    pair = Pair(FP32[strategy](), sgd)
    pair.backward(0)
    shards = [one for group in pair.optimizer.param_groups for one in group["params"]]
    for parameters in (pair.model.parameters(), list(pair.booster.unwrap_model(pair.model).parameters()), shards):
        with pytest.raises(ConfigError, match=r"booster\.clip_grad_norm_"):
            CLIPPING[clipping](parameters)
    found = pair.booster.clip_grad_norm_(pair.optimizer, 0.1)
    torch.testing.assert_close(found, clip_grad_norm_(pair.plain.parameters(), 0.1))
    pair.on_both("step")
    pair.on_both("zero_grad")
    pair.assert_equal()


@distributed(2)
def test_clipping_by_torch_of_weights_with_masters_is_an_error():
    pair = Pair(HALF["ddp"](), sgd)
    pair.booster.backward(pair.losses(0)[0], pair.optimizer)
    with pytest.raises(ConfigError, match=r"booster\.clip_grad_norm_"):
        clip_grad_norm_(pair.model.parameters(), 0.1)
    masters = [one for group in pair.optimizer.param_groups for one in group["params"]]
    assert clip_grad_norm_(masters, 0.1) < 10  # true gradients, without the loss scale


def _microbatches(pair, step):
    """Yields this rank's three microbatches of a step, and those of one process."""
    for number in range(3):
        yield pair.part(3 * step + number), batch(3 * step + number)


@pytest.mark.parametrize("clipping", CLIPPING)
@distributed(2)
def test_gradients_in_the_last_microbatch_are_the_mean_for_torch_too(clipping):
    pair = Pair(FP32["ddp"](), sgd)
    for step in range(2):
        for mine, whole in _microbatches(pair, step):
            ((pair.plain(whole) - 1).square().mean() / 3).backward()
            with pair.booster.accumulate(pair.model, pair.optimizer, steps=3) as is_last:
                pair.booster.backward((pair.model(mine) - 1).square().mean(), pair.optimizer)
                if is_last:
                    for found, expected in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                        torch.testing.assert_close(found.grad, expected.grad)
                    CLIPPING[clipping](pair.model.parameters())
                    CLIPPING[clipping](pair.plain.parameters())
                else:
                    with pytest.raises(ConfigError, match="before the last microbatch"):
                        CLIPPING[clipping](pair.model.parameters())
                pair.optimizer.step()
                pair.optimizer.zero_grad()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
    pair.assert_equal()


@pytest.mark.parametrize("counts_items", [False, True])
@distributed(2)
def test_several_backwards_in_the_last_microbatch(counts_items):
    pair = Pair(FP32["ddp"](), sgd)
    num_items = {"num_items": 4.0} if counts_items else {}
    for step in range(2):
        for mine, whole in _microbatches(pair, step):
            # With items 3 microbatches, 2 losses and 2 ranks have 48 of them.
            reduce = torch.sum if counts_items else torch.mean
            for target in (1, 2):
                (reduce((pair.plain(whole) - target).square()) / (48 if counts_items else 3)).backward()
            with pair.booster.accumulate(pair.model, pair.optimizer, steps=3):
                for target in (1, 2):
                    loss = reduce((pair.model(mine) - target).square())
                    pair.booster.backward(loss, pair.optimizer, **num_items)
                if pair.optimizer.num_microbatches == 3:
                    for found, expected in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                        torch.testing.assert_close(found.grad, expected.grad)
                pair.optimizer.step()
                pair.optimizer.zero_grad()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
    pair.assert_equal(atol=1e-5)


@distributed(2)
def test_a_save_in_the_last_microbatch_continues(tmp_path):
    pair = Pair(FP32["ddp"](), sgd)
    for mine, whole in _microbatches(pair, 0):
        ((pair.plain(whole) - 1).square().mean() / 3).backward()
        with pair.booster.accumulate(pair.model, pair.optimizer, steps=3) as is_last:
            pair.booster.backward((pair.model(mine) - 1).square().mean(), pair.optimizer)
            if is_last:
                pair.booster.save(tmp_path / "middle", pair.model, pair.optimizer)
    pair.plain_optimizer.step()
    resumed = Pair(FP32["ddp"](), sgd)
    resumed.booster.load(tmp_path / "middle", resumed.model, resumed.optimizer)
    resumed.optimizer.step()
    resumed.plain = pair.plain
    resumed.assert_equal()


@distributed(2)
def test_clipping_by_torch_sees_gradients_without_the_loss_scale():
    pair = Pair(Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16"), sgd)
    pair.booster.backward(pair.losses(0)[0], pair.optimizer)
    norm = clip_grad_norm_(pair.model.parameters(), 0.1)
    pair.losses(0)[1].backward()
    torch.testing.assert_close(norm, clip_grad_norm_(pair.plain.parameters(), 0.1), rtol=1e-2, atol=1e-3)
    pair.on_both("step")
    pair.assert_equal(rtol=1e-2, atol=1e-3)


GRADIENTS_ELSEWHERE = "leave the GradScaler out, and write booster.backward"


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_a_grad_scaler_left_in_the_loop(strategy):
    pair = Pair(FP32[strategy](), sgd)
    scaler = torch.amp.GradScaler(pair.booster.device.type, init_scale=2.0**8)
    loss, plain_loss = pair.losses(0)
    pair.booster.backward(scaler.scale(loss), pair.optimizer)
    if strategy != "ddp":
        with pytest.raises(ConfigError, match=GRADIENTS_ELSEWHERE):
            scaler.step(pair.optimizer)
        return
    scaler.step(pair.optimizer)
    plain_loss.backward()
    pair.plain_optimizer.step()
    pair.assert_equal()


@pytest.mark.parametrize("fused", [False, True])
@distributed(2)
def test_a_grad_scaler_beside_the_boosters_loss_scale(fused):
    """A fused optimizer would take the scale from attributes that the scaler sets on the wrapper."""
    pair = Pair(FP32["ddp"](), lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=fused))
    scaler = torch.amp.GradScaler(pair.booster.device.type, init_scale=2.0**8)
    loss, plain_loss = pair.losses(0)
    pair.booster.backward(scaler.scale(loss), pair.optimizer)
    scaler.step(pair.optimizer)
    plain_loss.backward()
    pair.plain_optimizer.step()
    pair.assert_equal()
    pair = Pair(Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16"), sgd)
    pair.booster.backward(scaler.scale(pair.losses(0)[0]), pair.optimizer)
    with pytest.raises(ConfigError, match=GRADIENTS_ELSEWHERE):
        scaler.step(pair.optimizer)


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_gradients_of_autograd_grad_that_are_set_by_hand(strategy):
    pair = Pair(FP32[strategy](), sgd)

    def train(model, loss, optimizer):
        parameters = list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    for step in range(2):
        loss, plain_loss = pair.losses(step)
        if strategy != "ddp":
            with pytest.raises(ConfigError, match=r"was set by hand|torch.autograd.grad\(\) with the weight"):
                train(pair.model, loss, pair.optimizer)
            return
        train(pair.model, loss, pair.optimizer)
        train(pair.plain, plain_loss, pair.plain_optimizer)
    pair.train(2)
    pair.assert_equal()


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_parameters_of_a_group_that_are_replaced_after_boost(strategy):
    pair = Pair(FP32[strategy](), sgd)
    pair.train(0)
    pair.optimizer.param_groups[0]["params"] = [*pair.model.parameters(), torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups\[0\].*add modules before boost"):
        pair.backward(1)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "hybrid_dp", "hybrid_zero"])
@distributed(2)
def test_an_embedding_that_scales_its_rows_would_differ_between_ranks(strategy):
    booster, model = FP32[strategy](), torch.nn.Sequential(torch.nn.Embedding(4, 3, max_norm=1.0))
    with pytest.raises(ConfigError, match=r"'0' has max_norm=1.0.*weight\.renorm_\(2, 0, 1\.0\)"):
        booster.boost(model, sgd(model.parameters()))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "gemini", "fsdp", "hybrid_zero"])
@distributed(2)
def test_an_embedding_that_counts_its_rows_would_count_those_of_a_rank(strategy):
    booster, model = FP32[strategy](), torch.nn.Sequential(torch.nn.Embedding(4, 3, scale_grad_by_freq=True))
    with pytest.raises(ConfigError, match=r"'0' has scale_grad_by_freq=True.*each of the 2 ranks counts"):
        booster.boost(model, sgd(model.parameters()))


@pytest.mark.parametrize("inputs", ["a list", "a generator", "one", "a dictionary"])
@distributed(2)
def test_autograd_grad_of_weights_that_fsdp_shards_is_an_error(inputs):
    pair = Pair(FP32["fsdp"](), sgd)
    loss = pair.losses(0)[0]
    weights = {
        "a list": list(pair.model.parameters()),
        "a generator": pair.model.parameters(),
        "one": next(pair.model.parameters()),
        "a dictionary": dict(pair.model.named_parameters()),
    }[inputs]
    with pytest.raises(ConfigError, match=r"torch.autograd.grad\(\) with the weight .*write booster.backward"):
        torch.autograd.grad(loss, weights)


@distributed(2)
def test_autograd_grad_of_inputs_works_under_fsdp():
    pair = Pair(FP32["fsdp"](), sgd)
    x = pair.part(0).requires_grad_()
    (found,) = torch.autograd.grad(pair.model(x).sum(), x)
    y = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(pair.plain(y).sum(), [y])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_methods_of_other_wrappers_say_what_to_write(strategy):
    model = Pair(FP32[strategy](), sgd).model
    for name, instead in (
        ("no_sync", "booster.no_sync(model, optimizer)"),
        ("clip_grad_norm_", "booster.clip_grad_norm_(optimizer, max_norm)"),
        ("backward", "booster.backward(loss, optimizer)"),
    ):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=re.escape(f"write {instead}")):
            getattr(model, name)


def _gradients(model, x):
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    return torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).square().sum())(weights)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda given: model(given).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacobian of each row": lambda model, x: torch.func.vmap(torch.func.jacrev(model))(x),
    "hessian": lambda model, x: torch.func.hessian(lambda given: model(given).square().sum())(x[0]),
    "gradients of weights": _gradients,
}


@pytest.mark.parametrize("strategy", FP32)
@distributed(2)
def test_transforms_of_torch_func_are_right_or_an_error(strategy):
    pair = Pair(FP32[strategy](), sgd)
    for step, transform in enumerate(TRANSFORMS.values()):
        x = pair.part(step)
        if "gemini" in strategy or "fsdp" in strategy:
            with pytest.raises(ConfigError, match=r"inside of a transform of torch.func.*with model.gathered\(\)"):
                transform(pair.model, x)
        if strategy == "hybrid_tp":
            with pytest.raises(ConfigError, match=r"inside of a transform of torch.func.*use torch.autograd.grad"):
                transform(pair.model, x)
            continue
        with pair.model.gathered() if hasattr(pair.model, "gathered") else contextlib.nullcontext():
            torch.testing.assert_close(transform(pair.model, x), transform(pair.plain, x))
    for step in range(2):
        pair.backward(step)
        pair.on_both("step")
        pair.on_both("zero_grad")
    pair.assert_equal()


TRACING = {
    "torch.jit.trace": lambda model, x: torch.jit.trace(model, x),
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
}


@pytest.mark.parametrize("call", TRACING)
@pytest.mark.parametrize("strategy", [name for name in FP32 if "gemini" in name or "fsdp" in name])
@distributed(2)
def test_tracing_a_model_whose_weights_are_gathered_is_right_or_an_error(strategy, call):
    pair = Pair(FP32[strategy](), sgd)
    x = pair.part(0)
    for called in (pair.model, pair.booster.unwrap_model(pair.model)):
        with pytest.raises(ConfigError, match=rf"was called inside of {call}, .*write `with model.gathered\(\):`"):
            TRACING[call](called, x)
        with pair.model.gathered():
            traced = TRACING[call](called, x)
            torch.testing.assert_close(traced(x), pair.plain(x))
    for step in range(2):
        pair.backward(step)
        pair.on_both("step")
        pair.on_both("zero_grad")
    pair.assert_equal()
