"""Planned activation checkpointing: its estimate against what is allocated, and the forwards that it repeats."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from allocations import Allocations
from decoder_cases import LENGTH, Decoder, compute_loss
from decoder_cases import VOCABULARY as VOCABULARY_OF_DECODER
from harness import distributed, run_ranks
from memory_cases import PLAN, TOKENS, Block, LanguageModel, check, measured, next_token_loss
from torch import nn

from booster import Booster, ConfigError, checkpoint_activations
from booster.core.activation_policy import policy_of
from booster.estimate import TrainingRecipe, plan_activations
from booster.estimate.estimate import Simulator
from booster.estimate.model_sources import load_model
from booster.registry import plugin_class

BATCH, NUM_LAYERS = 12, 8
DEPTH = 12
HYBRID = {"precision": "fp32"}


class DeepModel(LanguageModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))


def recipe_of(batch=BATCH):
    with torch.device("meta"):
        return TrainingRecipe(
            model=DeepModel(), batch=torch.empty(batch, TOKENS, dtype=torch.int64), criterion=next_token_loss
        )


def run_planned(name, settings, schedule, has_stages):
    """Train under a plan; return the memory and the number of forwards of layers in a step."""
    num_forwards = 0

    def count(module, args):
        nonlocal num_forwards
        num_forwards += 1

    def make_model():
        model = DeepModel()
        for layer in model.layers:
            layer.up.register_forward_pre_hook(count)  # not a hook of the layer, which a recomputation does not call
        return checkpoint_activations(model, "schedule", schedule=schedule)

    memory = measured(partial(plugin_class(name), **settings), make_model=make_model, batch=BATCH, stages=has_stages)
    return memory, num_forwards / 3


CASES = {
    "ddp": ("torch_ddp", {}),
    "zero 2": ("low_level_zero", {"stage": 2, "precision": "fp32"}),
    "gemini": ("gemini", {"precision": "fp32"}),
    "fsdp": ("torch_fsdp", {}),
    "tp": ("hybrid_parallel", {"tp_size": 2, "plan": PLAN, **HYBRID}),
    "pp": ("hybrid_parallel", {"pp_size": 2, "num_microbatches": 4, **HYBRID}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "share"),
    [(layout, share) for layout in CASES for share in (0.5, 0.15)],
)
def test_the_plan_fits_and_recomputes_little(layout, share):
    name, settings = CASES[layout]
    recipe = recipe_of()
    arguments = {"num_ranks": 2, "settings": settings}
    kept = Simulator.of(recipe, name, **arguments).estimate().total
    with torch.device("meta"):
        layerwise = TrainingRecipe(
            model=checkpoint_activations(DeepModel()), batch=recipe.batch, criterion=recipe.criterion
        )
    least = Simulator.of(layerwise, name, **arguments).estimate().total
    assert least < 0.8 * kept
    device_memory = round(least + share * (kept - least))
    schedule, estimate = plan_activations(recipe, name, device_memory=device_memory, **arguments)
    print(schedule, estimate.total / device_memory)
    assert estimate.fits
    assert 0 < len(schedule.recomputed) <= (1.25 - share) * NUM_LAYERS
    assert schedule.num_recomputations < NUM_LAYERS  # of layer-wise checkpointing
    ranks = run_ranks(run_planned, 2, name, settings, schedule.to_json(), layout == "pp", device="cpu")
    memory, _ = max(ranks, key=lambda one: max(one[0]["backward"], one[0]["step"]))
    check(estimate, memory | {"sent": max(one["sent"] for one, _ in ranks)})
    assert max(memory["backward"], memory["step"]) <= 1.02 * device_memory
    if layout == "pp":  # two stages, four microbatches
        assert sum(count for _, count in ranks) == 4 * (NUM_LAYERS + schedule.num_recomputations)
    elif layout != "tp":  # whose plan is verified with further forwards
        assert ranks[0][1] == NUM_LAYERS + schedule.num_recomputations


@pytest.mark.slow
def test_nothing_is_recomputed_if_all_fits_and_the_least_is_returned_if_nothing_does():
    recipe = recipe_of(batch=2)
    schedule, estimate = plan_activations(recipe, None, num_ranks=1, device_memory=2**40)
    assert schedule is None
    assert estimate.fits
    schedule, estimate = plan_activations(recipe, None, num_ranks=1, device_memory=2**20)
    assert schedule.recomputed
    assert not estimate.fits


def test_layers_that_are_checkpointed_already():
    recipe = recipe_of(batch=2)
    checkpoint_activations(recipe.model)
    with pytest.raises(ConfigError, match="is checkpointed already"):
        plan_activations(recipe, None, num_ranks=1, device_memory=2**20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "settings", "share"),
    [
        ("low_level_zero", {"stage": 1, "precision": "bf16"}, 0.4),
        ("torch_fsdp", {}, 0.6),
        ("hybrid_parallel", {"tp_size": 2, "zero_stage": 1, "precision": "bf16"}, 0.4),
    ],
)
def test_equal_layers_are_extrapolated(plugin, settings, share):
    source = load_model("llama-7b", batch=2, sequence=1024, dtype=torch.float32)
    recipe = TrainingRecipe(model=source.model, batch=source.batch, criterion=source.criterion)
    arguments = {"num_ranks": 4, "settings": settings}
    kept = Simulator.of(recipe, plugin, **arguments).estimate()
    device_memory = round(kept.memory.backward.total - share * kept.memory.backward.activations)
    assert kept.memory.step.total < device_memory < kept.total
    schedule, estimate = plan_activations(recipe, plugin, device_memory=device_memory, **arguments)
    assert estimate.fits
    assert 0 < len(schedule.recomputed) < 32
    with torch.device("meta"):
        source = load_model("llama-7b", batch=2, sequence=1024, dtype=torch.float32)
    checkpoint_activations(source.model, "schedule", schedule=schedule)
    recipe = TrainingRecipe(model=source.model, batch=source.batch, criterion=source.criterion)
    full = Simulator.of(recipe, plugin, **arguments).estimate()
    assert estimate.total == pytest.approx(full.total, rel=0.03)
    assert estimate.sent == pytest.approx(full.sent, rel=0.05)


def peak_of(settings):
    """Train a deep and narrow model; return the peak above what is kept between steps, and its policy."""
    model = Decoder(DEPTH)
    checkpoint_activations(model, **settings)
    policy = policy_of(model.blocks[0])
    ids = torch.randint(0, VOCABULARY_OF_DECODER, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    with Allocations() as allocations:
        booster = Booster(device="cpu")
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            allocations.mark(f"start {step}")
            booster.backward(compute_loss(model, ids), optimizer)
            allocations.mark(f"backward {step}")
            optimizer.step()
            optimizer.zero_grad()
    return allocations.peak("start 2", "backward 2") - allocations.at("start 2"), policy


@pytest.mark.slow
@distributed(world_size=1)
def test_a_budget_below_the_inputs_of_all_layers():
    kept_peak, policy = peak_of({"policy": "budget", "budget_bytes": 2**40})
    cost = policy.costs["blocks.1"]
    rest = kept_peak - DEPTH * (cost.input_bytes + cost.kept_bytes)  # gradients, temporaries, logits
    assert 0 < rest < cost.kept_bytes
    layerwise = DEPTH * cost.input_bytes + cost.kept_bytes
    layerwise_peak, _ = peak_of({})
    assert layerwise <= layerwise_peak <= layerwise + 1.1 * rest
    budget = cost.kept_bytes + DEPTH // 3 * cost.input_bytes
    peak, policy = peak_of({"policy": "budget", "budget_bytes": budget})
    assert policy.schedule.has_segments
    assert peak <= budget + 1.1 * rest
    assert peak < layerwise_peak
