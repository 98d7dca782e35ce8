"""LocalSGDPlugin trains as the algorithms of its papers, written out below for one process."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, run_ranks
from torch import nn

from booster import Booster
from booster.comm import all_gather_equal, group_rank, group_size
from booster.device import current_device
from booster.errors import CheckpointError, ConfigError, DesyncError
from booster.plugins import LocalSGDPlugin, LowLevelZeroPlugin, TorchDDPPlugin

pytestmark = pytest.mark.on_device
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}


def make_model(has_buffers=True):
    torch.manual_seed(5)
    if not has_buffers:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    # No bias before the norm: its gradient is rounding noise, which Adam would normalize.
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def make_optimizer(kind, model):
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 4, generator=generator).to(current_device())


def loss_of(model, inputs):
    return (model(inputs) - inputs[:, :2]).square().mean()


class Reference:
    """All workers of local SGD (Stich, 2019, algorithm 1) or DiLoCo (Douillard et al., 2023, algorithm 1) in turn."""

    def __init__(self, kind, num_workers, period, outer_lr=1.0, outer_momentum=0.0, nesterov=False):
        self.workers = [make_model().to(current_device()) for _ in range(num_workers)]
        self.optimizers = [make_optimizer(kind, one) for one in self.workers]
        self.period, self.lr, self.momentum, self.nesterov = period, outer_lr, outer_momentum, nesterov
        self.anchors = [one.detach().clone() for one in self.workers[0].parameters()]
        self.velocity = [torch.zeros_like(one) for one in self.anchors]
        self.num_steps = 0

    def step(self, accumulate=1, max_norm=None):
        for rank, (model, optimizer) in enumerate(zip(self.workers, self.optimizers, strict=True)):
            for microbatch in range(accumulate):
                (loss_of(model, batch(self.num_steps * accumulate + microbatch, rank)) / accumulate).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1
        if self.num_steps % self.period == 0:
            self.average()

    @torch.no_grad()
    def average(self):
        for index, anchor in enumerate(self.anchors):
            weights = [list(one.parameters())[index] for one in self.workers]
            if self.lr == 1 and self.momentum == 0:
                anchor.copy_(sum(weights) / len(weights))
            else:
                gradient = sum(anchor - one for one in weights) / len(weights)
                self.velocity[index] = self.momentum * self.velocity[index] + gradient
                direction = gradient + self.momentum * self.velocity[index] if self.nesterov else self.velocity[index]
                anchor -= self.lr * direction
            for one in weights:
                one.copy_(anchor)
        for one in self.workers[1:]:
            for buffer, first in zip(one.buffers(), self.workers[0].buffers(), strict=True):
                buffer.copy_(first)


class Run:
    """The same, boosted."""

    def __init__(self, kind, plugin, has_buffers=True):
        self.booster = Booster(plugin=plugin)
        model = make_model(has_buffers)
        self.model, self.optimizer, *_ = self.booster.boost(model, make_optimizer(kind, model))
        self.num_steps = 0

    def microbatch(self, number):
        self.booster.backward(loss_of(self.model, batch(number, group_rank())), self.optimizer)

    def step(self, accumulate=1, max_norm=None):
        for microbatch in range(accumulate):
            with self.booster.accumulate(self.model, self.optimizer, accumulate):
                self.microbatch(self.num_steps * accumulate + microbatch)
                if max_norm is not None:
                    self.booster.clip_grad_norm_(self.optimizer, max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.num_steps += 1


def assert_same_state(model, expected, **tolerance):
    for (name, found), one in zip(model.unwrap().state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(found, one, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


EXACT = {"rtol": 0.0, "atol": 0.0}
ROUNDED = {"rtol": 1e-5, "atol": 1e-6}  # three ranks sum in another order; momentum is summed by fused multiply-adds


@distributed(world_size=(1, 2, 3))
@pytest.mark.parametrize("outer", [{}, DILOCO, {"outer_momentum": 0.5}, {"outer_lr": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_every_step_is_that_of_the_algorithm(kind, outer, world_size):
    run = Run(kind, LocalSGDPlugin(period=3, **outer))
    reference = Reference(kind, world_size, 3, **outer)
    tolerance = EXACT if world_size < 3 and not outer else ROUNDED
    for _ in range(8):  # two rounds, and two steps of another
        run.step()
        reference.step()
        assert_same_state(run.model, reference.workers[group_rank()], **tolerance)
    run.optimizer.end_round()
    reference.average()
    assert_same_state(run.model, reference.workers[0], **tolerance)
    weights = torch.cat([one.detach().reshape(-1) for one in run.model.parameters()])
    assert len(all_gather_equal(weights).view(world_size, -1).unique(dim=0)) == 1


@distributed(world_size=2)
def test_accumulation_and_clipping_are_each_ranks_own():
    run, reference = Run("sgd", LocalSGDPlugin(period=2, **DILOCO)), Reference("sgd", 2, 2, **DILOCO)
    for _ in range(4):
        run.step(accumulate=3, max_norm=0.2)
        reference.step(accumulate=3, max_norm=0.2)
    assert_same_state(run.model, reference.workers[group_rank()], **ROUNDED)


@distributed(world_size=2)
def test_counted_items_are_each_ranks_own():
    run, reference = Run("sgd", LocalSGDPlugin(period=2)), Reference("sgd", 2, 2)
    for step in range(4):
        loss = loss_of(run.model, batch(step, group_rank())) * 8
        run.booster.backward(loss, run.optimizer, num_items=8)
        run.optimizer.step()
        run.optimizer.zero_grad()
        reference.step()
    assert_same_state(run.model, reference.workers[group_rank()], **ROUNDED)


@distributed(world_size=2)
def test_a_period_of_one_step_of_sgd_is_data_parallelism():
    found, plain = [], nn.Linear(4, 2)
    for plugin in (LocalSGDPlugin(period=1), TorchDDPPlugin()):
        booster = Booster(plugin=plugin)
        model = nn.Linear(4, 2)
        model.load_state_dict(plain.state_dict())
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            booster.backward(loss_of(model, batch(step, group_rank())), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    assert_same_state(found[0], found[1].unwrap(), **ROUNDED)


@distributed(world_size=2)
def test_bf16_trains_and_ranks_agree():
    booster = Booster(plugin=LocalSGDPlugin(period=2), mixed_precision="bf16")
    model = nn.Linear(4, 2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        booster.backward(loss_of(model, batch(step, group_rank())).float(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.dtype is torch.float32
    assert torch.equal(*all_gather_equal(model.weight.detach()).view(2, -1))


@distributed(world_size=2)
@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["mean", "diloco"])
def test_weights_written_between_rounds_stay(outer):
    run = Run("sgd", LocalSGDPlugin(period=2, **outer))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    first = run.model.unwrap()[0]

    def train_a_round():
        for step in range(2):
            run.booster.backward(loss_of(run.model, batch(step, group_rank())), run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()

    train_a_round()
    with torch.no_grad():
        first.weight.fill_(1.0)
    train_a_round()
    torch.testing.assert_close(first.weight.detach(), torch.ones_like(first.weight))


@distributed(world_size=2)
def test_frozen_weights_stay_as_they_are_and_new_groups_are_averaged():
    run = Run("sgd", LocalSGDPlugin(period=2, **DILOCO))
    first, last = run.model.unwrap()[0], run.model.unwrap()[3]
    first.requires_grad_(False)
    extra = nn.Parameter(torch.zeros(2, device=current_device()))
    run.optimizer.add_param_group({"params": [extra], "lr": 0.5})
    before, head = first.weight.detach().clone(), last.weight.detach().clone()
    for step in range(2):
        loss = loss_of(run.model, batch(step, group_rank())) + ((extra - group_rank()) ** 2).sum()
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert torch.equal(first.weight, before)
    assert not torch.equal(last.weight, head)
    assert torch.equal(*all_gather_equal(extra.detach()).view(2, -1))
    assert float(extra.detach().abs().sum()) > 0


@distributed(world_size=2)
@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["mean", "diloco"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_resume_is_exact(tmp_path, kind, outer):
    run = Run(kind, LocalSGDPlugin(period=2, **outer))
    for _ in range(4):
        run.step()
    run.booster.save(tmp_path / "c", run.model, run.optimizer)
    other = Run(kind, LocalSGDPlugin(period=2, **outer))
    other.step()  # in the middle of a round
    other.booster.load(tmp_path / "c", other.model, other.optimizer)
    other.num_steps = 4
    for _ in range(3):
        run.step()
        other.step()
        assert_same_state(other.model, run.model.unwrap(), **EXACT)
        for one, same in zip(run.model.parameters(), other.model.parameters(), strict=True):
            for key, value in run.optimizer.state[one].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizer.state[same][key])), key
                assert "@" not in key


@distributed(world_size=2)
def test_resume_in_the_middle_of_an_accumulation_is_exact(tmp_path):
    run = Run("adamw", LocalSGDPlugin(period=2), has_buffers=False)
    for _ in range(2):
        run.step(accumulate=2)

    def half(one):
        with one.booster.accumulate(one.model, one.optimizer, 2):
            one.microbatch(50 + one.optimizer.num_microbatches)
            one.optimizer.step()
            one.optimizer.zero_grad()

    half(run)
    run.booster.save(tmp_path / "c", run.model, run.optimizer)
    other = Run("adamw", LocalSGDPlugin(period=2), has_buffers=False)
    other.booster.load(tmp_path / "c", other.model, other.optimizer)
    for one in (run, other):
        half(one)
    assert_same_state(other.model, run.model.unwrap(), **EXACT)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["ddp", "zero"])
def test_checkpoints_open_in_other_plugins_and_theirs_here(tmp_path, name):
    plugin = TorchDDPPlugin() if name == "ddp" else LowLevelZeroPlugin(stage=1, precision="fp32")
    run = Run("adamw", LocalSGDPlugin(period=2, **DILOCO))
    for _ in range(2):
        run.step()
    run.booster.save(tmp_path / "local", run.model, run.optimizer)
    other = Run("adamw", plugin)
    other.booster.load(tmp_path / "local", other.model, other.optimizer)
    assert_same_state(other.model, run.model.unwrap(), **EXACT)
    assert not [key for state in other.optimizer.state.values() for key in state if "@" in key]
    other.step()
    other.booster.save(tmp_path / "other", other.model, other.optimizer)
    run.booster.load(tmp_path / "other", run.model, run.optimizer)
    assert_same_state(run.model, other.model.unwrap(), **EXACT)
    averages = [run.optimizer.state[one]["exp_avg"] for one in run.model.parameters()]
    flat = torch.cat([one.reshape(-1) for one in averages])
    assert torch.equal(*all_gather_equal(flat).view(2, -1))
    assert run.optimizer.outer_momentum(next(run.model.parameters())) is None
    run.step()


def save_after_two_steps(path):
    run = Run("adamw", LocalSGDPlugin(period=2, **DILOCO))
    for _ in range(2):
        run.step()
    run.booster.save(path, run.model, run.optimizer)
    return states_of(run)


def load(path):
    run = Run("adamw", LocalSGDPlugin(period=2, **DILOCO))
    run.booster.load(path, run.model, run.optimizer)
    return states_of(run)


def states_of(run):
    parameters = list(run.model.parameters())
    own = [run.optimizer.state[one]["exp_avg"].clone() for one in parameters]
    return torch.cat([one.reshape(-1) for one in [*own, *map(run.optimizer.outer_momentum, parameters)]])


def test_new_ranks_begin_with_the_states_of_the_first(tmp_path):
    first, second = run_ranks(save_after_two_steps, 2, tmp_path / "c")
    assert not torch.equal(first, second)
    for found, expected in zip(run_ranks(load, 3, tmp_path / "c"), [first, second, first], strict=True):
        assert torch.equal(found, expected)
    [alone] = run_ranks(load, 1, tmp_path / "c")
    assert torch.equal(alone, first)


@distributed(world_size=2)
def test_a_save_in_the_middle_of_a_round_is_refused(tmp_path):
    run = Run("adamw", LocalSGDPlugin(period=2))
    run.step()
    for save in (
        lambda: run.booster.save_model(run.model, tmp_path / "m"),
        lambda: run.booster.save_optimizer(run.optimizer, tmp_path / "o"),
        lambda: run.booster.save(tmp_path / "c", run.model, run.optimizer),
    ):
        with pytest.raises(CheckpointError, match="after step 1 of a round, in its middle"):
            save()
    run.optimizer.end_round()
    run.booster.save(tmp_path / "c", run.model, run.optimizer)
    with run.booster.accumulate(run.model, run.optimizer, 2):
        run.microbatch(9)
    with pytest.raises(CheckpointError, match=r"buffers such as '1\.running_mean'"):
        run.booster.save(tmp_path / "d", run.model, run.optimizer)


@distributed(world_size=2)
def test_mistakes_are_refused_on_all_ranks():
    for arguments, message in [
        ({"period": 0}, "an int of 1 or more"),
        ({"period": 2.5}, "an int of 1 or more"),
        ({"outer_lr": 0}, "a number above 0"),
        ({"outer_momentum": 1.0}, "from 0 to below 1"),
        ({"nesterov": True}, "give an outer_momentum"),
        ({"nesterov": 1, "outer_momentum": 0.9}, "must be a bool"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LocalSGDPlugin(**arguments)
    with pytest.raises(DesyncError, match="period"):
        LocalSGDPlugin(period=2 + group_rank())
    with pytest.raises(ConfigError, match="fp16"):
        Booster(plugin=LocalSGDPlugin(), mixed_precision="fp16")
    booster, raw = Booster(plugin=LocalSGDPlugin()), make_model()
    own = make_optimizer("sgd", raw)
    model, *_ = booster.boost(raw, own)
    loss_of(model, batch(0, group_rank())).backward()
    with pytest.raises(ConfigError, match=r"was passed to boost.., which does not count steps of a round"):
        own.step()


@distributed(world_size=2)
def test_nothing_is_communicated_in_a_round():
    run = Run("sgd", LocalSGDPlugin(period=100))
    if group_rank() == 0:  # the other rank would have to take part
        for _ in range(5):
            run.step(accumulate=2, max_norm=1.0)
    run.booster.wait_for_everyone()
    assert run.model.steps_in_round == (5 if group_rank() == 0 else 0)
    assert dict(zip(run.booster.plugin.mesh.mesh_dim_names, run.booster.plugin.mesh.shape, strict=True)) == {
        "dp": group_size()
    }
