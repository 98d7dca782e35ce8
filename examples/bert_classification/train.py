"""Fine-tunes BERT on text: which package of Python's standard library 128 bytes of source come from.

Run: booster run --nproc-per-node 2 examples/bert_classification/train.py --plugin low_level_zero --stop_after 60
     booster run --nproc-per-node 3 examples/bert_classification/train.py --plugin low_level_zero --resume
"""

from __future__ import annotations

import argparse
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from booster import Booster, LazyInitContext, Monitor, launch_from_torch
from booster.lr_scheduler import LinearWarmupLR
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PACKAGES = ("asyncio", "email", "http", "unittest")
LENGTH, FIRST_BYTE = 128, 2  # tokens 0 and 1 are padding and [CLS]
PLUGINS = {
    "none": lambda: None,
    "torch_ddp": TorchDDPPlugin,
    "low_level_zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=0.2, search_range_m=0.5),
    "torch_fsdp": TorchFSDPPlugin,
    "hybrid_parallel": lambda: HybridParallelPlugin(tp_size=2, precision="fp32"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", choices=list(PLUGINS), default="torch_ddp")
    parser.add_argument("--pretrained", type=Path, default=None, help="folder of save_pretrained or save_model")
    parser.add_argument("--use_lazy_init", action="store_true", help="build the model without memory")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--steps", type=int, default=120, help="of all runs together")
    parser.add_argument("--stop_after", type=int, default=None, help="save a checkpoint after this step and end")
    parser.add_argument("--batch_size", type=int, default=48, help="of all data-parallel ranks together")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bert_classification"))
    return parser.parse_args(arguments)


def read_texts(is_test: bool) -> list[dict[str, torch.Tensor]]:
    """Returns tokens and labels; every tenth window of bytes is for the test."""
    samples = []
    for label, package in enumerate(PACKAGES):
        files = sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        for index, window in enumerate(text[:80_000].split(LENGTH - 1)[:-1]):
            if (index % 10 == 0) == is_test:
                tokens = torch.cat([torch.tensor([1]), window.long() + FIRST_BYTE])
                samples.append({"input_ids": tokens, "labels": torch.tensor(label)})
    return samples


def build_model(arguments: argparse.Namespace) -> BertForSequenceClassification:
    torch.manual_seed(0)  # equal weights on all ranks
    config = BertConfig(
        vocab_size=256 + FIRST_BYTE, hidden_size=96, intermediate_size=192, num_hidden_layers=arguments.layers,
        num_attention_heads=4, max_position_embeddings=LENGTH, num_labels=len(PACKAGES),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with LazyInitContext() if arguments.use_lazy_init else nullcontext():
        return BertForSequenceClassification(config)


@torch.no_grad()
def evaluate(booster: Booster, model: torch.nn.Module, loader) -> tuple[float, int]:
    """Returns the accuracy and the number of samples: each counts once, on any number of ranks."""
    model.eval()
    right = []
    for batch in ({name: one.to(booster.device) for name, one in batch.items()} for batch in loader):
        right.append(booster.gather_for_metrics(model(**batch).logits.argmax(-1) == batch["labels"]))
    model.train()
    return float(torch.cat(right).float().mean()), len(torch.cat(right))


def train(booster: Booster, arguments: argparse.Namespace) -> tuple[list[float], float, int]:
    """Returns the losses of this run's steps, over all ranks, and what `evaluate` returns."""
    batch_size = arguments.batch_size // booster.plugin.dp_size
    loader = booster.prepare_dataloader(read_texts(is_test=False), batch_size, shuffle=True, drop_last=True)
    test_loader = booster.prepare_dataloader(read_texts(is_test=True), batch_size)
    model = build_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LinearWarmupLR(optimizer, total_steps=arguments.steps, warmup_steps=arguments.steps // 10)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    if arguments.pretrained is not None:
        booster.load_model(model, arguments.pretrained, strict=False)  # the head is new
    checkpoint, last, losses = arguments.output / "checkpoint", arguments.stop_after or arguments.steps, []
    step = booster.load(checkpoint, model, optimizer, scheduler, loader)["step"] if arguments.resume else 0
    if booster.is_main_process and not arguments.resume:
        (arguments.output / "log.jsonl").unlink(missing_ok=True)  # of an earlier run
    with Monitor(model, optimizer, log=arguments.output / "log.jsonl", first_step=step + 1):
        while step < last:
            for batch in loader:
                loss = model(**{name: one.to(booster.device) for name, one in batch.items()}).loss
                booster.backward(loss, optimizer)
                booster.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                losses.append(float(booster.gather_for_metrics(loss.detach()).mean()))
                step += 1
                if step == last:
                    break
    booster.save(checkpoint, model, optimizer, scheduler, loader, extra={"step": step})
    return losses, *evaluate(booster, model, test_loader)


if __name__ == "__main__":
    given = parse_arguments()
    launch_from_torch(seed=42)
    made = Booster(plugin=PLUGINS[given.plugin]())
    found, accuracy, count = train(made, given)
    made.print(f"{given.plugin}: loss {found[-1] if found else 0:.3f}, accuracy {accuracy:.1%} of {count} test samples")
