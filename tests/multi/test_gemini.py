"""Training under GeminiPlugin equals training in one process."""

from __future__ import annotations

import itertools

import pytest
from harness import preload
from parity import assert_parallel_equals_serial
from zoo import TRANSFORMERS_MODULES, model_names

preload(*TRANSFORMERS_MODULES)

WORLDS = (1, 2, 3, 4)
# Tied, frozen, unused and conditional parameters, several groups, odd sizes, buffers, weights read past their module.
MODELS = ("mlp_odd", "tied_lm", "frozen_unused_conditional", "multi_output_groups", "convnet_batchnorm")
POLICIES = {
    "static": {},
    "prefetch": {"max_prefetch": 2},
    "kept": {"shard_param_frac": 0.0},
    "half kept": {"shard_param_frac": 0.5},
    "strict": {"strict_ddp_mode": True},
    "cuda": {"placement_policy": "cuda"},
    "cpu": {"placement_policy": "cpu"},
    "auto": {"placement_policy": "auto"},
    "auto, little": {"placement_policy": "auto", "device_memory_budget": 2**18},
    "const": {"placement_policy": "const", "device_memory_budget": 2**16},
    "states offloaded": {"offload_optim_frac": 1.0},
    "half of the states offloaded": {"offload_optim_frac": 0.5},
    "half offloaded": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    "weights offloaded": {"offload_param_frac": 1.0},
    "synchronous": {"enable_async_reduce": False},
}


FRACTIONS = (0.0, 0.5, 1.0)


def grid(fast, everything):
    """Every combination once; those that `fast` does not say yes to are slow."""
    return [case if fast(*case) else pytest.param(*case, marks=pytest.mark.slow) for case in everything]


ALL_POLICIES = grid(
    # The policies in turn: one model over three ranks, another over two.
    lambda policy, model, world_size: (
        (model, world_size) == [("tied_lm", 3), ("frozen_unused_conditional", 2)][list(POLICIES).index(policy) % 2]
    ),
    itertools.product(POLICIES, model_names(), WORLDS),
)
ALL_PRECISIONS = grid(
    lambda policy, precision, model, world_size: (
        world_size == 2 and model in MODELS and (policy, precision) in (("static", "bf16"), ("cpu", "fp16"))
    ),
    itertools.product(["static", "prefetch", "cpu", "half kept", "auto"], ["bf16", "fp16"], model_names(), (1, 2, 3)),
)
ALL_ACCUMULATIONS = grid(
    lambda policy, synchronize, model, world_size: (
        (policy, world_size) == ("static", 2) and (model == "tied_lm" or (synchronize == "no_sync" and model in MODELS))
    ),
    itertools.product(["static", "prefetch", "cpu"], ["always", "no_sync", "accumulate"], model_names(), (2, 3)),
)
ALL_REPLICAS = grid(
    lambda policy, model: policy == "static" and model in MODELS,
    itertools.product(["static", "cpu", "kept", "prefetch"], model_names()),
)
ALL_FRACTIONS = grid(
    lambda kept, states, weights, model: model == "tied_lm" and 0.5 in (kept, states, weights),
    [
        (kept, states, weights, model)
        for kept, states, weights, model in itertools.product(FRACTIONS, FRACTIONS, FRACTIONS, MODELS)
        if weights <= kept  # what is kept whole is not offloaded
    ],
)


@pytest.mark.parametrize(
    ("model", "world_size"),
    grid(lambda model, world_size: world_size == 2, itertools.product(model_names(), WORLDS)),
)
def test_every_model_trains_as_in_one_process(model, world_size):
    assert_parallel_equals_serial("gemini", model, world_size=world_size)


@pytest.mark.parametrize(("policy", "model", "world_size"), ALL_POLICIES)
def test_every_policy_trains_as_in_one_process(policy, model, world_size):
    arguments = dict(POLICIES[policy])
    if "device_memory_budget" in arguments and model not in MODELS:
        arguments["device_memory_budget"] *= 8  # larger models and activations, most of which do not fit all the same
    assert_parallel_equals_serial("gemini", model, world_size=world_size, plugin_arguments=arguments)


@pytest.mark.parametrize(("kept", "states", "weights", "model"), ALL_FRACTIONS)
def test_every_fraction_trains_as_in_one_process(kept, states, weights, model):
    arguments = {"shard_param_frac": kept, "offload_optim_frac": states, "offload_param_frac": weights}
    assert_parallel_equals_serial("gemini", model, world_size=2, plugin_arguments=arguments)


@pytest.mark.parametrize(("policy", "precision", "model", "world_size"), ALL_PRECISIONS)
def test_low_precision_trains_as_in_one_process(policy, precision, model, world_size):
    assert_parallel_equals_serial(
        "gemini", model, world_size=world_size, precision=precision, plugin_arguments=POLICIES[policy]
    )


@pytest.mark.parametrize(("policy", "synchronize", "model", "world_size"), ALL_ACCUMULATIONS)
def test_accumulation_and_clipping(policy, synchronize, model, world_size):
    assert_parallel_equals_serial(
        "gemini",
        model,
        world_size=world_size,
        accumulation=3,
        synchronize=synchronize,
        max_norm=0.5,
        plugin_arguments=POLICIES[policy],
    )


@pytest.mark.parametrize(("policy", "model"), ALL_REPLICAS)
def test_replicated_shards(policy, model):
    arguments = POLICIES[policy] | {"extra_dp_size": 2}
    assert_parallel_equals_serial("gemini", model, world_size=4, plugin_arguments=arguments)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("policy", ["static", "cpu"])
def test_other_optimizers(policy, optimizer):
    assert_parallel_equals_serial(
        "gemini", "multi_output_groups", world_size=2, optimizer=optimizer, plugin_arguments=POLICIES[policy]
    )


@pytest.mark.parametrize("policy", ["static", "cpu"])
def test_messages_in_place_of_shared_memory(policy):
    assert_parallel_equals_serial(
        "gemini", "tied_lm", world_size=3, plugin_arguments=POLICIES[policy], uses_shared_memory=False
    )


FUSED = {"static": None, "cpu": "bf16", "half offloaded": "fp16", "kept": None}  # by default


@pytest.mark.parametrize(
    ("policy", "precision"),
    grid(
        lambda policy, precision: precision == FUSED[policy],
        itertools.product(FUSED, [None, "bf16", "fp16"]),
    ),
)
def test_the_fused_step(policy, precision):
    assert_parallel_equals_serial(
        "gemini",
        "tied_lm",
        world_size=2,
        precision=precision,
        optimizer="hybrid_adam",
        max_norm=0.5,
        plugin_arguments=POLICIES[policy],
    )
