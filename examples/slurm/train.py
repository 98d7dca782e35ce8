"""Trains under SLURM: every task is a rank, and the job continues from its last checkpoint when it is queued again.

Run: sbatch examples/slurm/job.sh
     python examples/slurm/train.py --steps 20     # a world of one, without SLURM
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster, Monitor, launch_from_slurm, launch_from_torch


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", help="name of a plugin")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--output", type=Path, default=Path("runs/slurm"), help="on a disk that all hosts see")
    return parser.parse_args(arguments)


class StopRequest:
    """Whether SLURM has announced the end of the job: `sbatch --signal=USR1@120` sends SIGUSR1 two minutes before."""

    def __init__(self) -> None:
        self.was_sent = False
        signal.signal(signal.SIGUSR1, self._note)

    def _note(self, *_: object) -> None:
        self.was_sent = True

    def on_any_rank(self, booster: Booster) -> bool:
        """Returns the same on all ranks. Collective."""
        flag = torch.tensor([float(self.was_sent)], device=booster.device)
        return bool(booster.gather_for_metrics(flag).any())


def train(booster: Booster, arguments: argparse.Namespace) -> int:
    """Trains to the last step or to the end of the job, and returns the step."""
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    loader = booster.prepare_dataloader(dataset, batch_size=32, shuffle=True, drop_last=True)
    torch.manual_seed(0)  # equal weights on all ranks
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    saved = booster.load(arguments.output, model, optimizer, dataloader=loader, missing_ok=True)
    step = 0 if saved is None else saved["step"]
    booster.print(f"from step {step} of {arguments.steps}, on {booster.plugin.dp_size} data-parallel ranks")
    stop = StopRequest()
    log = arguments.output / "log.jsonl"
    with Monitor(model, optimizer, log=log, first_step=step + 1, hang_seconds=300):
        while step < arguments.steps:
            for inputs, labels in loader:
                loss = criterion(model(inputs.to(booster.device)), labels.to(booster.device))
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                is_end = step == arguments.steps or stop.on_any_rank(booster)
                if is_end or step % arguments.every == 0:
                    extra = {"step": step}
                    booster.save(
                        arguments.output, model, optimizer, dataloader=loader, extra=extra, step=step, keep_last=2
                    )
                if is_end:
                    return step
    return step


def main() -> None:
    arguments = parse_arguments()
    if "SLURM_PROCID" in os.environ:
        launch_from_slurm(seed=42)
    else:
        launch_from_torch(seed=42)
    booster = Booster(plugin=arguments.plugin, mixed_precision="fp32")
    step = train(booster, arguments)
    booster.print(f"step {step}")
    if step < arguments.steps and "SLURM_JOB_ID" in os.environ and booster.is_main_process:
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)  # runs job.sh again


if __name__ == "__main__":
    main()
