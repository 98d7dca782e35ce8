"""Trains a byte-level GPT on the source of Python's standard library, under every plugin by a flag.

Run: booster run --nproc-per-node 2 examples/gpt_pretraining/train.py --plugin gemini
     booster plot runs/gpt_pretraining/*.jsonl --only loss -o runs/gpt_pretraining/curves.png
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from booster import AutoPlugin, Booster, Monitor, launch_from_torch
from booster.lr_scheduler import CosineAnnealingWarmupLR
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

LENGTH, MAX_BYTES = 128, 1_000_000
SEQUENCE = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}
WINDOWS = torch.zeros(8, LENGTH, dtype=torch.long)  # a batch of one of two ranks
PLUGINS = {
    "none": lambda: None,
    "torch_ddp": TorchDDPPlugin,
    "zero_1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero_2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.5, search_range_m=1),
    "torch_fsdp": TorchFSDPPlugin,
    "tensor": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "sequence": lambda: HybridParallelPlugin(sp_size=2, precision="fp32", **SEQUENCE),
    "pipeline": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32"),
    "auto": lambda: AutoPlugin(batch={"input_ids": WINDOWS, "labels": WINDOWS}, candidates="all"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=list(PLUGINS), default="torch_ddp")
    parser.add_argument("--output", type=Path, default=Path("runs/gpt_pretraining"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="of all data-parallel ranks together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args(arguments)


def read_windows() -> list[dict[str, torch.Tensor]]:
    """Returns windows of the library's bytes, as the model's arguments."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1]
    return [{"input_ids": window, "labels": window} for window in windows]


def build_model(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(0)  # equal weights on all ranks and under all plugins
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=arguments.width, n_layer=arguments.layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=10, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(booster: Booster, arguments: argparse.Namespace) -> list[float]:
    """Returns the loss of every step, over all data-parallel ranks."""
    model = build_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = CosineAnnealingWarmupLR(optimizer, arguments.steps, warmup_steps=arguments.steps // 5)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(read_windows(), batch_size, shuffle=True, drop_last=True)

    losses, batches = [], iter(loader)
    log = arguments.output / f"{arguments.plugin}.jsonl"
    if booster.is_main_process:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log):
        for step in range(arguments.steps):
            if step % len(loader) == 0:
                batches = iter(loader)
            # Under plugins without pipeline stages the batch is one microbatch.
            result = booster.execute_pipeline(batches, model, lambda outputs, batch: outputs.loss, optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(booster.gather_for_metrics(result["loss"]).mean()))
    booster.save_model(model, arguments.output / "model", shard=True)
    return losses


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    booster = Booster(plugin=PLUGINS[arguments.plugin]())
    losses = train(booster, arguments)
    booster.print(f"{arguments.plugin}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")


if __name__ == "__main__":
    main()
