"""What ranks that share layers or sequences read, gather and show under HybridParallelPlugin."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload, run_ranks
from torch.utils.data import DataLoader, TensorDataset
from zoo import TRANSFORMERS_MODULES, get_model

from booster import Booster
from booster.errors import ConfigError, DesyncError
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

preload(*TRANSFORMERS_MODULES)
SEQUENCE = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
AXES = [(2, {"tp_size": 2}), (2, SEQUENCE), (4, {"tp_size": 2}), (4, {"tp_size": 2, **SEQUENCE})]
NUM_SAMPLES = 11


def boosted(**arguments):
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments))
    raw = get_model("llama").build()
    return booster, *booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))[:2]


def gather_all(arguments, made_by_plugin):
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments))
    dataset = TensorDataset(torch.arange(NUM_SAMPLES))
    if made_by_plugin:
        loader = booster.plugin.prepare_dataloader(dataset, batch_size=2)
    else:
        raw = get_model("llama").build()
        loader = booster.boost(raw, dataloader=DataLoader(dataset, batch_size=2))[3]
    return [booster.gather_for_metrics(samples) for (samples,) in loader]


@pytest.mark.parametrize("made_by_plugin", [True, False])
@pytest.mark.parametrize(("world_size", "arguments"), AXES, ids=str)
def test_every_sample_is_gathered_once(world_size, arguments, made_by_plugin):
    for gathered in run_ranks(gather_all, world_size, arguments, made_by_plugin, timeout=60):
        assert torch.cat(gathered).sort().values.tolist() == list(range(NUM_SAMPLES))


@distributed(world_size=2)
@pytest.mark.parametrize("arguments", [{"tp_size": 2}, SEQUENCE], ids=str)
def test_ranks_of_one_batch_that_read_different_ones_are_told(arguments):
    _, model, _ = boosted(**arguments)
    entry = get_model("llama")
    with pytest.raises(DesyncError, match=r"input_ids: torch\.int64 .* sharded by plugin\.dp_rank and plugin\.dp_size"):
        model(**entry.make_batch(dist.get_rank(), 2))


@distributed(world_size=2)
def test_a_model_of_parts_does_not_save_itself():
    booster, model, _ = boosted(tp_size=2)
    with pytest.raises(ConfigError, match=r"write booster\.save_model\(model, directory, shard=True\)"):
        booster.unwrap_model(model).save_pretrained("anywhere")


@distributed(world_size=2)
def test_the_summary_counts_the_users_parameters():
    whole = sum(parameter.numel() for parameter in get_model("llama").build().parameters())
    booster, model, optimizer = boosted(tp_size=2)
    here = sum(parameter.numel() for parameter in model.parameters())
    assert here < whole
    assert f"{whole:,} parameters, {here:,} on this rank" in booster.summary(model, optimizer)
