"""Plans beside what runs: `booster run --nproc-per-node 2 benchmarks/auto_parallel/run.py [--models A,B] [--save]`.

Of each model every candidate of `AutoPlugin` trains for real, in turns, so that all see the same load of the machine,
which is measured in every round. A row has the time per batch, predicted and real, and the peak of memory; below each
table stands how much slower the chosen plan is than the fastest candidate. Medians decide; the fastest step is the one
that other programs disturbed least.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from booster import Booster, launch_from_torch
from booster.comm import barrier, group_rank, group_size, max_of_numbers
from booster.estimate.candidates import Candidate, find_candidates
from booster.estimate.estimate import MemoryEstimate, Simulator, TrainingRecipe, default_criterion
from booster.estimate.machine_profile import MachineProfile
from booster.estimate.machine_speed import measure_machine
from booster.launch.launch import destroy_world
from booster.registry import plugin_with_precision

ROUNDS = 4
STEPS = 3  # timed in a round, after one that is not
TOKENS, VOCABULARY, BATCH = 64, 2048, 8
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Model:
    """A model, the batch of a data-parallel rank, and the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    criterion: Callable[[Any, Any], torch.Tensor] = default_criterion


@dataclass
class Case:
    """A candidate, and what it takes: seconds per batch and bytes."""

    candidate: Candidate
    step: Callable[[], None]
    booster: Booster
    measured: list[float] = field(default_factory=list)
    memory: int = 0


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=688, vocab_size=VOCABULARY, use_cache=False))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=TOKENS))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=16))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts, vocab_size=VOCABULARY, use_cache=False))


def _mlp() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(1024, 16))


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


def _images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(BATCH, 3, 64, 64), "labels": torch.randint(16, (BATCH,))}


def _square(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.square().mean()


MODELS = {
    "Llama": Model(_llama, _tokens),
    "GPT-2": Model(_gpt2, _tokens),
    "BERT": Model(_bert, _tokens),
    "ViT": Model(_vit, _images),
    "Mixtral": Model(_mixtral, _tokens),
    "MLP": Model(_mlp, lambda: torch.rand(512, 1024), _square),
}


def _case_of(model: Model, candidate: Candidate) -> Case:
    torch.manual_seed(0)
    plugin = plugin_with_precision(candidate.plugin, candidate.mixed_precision, **candidate.settings)
    booster = Booster(plugin=plugin, mixed_precision=candidate.mixed_precision)
    batch = model.batch()
    case = Case(candidate, lambda: None, booster)
    gc.collect()  # what is freed while allocations are recorded would count against them
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        network = model.build()
        boosted, optimizer, *_ = booster.boost(network, torch.optim.AdamW(network.parameters()))

        def step() -> None:
            booster.execute_pipeline(iter([batch]), boosted, model.criterion, optimizer, return_loss=False)
            optimizer.step()
            optimizer.zero_grad()

        del network
        step()
        gc.collect()
        begin = time.time_ns()
        step()
    case.step = step
    case.memory = max_of_numbers([_peak(recorded, begin)])[0]
    return case


def _peak(recorded: profile, begin: int) -> int:
    """Return the most bytes that tensors took after a moment."""
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    total = most = 0
    for when, num_bytes in sorted((one.start_ns(), one.nbytes()) for one in events):
        total += num_bytes
        most = max(most, total) if when >= begin else most
    return most


def _seconds_of(case: Case) -> list[float]:
    """Return the times of steps per batch, of the slowest rank."""
    case.step()
    times = []
    for _ in range(STEPS):
        barrier()
        start = time.perf_counter()
        case.step()
        times.append(time.perf_counter() - start)
    return [1e-9 * one / case.booster.plugin.dp_size for one in max_of_numbers([round(1e9 * one) for one in times])]


def _measure(model: Model, candidates: list[Candidate], num_rounds: int) -> tuple[list[Case], list[MachineProfile]]:
    cases = [_case_of(model, one) for one in candidates]
    profiles = []
    gc.disable()
    for number in range(num_rounds):
        profiles.append(measure_machine())
        for case in cases if number % 2 else reversed(cases):
            case.measured += _seconds_of(case)
        gc.collect()
    gc.enable()
    for case in cases:
        case.step = lambda: None
        case.booster.close()
    return cases, profiles


def _predict(model: Model, case: Case, profiles: list[MachineProfile], dp_size: int) -> dict[str, Any]:
    recipe = TrainingRecipe(model=model.build(), batch=model.batch(), criterion=model.criterion)
    candidate, size = case.candidate, profiles[0].num_ranks
    estimates: list[MemoryEstimate] = [
        Simulator.of(
            recipe,
            candidate.plugin,
            num_ranks=size,
            settings=candidate.settings,
            mixed_precision=candidate.mixed_precision,
            profile=one,
        ).estimate()
        for one in profiles
    ]
    predicted = [one.step_time.total / dp_size for one in estimates if one.step_time is not None]
    return {
        "candidate": candidate.name,
        "measured": case.measured,
        "predicted": predicted,
        "time_ratio": statistics.median(predicted) / statistics.median(case.measured),
        "time_ratio_to_fastest": statistics.median(predicted) / min(case.measured),
        "memory": case.memory,
        "predicted_memory": estimates[0].total,
        "memory_ratio": estimates[0].total / case.memory,
    }


def _table(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the rows of a model as a table, with what the choice costs."""
    rows.sort(key=lambda row: statistics.median(row["predicted"]))
    fastest = min(rows, key=lambda row: statistics.median(row["measured"]))
    least = min(rows, key=lambda row: min(row["measured"]))
    lines = [
        f"**{name}**",
        "",
        "| candidate, best predicted first | ms per batch | predicted | ratio | MiB | predicted | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        memory = f"{row['memory'] / 2**20:.1f} | {row['predicted_memory'] / 2**20:.1f} | {row['memory_ratio']:.2f}"
        lines.append(
            f"| {row['candidate']} | {_spread(row['measured'])} | {_spread(row['predicted'])} |"
            f" {row['time_ratio']:.2f} | {memory} |"
        )
    loss = statistics.median(rows[0]["measured"]) / statistics.median(fastest["measured"])
    least_loss = min(rows[0]["measured"]) / min(least["measured"])
    lines += [
        "",
        f"chosen: {rows[0]['candidate']}; fastest: {fastest['candidate']}: the choice takes {loss:.2f} of its median"
        f" step, {least_loss:.2f} by fastest steps",
    ]
    return "\n".join(lines)


def _summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for key in ("time_ratio", "time_ratio_to_fastest", "memory_ratio"):
        errors = sorted(abs(row[key] - 1) for row in rows)
        lines.append(f"{key}: median error {100 * statistics.median(errors):.0f} %, largest {100 * errors[-1]:.0f} %")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    low, middle, high = (1e3 * one for one in (min(values), statistics.median(values), max(values)))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    """Measure, predict, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", action="store_true", help="write a JSON file into results/")
    arguments = parser.parse_args()
    launch_from_torch(verbose=False)
    torch.manual_seed(0)
    rank, size = group_rank(), group_size()
    candidates = find_candidates("all", size, mixed_precision="fp32")
    found: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.models.split(","):
        cases, profiles = _measure(MODELS[name], candidates, arguments.rounds)
        if rank == 0:
            sizes = [case.booster.plugin.dp_size for case in cases]
            found[name] = [
                _predict(MODELS[name], case, profiles, dp_size) for case, dp_size in zip(cases, sizes, strict=True)
            ]
            print(_table(name, found[name]), end="\n\n", flush=True)
        barrier()
    destroy_world()
    if rank:
        return
    print(_summary([row for rows in found.values() for row in rows]))
    if arguments.save:
        path = RESULTS / f"auto_parallel-{size}-{datetime.now():%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps({"machine": profiles[0].machine, "ranks": size, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
