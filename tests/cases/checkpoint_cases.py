"""Models, optimizers and forms of checkpoints for the tests of GeneralCheckpointIO."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.optim import AdamW

from booster.interface import ModelWrapper, OptimizerWrapper


class Net(nn.Module):
    """Tied weights, buffers of three formats, a scalar, an empty parameter."""

    def __init__(self, seed=0, tied=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_N):
        return self.head(self.norm(self.embed(tokens_N))) * self.scale


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def names_in(directory):
    return sorted(os.listdir(directory))


FORMS = {
    "safetensors": ("m.safetensors", {}),
    "bin": ("m.bin", {"use_safetensors": False}),
    "pt": ("m.pt", {"use_safetensors": False}),
    "sharded": ("m", {"shard": True}),
    "sharded bin": ("m", {"shard": True, "use_safetensors": False}),
    "variant": ("m", {"shard": True, "prefix": "fp16"}),
}


def stepped(net, optimizer_class=AdamW, num_steps=2, **options):
    model = ModelWrapper(net)
    groups = [{"params": [net.embed.weight, net.scale]}, {"params": list(net.norm.parameters()), "lr": 0.25}]
    optimizer = OptimizerWrapper(optimizer_class(groups, **{"lr": 0.125} | options), model)
    for _ in range(num_steps):
        train_step(model, optimizer)
    return model, optimizer


def train_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(8)).float().pow(2).mean().backward()
    optimizer.step()
