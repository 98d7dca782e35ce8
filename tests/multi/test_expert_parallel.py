"""HybridParallelPlugin with ep_size: ranks that share the experts of a model give what one process gives."""

from __future__ import annotations

import pytest
from harness import preload
from hybrid_cases import assert_hybrid_equals_serial
from pipeline_cases import assert_pipeline_equals_serial
from zoo import TRANSFORMERS_MODULES, get_model

preload(*TRANSFORMERS_MODULES)

STEPS = 3

EP_2 = (2, {"ep_size": 2})
LAYOUTS = {
    "ep 2": EP_2,
    "ep 2 dp 2": (4, {"ep_size": 2}),
    "ep 2 tp 2": (4, {"ep_size": 2, "tp_size": 2}),
    "ep 4": (4, {"ep_size": 4}),
    "ep 2 inside": (4, {"ep_size": 2, "tp_size": 2, "dp_outside": False}),
}


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Routers by softmax, by sigmoid, by groups, by the scores of inputs; shared experts, biases, interleaved gates; one,
# two and eight experts per token; experts in one tensor, in a dict, in a list.
OWN = ["mixtral", "deepseek_v3_grouped", "switch", "nllb_moe", "routed_classifier", "mixtral_8_experts_per_token"]
LOOPING = ["looping_classifier", "looping_classifier_that_calls_all"]  # over a plain list
_NAMED = "GptOss GraniteMoe Glm4Moe Jamba Llama4 Olmoe Phimoe Qwen2Moe Qwen3Moe"
# The others whose configuration has an expert-parallel plan.
_MORE = """
    AXK1 AXK2 Afmoe AriaText Cohere2Moe DeepseekV2 DeepseekV4 Dots1 Dots3Note Ernie4_5_Moe ExaoneMoe FlexOlmo
    Glm4MoeLite GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared HYV3 HYV4 HunYuanMoEV1 Inkling Inkling2 KimiLinear
    Kolibri1 Laguna Lfm2Moe Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL NemotronH Qwen3Next Qwen3_5Moe Qwen4Exp
    SolarOpen Zaya
"""
OF_TRANSFORMERS, MORE = ([f"{name}ForCausalLM" for name in names.split()] for names in (_NAMED, _MORE))


@pytest.mark.parametrize(
    "model",
    [
        *OWN,
        *LOOPING,
        *OF_TRANSFORMERS,
        *[slow(name) for name in MORE],
        *[slow(name) for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "bailing_hybrid")],
        "mixtral_one_expert_per_token",
        "mixtral_5_experts",
    ],
)
def test_two_ranks_share_the_experts_of_every_model(model):
    assert_hybrid_equals_serial(model, EP_2, zero_stage=1, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["mixtral", *[slow(one) for one in (*OF_TRANSFORMERS, "deepseek_v3_grouped")]])
def test_layouts(model, layout, zero_stage):
    assert_hybrid_equals_serial(model, LAYOUTS[layout], zero_stage=zero_stage, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("model", ["switch", "routed_classifier", *LOOPING])
def test_experts_in_lists_over_more_ranks(model, zero_stage):
    assert_hybrid_equals_serial(model, LAYOUTS["ep 2 dp 2"], zero_stage=zero_stage, max_norm=0.5, steps=STEPS)
    assert_hybrid_equals_serial(model, LAYOUTS["ep 4"], zero_stage=zero_stage, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize("model", ["mixtral_6_experts", "mixtral_5_experts"])
def test_three_ranks_share_experts(model):
    assert_hybrid_equals_serial(model, (3, {"ep_size": 3}), zero_stage=1, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_low_precision_equals_serial(precision, zero_stage):
    assert_hybrid_equals_serial("mixtral", EP_2, zero_stage=zero_stage, precision=precision, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ("ep 2", {"gradient_checkpoint_config": True}),
        ("ep 2 dp 2", {"overlap_allgather": True}),
        ("ep 2 dp 2", {"overlap_communication": False}),
        ("ep 2", {"cpu_offload": True}),
    ],
    ids=str,
)
def test_arguments_change_nothing(layout, arguments):
    assert_hybrid_equals_serial(
        "mixtral", LAYOUTS[layout], zero_stage=1, arguments=arguments, max_norm=0.5, steps=STEPS
    )


@pytest.mark.parametrize("synchronize", ["always", "no_sync"])
def test_accumulation(synchronize):
    assert_hybrid_equals_serial(
        "mixtral", EP_2, zero_stage=1, accumulation=2, synchronize=synchronize, max_norm=0.5, steps=STEPS
    )


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_ranks_that_divide_the_sequence(mode):
    arguments = {"ep_size": 2, "sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
    assert_hybrid_equals_serial("mixtral", (4, arguments), zero_stage=1, max_norm=0.5, steps=STEPS)


# Layers of booster.moe: one router and one set of experts for both blocks, auxiliary losses, recomputed blocks.
@pytest.mark.parametrize("model", ["widenet_dropless", "widenet_dropless_stacked", "widenet_dropless_checkpointed"])
@pytest.mark.parametrize("layout", ["ep 2", "ep 2 dp 2", "ep 4"])
def test_layers_of_booster_moe(model, layout):
    assert_hybrid_equals_serial(model, LAYOUTS[layout], zero_stage=1, max_norm=0.5, steps=STEPS)


OWN_LAYERS = ["widenet_dropless", "widenet_dropless_stacked"]


@pytest.mark.parametrize("model", OWN_LAYERS)
def test_layers_of_booster_moe_beside_divided_ones(model):
    arguments = {"ep_size": 2, "tp_size": 2, "plan": {"blocks.*.project": "colwise_gather_output"}}
    assert_hybrid_equals_serial(model, (4, arguments), zero_stage=1, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize("model", OWN_LAYERS)
def test_stages_that_share_layers_of_booster_moe(model):
    """Its experts are on both stages."""
    assert_pipeline_equals_serial(model, microbatches=1, samples_per_rank=4, axes="dp 2", arguments={"ep_size": 2})


@pytest.mark.parametrize(
    ("model", "schedule", "arguments"),
    [
        ("mixtral", "1f1b", {}),
        ("mixtral", "1f1b", {"zero_stage": 1}),
        ("mixtral", "gpipe", {"dp_outside": False}),
        ("mixtral", "interleaved", {}),
        ("mixtral", "zbv", {}),
        ("Qwen2MoeForCausalLM", "1f1b", {}),
        ("GptOssForCausalLM", "1f1b", {"zero_stage": 1}),
        *[slow(name, "1f1b", {"zero_stage": 1}) for name in (*OF_TRANSFORMERS, "deepseek_v3_grouped")],
        *[slow(name, "1f1b", {}) for name in ("switch", "nllb_moe", "mixtral_6_experts")],
    ],
)
def test_stages_of_a_pipeline(model, schedule, arguments):
    microbatches = 1 if get_model(model).mixes_samples else 4  # a router whose capacity depends on the batch
    arguments = {"ep_size": 2, **arguments}
    assert_pipeline_equals_serial(
        model,
        schedule=schedule,
        microbatches=microbatches,
        axes="dp 2",
        arguments=arguments,
        samples_per_rank=max(microbatches, 2),
    )


def test_stages_tensor_parallel_ranks_and_shared_experts():
    arguments = {"ep_size": 2, "tp_size": 2, "zero_stage": 1}
    assert_pipeline_equals_serial("mixtral", axes="dp 2 tp 2", arguments=arguments)
