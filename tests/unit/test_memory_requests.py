"""`estimate_memory`: what it measures, what it leaves alone, and what it refuses."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import ConfigError, LazyInitContext, checkpoint_activations, estimate_memory
from booster.checkpoint_io.saving.writer import host_memory
from booster.comm import fake
from booster.estimate import estimate
from booster.estimate.allocation_tracker import AllocationTracker
from booster.optim import CAME, Adafactor, HybridAdam, Lamb
from booster.single_device import SingleDevicePlugin

WIDTH = 64
BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def build():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def mean(outputs, batch):
    return outputs.mean()


def ask(plugin=None, model=None, **arguments):
    defaults = {"batch": torch.zeros(8, WIDTH), "criterion": mean}
    return estimate_memory(build() if model is None else model, plugin, **{**defaults, **arguments})


def test_it_adds_up():
    estimate = ask()
    assert estimate.memory.steady_state.parameters == 2 * BYTES
    assert estimate.memory.steady_state.optimizer_states == 4 * BYTES + 4 * 4  # with step counters
    assert estimate.memory.step.gradients == 2 * BYTES
    assert estimate.total == estimate.peak.total >= estimate.memory.steady_state.total
    assert estimate.sent == 0
    assert (estimate.fits, ask(device_memory=estimate.total).fits, ask(device_memory=estimate.total - 1).fits) == (
        None,
        True,
        False,
    )


@pytest.mark.parametrize("build_context", [lambda: torch.device("meta"), LazyInitContext], ids=["meta", "lazy"])
def test_a_model_without_memory_gives_the_same(build_context):
    with build_context():
        model = build()
    assert ask(model=model) == ask()


def test_what_was_given_stays_as_it_was():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, hook = torch.get_rng_state(), sys.excepthook
    ask("low_level_zero", model=model, optimizer=optimizer, num_ranks=4, settings={"stage": 2})
    assert torch.equal(torch.get_rng_state(), random)
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_parameters_that_the_optimizer_does_not_have_take_no_states():
    model = build()
    model[0].weight.requires_grad_(False)
    estimate = ask(model=model, optimizer=torch.optim.AdamW([model[2].weight]))
    assert estimate.memory.steady_state.optimizer_states == 2 * 4 * WIDTH * WIDTH + 4


def test_tied_parameters_count_once():
    model = build()
    model[2].weight = model[0].weight
    assert ask(model=model).memory.steady_state.parameters == BYTES + 4 * WIDTH


def test_more_ranks_need_less_each():
    totals = [
        ask(
            "low_level_zero", num_ranks=ranks, settings={"stage": 1, "precision": "fp32"}
        ).memory.steady_state.optimizer_states
        for ranks in (1, 2, 8)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[2] == pytest.approx(totals[0] / 8, rel=0.1)


def test_checkpointed_layers_keep_less():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU()) for _ in range(6))
            self.checkpoints = False

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
            return x

    model = Checkpointed()
    batch = torch.zeros(64, WIDTH)
    whole = ask(model=model, batch=batch).memory.backward.activations
    model.checkpoints = True
    assert ask(model=model, batch=batch).memory.backward.activations < 0.7 * whole


# Saves.


def test_saves_in_the_background_copy_what_a_rank_writes():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    given = {"model": model, "batch": torch.zeros(8, 1024), "checkpoint": True}
    whole = 3 * 4 * 4 * 1024**2  # weights and two states
    saves = ask(**given).memory.checkpoint
    assert saves.host == 3 * 8 * 2**20  # a job for each 16 MiB
    assert saves.async_host - saves.host == pytest.approx(whole, rel=0.01)
    for size, axes in ((2, {}), (4, {}), (4, {"extra_dp_size": 2}), (12, {"extra_dp_size": 3})):
        settings = {"stage": 1, "precision": "fp32", **axes}
        saves = ask("low_level_zero", num_ranks=size, settings=settings, **given).memory.checkpoint
        assert saves.async_host - saves.host == pytest.approx(whole / size, rel=0.1), (size, axes)
    assert ask(model=model, batch=torch.zeros(8, 1024)).memory.checkpoint is None


def test_memory_of_threads_and_of_the_host_is_counted_apart(monkeypatch):
    monkeypatch.setattr(fake, "replicas", fake.FakeReplicas(0, {}))
    tracker = AllocationTracker(torch.device("cpu"))
    with estimate.new_fake_mode(), tracker:
        with fake.as_threads(4):
            temporary = torch.empty(1000)
            staging = host_memory(500, is_pinned=True)
        del temporary
        assert tracker.take_peak().total == 4 * 4000
        assert tracker.offloaded == 4 * 500
        del staging
        assert (tracker.offloaded, tracker.peak_offloaded) == (0, 4 * 500)


# States.


@pytest.mark.parametrize(
    ("make", "matrix", "vector"),
    [
        (torch.optim.SGD, 0, 0),
        (lambda params: torch.optim.SGD(params, momentum=0.9), 4 * 600, 4 * 30),
        (torch.optim.AdamW, 8 * 600, 8 * 30),
        (HybridAdam, 8 * 600, 8 * 30),
        (Lamb, 8 * 600, 8 * 30),
        (Adafactor, 4 * (20 + 30), 4 * 30),
        (partial(CAME, lr=1e-4), 4 * 600 + 2 * 4 * (20 + 30), 2 * 4 * 30),
    ],
    ids=["sgd", "momentum", "adamw", "hybrid_adam", "lamb", "adafactor", "came"],
)
def test_states_are_those_of_a_step(make, matrix, vector):
    parameters = [nn.Parameter(torch.zeros(20, 30)), nn.Parameter(torch.zeros(30))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    optimizer.step()
    kept = [
        sum(value.nbytes for value in optimizer.state[one].values() if torch.is_tensor(value) and value.numel() > 1)
        for one in parameters
    ]
    assert kept == [matrix, vector]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(20, 30)), nn.Parameter(torch.zeros(30))

        def forward(self, x):
            return (x @ self.weight + self.bias).mean()

    model = Model()
    given = {"model": model, "batch": torch.zeros(4, 20), "criterion": lambda outputs, batch: outputs}
    for optimizer in (make, make(list(model.parameters()))):
        found = ask(optimizer=optimizer, **given).memory.steady_state.optimizer_states
        assert matrix + vector <= found <= matrix + vector + 64  # step counters


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"plugin": "zero"}, "not known"),
        ({"plugin": "low_level_zero", "settings": {"stages": 2}}, "use those that it has: stage, precision"),
        ({"plugin": "low_level_zero", "settings": {"stage": 7}}, "stage"),
        ({"plugin": "hybrid_parallel", "num_ranks": 4, "settings": {"tp_size": 3}}, "which do not divide world_size=4"),
        ({"num_ranks": 2}, "needs a plugin"),
        ({"plugin": "torch_ddp", "num_ranks": 0}, "is not a positive int"),
        ({"plugin": SingleDevicePlugin, "num_ranks": 1}, "give a Plugin, or a name"),
        (
            {"plugin": "low_level_zero", "settings": {"precision": "fp32"}, "mixed_precision": "bf16"},
            "that has precision='fp32'",
        ),
        ({"mixed_precision": "bf61"}, "bf61"),
        ({"optimizer": "adamw"}, "is not an optimizer"),
        ({"optimizer": lambda parameters: parameters}, "returned a list"),
        ({"criterion": lambda outputs, batch: outputs}, "one number"),
        ({"batch": torch.zeros(8, 3)}, "can't be run on fake tensors"),
        ({"batch": (torch.zeros(8, WIDTH), 1, 2)}, "whose forward has the signature"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(arguments, words):
    arguments = dict(arguments)
    plugin = arguments.pop("plugin", None)
    with pytest.raises(ConfigError, match=words):
        ask(plugin, **arguments)
    assert not dist.is_initialized()


def test_a_model_without_a_loss_says_what_to_give():
    with pytest.raises(ConfigError, match="give criterion="):
        estimate_memory(build(), batch=torch.zeros(8, WIDTH))


def test_a_forward_that_depends_on_its_numbers_is_named():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(ConfigError, match="data-dependent control flow"):
        ask(model=Branching(WIDTH, WIDTH))


def test_a_plugin_object_has_its_own_settings():
    with pytest.raises(ConfigError, match="give its name in place of the object"):
        ask(SingleDevicePlugin("cpu"), num_ranks=2)
    assert ask(SingleDevicePlugin("cpu")).total == ask().total


def test_fake_tensors_that_outlive_an_estimate_have_a_device():
    kept = []

    def loss_of(outputs, batch):
        kept.append(outputs)
        return outputs.mean()

    estimate_memory(nn.Linear(4, 2), batch=torch.rand(3, 4), criterion=loss_of)
    assert all(one.device.type == "cpu" and repr(one) for one in kept)
    assert kept


def test_fsdp_frees_the_casts_of_autocast_with_its_weights():
    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

        def forward(self, x):
            return self.down(self.up(x).relu())

    class Stack(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layers = nn.ModuleList(Layer(width) for _ in range(24))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    width = 512
    with torch.device("meta"):
        model, batch = checkpoint_activations(Stack(width)), torch.empty(1, width)
    loss = {"criterion": lambda outputs, batch: outputs.mean(), "batch": batch}
    found = estimate_memory(model, "torch_fsdp", num_ranks=32, mixed_precision="bf16", **loss)
    casts_of_a_layer = 2 * 2 * width * width  # autocast would keep those of all 24 until the end of the forward
    assert found.memory.backward.activations < 8 * casts_of_a_layer  # with a layer's gradients
