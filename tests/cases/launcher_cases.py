"""A few real steps of DDP under a launcher of others, and the same in one process by plain torch."""

from __future__ import annotations

import os

import torch

# Whatever this test run itself was started by.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_BEGINNINGS = ("SLURM", "OMPI_", "PMIX_", "PMI_", "TORCHELASTIC_", "GLOO_SOCKET_IFNAME")

# Called with the name of the launch function; the first rank writes the weights, every rank says where it is.
TRAIN = """\
import json, os, sys
import torch
import booster

launch = getattr(booster, sys.argv[1])
launch(verbose=False, timeout_seconds=60)
launch(verbose=False, timeout_seconds=60)  # the second call changes nothing
coordinator = booster.DistCoordinator()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
inputs, targets = torch.randn(12, 6).double(), torch.randn(12, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
strategy = booster.Booster(plugin="torch_ddp")
model, optimizer, criterion, _, _ = strategy.boost(model, optimizer, torch.nn.MSELoss())
mine = slice(coordinator.rank, None, coordinator.world_size)
for _ in range(3):
    strategy.backward(criterion(model(inputs[mine]), targets[mine]), optimizer)
    optimizer.step()
    optimizer.zero_grad()
where = {"rank": coordinator.rank, "local_rank": coordinator.local_rank, "world_size": coordinator.world_size}
where["gloo"] = os.environ.get("GLOO_SOCKET_IFNAME")
with open(f"rank_{coordinator.rank}.json", "w") as file:
    json.dump(where | {"weights": [weight.tolist() for weight in model.parameters()]}, file)
"""


def trained_alone() -> list[torch.Tensor]:
    """Returns the weights that one process has after the same steps."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        inputs, targets = torch.randn(12, 6).double(), torch.randn(12, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in model.parameters()]


def assert_trained(weights: list[list[float]]) -> None:
    """Fails unless the weights are those of one process; means of means are rounded differently."""
    for mine, expected in zip(weights, trained_alone(), strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), expected, rtol=0, atol=1e-14)


def plain_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without what launchers set, and with these."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN and not name.startswith(FOREIGN_BEGINNINGS)
    }
    return kept | {"OMP_NUM_THREADS": "1"} | variables
