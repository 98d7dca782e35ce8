"""Files that transformers converts when it loads them fill models under every plugin."""

from __future__ import annotations

import pytest
import torch
from harness import preload, run_ranks
from oracles.joined_slices import joined_over_ranks
from strategies import FP32
from zoo import TRANSFORMERS_MODULES, get_model

from booster import Booster
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

preload(*TRANSFORMERS_MODULES)

BOOSTERS = {
    **FP32,
    "hybrid_tp_zero": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", tp_size=2, zero_stage=1)),
    "hybrid_pp": lambda: Booster(plugin=HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=2)),
}


def loaded_weights(strategy, directory):
    booster = BOOSTERS[strategy]()
    torch.manual_seed(4)
    raw = get_model("mixtral").construct()
    model = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))[0]
    booster.load_model(model, directory)
    return joined_over_ranks(model)


@pytest.mark.parametrize("strategy", BOOSTERS)
def test_experts_that_are_stored_one_by_one(tmp_path, strategy):
    raw = get_model("mixtral").build()
    raw.save_pretrained(tmp_path)
    expected = raw.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in expected)
    for found in run_ranks(loaded_weights, 4 if strategy == "hybrid_tp_zero" else 2, strategy, str(tmp_path)):
        assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
        assert found.keys() >= {name for name, _ in raw.named_parameters()}
