"""Trains a model whose weights and optimizer states exceed a memory limit: they lie in files, and pass through memory.

Run: booster run --nproc-per-node 2 examples/nvme/train.py --limit-mib 700
     booster run --nproc-per-node 2 examples/nvme/train.py --limit-mib 700 --plugin torch_ddp   # too little memory
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import torch
from torch import nn

from booster import Booster, DistCoordinator, LazyInitContext, Monitor, launch_from_torch
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="gemini", help="gemini offloads, the others do not")
    parser.add_argument("--offload-dir", type=Path, default=None, help="on a fast disk; default: a temporary directory")
    parser.add_argument("--log", type=Path, default=None, help="JSON lines of every step, for `booster plot`")
    parser.add_argument("--limit-mib", type=int, default=None, help="memory that each process may allocate")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(arguments)


def limit_memory(mebibytes: int) -> None:
    """Lets allocations fail beyond a number of MiB above what the process has now."""
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + mebibytes * 2**20,) * 2)


def make_booster(arguments: argparse.Namespace, folder: str) -> Booster:
    """Returns the Booster; Gemini keeps weights, gradients and states in files."""
    if arguments.plugin != "gemini":
        return Booster(plugin=arguments.plugin, mixed_precision="fp32")
    plugin = GeminiPlugin(
        precision="fp32",
        placement_policy="static",
        offload_optim_frac=1.0,
        offload_param_frac=1.0,
        offload_dir=arguments.offload_dir or folder,
        min_chunk_size_m=arguments.width**2 / 2**20,
        search_range_m=arguments.width**2 / 2**20,
    )
    return Booster(plugin=plugin)


def train(arguments: argparse.Namespace) -> tuple[list[float], int]:
    """Returns the losses of this rank and the bytes of weights, gradients and states."""
    with tempfile.TemporaryDirectory() as folder:
        booster = make_booster(arguments, folder)
        if arguments.limit_mib is not None:
            limit_memory(arguments.limit_mib)
        torch.manual_seed(0)
        with LazyInitContext():  # no memory yet
            blocks = [one for _ in range(arguments.layers) for one in (nn.Linear(*[arguments.width] * 2), nn.ReLU())]
            model = nn.Sequential(*blocks, nn.Linear(arguments.width, 1))
        num_bytes = sum(parameter.numel() for parameter in model.parameters()) * 16
        optimizer = HybridAdam(model.parameters(), lr=1e-4)
        model, optimizer, *_ = booster.boost(model, optimizer)
        losses = []
        x = torch.randn(arguments.batch_size, arguments.width, device=booster.device)
        with Monitor(model, optimizer, log=arguments.log):
            for _ in range(arguments.steps):
                loss = (model(x) - 1).square().mean()
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        booster.close()
    return losses, num_bytes


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    losses, num_bytes = train(arguments)
    DistCoordinator().print_on_master(
        f"{arguments.plugin}: {num_bytes / 2**20:,.0f} MiB of weights, gradients and states; losses"
        f" {', '.join(f'{loss:.4f}' for loss in losses)}; memory limit of a process: {arguments.limit_mib} MiB"
    )


if __name__ == "__main__":
    main()
