"""HybridParallelPlugin: training over ranks that share layers gives what one process gives."""

from __future__ import annotations

import pytest
from harness import RanksFailed, preload
from hybrid_cases import (
    DENSE,
    EXPERTS,
    LAYOUTS,
    MODES,
    OWN_ATTENTION,
    TP_2,
    TP_2_DP_2,
    TP_3,
    TP_4,
    assert_hybrid_equals_serial,
    models_under,
    on_own_axis,
    on_tensor_axis,
)
from zoo import TRANSFORMERS_MODULES

preload(*TRANSFORMERS_MODULES)
STEPS = 3  # in the default run; the slow grids take 5


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("model", [*DENSE, *EXPERTS])
def test_two_ranks_share_every_model(model):
    assert_hybrid_equals_serial(model, TP_2, max_norm=0.5, steps=STEPS)


# Fewer heads of keys than ranks, with and without ties and biases; the smallest vocabulary that a rank can have.
@pytest.mark.parametrize("model", ["llama", "gemma", "gpt2", "t5", "falcon", "mixtral", "user_mixer"])
def test_four_ranks_share_a_model(model):
    assert_hybrid_equals_serial(model, TP_4, max_norm=0.5, steps=STEPS)


# Heads and features that do not divide.
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "bloom", "user_transformer", "user_mixer"])
def test_three_ranks_share_a_model(model):
    assert_hybrid_equals_serial(model, TP_3, steps=STEPS)


@pytest.mark.parametrize(
    ("model", "zero_stage"),
    [
        *[("llama", 0), ("llama", 1), ("llama", 2), ("gpt2", 1), ("bert", 2), ("user_transformer", 0), ("mixtral", 1)],
        *[slow("gpt2", 0), slow("bert", 0), slow("mixtral", 0), slow("bert", 1), slow("user_transformer", 1)],
        *[slow("gpt2", 2), slow("user_transformer", 2), slow("mixtral", 2)],
    ],
)
def test_replicas_of_shared_models_equal_serial(model, zero_stage):
    assert_hybrid_equals_serial(model, TP_2_DP_2, zero_stage=zero_stage, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize(
    ("model", "zero_stage"),
    [
        (model, stage) if (number + stage) % 2 == 0 else slow(model, stage)
        for number, model in enumerate(
            ["tied_lm", "frozen_unused_conditional", "multi_output_groups", "convnet_batchnorm"]
        )
        for stage in (0, 1, 2)
    ],
)
def test_data_parallelism_alone_equals_serial(model, zero_stage):
    assert_hybrid_equals_serial(model, (2, {}), zero_stage=zero_stage, max_norm=0.5, steps=STEPS)


# Every way to divide it over four ranks of one model, and over two of the other.
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (model, layout) if layout.endswith(size) else slow(model, layout)
        for model, size in (("llama", "4"), ("user_transformer", "2"))
        for layout in MODES
    ],
)
def test_ranks_that_divide_the_sequence_equal_serial(model, layout):
    assert_hybrid_equals_serial(model, MODES[layout], zero_stage=1, max_norm=0.5, steps=STEPS)


# Not causal; encoder and decoder; a position bias; sequences of odd length; padding; a window; biases by distance.
# By default every kind in two of the modes.
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        (model, mode) if number % 3 != index else slow(model, mode)
        for number, model in enumerate(["bert", "t5", "vit", "opt", "llama_padded", "mistral_sliding", "gpt2", "gemma"])
        for index, mode in enumerate(["split_gather", "all_to_all", "ring_attn"])
    ],
)
def test_every_kind_of_sequence_is_divided(model, mode):
    assert_hybrid_equals_serial(model, MODES[f"{mode} 2"], steps=STEPS)


@pytest.mark.parametrize(
    "layout",
    [
        on_tensor_axis("split_gather", 3),
        on_tensor_axis("ring", 3),
        on_own_axis("all_to_all", 3),
        on_own_axis("ring_attn", 3),
        on_own_axis("all_to_all", 2, tp_size=2),
        on_own_axis("ring_attn", 2, tp_size=2),
        on_own_axis("all_to_all", 2, dp_size=2),
        on_own_axis("ring_attn", 2, dp_size=2),
        (4, {**on_tensor_axis("split_gather", 2)[1]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama"])
def test_axes_combine(model, layout):
    assert_hybrid_equals_serial(model, layout, zero_stage=2, max_norm=0.5, steps=STEPS)


LOW_PRECISION = [
    ("llama", "tp 2", 0),
    ("gpt2", "tp 2 dp 2", 1),
    ("bert", "tp 2 dp 2", 2),
    ("llama", "split_gather 2", 1),
    ("llama", "all_to_all 2", 2),
    ("llama", "ring_attn 2", 0),
    ("user_transformer", "tp 4", 0),
]


# By default the precisions in turn.
@pytest.mark.parametrize(
    ("model", "layout", "zero_stage", "precision"),
    [
        (*case, precision) if number % 2 == index else slow(*case, precision)
        for number, case in enumerate(LOW_PRECISION)
        for index, precision in enumerate(["bf16", "fp16"])
    ],
)
def test_low_precision_equals_serial(model, layout, zero_stage, precision):
    assert_hybrid_equals_serial(
        model, LAYOUTS[layout], zero_stage=zero_stage, precision=precision, max_norm=0.5, steps=STEPS
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"parallel_output": False},
        {"make_vocab_size_divisible_by": 1},
        {"make_vocab_size_divisible_by": 1000},
        {"dp_outside": False},
        {"overlap_communication": False},
        {"overlap_allgather": True},
        {"gradient_checkpoint_config": True},
        {"gradient_checkpoint_config": {"ratio": 0.5}},
        {"cpu_offload": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", slow("gpt2")])
def test_arguments_change_nothing(model, arguments):
    assert_hybrid_equals_serial(model, TP_2_DP_2, zero_stage=1, arguments=arguments, max_norm=0.5, steps=STEPS)


@pytest.mark.parametrize(
    "plan",
    [
        {"layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"},
        {"layers.*.up": "colwise_gather_output", "layers.*.gate": "colwise_gather_output"},
        {"tokens": "vocab", "head": "vocab"},
    ],
    ids=str,
)
def test_a_plan_of_the_user_is_followed(plan):
    assert_hybrid_equals_serial("user_transformer", TP_2, arguments={"plan": plan}, steps=STEPS)


# Fused projections, a gate per head, one layer called three times, two heads on a model, experts that are skipped.
@pytest.mark.parametrize(
    "model", ["tied_lm", "convit", "albert_pretraining", "gpt2_double_heads", "routed_experts", "torch_transformer"]
)
def test_models_of_other_plugins_are_shared_too(model):
    assert_hybrid_equals_serial(model, TP_2, steps=STEPS)


@pytest.mark.parametrize("model", ["mlp_odd", "lstm", "convnet_batchnorm"])
def test_models_that_nothing_can_be_cut_of_are_refused(model):
    with pytest.raises(RanksFailed, match=r"ConfigError: no tensor-parallel plan is known .* is not sharded: "):
        assert_hybrid_equals_serial(model, TP_2, steps=1)


def test_layers_that_need_the_whole_sequence_are_refused():
    with pytest.raises(RanksFailed, match=r"ConfigError: .*compute tokens independently"):
        assert_hybrid_equals_serial("user_mixer", MODES["split_gather 2"], steps=1)


def test_experts_under_sequence_parallelism_over_tp():
    assert_hybrid_equals_serial("mixtral", MODES["split_gather 2"], steps=1)


@pytest.mark.parametrize("model", OWN_ATTENTION)
def test_attention_that_cannot_be_exchanged_is_refused(model):
    with pytest.raises(RanksFailed, match=r"ConfigError: .*F\.scaled_dot_product_attention"):
        assert_hybrid_equals_serial(model, MODES["all_to_all 2"], steps=1)


def test_more_ranks_than_fused_groups_are_refused():
    with pytest.raises(RanksFailed, match=r"ConfigError: .*query_key_value.*tp_size of at most 2"):
        assert_hybrid_equals_serial("falcon_groups", TP_4, steps=1)


GRID = [(model, layout, stage) for layout in LAYOUTS for model in models_under(layout) for stage in (0, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "zero_stage"), GRID)
def test_whole_grid_equals_serial(model, layout, zero_stage):
    assert_hybrid_equals_serial(
        model,
        LAYOUTS[layout],
        zero_stage=zero_stage,
        max_norm=0.5,
        accumulation=2,
        synchronize="no_sync" if zero_stage == 1 else "always",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "zero_stage"), GRID)
def test_whole_grid_with_checkpointed_layers_equals_serial(model, layout, zero_stage):
    assert_hybrid_equals_serial(
        model,
        LAYOUTS[layout],
        zero_stage=zero_stage,
        max_norm=0.5,
        arguments={"gradient_checkpoint_config": {"ratio": 0.5 if zero_stage == 1 else 1.0}},
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("model", "layout", "zero_stage"), GRID)
def test_whole_grid_in_low_precision_equals_serial(model, layout, zero_stage, precision):
    assert_hybrid_equals_serial(
        model, LAYOUTS[layout], zero_stage=zero_stage, precision=precision, max_norm=0.5, accumulation=2
    )
