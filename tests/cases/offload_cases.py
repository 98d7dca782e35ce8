"""Optimizers with their states on the disk, for the tests of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from booster.optim import CPUAdam

# Sizes around the small chunks below: several parameters in a chunk, and several chunks of a parameter.
SHAPES = [(300, 17), (7,), (), (0, 3), (5000,), (64, 64), (1,), (3000, 3)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, step=0):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(optimizer, steps=range(4)):
    for step in steps:
        give_gradients(params_of(optimizer), step=step)
        optimizer.step()


def params_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def groups_of(params):
    return [{"params": params[:3], "lr": 0.02, "weight_decay": 0.1}, {"params": params[3:], "betas": (0.5, 0.9)}]


def twins(directory, dtype=torch.float32, fraction=1.0, **settings):
    """Returns the same optimizer with its states on the disk and in memory."""
    offloaded = CPUAdam(
        groups_of(parameters(dtype)), nvme_offload_fraction=fraction, nvme_offload_dir=directory, **settings
    )
    return offloaded, CPUAdam(groups_of(parameters(dtype)), **settings)


def assert_alike(one, other):
    """Bit for bit: parameters and states."""
    for p, q in zip(params_of(one), params_of(other), strict=True):
        assert torch.equal(p, q)
        assert one.state[p].keys() == other.state[q].keys()
        for key, value in one.state[p].items():
            assert torch.equal(value, other.state[q][key]), (tuple(p.shape), key)


def files_in(directory):
    return sorted(Path(directory).glob("booster-states-*/*"))


def bytes_in(directory):
    return sum(path.stat().st_size for path in files_in(directory))
