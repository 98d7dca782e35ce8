"""What `estimate_memory` says before, against what the plugins allocate in training."""

from __future__ import annotations

from functools import partial

import pytest
from harness import distributed, run_ranks
from memory_cases import PLAN, TOKENS, WIDTH, LanguageModel, check, estimated, measured, of_name, trained

from booster import ConfigError, checkpoint_activations
from booster.device import current_device
from booster.optim import HybridAdam
from booster.plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

pytestmark = pytest.mark.on_device


@distributed(world_size=1)
@pytest.mark.parametrize("precision", [None, "bf16", "fp16_naive"])
@pytest.mark.slow
def test_one_device(precision):
    check(*trained(None, precision=of_name(precision)))


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize("precision", [None, "bf16", "fp16_naive"])
@pytest.mark.parametrize("views", [False, True])
def test_torch_ddp(precision, views):
    check(*trained(lambda: TorchDDPPlugin(gradient_as_bucket_view=views), precision=of_name(precision)))


@distributed(world_size=2)
@pytest.mark.parametrize(
    "settings",
    [
        {"tp_size": 2, "plan": PLAN},
        {"tp_size": 2, "plan": PLAN, "parallel_output": False},
        {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
        {"tp_size": 2, "plan": PLAN, "gradient_checkpoint_config": True},
        {"zero_stage": 1},
    ],
    ids=["tp", "whole logits", "sp", "checkpointed", "zero"],
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_hybrid_parallel(settings, precision):
    check(*trained(lambda: HybridParallelPlugin(precision=precision, **settings), optimizer=HybridAdam))


@distributed(world_size=4)
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpoint_config": True}], ids=["square", "checkpointed"])
@pytest.mark.slow
def test_tensor_grids(settings):
    settings = {"tp_size": 4, "tp_mode": "2d", "plan": PLAN, "precision": "fp32", **settings}
    check(*trained(lambda: HybridParallelPlugin(**settings), optimizer=HybridAdam))


@pytest.mark.slow
@distributed(world_size=2)
@pytest.mark.parametrize("policy", [{}, {"policy": "selective"}, {"policy": "budget", "budget_bytes": 24 * 2**20}])
@pytest.mark.parametrize(
    "make_plugin",
    [
        TorchDDPPlugin,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
                partial(GeminiPlugin, precision="fp32"),
                TorchFSDPPlugin,
                partial(HybridParallelPlugin, tp_size=2, plan=PLAN, precision="fp32"),
            )
        ),
    ],
)
def test_activation_policies(make_plugin, policy):
    check(*trained(make_plugin, make_model=lambda: checkpoint_activations(LanguageModel(), **policy)))


@pytest.mark.slow
@distributed(world_size=1)
def test_offloaded_inputs_are_not_on_the_device():
    kept = estimated(None, make_model=lambda: checkpoint_activations(LanguageModel()), batch=32)
    offloaded = estimated(None, make_model=lambda: checkpoint_activations(LanguageModel(), offload="cpu"), batch=32)
    num_bytes = 32 * TOKENS * WIDTH * 4
    saved = kept.memory.backward.total - offloaded.memory.backward.total
    num_offloaded = 4 if current_device().type == "cpu" else 3  # an accelerator copies one back ahead of its use
    assert 0.95 * num_offloaded * num_bytes < saved < 1.1 * 4 * num_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "style", ["1f1b", "zbv", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpipe", "interleaved"))]
)
def test_pipeline_stages(style):
    chunks = 2 if style in ("interleaved", "zbv") else 1
    settings = {"pp_size": 2, "pp_style": style, "num_model_chunks": chunks, "num_microbatches": 4, "precision": "fp32"}
    check_stages(settings, 2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("others", [{"tp_size": 2, "plan": PLAN}, {"zero_stage": 1}], ids=["tp", "zero"])
def test_pipeline_stages_with_others(precision, others):
    check_stages({"pp_size": 2, "num_microbatches": 4, "precision": precision, **others}, 4)


def check_stages(settings, world_size):
    """Compares on the rank that needs the most, whatever stage that is."""
    estimate = estimated("hybrid_parallel", num_ranks=world_size, settings=settings)
    everyone = run_ranks(of_stage, world_size, settings, device="cpu")  # the estimate is of this process's device
    worst = max(everyone, key=lambda one: max(one["kept"], one["backward"], one["step"]))
    check(estimate, worst | {"sent": max(one["sent"] for one in everyone)})


def of_stage(settings):
    return measured(lambda: HybridParallelPlugin(**settings), stages=True)


@distributed(world_size=2)
def test_stages_of_a_launched_world_are_estimated_before_it():
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32")
    with pytest.raises(ConfigError, match="estimate by its name before the launch"):
        estimated(plugin)


@distributed(world_size=2)
def test_saves_of_a_launched_world_are_estimated_before_it():
    with pytest.raises(ConfigError, match="what a rank saves depends on what other ranks hold"):
        estimated(TorchDDPPlugin(), checkpoint=True)
