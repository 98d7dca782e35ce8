"""Trains a small network to give what a large, frozen one gives: the teacher is boosted without an optimizer.

Run: booster run --nproc-per-node 2 examples/distillation/train.py --plugin torch_fsdp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from booster import Booster, Monitor, launch_from_torch

TEMPERATURE = 2.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", help="name of a plugin, or none")
    parser.add_argument("--epochs", type=int, default=10, help="of teacher and of student")
    parser.add_argument("--max-steps", type=int, default=None, help="of all epochs together")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--output", type=Path, default=Path("runs/distillation"))
    return parser.parse_args(arguments)


def build_model(width: int) -> nn.Module:
    torch.manual_seed(width)  # equal weights on all ranks
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the images for training, and every fifth for the test."""
    images, labels = (torch.tensor(one) for one in (load_digits().data / 16, load_digits().target))
    is_test = torch.arange(len(labels)) % 5 == 0
    images = images.float()
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def fit(booster: Booster, model, optimizer, loader, loss_of, arguments: argparse.Namespace, log: str) -> list[float]:
    """Trains a boosted model by a loss of (inputs, labels), and returns the losses of this rank."""
    path, losses = arguments.output / f"{log}.jsonl", []
    if booster.is_main_process:
        path.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=path):
        for inputs, labels in (batch for _ in range(arguments.epochs) for batch in loader):
            loss = loss_of(inputs.to(booster.device), labels.to(booster.device))
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if len(losses) == arguments.max_steps:
                break
    return losses


@torch.no_grad()
def evaluate(booster: Booster, model: nn.Module, loader) -> float:
    """Returns the share of right labels, each image counted once."""
    right = [
        booster.gather_for_metrics(model(inputs.to(booster.device)).argmax(1) == labels.to(booster.device))
        for inputs, labels in loader
    ]
    return float(torch.cat(right).float().mean())


def train(booster: Booster, arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    """Returns the student's losses, and the accuracy of teacher and student."""
    images, test = read_digits()
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(images, batch_size, shuffle=True, drop_last=True)
    test_loader = booster.prepare_dataloader(test, batch_size)
    teacher = build_model(256)
    teacher, optimizer, *_ = booster.boost(teacher, torch.optim.AdamW(teacher.parameters(), lr=1e-3))
    fit(booster, teacher, optimizer, loader, lambda x, y: F.cross_entropy(teacher(x), y), arguments, "teacher")
    booster.save_model(teacher, arguments.output / "teacher", shard=True)

    frozen = build_model(256).requires_grad_(False)
    frozen, *_ = booster.boost(frozen)  # no optimizer: it is sharded as the plugin shards, and never trains
    booster.load_model(frozen, arguments.output / "teacher")
    student = build_model(16)
    student, optimizer, *_ = booster.boost(student, torch.optim.AdamW(student.parameters(), lr=3e-3))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            soft = F.softmax(frozen(x) / TEMPERATURE, 1)
        logits = student(x)
        return F.cross_entropy(logits, y) + TEMPERATURE**2 * F.cross_entropy(logits / TEMPERATURE, soft)

    losses = fit(booster, student, optimizer, loader, loss_of, arguments, "student")
    return losses, evaluate(booster, frozen, test_loader), evaluate(booster, student, test_loader)


if __name__ == "__main__":
    given = parse_arguments()
    launch_from_torch(seed=42)
    made = Booster(plugin=None if given.plugin == "none" else given.plugin, mixed_precision="fp32")
    _, of_teacher, of_student = train(made, given)
    made.print(f"{given.plugin}: accuracy of the teacher {of_teacher:.1%}, of the student {of_student:.1%}")
