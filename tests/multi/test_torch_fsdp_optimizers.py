"""TorchFSDPPlugin: optimizers that need whole parameters step as in one process, those that need all are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_twins import STRATEGIES, FSDPTwins, small_units
from gemini_models import WIDTH, Stack, square_loss
from harness import distributed, run_ranks
from oracles.made_up_optimizers import ClipsGlobally, NeedsClosure
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn

from booster import Booster, ConfigError, DesyncError
from booster.device import current_device
from booster.plugins import TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device

SLOW = pytest.mark.slow


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=SLOW)


ELEMENTWISE = ("Adam", "AdamW", "SGD", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD")


class Odd(nn.Module):
    """Blocks of odd sizes, one of them lower than most worlds, with biases, and a parameter of the root."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width, bias), nn.Tanh(), nn.Linear(width, WIDTH, bias))
            for width in (5, 2, 13)
        )
        self.head = nn.Linear(WIDTH, 3, bias)
        if bias:
            self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * getattr(self, "gain", 1.0)


class OnlyMatrices(Odd):
    def __init__(self) -> None:
        super().__init__(bias=False)


class ManyOdd(Odd):
    """With a 3-dim weight, which Adafactor factors too, and an embedding-like table taller than wide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.conv(x[:, None]).mean(dim=1))


def elementwise(name):
    def make(model):
        settings = {"ASGD": {}, "SGD": {"momentum": 0.9}}.get(name, {"eps": 1e-3})
        return getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)

    return make


def muon(model):
    return torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.1)


def muon_in_groups(model):
    matrices = list(model.parameters())
    return torch.optim.Muon(
        [{"params": matrices[:2], "lr": 0.05}, {"params": matrices[2:], "weight_decay": 0.3, "nesterov": False}],
        lr=0.02,
    )


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.1)


def adafactor_in_groups(model):
    named = dict(model.named_parameters())
    flat = [one for one in named.values() if one.dim() < 2]
    rest = [one for one in named.values() if one.dim() >= 2]
    return torch.optim.Adafactor([{"params": flat, "weight_decay": 0.0}, {"params": rest, "lr": 0.03}], lr=0.05)


def lamb(model):
    first = list(model.blocks.parameters())
    rest = [one for one in model.parameters() if all(one is not other for other in first)]
    return ShardAwareLamb([{"params": first, "lr": 0.02}, {"params": rest}], lr=0.01, weight_decay=0.1)


WHOLE = {
    "muon": (OnlyMatrices, muon),
    "muon in groups": (OnlyMatrices, muon_in_groups),
    "adafactor": (ManyOdd, adafactor),
    "adafactor in groups": (ManyOdd, adafactor_in_groups),
    "lamb": (Odd, lamb),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@distributed(world_size=2)
def test_elementwise_optimizers_of_torch_equal_one_process(name):
    FSDPTwins(Odd, optimizer=elementwise(name)).train().assert_equal()


class WholeTwins(FSDPTwins):
    """Twins whose updates are not per element."""

    def assert_equal(self) -> None:
        """Each tensor moved, and arrived 1e-5 of its size from the same place: sums in another order, 4 steps long."""
        found, expected = self.model.state_dict(), self.plain.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            distance = torch.linalg.vector_norm(found[name] - tensor)
            assert distance <= 1e-5 * torch.linalg.vector_norm(tensor), f"{name}: {distance} {tensor.norm()}"
            assert not torch.equal(tensor, self.initial[name]), name


def train_whole(name, arguments):
    build, optimizer = WHOLE[name]
    WholeTwins(build, optimizer=optimizer, **arguments).train().assert_equal()


# By default each optimizer in shards of an odd world, and on ranks that hold everything.
@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    [
        case if case[1:] in (("full", 3), ("none", 2)) else slow(*case)
        for case in itertools.product(WHOLE, ["full", "grad op", "none"], [2, 3])
    ],
)
def test_optimizers_of_whole_parameters_equal_one_process(name, strategy, world_size):
    run_ranks(train_whole, world_size, name, STRATEGIES[strategy])


@pytest.mark.parametrize("name", [slow("muon"), "muon in groups", "adafactor", slow("adafactor in groups"), "lamb"])
def test_optimizers_of_whole_parameters_over_replicas(name):
    run_ranks(train_whole, 4, name, STRATEGIES["hybrid"])


@pytest.mark.parametrize("name", ["muon", "adafactor in groups", *map(slow, ("muon in groups", "adafactor", "lamb"))])
def test_optimizers_of_whole_parameters_in_the_smallest_units(name):
    run_ranks(train_whole, 3, name, {"auto_wrap_policy": small_units(1)})


def ignores_some(model):
    return [model.blocks[1], model.head]


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_parameters_with_ignored_modules(name):
    run_ranks(train_whole, 2, name, {"ignores": ignores_some})


# Not Muon, whose iteration in bf16 carries what sums in another order differ by, 1e-7, up to 1e-2 in one process too.
@pytest.mark.parametrize("name", ["adafactor in groups", "lamb"])
@distributed(world_size=[2, slow(3)])
def test_clipping_and_windows_before_a_step_on_whole_parameters(name):
    build, optimizer = WHOLE[name]
    twins = WholeTwins(build, optimizer=optimizer)
    for step in range(3):
        with twins.booster.no_sync(twins.model, twins.optimizer):
            twins.backward(10 * step)
        twins.backward(10 * step + 1)
        found = twins.booster.clip_grad_norm_(twins.optimizer, 0.1)
        expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
        assert expected > 0.1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for one in (twins.plain_optimizer, twins.optimizer):
            one.step()
            one.zero_grad()
    twins.assert_equal()


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@distributed(world_size=[slow(2), 3])
def test_freezing_and_unfreezing_under_optimizers_of_whole_parameters(name):
    build, optimizer = WHOLE[name]
    twins = WholeTwins(build, optimizer=optimizer).train(range(2))
    for is_trained in (False, True):
        for model in (twins.plain, twins.raw):
            model.blocks[1].requires_grad_(is_trained)
        twins.train(range(2, 4))
    twins.assert_equal()


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@distributed(world_size=2)
def test_steps_before_boost_of_optimizers_of_whole_parameters_are_remembered(name):
    build, optimizer = WHOLE[name]

    def after_steps(model):
        made = optimizer(model)
        for step in range(2):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            square_loss(model(x.to(next(model.parameters()).device))).backward()
            made.step()
            made.zero_grad()
        return made

    WholeTwins(build, optimizer=after_steps).train().assert_equal()


# What can't be.


@pytest.mark.parametrize("only_one", [False, True])
@distributed(world_size=2)
def test_sparse_adam_is_refused_on_all_ranks(only_one):
    model = nn.Linear(4, 4, bias=False)
    name = "AdamW" if only_one and dist.get_rank() == 0 else "SparseAdam"
    optimizer = getattr(torch.optim, name)(model.parameters())
    before = model.weight.clone()
    with pytest.raises(ConfigError):
        Booster(plugin=TorchFSDPPlugin()).boost(model, optimizer)
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["params"][0] is model.weight


# Each way of needing all parameters at once: a closure over all of them, a norm of all gradients, one number for all.
TOGETHER = {
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters()), "it needs dot products over all parameters"),
    "ClipsGlobally": (
        lambda model: ClipsGlobally(model.parameters(), max_norm=1.0),
        "came out different without the others",
    ),
    "NeedsClosure": (lambda model: NeedsClosure(model.parameters()), "raised TypeError"),
}


@pytest.mark.parametrize("only_one", [False, True])
@pytest.mark.parametrize("name", TOGETHER)
@distributed(world_size=2)
def test_optimizers_of_all_parameters_at_once_are_refused_on_all_ranks(name, only_one):
    model = nn.Linear(4, 4)
    make, why = TOGETHER[name]
    optimizer = torch.optim.AdamW(model.parameters()) if only_one and dist.get_rank() == 0 else make(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    booster = Booster(plugin=TorchFSDPPlugin())
    with pytest.raises(ConfigError, match=f"{name} needs all parameters at once.*{why}.*or TorchDDPPlugin"):
        booster.boost(model, optimizer)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    found = [one for group in optimizer.param_groups for one in group["params"]]
    assert all(one is parameter for one, parameter in zip(found, model.parameters(), strict=True))
    booster.boost(model, torch.optim.AdamW(model.parameters()))


class DDPTwins(FSDPTwins):
    """Twins under the plugin that the refusal names, with an optimizer that computes the gradients itself."""

    def make_plugin(self, **arguments):
        return TorchDDPPlugin(**arguments)

    def closure_steps(self, num_steps):
        for step in range(num_steps):
            expected = self.plain_optimizer.step(lambda step=step: self._plain_closure(step))
            found = self.optimizer.step(lambda step=step: self._closure(step))
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=1e-6)
        return self

    def _plain_closure(self, step):
        self.plain_optimizer.zero_grad()
        losses = [square_loss(self.plain(self.batch(step, rank))) / self.size for rank in range(self.size)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum()

    def _closure(self, step):
        self.optimizer.zero_grad()
        loss = square_loss(self.model(self.batch(step)))
        self.booster.backward(loss, self.optimizer)
        mean = loss.detach() / self.size  # what a line search compares has to be the same on all ranks
        dist.all_reduce(mean)
        return mean

    def assert_equal(self) -> None:
        """Curvatures are quotients of small differences: they multiply what sums in another order differ by."""
        expected = dict(self.plain.state_dict())
        torch.testing.assert_close(dict(self.model.state_dict()), expected, rtol=1e-3, atol=1e-4)
        assert all(not torch.equal(tensor, self.initial[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@distributed(world_size=2)
def test_lbfgs_under_the_plugin_that_the_refusal_names_equals_one_process(line_search):
    def lbfgs(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.1 if line_search is None else 0.5, max_iter=3, line_search_fn=line_search
        )

    DDPTwins(Odd, optimizer=lbfgs).closure_steps(3).assert_equal()


@distributed(world_size=2)
def test_param_groups_that_differ_between_ranks_are_an_error_on_all():
    model = Stack()
    optimizer = torch.optim.SGD(list(model.parameters())[: 4 + dist.get_rank()], lr=0.1)
    with pytest.raises(DesyncError, match="param groups"):
        Booster(plugin=TorchFSDPPlugin()).boost(model, optimizer)


# Checkpoints.


def whole_states(optimizer):
    """The optimizer's states by name, whole, and the values that are no tensors."""
    state = optimizer.checkpoint_state()
    parts = [(part.name, tuple(part.global_shape), part.span, part.tensor.clone().cpu()) for part in state.slices()]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts)
    found = {}
    for name, shape, span, tensor in (part for parts in of_ranks for part in parts):
        whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
        whole.view(-1)[slice(*span)] = tensor.reshape(-1).double()
    assert all(not whole.isnan().any() for whole in found.values())
    return found, state.values()


def _batch(step, size=12):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step)).to(current_device())
    return whole.chunk(world_size)[rank]


class Job:
    def __init__(self, name, strategy, is_other=False) -> None:
        build, optimizer = WHOLE[name]
        self.raw = build()
        if is_other:
            with torch.no_grad():
                for parameter in self.raw.parameters():
                    parameter.add_(0.5)
        self.booster = Booster(plugin=TorchFSDPPlugin(**STRATEGIES[strategy]))
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, optimizer(self.raw))

    def train(self, *steps):
        for step in steps:
            self.booster.backward(square_loss(self.model(_batch(step))), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def save_whole(name, strategy, path):
    job = Job(name, strategy).train(0, 1)
    job.booster.save(Path(path), job.model, job.optimizer)
    now = job.weights(), whole_states(job.optimizer)
    return *now, job.train(2, 3).weights()


def load_whole(name, strategy, path):
    job = Job(name, strategy, is_other=True).train(7)
    job.booster.load(Path(path), job.model, job.optimizer)
    now = job.weights(), whole_states(job.optimizer)
    return *now, job.train(2, 3).weights()


WAYS = [
    (("full", 2), ("full", 3)),
    (("full", 3), ("full", 2)),
    (("full", 3), ("full", 1)),
    (("grad op", 1), ("full", 4)),
    (("hybrid", 4), ("none", 2)),
    (("none", 2), ("hybrid", 4)),
]
# By default each way with one optimizer, and each optimizer in one way.
DEFAULT_WAYS = [*zip(["muon", "adafactor", "lamb", "muon in groups", "adafactor in groups", "lamb"], WAYS, strict=True)]


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        pytest.param(name, *way, id=f"{name}, {way[0]} to {way[1]}", marks=[] if (name, way) in DEFAULT_WAYS else SLOW)
        for name in WHOLE
        for way in WAYS
    ],
)
def test_states_of_whole_parameters_load_into_another_world(tmp_path, name, source, target):
    path = str(tmp_path / "c")
    weights, (states, values), after = run_ranks(save_whole, source[1], name, source[0], path)[0]
    assert states
    for found, (found_states, found_values), found_after in run_ranks(load_whole, target[1], name, target[0], path):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert found_states.keys() == states.keys()
        assert all(torch.equal(found_states[name], tensor) for name, tensor in states.items())
        assert found_values == values
        for name, tensor in after.items():
            distance = torch.linalg.vector_norm(found_after[name] - tensor)
            assert distance <= 1e-5 * torch.linalg.vector_norm(tensor), f"{name}: {distance} {tensor.norm()}"
