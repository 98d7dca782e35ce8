"""Time against memory of the activation policies: a step of one Llama in one process, with each policy.

    python benchmarks/finetune/activations.py [--sequence 512] [--memory] [--save] [--draw FILE]

The baseline keeps all activations; the peer is transformers' `gradient_checkpointing_enable()`. Budgets are parts of
what all layers keep: they make a curve with the baseline. Each other policy is a point.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ != "__mp_main__":  # a rank's sys.path comes from here anyway
    sys.path[:1] = map(str, Path(__file__).resolve().parents[1:3])  # benchmarks/, and booster from the checkout

import torch
from _harness.llama import LLAMA_SIZES
from _harness.pair import Comparison, Engine, RankError, Schedule, Step, World, compare, save
from finetune.engines import base_model
from torch import nn

ALL_KEPT, PEER = "all kept", "transformers' checkpointing"
PARTS = (0.25, 0.5, 0.75)
_SIZE, _SAMPLES = LLAMA_SIZES["10m"], 4
_WARMUP = 4  # of which a budget measures two
_MEMORY_STEPS = 5
_TIMEOUT_SECONDS = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 if an engine could not be built."""
    options = _parser().parse_args(arguments)
    try:
        comparison = compare(
            f"activations of a 10m Llama, {_SAMPLES} x {options.sequence} tokens",
            engines_of(options.sequence),
            Schedule(steps=options.steps, warmup=_WARMUP),
            World(size=1, timeout_seconds=_TIMEOUT_SECONDS),
            memory_steps=_MEMORY_STEPS if options.memory or options.draw else 0,
            step_tokens=_SAMPLES * options.sequence,
        )
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print(comparison.table(), end="\n\n", flush=True)
    if options.save:
        print("saved", save("activations", [comparison], vars(options)))
    if options.draw:
        draw(points_of(comparison), options.draw)
        print("drawn", options.draw)
    return int(comparison.has_failed)


def engines_of(sequence: int) -> list[Engine]:
    """Returns the baseline, the peer, and a policy each."""
    needed = kept_bytes(sequence)
    settings: dict[str, dict[str, Any] | None] = {
        "layers": {"policy": "layers"},
        "selective": {"policy": "selective"},
        **{f"budget {part:.0%}": {"policy": "budget", "budget_bytes": round(part * needed)} for part in PARTS},
    }
    return [
        Engine(name=ALL_KEPT, build=partial(_build, sequence, None), requires=("booster",)),
        Engine(name=PEER, build=partial(_build, sequence, {}), requires=("booster",)),
        *(
            Engine(name=name, build=partial(_build, sequence, one), requires=("booster",))
            for name, one in settings.items()
        ),
    ]


def kept_bytes(sequence: int) -> int:
    """Returns the bytes that all layers keep for backward, as a budget measures them."""
    from booster.core.activation_budget import ActivationBudget
    from booster.core.activation_policy import policy_of

    model = base_model(_SIZE, sequence)
    step = _step(model, {"policy": "budget", "budget_bytes": 2**60}, sequence)
    for index in range(2):
        step(index)
    budget = policy_of(model.model.layers[0])
    assert isinstance(budget, ActivationBudget)
    return sum(cost.input_bytes + cost.kept_bytes for cost in budget.costs.values())


def points_of(comparison: Comparison) -> dict[str, tuple[float, float]]:
    """Returns the peak memory in MiB, and the time over that of the baseline, of each engine that was measured."""
    points = {}
    for engine in comparison.engines:
        ratio = comparison.ratio(engine.name, ALL_KEPT)
        if engine.memory is not None and engine.memory.step_peak is not None:
            points[engine.name] = (engine.memory.step_peak / 2**20, 1.0 if ratio is None else ratio.median)
    return points


def draw(points: dict[str, tuple[float, float]], path: Path) -> None:
    """Draw time over memory: one curve of the budgets and a point for each other policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    curve = sorted(points[name] for name in points if name.startswith("budget") or name == ALL_KEPT)
    axes.plot(*zip(*curve, strict=True), marker="o", label="budget of 25, 50, 75 %, all kept")
    for name in ("layers", "selective", PEER):
        if name in points:
            axes.plot(*points[name], marker="s", linestyle="", label=name)
    axes.set(xlabel="peak memory of a step, MiB", ylabel="time of a step over that with all kept")
    axes.legend()
    figure.savefig(path, dpi=110)


def _build(sequence: int, settings: dict[str, Any] | None) -> Step:
    return _step(base_model(_SIZE, sequence), settings, sequence)


def _step(model: nn.Module, settings: dict[str, Any] | None, sequence: int) -> Step:
    from booster import Booster, checkpoint_activations

    if settings:
        checkpoint_activations(model, **settings)
    elif settings is not None:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    booster = Booster(device="cpu")
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = torch.randint(_SIZE.vocabulary, (_SAMPLES, sequence), generator=torch.Generator().manual_seed(1))

    def step(index: int) -> torch.Tensor:
        loss = boosted(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=12, help="timed ones")
    parser.add_argument("--memory", action="store_true", help="also measure resident memory, in further processes")
    parser.add_argument("--save", action="store_true", help="write a JSON file under benchmarks/results/")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw time against memory, implies --memory")
    return parser


if __name__ == "__main__":
    sys.exit(main())
