"""Trains a small Mixtral whose experts are shared by the data-parallel ranks, or replicated on each.

Run: booster run --nproc-per-node 2 examples/moe/train.py --ep 1
     booster run --nproc-per-node 2 examples/moe/train.py --ep 2
The second draws both runs: the losses lie on one line, and the routers use all experts.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from booster import Booster, Monitor, launch_from_torch
from booster.moe import global_load_balancing
from booster.plugins import HybridParallelPlugin

LENGTH, MAX_BYTES = 64, 500_000


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ep", type=int, default=2, help="data-parallel ranks that share the experts")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--zero", type=int, choices=[0, 1, 2], default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("runs/moe"))
    return parser.parse_args(arguments)


def make_booster(arguments: argparse.Namespace) -> Booster:
    return Booster(plugin=HybridParallelPlugin(ep_size=arguments.ep, zero_stage=arguments.zero, precision="fp32"))


def make_model(arguments: argparse.Namespace) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=2 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=arguments.experts,
        max_position_embeddings=LENGTH,
        output_router_logits=True,  # adds the auxiliary loss
        router_aux_loss_coef=0.05,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def read_windows() -> list[torch.Tensor]:
    """Returns windows of the standard library's bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:MAX_BYTES]
    return list(torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1])


def train(booster: Booster, arguments: argparse.Namespace) -> float:
    """Returns the mean loss of the last step."""
    loader = booster.prepare_dataloader(
        read_windows(), arguments.batch_size // booster.plugin.dp_size, shuffle=True, drop_last=True
    )
    torch.manual_seed(0)
    model = make_model(arguments)
    booster.print(booster.plugin.explain(model))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    global_load_balancing(model, booster.plugin.data_group)  # with --ep 2 it is so by default
    output = arguments.output / f"ep{arguments.ep}"
    if booster.is_main_process:
        (output / "log.jsonl").unlink(missing_ok=True)  # of an earlier run
    batches, loss = iter(loader), torch.zeros(())
    with Monitor(model, optimizer, log=output / "log.jsonl"):
        for step in range(arguments.steps):
            if step and step % len(loader) == 0:
                batches = iter(loader)
            tokens = next(batches).to(booster.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            booster.backward(loss, optimizer)
            booster.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    booster.save_model(model, output / "model", shard=True)  # a folder for from_pretrained, whatever --ep is
    if booster.is_main_process:
        draw(arguments.output)
    return float(booster.gather_for_metrics(loss.detach()).mean())


def draw(directory: Path) -> None:
    """Draws the losses of all runs in the directory, and the tokens of each expert in the last step of the last one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, bars = figure.subplots(1, 2)
    for log, style in zip(sorted(directory.glob("ep*/log.jsonl")), ("-", "--", ":"), strict=False):
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses.plot([record["loss"] for record in records], style, label=log.parent.name)
    loads = records[-1]["experts"]
    for number, (name, load) in enumerate(loads.items()):
        places = [expert + number / (len(loads) + 1) for expert in range(len(load["tokens"]))]
        bars.bar(places, load["tokens"], 1 / (len(loads) + 1), label=name)
    for axes, x, y in ((losses, "step", "loss"), (bars, "expert", "tokens in the last step")):
        axes.set(xlabel=x, ylabel=y)
        axes.legend()
    figure.savefig(directory / "curves.png")


if __name__ == "__main__":
    given = parse_arguments()
    launch_from_torch(seed=42)
    made = make_booster(given)
    made.print(f"loss {train(made, given):.3f}")
