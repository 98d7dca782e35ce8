"""A run that stops and starts again is the run that was never stopped; other world sizes go on from the same state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import distributed, run_ranks
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from booster import Booster, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugins import TorchDDPPlugin

PRECISIONS = {
    None: lambda: None,
    "bf16": lambda: "bf16",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2**14, growth_interval=2),  # overflows and grows on the way
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2**14, growth_interval=2),
    "fp8": lambda: "fp8",
}


class Job:
    """A small training run whose every part has a state: dropout, tied and frozen weights, scheduler, loader."""

    def __init__(self, precision: str | None, plugin=None) -> None:
        torch.manual_seed(7)
        self.booster = Booster(plugin=plugin or TorchDDPPlugin(), mixed_precision=PRECISIONS[precision]())
        model = nn.ModuleDict({"a": nn.Linear(16, 16), "drop": nn.Dropout(0.1), "b": nn.Linear(16, 16, bias=False)})
        model["b"].weight = model["a"].weight
        model["frozen"] = nn.Linear(16, 16).requires_grad_(False)
        groups = [{"params": [model["a"].weight], "lr": 0.02}, {"params": [model["a"].bias], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = CosineAnnealingLR(optimizer, T_max=20)
        self.loader = self.booster.prepare_dataloader(torch.randn(26, 16), 2, shuffle=True)
        self.model, self.optimizer, *_ = self.booster.boost(Net(model), optimizer)
        self.batches: Iterator[torch.Tensor] | None = None
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        if self.batches is None:  # kept between calls: a new iter() is a new epoch, unless a state was loaded
            self.batches = iter(self.loader)
        while steps:
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                continue
            loss = self.model(batch).square().mean() * 10
            self.booster.backward(loss, self.optimizer)
            self.booster.clip_grad_norm_(self.optimizer, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())
            steps -= 1

    def save(self, path: Path) -> None:
        self.booster.save_model(self.model, path, shard=True)
        self.booster.save_optimizer(self.optimizer, path, shard=True)
        self.booster.save_lr_scheduler(self.scheduler, path / "scheduler.json")
        if self.booster.is_main_process:
            (path / "loader.json").write_text(json.dumps(self.loader.state_dict()))
        self.booster.wait_for_everyone()

    def load(self, path: Path) -> None:
        self.booster.load_optimizer(self.optimizer, path)
        self.booster.load_model(self.model, path)
        self.booster.load_lr_scheduler(self.scheduler, path / "scheduler.json")
        self.loader.load_state_dict(json.loads((path / "loader.json").read_text()))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return found | {part.name: part.tensor.clone() for part in self.optimizer.checkpoint_state().slices()}


class Net(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["frozen"](self.parts["b"](self.parts["drop"](torch.relu(self.parts["a"](x)))))


@distributed(world_size=2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cut", [1, 4, 7, 9])  # an epoch has 7 batches
def test_resume_is_bit_exact(tmp_path, precision, cut):
    whole = Job(precision)
    whole.train(cut)
    whole.save(tmp_path / "checkpoint")
    random_state = torch.get_rng_state()
    whole.train(12)

    again = Job(precision)
    again.load(tmp_path / "checkpoint")
    torch.set_rng_state(random_state)
    again.train(12)
    assert again.losses == whole.losses[cut:]
    expected, found = whole.tensors(), again.tensors()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert again.optimizer.num_skipped_steps == whole.optimizer.num_skipped_steps
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    if precision is not None and precision.startswith("fp16"):
        assert again.optimizer.loss_scaler.state_dict() == whole.optimizer.loss_scaler.state_dict()
        assert whole.optimizer.num_skipped_steps > 0


def save_after_three(path: str) -> dict[str, torch.Tensor]:
    job = Job(None)
    job.train(3)
    job.save(Path(path))
    return job.tensors()


def load_and_look(path: str) -> dict[str, torch.Tensor]:
    job = Job(None)
    job.load(Path(path))
    return job.tensors()


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (2, 3), (3, 4), (4, 2)])
def test_any_world_size_loads_what_another_saved(tmp_path, saved, loaded):
    expected = run_ranks(save_after_three, saved, str(tmp_path / "checkpoint"))[0]
    for found in run_ranks(load_and_look, loaded, str(tmp_path / "checkpoint")):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_one_device_loads_what_ranks_saved(tmp_path):
    expected = run_ranks(save_after_three, 2, str(tmp_path / "checkpoint"))[0]
    from booster.single_device import SingleDevicePlugin

    assert not dist.is_initialized()
    job = Job(None, SingleDevicePlugin("cpu"))
    job.load(tmp_path / "checkpoint")
    for name, tensor in job.tensors().items():
        assert torch.equal(tensor, expected[name]), name
