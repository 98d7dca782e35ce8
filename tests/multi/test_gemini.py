"""Training under GeminiPlugin equals training in one process."""

from __future__ import annotations

import pytest
from parity import assert_parallel_equals_serial
from zoo import model_names

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


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_model_trains_as_in_one_process(model, world_size):
    assert_parallel_equals_serial("gemini", model, world_size=world_size)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_as_in_one_process(policy, model, world_size):
    assert_parallel_equals_serial("gemini", model, world_size=world_size, plugin_arguments=POLICIES[policy])


@pytest.mark.parametrize("policy", ["static", "prefetch", "cpu", "half kept"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_low_precision_trains_as_in_one_process(world_size, precision, model, policy):
    assert_parallel_equals_serial(
        "gemini", model, world_size=world_size, precision=precision, plugin_arguments=POLICIES[policy]
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize("policy", ["static", "prefetch", "cpu"])
def test_accumulation_and_clipping(policy, synchronize, model):
    assert_parallel_equals_serial(
        "gemini",
        model,
        world_size=2,
        accumulation=3,
        synchronize=synchronize,
        max_norm=0.5,
        plugin_arguments=POLICIES[policy],
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", ["static", "cpu", "kept"])
def test_replicated_shards(policy, model):
    arguments = POLICIES[policy] | {"extra_dp_size": 2}
    assert_parallel_equals_serial("gemini", model, world_size=4, plugin_arguments=arguments)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("policy", ["static", "cpu"])
def test_other_optimizers(policy, optimizer):
    assert_parallel_equals_serial(
        "gemini", "multi_output_groups", world_size=2, optimizer=optimizer, plugin_arguments=POLICIES[policy]
    )
