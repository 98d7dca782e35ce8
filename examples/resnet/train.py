"""Trains a small residual network on handwritten digits; two ranks give what one process gives.

Run: booster run --nproc-per-node 2 examples/resnet/train.py
     booster run --nproc-per-node 2 examples/resnet/train.py --resume --plugin torch_fsdp
     python examples/resnet/train.py --plugin none
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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", help="name of a plugin, or none")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-steps", type=int, default=None, help="of all epochs together")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("-c", "--checkpoint", type=Path, default=Path("runs/resnet"), help="directory to save into")
    parser.add_argument("-r", "--resume", action="store_true", help="continue from there")
    return parser.parse_args(arguments)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(x_BCHW + self.norm2(self.conv2(y_BCHW)))


def build_model(width: int = 32, num_blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)  # equal weights on all ranks
    stem = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*stem, *(Block(width) for _ in range(num_blocks)), *head)


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the images for training, and every fifth for the test."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


@torch.no_grad()
def evaluate(booster: Booster, model: nn.Module, loader) -> float:
    """Returns the share of right labels, each image counted once."""
    model.eval()
    right = [
        booster.gather_for_metrics(model(inputs.to(booster.device)).argmax(1) == labels.to(booster.device))
        for inputs, labels in loader
    ]
    model.train()
    return float(torch.cat(right).float().mean())


def train(booster: Booster, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Returns the loss of every step, over all ranks, and the accuracy on the test images."""
    images, test = read_digits()
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(images, batch_size, shuffle=True, drop_last=True)
    test_loader = booster.prepare_dataloader(test, batch_size)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    saved = booster.load(arguments.checkpoint, model, optimizer, dataloader=loader) if arguments.resume else {"step": 0}
    log, losses = arguments.checkpoint / f"{arguments.plugin}.jsonl", []
    if booster.is_main_process and not arguments.resume:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log, first_step=saved["step"] + 1):
        for inputs, labels in (batch for _ in range(arguments.epochs) for batch in loader):
            loss = criterion(model(inputs.to(booster.device)), labels.to(booster.device))
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(booster.gather_for_metrics(loss.detach()).mean()))
            if len(losses) == arguments.max_steps:
                break
    step = saved["step"] + len(losses)
    booster.save(
        arguments.checkpoint, model, optimizer, dataloader=loader, extra={"step": step}, step=step, keep_last=2
    )
    return losses, evaluate(booster, model, test_loader)


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    booster = Booster(plugin=None if arguments.plugin == "none" else arguments.plugin, mixed_precision="fp32")
    losses, accuracy = train(booster, arguments)
    booster.print(f"{arguments.plugin}: loss {losses[-1]:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
