"""Shared by tests of checkpoints under TorchFSDPPlugin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_twins import STRATEGIES
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from booster import Booster
from booster.plugins import TorchFSDPPlugin


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


ONE_LEVEL = pytest.mark.parametrize("strategy", ["full", slow("grad op"), slow("none")])


# With batch norms in the model, which only FSDP1's class leaves in fp32.
PRECISIONS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True),
    "bf16, fp32 sums": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True),
    "fp16": MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=True),
}


class Layer(nn.Module):
    """Odd sizes, and a first dimension smaller than most worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 37), nn.Linear(37, 6)
        self.gate = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(fitting(self.gate, x))
        return x + gate * fitting(self.narrow, torch.relu(fitting(self.wide, x)))


def fitting(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Runs a layer in its own format: those of ignored modules differ from the others'."""
    return layer(x.to(layer.weight.dtype))


class Net(nn.Module):
    """Tied weights, buffers of several formats, a scalar, an empty parameter, a frozen layer, odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.rand(11) > 0.5)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(fitting(self.frozen, self.embed(tokens)))
        for layer in self.layers:
            x = layer(x)
        return fitting(self.head, x) * self.scale + self.none.sum() + self.mask


def param_groups(net: Net, with_frozen: bool = False) -> list[dict]:
    chosen = [net.embed.weight, net.scale, net.none]
    rest = [one for one in net.parameters() if all(one is not other for other in chosen)]
    if not with_frozen:
        rest = [one for one in rest if one.requires_grad]
    return [{"params": chosen, "lr": 0.02}, {"params": rest, "weight_decay": 0.1}]


def ignored(net: Net, which: str) -> list[nn.Module]:
    return {"nothing": [], "a layer": [net.layers[1]], "parts": [net.layers[0].gate, net.frozen, net.norm]}[which]


class Job:
    """A small training run."""

    def __init__(
        self, strategy="full", *, seed=0, net=None, make=torch.optim.AdamW, precision="fp32", ignores="nothing", **more
    ) -> None:
        raw = Net(seed) if net is None else net
        plugin = TorchFSDPPlugin(
            **STRATEGIES[strategy] | {"mixed_precision": PRECISIONS[precision], "initial_scale": 2**8} | more,
            ignored_modules=ignored(raw, ignores) or None,
        )
        self.booster = Booster(plugin=plugin)
        groups = param_groups(raw, with_frozen=net is not None)
        self.raw = raw
        # The large eps keeps gradients that are rounding noise small: those before the batch norm are 0 but for it.
        self.model, self.optimizer, *_ = self.booster.boost(raw, make(groups, lr=0.01, eps=1e-3))

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(11, (5,), generator=generator)
        scores = self.model(tokens.to(self.booster.device))
        self.booster.backward(scores.float().square().mean(), self.optimizer)

    def train(self, *steps: int) -> Job:
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, path: Path, **options) -> Path:
        self.booster.save(path, self.model, self.optimizer, **options)
        return path

    def load(self, path: Path) -> Job:
        self.booster.load(path, self.model, self.optimizer)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name
