"""Trains a small GPT on the source of Python's standard library.

Run: booster run --nproc-per-node 2 examples/demo/train.py --output runs/demo
     booster run --nproc-per-node 2 examples/demo/train.py --output runs/demo --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from text import ByteWindows, read_library, unigram_entropy
from torch.optim.lr_scheduler import OneCycleLR
from transformers import GPT2Config, GPT2LMHeadModel

from booster import Booster, Monitor, launch_from_torch

LENGTH, BATCH = 128, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--stop-after", type=int, default=None, help="save a checkpoint after this step and end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--plugin", default="torch_ddp")
    parser.add_argument("--mixed-precision", default=None)
    return parser.parse_args()


def build_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=192, n_layer=4, n_head=6, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=10, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def window_losses(model, windows: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of predicting each next byte, for every window."""
    logits = model(windows).logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, windows[:, 1:], reduction="none").mean(1)


@torch.no_grad()
def validate(booster, model, loader) -> float:
    model.eval()
    losses = []
    for windows in loader:
        losses.append(booster.gather_for_metrics(window_losses(model, windows.to(booster.device))))
    model.train()
    return float(torch.cat(losses).mean())


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    booster = Booster(plugin=arguments.plugin, mixed_precision=arguments.mixed_precision)

    validation_text = read_library(is_validation=True)[:100_000]
    loader = booster.prepare_dataloader(ByteWindows(read_library(is_validation=False), LENGTH), BATCH, shuffle=True)
    validation_loader = booster.prepare_dataloader(ByteWindows(validation_text, LENGTH), BATCH)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    scheduler = OneCycleLR(optimizer, max_lr=2e-3, total_steps=arguments.steps, pct_start=0.15)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    booster.summary(model, optimizer)

    checkpoint = arguments.output / "checkpoint"
    step = booster.load(checkpoint, model, optimizer, scheduler, loader)["step"] if arguments.resume else 0
    last = arguments.stop_after or arguments.steps
    batches, log = iter(loader), arguments.output / "log.jsonl"
    if step == 0 and booster.is_main_process:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log, total_steps=arguments.steps, first_step=step + 1):
        while step < last:
            windows = next(batches, None)
            if windows is None:
                batches = iter(loader)
                continue
            loss = window_losses(model, windows.to(booster.device)).mean()
            booster.backward(loss, optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1

    booster.save(checkpoint, model, optimizer, scheduler, loader, extra={"step": step}, size_per_shard=4)
    entropy = unigram_entropy(validation_text)
    validation_loss = validate(booster, model, validation_loader)
    booster.print(f"step {step}: validation loss {validation_loss:.3f}, unigram entropy {entropy:.3f} nats per byte")


if __name__ == "__main__":
    main()
