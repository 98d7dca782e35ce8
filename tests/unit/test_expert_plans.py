"""Every configuration of transformers with an expert-parallel plan: its experts are found and divided."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo.small_configs import HIDDEN, small_config

from booster.core.shard_spec import ShardSpec
from booster.plugins.hybrid_parallel.expert_parallel.plan import find_experts

transformers = pytest.importorskip("transformers")

# Layers without experts come first, more of them than two.
_DENSE_FIRST = ("bailing_hybrid", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_HALF_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"first_k_dense_replace": 1} for name in _DENSE_FIRST},
    **dict.fromkeys(("beam", "deepseek_ocr2_text", "step3p5"), _HALF_SPARSE),
    "dots3_note_vision_encoder": {**_HALF_SPARSE, "per_layer_config": None, "adapter_in_dim": HIDDEN},
    "ernie4_5_vl_moe_text": {**_HALF_SPARSE, "moe_intermediate_size": [56, 56], "head_dim": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 56},
    "glm5_next_text": {**_HALF_SPARSE, "qk_rope_head_dim": 0},
}


def configurations() -> Iterator[type]:
    """Yields the configuration classes whose models have a plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[name]
        if getattr(config_class, "base_model_ep_plan", None):
            yield config_class


def build(config_class: type) -> nn.Module:
    config = small_config(config_class, CHANGES.get(config_class.model_type))
    file = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    classes = [one for one in vars(file).values() if getattr(one, "config_class", None) is config_class]
    classes = [
        one for one in classes if one.__module__ == file.__name__ and not one.__name__.endswith("PreTrainedModel")
    ]
    with torch.device("meta"):
        return classes[0](config)


@pytest.mark.slow
def test_the_experts_of_every_configuration_with_a_plan_divide():
    found = {}
    for config_class in configurations():
        model = build(config_class)
        specs = {name: ShardSpec.unsharded(one.shape) for name, one in model.named_parameters()}
        plan = find_experts(model, 2, None)
        assert plan.source.endswith("transformers"), config_class.model_type
        halves = [plan.shard_specs(model, specs, rank) for rank in range(2)]
        shared = {name for name, spec in halves[0].items() if spec.is_expert}
        assert shared, config_class.model_type
        for name in shared:
            first, second = (half[name] for half in halves)
            assert first.local_shape[0] + second.local_shape[0] == first.logical_shape[0]
            assert 0 < second.local_shape[0] <= first.local_shape[0]
        found[config_class.model_type] = len(plan.entries)
    assert len(found) > 50  # in transformers 5.23: 67
