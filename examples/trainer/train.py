"""Trains a classifier of handwritten digits by a Trainer: no loop, a hook for each wish, one flag per plugin.

Run: booster run --nproc-per-node 2 examples/trainer/train.py --plugin gemini
     booster run --nproc-per-node 2 examples/trainer/train.py --plugin torch_fsdp --epochs 20  # continues the run
     python examples/trainer/train.py --plugin none
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from booster import Booster, Trainer, launch_from_torch
from booster.lr_scheduler import LinearWarmupLR
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.trainer import AccuracyHook, CheckpointHook, EarlyStopHook, EMAHook, MonitorHook, ThroughputHook

PLUGINS = {
    "none": lambda: None,
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.01, search_range_m=0.01),
    "torch_fsdp": TorchFSDPPlugin,
    "hybrid_parallel": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "pipeline": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", choices=list(PLUGINS), default="torch_ddp")
    parser.add_argument("--epochs", type=int, default=12, help="of all runs together")
    parser.add_argument("--batch-size", type=int, default=64, help="of all data-parallel ranks together")
    parser.add_argument("--output", type=Path, default=Path("runs/trainer"))
    return parser.parse_args(arguments)


def build_model() -> nn.Module:
    torch.manual_seed(0)  # equal weights on all ranks
    layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), *layers, nn.Linear(128, 10))


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the images for training, and every fifth for the test."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def train(booster: Booster, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the metrics of the last epoch, equal on all ranks."""
    images, test = read_digits()
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(images, batch_size, shuffle=True, drop_last=True)
    test_loader = booster.prepare_dataloader(test, batch_size)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = LinearWarmupLR(optimizer, total_steps=20 * len(loader), warmup_steps=len(loader))
    model, optimizer, criterion, _, scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=scheduler
    )
    hooks = [
        AccuracyHook(),
        EMAHook(decay=0.9),  # what the test images are classified with
        EarlyStopHook("eval_accuracy", mode="max", wait=6),
        CheckpointHook(arguments.output / "run", keep_last=2, best="eval_accuracy", mode="max", use_async=True),
        MonitorHook(log=arguments.output / f"{arguments.plugin}.jsonl"),
        ThroughputHook(),
    ]
    trainer = Trainer(booster, model, optimizer, criterion, scheduler, hooks, max_norm=1.0)
    return trainer.fit(loader, epochs=arguments.epochs, eval_loader=test_loader, resume="auto")


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    booster = Booster(plugin=PLUGINS[arguments.plugin]())
    found = train(booster, arguments)
    booster.print(f"{arguments.plugin}: loss {found['epoch_loss']:.4f}, accuracy {found['eval_accuracy']:.1%}")


if __name__ == "__main__":
    main()
