"""Trains a small vision transformer on images, under any plugin by a flag; the loss curves coincide.

Run: booster run --nproc-per-node 2 examples/vit/train.py --plugin pipeline
     booster run --nproc-per-node 4 examples/vit/train.py --plugin pipeline_tensor
     booster plot runs/vit/*.jsonl --only loss -o runs/vit/curves.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from images import NUM_CLASSES, SIZE, read_cifar10, read_digits
from torch.optim.lr_scheduler import OneCycleLR
from transformers import ViTConfig, ViTForImageClassification

from booster import Booster, Monitor, launch_from_torch
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "none": lambda: None,
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.5, search_range_m=1),
    "torch_fsdp": TorchFSDPPlugin,
    "pipeline": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32"),
    "pipeline_tensor": lambda: HybridParallelPlugin(pp_size=2, tp_size=2, num_microbatches=4, precision="fp32"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", choices=list(PLUGINS), default="torch_ddp")
    parser.add_argument("--output", type=Path, default=Path("runs/vit"))
    parser.add_argument("--cifar10", type=Path, default=None, help="the folder cifar-10-batches-bin; default: digits")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="of all data-parallel ranks together")
    parser.add_argument("--patch-size", type=int, default=8, help="edge of the squares that are the model's tokens")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=96)
    return parser.parse_args(arguments)


def build_model(arguments: argparse.Namespace) -> ViTForImageClassification:
    torch.manual_seed(0)  # the same weights on all ranks, whatever the strategy
    config = ViTConfig(
        image_size=SIZE, patch_size=arguments.patch_size, num_labels=NUM_CLASSES, num_hidden_layers=arguments.layers,
        hidden_size=arguments.width, intermediate_size=2 * arguments.width, num_attention_heads=4,
    )  # fmt: skip
    return ViTForImageClassification(config)


def mean_loss(outputs, batch):
    return outputs.loss


def evaluate(booster, model, loader) -> float:
    """Returns the share of images that the model labels rightly."""
    model.eval()
    counts = torch.zeros(2)
    for batch in loader:
        outputs = booster.execute_pipeline(iter([batch]), model, mean_loss, return_outputs=True)["outputs"]
        if outputs is not None:  # a stage in the middle of the model has none
            is_right = outputs.logits.argmax(-1).cpu() == batch["labels"]
            counts += torch.tensor([is_right.sum(), len(is_right)])
    model.train()
    counts = counts.to(booster.device)
    dist.all_reduce(counts)  # ranks that share their images count the same
    return float(counts[0] / counts[1])


def train(booster, arguments: argparse.Namespace) -> tuple[list[float], float]:
    """Returns the loss of every step, over all data-parallel ranks, and the accuracy on the held-out images."""
    images, held_out = read_cifar10(arguments.cifar10) if arguments.cifar10 else read_digits()
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(images, batch_size, shuffle=True, drop_last=True)
    model = build_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4, fused=True)
    scheduler = OneCycleLR(optimizer, max_lr=7e-4, total_steps=arguments.steps + 1, pct_start=0.2)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)

    losses, batches = [], iter(loader)
    log = arguments.output / f"{arguments.plugin}.jsonl"
    if booster.is_main_process:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log, total_steps=arguments.steps):
        for step in range(arguments.steps):
            if step % len(loader) == 0:
                batches = iter(loader)
            loss = booster.execute_pipeline(batches, model, mean_loss, optimizer)["loss"]
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(booster.gather_for_metrics(loss).mean()))
    return losses, evaluate(booster, model, booster.prepare_dataloader(held_out, batch_size))


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    booster = Booster(plugin=PLUGINS[arguments.plugin]())
    losses, accuracy = train(booster, arguments)
    booster.print(f"{arguments.plugin}: loss {losses[-1]:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
