"""Train a small GPT on the source of Python's standard library; run by `booster demo`.

Run: booster run --nproc-per-node 2 booster/cli/demo_train.py --output FOLDER --steps 120 --stop-after 60
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from booster.booster import Booster
from booster.launch.launch import launch_from_torch
from booster.monitor import Monitor

LENGTH, BATCH, WIDTH, NUM_LAYERS, NUM_HEADS = 96, 16, 128, 3, 4
MAX_BYTES = 2_000_000


class Bytes(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of the bytes of the standard library's files, one after the other."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).split(LENGTH)[:-1]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Any:
        return self.windows[index].long()


class GPT(nn.Module):
    """Decoder of `nn.TransformerEncoderLayer`s over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(NUM_LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x_BT: torch.Tensor) -> Any:
        x_BTD = self.tokens(x_BT) + self.positions(torch.arange(x_BT.shape[1], device=x_BT.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x_BT.shape[1], device=x_BT.device, dtype=x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, src_mask=mask, is_causal=True)
        return self.head(self.norm(x_BTD))


def main() -> None:
    """Train from the last checkpoint, if there is one, to the step to stop after, and save there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plugin", default="torch_ddp")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop-after", type=int, required=True)
    arguments = parser.parse_args()
    launch_from_torch(seed=42)
    booster = Booster(plugin=arguments.plugin)
    loader = booster.prepare_dataloader(Bytes(), BATCH, shuffle=True, drop_last=True)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=arguments.steps + 1)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    checkpoint = arguments.output / "checkpoint"
    saved = booster.load(checkpoint, model, optimizer, scheduler, loader, missing_ok=True)
    step = 0 if saved is None else saved["step"]
    booster.print(f"from step {step} to {arguments.stop_after} under {type(booster.plugin).__name__}")
    batches = iter(loader)
    with Monitor(model, optimizer, log=arguments.output / "log.jsonl", first_step=step + 1):
        while step < arguments.stop_after:
            x_BT = next(batches, None)
            if x_BT is None:  # the end of an epoch
                batches = iter(loader)
                continue
            x_BT = x_BT.to(booster.device)
            loss = F.cross_entropy(model(x_BT)[:, :-1].float().transpose(1, 2), x_BT[:, 1:])
            booster.backward(loss, optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not optimizer.step_was_skipped:
                scheduler.step()
            step += 1
    booster.save(checkpoint, model, optimizer, scheduler, loader, extra={"step": step})


if __name__ == "__main__":
    main()
