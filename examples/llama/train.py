"""Trains a small Llama with tensor and pipeline parallelism and ZeRO at once.

Run: booster run --nproc-per-node 4 examples/llama/train.py --tp 2 --pp 2
     booster run --nproc-per-node 4 examples/llama/train.py --tp 2 --zero 1
     booster run --nproc-per-node 2 examples/llama/train.py --plugin torch_fsdp
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster, LazyInitContext, Monitor, launch_from_torch
from booster.optim import HybridAdam
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

LENGTH, MAX_BYTES = 128, 1_000_000
CONFIGS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "10m": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8, "num_attention_heads": 8},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    names = ["hybrid_parallel", "torch_ddp", "low_level_zero", "gemini", "torch_fsdp"]
    parser.add_argument("-p", "--plugin", choices=names, default="hybrid_parallel")
    parser.add_argument("-c", "--config", choices=list(CONFIGS), default="10m")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2], default=0, help="ZeRO stage over data-parallel ranks")
    parser.add_argument("--pp_style", default="1f1b")
    parser.add_argument("--mbs", type=int, default=4, help="samples of a microbatch")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("-g", "--grad_checkpoint", action="store_true", help="compute layers again in backward")
    parser.add_argument("-b", "--batch_size", type=int, default=16, help="of all data-parallel ranks together")
    parser.add_argument("-s", "--num_steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/llama"))
    return parser.parse_args(arguments)


def make_booster(arguments: argparse.Namespace) -> Booster:
    precision = arguments.precision
    if arguments.plugin == "hybrid_parallel":
        return Booster(
            plugin=HybridParallelPlugin(
                tp_size=arguments.tp,
                pp_size=arguments.pp,
                zero_stage=arguments.zero,
                precision=precision,
                microbatch_size=arguments.mbs if arguments.pp > 1 else None,
                pp_style=arguments.pp_style,
                num_model_chunks=2 if arguments.pp_style in ("interleaved", "zbv") else 1,
                gradient_checkpoint_config=arguments.grad_checkpoint or None,
            )
        )
    if arguments.plugin == "low_level_zero":
        return Booster(plugin=LowLevelZeroPlugin(stage=arguments.zero or 1, precision=precision))
    if arguments.plugin == "gemini":
        return Booster(plugin=GeminiPlugin(precision=precision, min_chunk_size_m=1, search_range_m=1))
    plugin = TorchDDPPlugin() if arguments.plugin == "torch_ddp" else TorchFSDPPlugin()
    return Booster(plugin=plugin, mixed_precision=None if precision == "fp32" else precision)


def read_windows() -> list[dict[str, torch.Tensor]]:
    """Returns windows of the standard library's bytes, as the model's arguments."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1]
    return [{"input_ids": window, "labels": window} for window in windows]


def train(booster: Booster, arguments: argparse.Namespace) -> float:
    """Returns the loss of the last step."""
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(read_windows(), batch_size, shuffle=True, drop_last=True)
    config = LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **CONFIGS[arguments.config])
    with LazyInitContext():  # no rank ever holds the whole model
        model = LlamaForCausalLM(config)
    if isinstance(booster.plugin, HybridParallelPlugin):
        booster.print(booster.plugin.explain(model))
    optimizer = HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    batches, loss = iter(loader), torch.zeros(())
    log = arguments.output / "log.jsonl"
    if booster.is_main_process:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log):
        for step in range(arguments.num_steps):
            if step and step % len(loader) == 0:
                batches = iter(loader)
            result = booster.execute_pipeline(batches, model, lambda outputs, batch: outputs.loss, optimizer)
            loss = result["loss"]
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    booster.save_model(model, arguments.output / "model", shard=True)  # a folder for from_pretrained
    return float(booster.gather_for_metrics(loss.float()).mean())


if __name__ == "__main__":
    given = parse_arguments()
    launch_from_torch(seed=42)
    made = make_booster(given)
    last = train(made, given)
    made.print(f"loss {last:.3f}")
