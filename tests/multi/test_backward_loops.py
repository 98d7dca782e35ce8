"""Loops around backward() as users write them: every plugin gives what plain torch gives in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from booster import Booster, ConfigError
from booster.plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

pytestmark = pytest.mark.on_device

PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "ddp views": lambda: TorchDDPPlugin(gradient_as_bucket_view=True, bucket_cap_mb=0.0001),
    "ddp small buckets": lambda: TorchDDPPlugin(bucket_cap_mb=0.0001),
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "fsdp": TorchFSDPPlugin,
    "hybrid": lambda: HybridParallelPlugin(precision="fp32"),
    "hybrid zero 1": lambda: HybridParallelPlugin(precision="fp32", zero_stage=1),
}


class Net(nn.Module):
    """Layers of which some can be frozen, and methods that compute losses without the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 8))  # saved for backward, and equal on all ranks

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(torch.tanh(self.body(inputs)) * self.gain))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs))

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs)).square().mean()


@dataclass
class Training:
    """What a loop calls, by plain torch or by a Booster."""

    model: Any
    optimizer: Any
    user_model: nn.Module
    booster: Booster | None = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self.booster is None:
            loss.backward(**kwargs)
        else:
            self.booster.backward(loss, self.optimizer, **kwargs)

    def no_sync(self):
        return nullcontext() if self.booster is None else self.booster.no_sync(self.model, self.optimizer)

    def step(self) -> None:
        if self.booster is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        else:
            norm = self.booster.clip_grad_norm_(self.optimizer, 0.3)
        self.norms.append(float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __post_init__(self) -> None:
        self.norms: list[float] = []


def forward_in_no_sync_and_backward_outside(training, inputs):
    with training.no_sync():
        first = training.model(inputs).square().mean()
        second = training.model(inputs * 0.5).square().mean()
        training.backward(first)
    training.backward(second)
    training.step()


def forward_outside_and_backward_in_no_sync(training, inputs):
    first = training.model(inputs).square().mean()
    second = training.model(inputs * 0.5).square().mean()
    with training.no_sync():
        training.backward(first)
    training.backward(second)
    training.step()


def every_backward_in_no_sync(training, inputs):
    with training.no_sync():
        training.backward(training.model(inputs).square().mean())
    training.step()


def two_backwards_over_one_forward(training, inputs):
    outputs = training.model(inputs)
    training.backward(outputs.square().mean(), retain_graph=True)
    training.backward(outputs.sum(dim=1).abs().mean())
    training.step()


def two_forwards_before_one_backward(training, inputs):
    training.backward(training.model(inputs).square().mean() + training.model(-inputs).abs().mean())
    training.step()


def loss_by_a_method(training, inputs):
    training.backward(training.user_model.loss(inputs))
    training.step()


def loss_by_submodules(training, inputs):
    net = training.user_model
    training.backward(net.head(net.features(inputs)).square().mean())
    training.step()


def loss_by_a_method_accumulated(training, inputs):
    with training.no_sync():
        training.backward(training.user_model.loss(inputs) / 2)
    training.backward(training.model(inputs * 2).square().mean() / 2)
    training.step()


def plain_backward(training, inputs):
    training.model(inputs).square().mean().backward()
    training.step()


def plain_backward_after_no_sync(training, inputs):
    with training.no_sync():
        (training.model(inputs).square().mean() / 2).backward()
    (training.user_model.loss(inputs * 2) / 2).backward()
    training.step()


def unfreezing_later(training, inputs):
    training.backward(training.model(inputs).square().mean())
    training.step()
    training.user_model.middle.requires_grad_(True)


def freezing_in_turns(training, inputs):
    for name in ("body", "head"):
        net = training.user_model
        for part in (net.body, net.middle, net.head):
            part.requires_grad_(part is getattr(net, name))
        training.backward(training.model(inputs).square().mean())
        training.step()


def freezing_within_an_accumulation(training, inputs):
    with training.no_sync():
        training.backward(training.model(inputs).square().mean())
    training.user_model.middle.requires_grad_(False)
    training.backward(training.model(inputs * 0.5).square().mean())
    training.step()
    training.user_model.middle.requires_grad_(True)


def freezing_before_the_step(training, inputs):
    training.backward(training.model(inputs).square().mean())
    training.user_model.middle.requires_grad_(False)
    training.step()
    training.user_model.middle.requires_grad_(True)


def freezing_after_no_sync(training, inputs):
    with training.no_sync():
        training.backward(training.model(inputs).square().mean())
    training.user_model.middle.requires_grad_(False)
    training.step()
    training.backward(training.model(inputs).square().mean())
    training.step()
    training.user_model.middle.requires_grad_(True)


def training_again_after_another_was_unfrozen(training, inputs):
    """The middle came frozen; it is unfrozen while the body, which trained, is frozen."""
    net = training.user_model
    training.backward(training.model(inputs).square().mean())
    training.step()
    net.body.requires_grad_(False)
    net.middle.requires_grad_(True)
    training.backward(training.model(inputs).square().mean())
    training.step()
    net.body.requires_grad_(True)
    training.backward(training.model(inputs).square().mean())
    training.step()


def unfreezing_within_an_accumulation(training, inputs):
    training.user_model.middle.requires_grad_(False)
    with training.no_sync():
        training.backward(training.model(inputs).square().mean())
    training.user_model.middle.requires_grad_(True)
    training.backward(training.model(inputs * 0.5).square().mean())
    training.step()


LOOPS = [
    forward_in_no_sync_and_backward_outside,
    forward_outside_and_backward_in_no_sync,
    every_backward_in_no_sync,
    two_backwards_over_one_forward,
    two_forwards_before_one_backward,
    loss_by_a_method,
    loss_by_submodules,
    loss_by_a_method_accumulated,
    plain_backward,
    plain_backward_after_no_sync,
]


def compared(name: str, loop: Callable[..., None], steps: int = 3, frozen: Sequence[str] = ()) -> None:
    """Runs a loop on this rank's part of each batch, and in plain torch on the whole one; both must end alike."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Net()
    for key in frozen:
        getattr(model, key).requires_grad_(False)
    booster = Booster(plugin=PLUGINS[name]())
    reference = copy.deepcopy(model).to(booster.device)
    serial = Training(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), reference)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    parallel = Training(boosted, optimizer, booster.unwrap_model(boosted), booster)
    for step in range(steps):
        batch = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(step)).to(booster.device)
        loop(serial, batch)
        loop(parallel, batch[rank * 4 : rank * 4 + 4])
    assert_alike(booster, boosted, reference, f"{loop.__name__} under {name}")
    torch.testing.assert_close(parallel.norms, serial.norms, rtol=1e-4, atol=1e-6)


def assert_alike(booster: Booster, boosted: Any, reference: nn.Module, what: str) -> None:
    state = boosted.state_dict()
    for key, expected in reference.state_dict().items():
        found = state[key]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        if found.shape == expected.shape:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=f"{key} of {what}: {{}}".format)
        else:
            pytest.fail(f"{key} of {what} has shape {tuple(found.shape)}")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", PLUGINS)
def test_loop_equals_plain_torch(name, loop):
    run_ranks(compared, 2, name, loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", PLUGINS)
def test_loop_equals_plain_torch_on_three_ranks(name, loop):
    run_ranks(compared, 3, name, loop)


@pytest.mark.parametrize("name", PLUGINS)
def test_layers_frozen_at_boost_train_once_they_are_unfrozen(name):
    run_ranks(compared, 2, name, unfreezing_later, frozen=["middle"])


@pytest.mark.parametrize("name", PLUGINS)
def test_layers_train_again_after_others_were_unfrozen(name):
    run_ranks(compared, 2, name, training_again_after_another_was_unfrozen, frozen=["middle"])


@pytest.mark.parametrize("name", PLUGINS)
def test_layers_may_train_in_turns(name):
    run_ranks(compared, 2, name, freezing_in_turns)


@pytest.mark.parametrize(
    "loop",
    [
        freezing_within_an_accumulation,
        freezing_before_the_step,
        freezing_after_no_sync,
        unfreezing_within_an_accumulation,
    ],
)
@pytest.mark.parametrize("name", PLUGINS)
def test_layers_may_be_frozen_and_unfrozen_at_any_time(name, loop):
    run_ranks(compared, 2, name, loop)


def freeze_after_the_backward_of_another_optimizer(name: str) -> None:
    """Rank 1 alone uses the judge in the generator's loss; then a layer of the judge is frozen, and the judge steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    generator, judge = Net(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    booster = Booster(plugin=PLUGINS[name]())
    references = [copy.deepcopy(model).to(booster.device) for model in (generator, judge)]
    serial = [Training(one, torch.optim.SGD(one.parameters(), lr=0.1), one) for one in references]
    parallel = []
    for model in (generator, judge):
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        parallel.append(Training(boosted, optimizer, booster.unwrap_model(boosted), booster))
    for step in range(3):
        batch = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(step)).to(booster.device)
        for (made, judged), part, is_serial in ((serial, batch, True), (parallel, batch[rank * 4 :][:4], False)):
            outputs = made.model(part)
            is_judged = torch.arange(4 * size, device=part.device) >= 4 if is_serial else rank > 0
            unjudged = outputs.square().mean(1, keepdim=True)
            scores = unjudged if is_judged is False else judged.model(outputs)
            scores = torch.where(is_judged[:, None], scores, unjudged) if is_serial else scores
            made.backward(scores.mean())
            made.step()
            judged.user_model[0].requires_grad_(False)
            judged.backward(judged.model(part[:, :3]).square().mean())
            judged.step()
            judged.user_model[0].requires_grad_(True)
    for mine, reference in zip(parallel, references, strict=True):
        assert_alike(booster, mine.model, reference, f"{type(reference).__name__} under {name}")
    torch.testing.assert_close(parallel[1].norms, serial[1].norms, rtol=1e-4, atol=1e-6)


# Under Gemini and FSDP a forward is collective, so no rank may run a model alone.
@pytest.mark.parametrize("name", [name for name in PLUGINS if name not in ("gemini", "fsdp")])
def test_a_layer_may_be_frozen_after_the_backward_of_another_optimizer(name):
    run_ranks(freeze_after_the_backward_of_another_optimizer, 2, name)


def clear_by_the_model_in_an_accumulation(name: str, clears: str) -> None:
    """Gradients are cleared in every iteration, by the optimizer or by the model, inside of the block or before it."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Net()
    model.gate = nn.Parameter(torch.tensor(1.0))  # FSDP keeps it whole
    booster = Booster(plugin=PLUGINS[name]())
    reference = copy.deepcopy(model).to(booster.device)
    serial = torch.optim.SGD(reference.parameters(), lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for step in range(2):
        batches = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(step)).to(booster.device)
        (sum((reference(one) * reference.gate).square().mean() for one in batches) / 3).backward()
        serial.step()
        serial.zero_grad()
        for batch in batches:
            if clears == "before":
                boosted.zero_grad()
            with booster.accumulate(boosted, optimizer, 3):
                outputs = boosted(batch[rank * 4 : rank * 4 + 4]) * booster.unwrap_model(boosted).gate
                booster.backward(outputs.square().mean(), optimizer)
                norms.append(optimizer.get_grad_norm())  # that of the last step until the last microbatch
                optimizer.step()
                if clears == "inside":
                    boosted.zero_grad()
    assert_alike(booster, boosted, reference, f"accumulation cleared {clears} under {name}")
    assert norms[:2] == [None, None]
    assert norms[2] == norms[3] == norms[4] != norms[5]


# FSDP has no parameter that is read outside of the forward.
@pytest.mark.parametrize("clears", ["inside", "before"])
@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "fsdp"])
def test_model_zero_grad_keeps_an_accumulation(name, clears):
    run_ranks(clear_by_the_model_in_an_accumulation, 2, name, clears)


def norms_of_a_plain_backward(name: str) -> None:
    booster = Booster(plugin=PLUGINS[name]())
    model = nn.Linear(6, 3)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(2, 6, device=booster.device)
    booster.backward(boosted(inputs).sum(), optimizer)
    first = optimizer.get_grad_norm()
    optimizer.step()
    optimizer.zero_grad()
    boosted(inputs * 10).sum().backward()
    assert optimizer.get_grad_norm() > 5 * first
    torch.testing.assert_close(optimizer.get_grad_norm(), float(booster.clip_grad_norm_(optimizer, 1.0)))


@pytest.mark.parametrize("name", PLUGINS)
def test_the_norm_of_a_plain_backward_is_that_of_its_gradients(name):
    run_ranks(norms_of_a_plain_backward, 2, name)


def unfreeze_before_a_plain_backward(name: str) -> None:
    booster = Booster(plugin=PLUGINS[name]())
    model = Net()
    model.head.requires_grad_(False)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.unwrap_model(boosted).head.requires_grad_(True)
    boosted(torch.ones(2, 6, device=booster.device)).sum().backward()
    with pytest.raises(ConfigError, match=r"'head.weight' trains since boost\(\), where it was frozen"):
        optimizer.step()


@pytest.mark.parametrize("name", ["zero 1", "zero 2", "gemini", "fsdp"])
def test_an_unfrozen_layer_needs_the_booster_s_backward(name):
    run_ranks(unfreeze_before_a_plain_backward, 2, name)


def add_groups(name: str) -> None:
    booster = Booster(plugin=PLUGINS[name]())
    model = Net()
    boosted, optimizer, *_ = booster.boost(
        model, torch.optim.SGD([*model.body.parameters(), *model.middle.parameters()], lr=0.1)
    )
    inputs = torch.ones(2, 6, device=booster.device)
    booster.backward(boosted(inputs).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    boosted.eval()
    with torch.no_grad():
        boosted(inputs)  # FSDP leaves weights gathered
    boosted.train()
    with pytest.raises(ConfigError, match=r"'body.weight', which is in a param group already"):
        optimizer.add_param_group({"params": list(booster.unwrap_model(boosted).body.parameters())})
    before = boosted.state_dict()["head.bias"].clone()
    optimizer.add_param_group({"params": list(booster.unwrap_model(boosted).head.parameters()), "lr": 1.0})
    booster.backward(boosted(inputs).sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(boosted.state_dict()["head.bias"], before - 2.0)


@pytest.mark.parametrize("name", ["zero 1", "zero 2", "gemini", "fsdp"])
def test_groups_are_added_after_an_evaluation_and_never_twice(name):
    run_ranks(add_groups, 2, name)
