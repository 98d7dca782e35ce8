"""Trains a GPT-2 whose parameters are marked, which makes it tensor parallel as in Megatron-LM.

Run: booster run --nproc-per-node 2 examples/annotated/train.py --tp 2
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import GPT2Config, GPT2LMHeadModel

from booster import Booster, Monitor, launch_from_torch, shard
from booster.plugins import HybridParallelPlugin

LENGTH, MAX_BYTES = 128, 1_000_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=["none", "hybrid_parallel"], default="hybrid_parallel")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--output", type=Path, default=Path("runs/annotated"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args(arguments)


def mark(model: nn.Module) -> None:
    """Marks the parameters of a GPT-2, whose weights have inputs first, for column- and row-parallel layers."""
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if name.endswith("mlp.c_fc"):
                shard(parameter, Shard(-1))  # columns; the output stays sharded for c_proj
            elif name.endswith("mlp.c_proj") and leaf == "weight":
                shard(parameter, Shard(0))  # rows
            elif name.endswith(("wte", "wpe", "attn.c_attn", "attn.c_proj")):
                shard(parameter, Shard(-1))  # columns; outputs are gathered


def read_windows() -> list[torch.Tensor]:
    """Returns windows of the bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
    return list(torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1])


def build_model(arguments: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(0)  # equal weights on all ranks
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=arguments.width, n_layer=arguments.layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=10, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(booster: Booster, arguments: argparse.Namespace) -> list[float]:
    """Returns the loss of every step, over all data-parallel ranks."""
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(read_windows(), batch_size, shuffle=True, drop_last=True)
    model = build_model(arguments)
    mark(model)
    if isinstance(booster.plugin, HybridParallelPlugin):
        booster.print(booster.plugin.explain(model))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses: list[float] = []
    log = arguments.output / f"{arguments.plugin}.jsonl"
    if booster.is_main_process:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log):
        while len(losses) < arguments.steps:
            for window in loader:
                loss = model(input_ids=window.to(booster.device), labels=window.to(booster.device)).loss
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(booster.gather_for_metrics(loss.detach()).mean()))
                if len(losses) == arguments.steps:
                    break
    return losses


def main() -> None:
    arguments = parse_arguments()
    launch_from_torch(seed=42)
    is_plain = arguments.plugin == "none"
    booster = Booster(plugin=None if is_plain else HybridParallelPlugin(tp_size=arguments.tp, precision="fp32"))
    losses = train(booster, arguments)
    booster.print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")


if __name__ == "__main__":
    main()
