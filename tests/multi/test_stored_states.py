"""Checkpoints of state that has no shards: it comes back under every plugin, also from another one."""

from __future__ import annotations

import pytest
import torch
from harness import distributed, run_ranks
from strategies import FP32
from torch import nn

from booster import Booster, CheckpointError, FP16TorchMixedPrecision
from booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

pytestmark = pytest.mark.on_device


class Counting(torch.optim.SGD):
    """Counts in a tensor of one element for each parameter, which is the shape of small shards."""

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", torch.zeros(1, device=parameter.device)) + 1
        return result

    def use_shards(self, shards):
        """Elementwise."""


class Net(nn.Module):
    """Has a bias of two elements, of which each of two ranks has one, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.num_calls = nn.Linear(4, 8), nn.Linear(8, 2), 0

    def forward(self, x):
        self.num_calls += self.training
        return self.head(torch.tanh(self.body(x)))

    def get_extra_state(self):
        return torch.tensor(self.num_calls)

    def set_extra_state(self, state):
        self.num_calls = int(state)


def made(kind):
    booster = FP32[kind]()
    torch.manual_seed(0)
    model = Net()
    model, optimizer, *_ = booster.boost(model, Counting(model.parameters(), lr=0.1))
    return booster, model, optimizer


def save_and_load(kind, other, path):
    booster, model, optimizer = made(kind)
    for _ in range(3):
        booster.backward(model(torch.ones(2, 4, device=booster.device)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save(path, model, optimizer)
    loaded, model, optimizer = made(other)
    loaded.load(path, model, optimizer)
    counts = [state["count"] for state in optimizer.state.values() if "count" in state]
    return loaded.unwrap_model(model).num_calls, {tuple(one.shape) for one in counts}, {one.item() for one in counts}


@pytest.mark.parametrize("other", FP32)
@pytest.mark.parametrize("kind", FP32)
def test_counts_of_parameters_and_extra_states_come_back(kind, other, tmp_path):
    for calls, shapes, counts in run_ranks(save_and_load, 2, kind, other, tmp_path / "run"):
        assert calls == 3
        assert shapes <= {(1,)}
        assert counts <= {3.0}


PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "fsdp": TorchFSDPPlugin,
}


@pytest.mark.parametrize("kind", PLUGINS)
@distributed(world_size=2)
def test_an_overflow_before_a_resume_in_fp32_skips_its_step(kind, tmp_path):
    def boosted(precision, plugin):
        booster = Booster(plugin=plugin, mixed_precision=precision)
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]

    booster, model, optimizer = boosted(FP16TorchMixedPrecision(init_scale=2.0**16), TorchDDPPlugin())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with booster.accumulate(model, optimizer, 2):
        booster.backward(model(torch.full((2, 4), 1e4, device=booster.device)).float().sum() * 1e30, optimizer)
    booster.save(tmp_path / "run", model, optimizer)
    booster, model, optimizer = boosted(None, PLUGINS[kind]())
    booster.load(tmp_path / "run", model, optimizer)
    with booster.accumulate(model, optimizer, 2) as is_last:
        booster.backward(model(torch.ones(2, 4, device=booster.device)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert is_last
    assert optimizer.step_was_skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["zero1", "gemini", "fsdp", "hybrid_tp"])
@distributed(world_size=2)
def test_every_tensor_that_is_left_out_is_named(kind, tmp_path):
    booster, model, _ = made("ddp")
    booster.save_model(model, tmp_path / "model", shard=True)
    booster = FP32[kind]()
    larger = Net()
    larger.extra = nn.Linear(3, 5)
    larger.head = nn.Linear(8, 3)
    larger, *_ = booster.boost(larger, torch.optim.SGD(larger.parameters(), lr=0.1))
    with pytest.raises(CheckpointError) as error:
        booster.load_model(larger, tmp_path / "model")
    for name in ("extra.weight", "extra.bias", "head.weight", "head.bias"):
        assert name in str(error.value)
