"""Predicted against measured step times: `booster run --nproc-per-node 2 benchmarks/step_time/run.py [OUTPUT.json]`.

Each round measures the machine and then trains every model under every plugin for a few steps, in turns, so that all of
it sees the same load of the machine. A row has medians with the smallest and largest; the fastest step is the one that
other programs disturbed least.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster import Booster, launch_from_torch
from booster.comm import barrier, group_rank, group_size, max_of_numbers
from booster.estimate.estimate import TrainingRecipe, default_criterion, estimate_recipe
from booster.estimate.machine_speed import measure_machine
from booster.launch.launch import destroy_world
from booster.registry import plugin_from_name

ROUNDS = 3
STEPS = 4  # timed in a round, after one that is not
TOKENS, VOCABULARY, BATCH = 128, 2048, 4


@dataclass(frozen=True)
class Model:
    """A model, the batch of a rank, and the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    criterion: Callable[[Any, Any], torch.Tensor] = default_criterion


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, intermediate_size=688, vocab_size=VOCABULARY, use_cache=False, bos_token_id=0)
    )


def _mlp() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(1024, 16))


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


MODELS = {
    "GPT-2": Model(_gpt2, _tokens),
    "Llama": Model(_llama, _tokens),
    "MLP": Model(_mlp, lambda: torch.rand(256, 1024), lambda outputs, batch: outputs.square().mean()),
}
PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("torch_ddp", {}),
    "ZeRO 1": ("low_level_zero", {"stage": 1, "precision": "fp32"}),
    "Gemini": ("gemini", {"precision": "fp32"}),
    "FSDP": ("torch_fsdp", {}),
    "tp 2": ("hybrid_parallel", {"tp_size": 2, "precision": "fp32", "verbose": False}),
    "pp 2": ("hybrid_parallel", {"pp_size": 2, "num_microbatches": 4, "precision": "fp32", "verbose": False}),
}


def _step_of(model: Model, plugin: str, settings: dict[str, Any]) -> Callable[[], None]:
    torch.manual_seed(0)
    booster = Booster(plugin=plugin_from_name(plugin, **settings))
    network = model.build()
    boosted, optimizer, *_ = booster.boost(network, torch.optim.AdamW(network.parameters()))
    batch = model.batch()

    def step() -> None:
        booster.execute_pipeline(iter([batch]), boosted, model.criterion, optimizer, return_loss=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds_of(step: Callable[[], None]) -> list[float]:
    """Return the times of steps, of the slowest rank."""
    step()
    times = []
    for _ in range(STEPS):
        barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return [1e-9 * one for one in max_of_numbers([round(1e9 * one) for one in times])]


def main(output: str | None = None) -> None:
    """Measure, predict, and print the table."""
    launch_from_torch(verbose=False)
    torch.manual_seed(0)
    cases = {(model, plugin): (MODELS[model], *PLUGINS[plugin]) for model in MODELS for plugin in PLUGINS}
    steps = {name: _step_of(*case) for name, case in cases.items()}
    profiles, measured = [], {name: list[float]() for name in cases}
    for _ in range(ROUNDS):
        profiles.append(measure_machine(group_size()))
        for name, step in steps.items():
            measured[name] += _seconds_of(step)
    rank, size = group_rank(), group_size()
    del steps
    destroy_world()
    if rank:
        return
    rows = []
    for (name, plugin), (model, plugin_name, settings) in cases.items():
        recipe = TrainingRecipe(model=model.build(), batch=model.batch(), criterion=model.criterion)
        predicted = []
        for profile in profiles:
            estimate = estimate_recipe(recipe, plugin_name, num_ranks=size, settings=settings, profile=profile)
            assert estimate.step_time is not None
            predicted.append(estimate.step_time.total)
        rows.append({"model": name, "plugin": plugin, "measured": measured[name, plugin], "predicted": predicted})
    for row in rows:
        predicted_seconds = statistics.median(row["predicted"])
        row["ratio"] = predicted_seconds / statistics.median(row["measured"])
        row["ratio_to_fastest"] = predicted_seconds / min(row["measured"])
    if output is not None:
        Path(output).write_text(json.dumps({"machine": profiles[0].machine, "rows": rows}, indent=1) + "\n")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table for a README, with the spread of the rounds."""
    lines = [
        "| model | plugin | measured (ms) | predicted (ms) | ratio | ratio to the fastest step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [_spread(row["measured"], 1e3, 1), _spread(row["predicted"], 1e3, 1), f"{row['ratio']:.2f}"]
        lines.append(f"| {row['model']} | {row['plugin']} | {' | '.join(cells)} | {row['ratio_to_fastest']:.2f} |")
    for name in ("ratio", "ratio_to_fastest"):
        errors = sorted(abs(row[name] - 1) for row in rows)
        lines += ["", f"{name}: median error {100 * statistics.median(errors):.0f} %, largest {100 * errors[-1]:.0f} %"]
    return "\n".join(lines)


def _spread(values: list[float], factor: float, digits: int) -> str:
    low, middle, high = (factor * one for one in (min(values), statistics.median(values), max(values)))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main(*sys.argv[1:])
