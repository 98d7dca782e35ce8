"""Gradient handlers run between backward and step, on what the optimizer takes, or an error says why they can't."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from strategies import FP32, HALF, Pair
from torch import nn
from trainer_cases import PLUGINS, make_data, make_model, make_optimizer, make_trainer

from booster import Booster, GradientHandler, Trainer, register_gradient_handler
from booster.comm import all_reduce_sum, group_size
from booster.errors import ConfigError, RankFailedError
from booster.plugins import TorchDDPPlugin
from booster.trainer import DataParallelGradientHandler, attach_gradient_handlers

preload("booster", "booster.plugins", "booster.trainer")

pytestmark = pytest.mark.on_device


# The documents' example: a handler of one's own takes the place of the averaging of data parallelism.
@register_gradient_handler
class MyGradientHandler(GradientHandler):
    reduces = "dp"

    def handle_gradient(self):
        for _, gradient in self.named_gradients():
            gradient.copy_(all_reduce_sum(gradient.contiguous(), self.group("dp")) / group_size(self.group("dp")))


@register_gradient_handler
class Scale(GradientHandler):
    """Changes gradients that the plugin has reduced."""

    def __init__(self, booster, model, optimizer, factor=0.5):
        super().__init__(booster, model, optimizer)
        self.factor = factor

    def handle_gradient(self):
        for _, gradient in self.named_gradients():
            gradient.mul_(self.factor)


def train(handlers, *, accumulate=1):
    booster = Booster(plugin=TorchDDPPlugin())
    loader = booster.prepare_dataloader(make_data()[0], 2, shuffle=True)
    model = make_model()
    optimizer = make_optimizer(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    criterion = nn.CrossEntropyLoss()
    trainer = Trainer(
        booster, model, optimizer, criterion, accumulate=accumulate, max_norm=0.5, gradient_handlers=handlers
    )
    trainer.fit(loader, epochs=2)
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("handler", ["MyGradientHandler", DataParallelGradientHandler])
@distributed(2)
def test_a_handler_takes_the_place_of_data_parallelism(handler):
    for accumulate in (1, 4):
        expected = train([], accumulate=accumulate)
        found = train([handler], accumulate=accumulate)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def gradients_without_reduction():
    booster = Booster(plugin=TorchDDPPlugin())
    model = nn.Linear(2, 1, bias=False)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []

    class Look(GradientHandler):
        reduces = "dp"

        def handle_gradient(self):
            seen.extend(gradient.clone() for _, gradient in self.named_gradients())

    attach_gradient_handlers(booster, model, optimizer, [Look])
    for _ in range(2):
        with booster.accumulate(model, optimizer, 2):
            booster.backward(model(torch.full((1, 2), 1.0 + booster.rank)).sum(), optimizer)
            optimizer.step()
    return seen[0].tolist()


def test_the_plugin_leaves_the_reduction_to_the_handler():
    assert run_ranks(gradients_without_reduction, 2, device="cpu") == [[[1.0, 1.0]], [[2.0, 2.0]]]


@pytest.mark.parametrize("kind", FP32)
@distributed(2)
def test_a_handler_changes_the_gradients_of_the_step_under_every_plugin(kind):
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    pair = Pair(FP32[kind](), make)
    attach_gradient_handlers(pair.booster, pair.model, pair.optimizer, [{"type": "Scale", "factor": 0.25}])
    for step in range(3):
        pair.backward(step)
        for parameter in pair.plain.parameters():
            parameter.grad.mul_(0.25)
        plain_norm = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        norm = pair.booster.clip_grad_norm_(pair.optimizer, 0.01)
        torch.testing.assert_close(norm.cpu().float(), plain_norm.cpu(), rtol=1e-4, atol=1e-7)
        pair.on_both("step")
        pair.on_both("zero_grad")
    pair.assert_equal()


@pytest.mark.parametrize("kind", HALF)
@distributed(2)
def test_a_handler_sees_unscaled_gradients_and_the_norm_is_that_of_what_it_leaves(kind):
    pair = Pair(HALF[kind](), lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
    norms, kept = [], []

    class Double(GradientHandler):
        def handle_gradient(self):
            kept.extend((gradient, gradient.clone()) for _, gradient in self.named_gradients())
            for gradient, _ in kept:
                gradient.mul_(2.0)

    pair.backward(0)
    norms.append(pair.booster.clip_grad_norm_(pair.optimizer, float("inf")))
    pair.optimizer.zero_grad()
    attach_gradient_handlers(pair.booster, pair.model, pair.optimizer, [Double])
    pair.backward(0)
    norms.append(pair.booster.clip_grad_norm_(pair.optimizer, float("inf")))
    torch.testing.assert_close(norms[1], 2.0 * norms[0], rtol=1e-6, atol=0)
    assert kept
    assert all(torch.equal(gradient, 2.0 * before) for gradient, before in kept)
    largest = max(float(one.grad.abs().max()) for one in pair.plain.parameters()) / 2  # of two backwards
    assert max(float(before.abs().max()) for _, before in kept) < 1.1 * largest


@distributed(2)
def test_a_handler_in_a_pipeline_sees_its_stages_gradients():
    names = []

    class Names(GradientHandler):
        def handle_gradient(self):
            names.extend(name for name, _ in self.named_gradients())
            assert self.group("pp") is not None
            with pytest.raises(ConfigError, match="has no such axis: choose one of dp"):
                self.group("rows")

    trainer, loader, _ = make_trainer("pp_2", [])
    attach_gradient_handlers(trainer.booster, trainer.model, trainer.optimizer, [Names])
    trainer.fit(loader, steps=1)
    assert set(names) < set(joined_over_ranks(trainer.model))


@pytest.mark.parametrize("kind", [one for one in PLUGINS if one != "ddp"])
@distributed(2)
def test_a_reduction_that_the_plugin_contradicts_is_an_error(kind):
    trainer, _, _ = make_trainer(kind, [])
    name = type(trainer.booster.plugin).__name__
    objects = (trainer.booster, trainer.model, trainer.optimizer)
    with pytest.raises(ConfigError, match=f"MyGradientHandler reduces the gradients over 'dp', and {name} does that"):
        Trainer(*objects, gradient_handlers=["MyGradientHandler"])


def fail_on_one_rank():
    class Failing(GradientHandler):
        def handle_gradient(self):
            if self.booster.rank == 1:
                raise KeyError("what the handler says")

    try:
        train([Failing])
    except Exception as error:
        return type(error), str(error)
    return None


def test_a_handler_that_raises_on_one_rank_ends_all():
    (other, text), (failed, _) = run_ranks(fail_on_one_rank, 2, fresh=True, device="cpu")
    assert failed is KeyError
    assert other is RankFailedError
    assert "the gradient handler Failing: KeyError" in text


@distributed(2)
def test_wrong_handlers():
    trainer, _, _ = make_trainer("ddp", [])
    objects = (trainer.booster, trainer.model, trainer.optimizer)

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4, sparse=True)

    for given, message in (
        ("MyGradientHandler", "is a single handler: pass a list"),
        (["MyGradientHandlr"], "is unknown: decorate its class"),
        ([nn.Linear], "derive a class from booster.GradientHandler"),
        ([{"type": "Scale", "by": 2}], "does not take the arguments"),
        (["MyGradientHandler", DataParallelGradientHandler], "all reduce the gradients over 'dp', which is done once"),
    ):
        with pytest.raises(ConfigError, match=message):
            attach_gradient_handlers(*objects, given)
    model = Sparse()
    model, optimizer, *_ = trainer.booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="sparse=True"):
        attach_gradient_handlers(trainer.booster, model, optimizer, ["MyGradientHandler"])
    with pytest.raises(ConfigError, match="lacks handle_gradient"):
        register_gradient_handler(GradientHandler)

    with pytest.raises(ConfigError, match="is registered already"):
        register_gradient_handler(type("MyGradientHandler", (MyGradientHandler,), {"__module__": "elsewhere"}))
