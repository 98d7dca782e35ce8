"""Fine-tunes a small Llama by LoRA, under every plugin by a flag, merges the adapter and samples from both models.

Run: booster run --nproc-per-node 2 examples/finetune/train.py --plugin fsdp
The first run trains the base on the source of Python's standard library. Adapters learn the same source in capitals.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from booster import Booster, LazyInitContext, Monitor, launch_from_torch
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

LENGTH, MAX_BYTES = 128, 1_000_000
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "zero2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.5, search_range_m=1),
    "fsdp": TorchFSDPPlugin,
    "tp2": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
    "pp2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=list(PLUGINS), default="ddp", help="of the fine-tuning")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--pretrain-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16, help="of all data-parallel ranks together")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args(arguments)


def read_windows(in_capitals: bool) -> list[dict[str, torch.Tensor]]:
    """Returns windows of the library's bytes, as the model's arguments."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
    text = text.upper() if in_capitals else text
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1]
    return [{"input_ids": window, "labels": window} for window in windows]


def train(booster: Booster, model, optimizer, name: str, steps: int, arguments) -> list[float]:
    """Returns the loss of every step, over all data-parallel ranks."""
    batch_size = arguments.batch_size // booster.plugin.dp_size
    windows = read_windows(in_capitals=name != "base")
    loader = booster.prepare_dataloader(windows, batch_size, shuffle=True, drop_last=True)
    losses, batches, log = [], iter(loader), arguments.output / f"{name}.jsonl"
    if booster.is_main_process:
        log.unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=log):
        for step in range(steps):
            if step % len(loader) == 0:
                batches = iter(loader)
            result = booster.execute_pipeline(batches, model, lambda outputs, batch: outputs.loss, optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(booster.gather_for_metrics(result["loss"]).mean()))
    return losses


def pretrain(arguments: argparse.Namespace) -> None:
    """Writes the base, a folder for `from_pretrained`; a downloaded model would do as well."""
    booster = Booster(plugin=TorchDDPPlugin())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=arguments.width, intermediate_size=3 * arguments.width, num_attention_heads=4,
        num_hidden_layers=arguments.layers, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    train(booster, model, optimizer, "base", arguments.pretrain_steps, arguments)
    booster.save_model(model, arguments.output / "base", shard=True)


def finetune(booster: Booster, arguments: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)  # equal adapters under all plugins
    with LazyInitContext():  # no rank ever holds the whole base, where the plugin shards it
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(arguments.output / "base"))
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = booster.enable_lora(model, lora_config=lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained, lr=5e-3))
    booster.load_model(model, arguments.output / "base")
    losses = train(booster, model, optimizer, arguments.plugin, arguments.steps, arguments)
    booster.save_lora_as_pretrained(model, arguments.output / arguments.plugin)
    return losses


def sample(model: LlamaForCausalLM) -> str:
    torch.manual_seed(0)
    prompt = torch.tensor([list(b"# This function ")])
    tokens = model.generate(prompt, max_length=LENGTH, do_sample=True, temperature=0.7, pad_token_id=0)
    return bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    given = parse_arguments()
    launch_from_torch(seed=42)
    made = Booster(plugin=PLUGINS[given.plugin]())
    if not (given.output / "base").exists():
        pretrain(given)
    made.print(f"{given.plugin}: loss {finetune(made, given)[-1]:.3f}")
    if made.is_main_process:
        whole = LlamaForCausalLM.from_pretrained(given.output / "base")
        print("the base:", sample(whole), sep="\n")
        merged = PeftModel.from_pretrained(whole, given.output / given.plugin).merge_and_unload()
        print("with the adapter:", sample(merged), sep="\n")
