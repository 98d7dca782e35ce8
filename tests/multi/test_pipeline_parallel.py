"""HybridParallelPlugin: training in stages gives what one process gives, for every schedule and every kind of model."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import RanksFailed, preload, run_ranks
from pipeline_cases import (
    AXES,
    MODELS,
    SCHEDULES,
    SEQUENCES,
    TIED,
    assert_pipeline_equals_serial,
    num_chunks_of,
    num_layers_for,
    take_features,
)
from zoo import TRANSFORMERS_MODULES, WholeBatches, get_model

from booster import Booster
from booster.plugins.hybrid_parallel import pipeline_runner as runner
from booster.plugins.hybrid_parallel.plugin import HybridParallelPlugin

preload(*TRANSFORMERS_MODULES)
DEEP = [model for model in MODELS if get_model(model).construct_deep is not None]


@pytest.mark.parametrize("model", [*MODELS, "unlike_sequence", "named_chain", "torch_transformer"])
def test_two_stages_train_every_model(model):
    assert_pipeline_equals_serial(model)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["glued_chain", "llama", "tied_lm", "t5"])
def test_two_stages_train_by_every_schedule(model, schedule):
    assert_pipeline_equals_serial(model, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["glued_chain", "gpt2"])
def test_four_stages_train_by_every_schedule(model, schedule):
    assert_pipeline_equals_serial(model, pp_size=4, schedule=schedule, steps=2)


# Fewer microbatches than stages, as many, more, and numbers that schedules fill up to a multiple.
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_microbatches(schedule, microbatches):
    assert_pipeline_equals_serial("glued_chain", schedule=schedule, microbatches=microbatches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_microbatches_in_three_stages(schedule):
    assert_pipeline_equals_serial("glued_chain", pp_size=3, schedule=schedule, microbatches=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("samples", "arguments"),
    [
        (7, {}),  # microbatches of two sizes
        (3, {}),  # fewer samples than microbatches
        (7, {"microbatch_size": 2}),  # the last one is smaller
        (4, {"microbatch_size": 9}),  # all in one
    ],
    ids=str,
)
def test_uneven_microbatches_count_by_their_samples(schedule, samples, arguments):
    assert_pipeline_equals_serial("glued_chain", schedule=schedule, samples_per_rank=samples, arguments=arguments)


@pytest.mark.parametrize("axes", [name for name in AXES if name != "alone"])
@pytest.mark.parametrize("model", ["llama", "user_transformer"])
def test_stages_and_other_axes(model, axes):
    assert_pipeline_equals_serial(model, axes=axes, samples_per_rank=4)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
@pytest.mark.parametrize("axes", ["dp 2 zero 1", "tp 2", "all_to_all 2"])
def test_parts_of_one_stage_and_other_axes(axes, schedule):
    assert_pipeline_equals_serial("gpt2" if axes == "tp 2" else "llama", axes=axes, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("axes", ["alone", "dp 2 zero 1"])
@pytest.mark.parametrize("model", ["partly_frozen_chain", "tied_lm"])
def test_frozen_layers_and_ties_and_groups(model, axes, schedule):
    assert_pipeline_equals_serial(model, axes=axes, schedule=schedule)


@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize(
    ("schedule", "axes"),
    [("1f1b", "alone"), ("1f1b", "dp 2"), ("1f1b", "dp 2 zero 1"), ("zbv", "dp 2 zero 1"), ("interleaved", "alone")],
)
def test_batches_are_accumulated(schedule, axes, synchronize):
    assert_pipeline_equals_serial(
        "tied_lm", axes=axes, schedule=schedule, microbatches=2, accumulation=3, synchronize=synchronize
    )


@pytest.mark.parametrize("synchronize", ["no_sync", "accumulate"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_that_are_sums_over_items(schedule, synchronize):
    assert_pipeline_equals_serial(
        "glued_chain",
        axes="dp 2",
        schedule=schedule,
        microbatches=3,
        samples_per_rank=5,
        accumulation=2,
        synchronize=synchronize,
        counts_items=True,
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("model", "schedule", "axes"),
    [
        ("llama", "1f1b", "alone"),
        ("glued_chain", "interleaved", "dp 2"),
        ("tied_lm", "zbv", "dp 2 zero 1"),
        ("gpt2", "1f1b", "tp 2"),
    ],
)
def test_low_precision_equals_serial(model, schedule, axes, precision):
    assert_pipeline_equals_serial(model, schedule=schedule, axes=axes, precision=precision)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama", {"gradient_checkpoint_config": True}),
        ("t5", {"gradient_checkpoint_config": {"ratio": 0.5}}),
        ("tied_lm", {"broadcast_loss": True, "enable_metadata_cache": False}),
        ("glued_chain", {"num_layers_per_stage": [3, 1]}),
        ("glued_chain", {"split": ["layers.1"]}),
        ("glued_chain", {"broadcast_buffers": False}),
    ],
    ids=str,
)
def test_arguments_change_nothing(model, arguments):
    assert_pipeline_equals_serial(model, arguments=arguments, num_layers=4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layers_that_are_computed_again(schedule):
    assert_pipeline_equals_serial("user_transformer", schedule=schedule, arguments={"gradient_checkpoint_config": True})


# The stem, what stands between, and the head: without a list of layers one says where it is to be cut, or what runs.
def test_a_model_that_is_split_by_its_user():
    assert_pipeline_equals_serial("named_chain", arguments={"split": ["right"]})


def test_a_model_whose_run_is_said_by_its_user():
    sequence = [take_features, "stem", torch.tanh, "left", F.gelu, "right", torch.tanh, "tail", "head"]
    assert_pipeline_equals_serial("named_chain", arguments={"execution_sequence": sequence})
    assert_pipeline_equals_serial(
        "named_chain",
        schedule="interleaved",
        arguments={"execution_sequence": sequence, "num_layers_per_stage": [2, 1, 1, 1]},
    )


def test_a_value_that_goes_round_the_layers_is_refused():
    with pytest.raises(
        RanksFailed,
        match=r"ConfigError: the layers .* of LongSkip run one after the other, but what .* returns goes around",
    ):
        assert_pipeline_equals_serial("long_skip")
    with pytest.raises(RanksFailed, match=r"ConfigError: split names 'layers\.2', but what .* returns goes around"):
        assert_pipeline_equals_serial("long_skip", arguments={"split": ["layers.2"]})


def test_a_step_without_shared_memory():
    assert_pipeline_equals_serial("tied_lm", axes="dp 2", uses_shared_memory=False)


def train_in_order(is_ordered, schedule):
    entry = get_model("glued_chain", 4)
    whole, arguments = WholeBatches(entry), {"pp_size": 2, "num_microbatches": 4, **SCHEDULES[schedule]}
    booster, raw = Booster(plugin=HybridParallelPlugin(precision="fp32", **arguments)), whole.build()
    with mock.patch.object(runner, "_is_ordered", return_value=is_ordered):
        model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for step in range(2):
        booster.execute_pipeline(iter([whole.feed(entry.make_batch(step, 8))]), model, whole.criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_links_in_a_common_order_as_on_accelerators(schedule):
    of_one_group = run_ranks(train_in_order, 2, False, schedule)
    in_order = run_ranks(train_in_order, 2, True, schedule)
    for found, expected in zip(in_order, of_one_group, strict=True):
        assert found
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# The whole grid.

NAMES = [*DEEP, *SEQUENCES]


def enough_parts(model: str, schedule: str, pp_size: int) -> bool:
    chunks = num_chunks_of(schedule, pp_size)
    return model != "named_chain" and (model != "unlike_sequence" or chunks <= 4)


GRID = [
    pytest.param(model, schedule, pp_size, id=f"{model}, {schedule}, pp {pp_size}")
    for model in NAMES
    for schedule in SCHEDULES
    for pp_size in (2, 4)
    if enough_parts(model, schedule, pp_size)
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule", "pp_size"), GRID)
def test_whole_grid_equals_serial(model, schedule, pp_size):
    assert_pipeline_equals_serial(
        model, pp_size=pp_size, schedule=schedule, microbatches=5, accumulation=2, synchronize="no_sync", steps=4
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("pp_size", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["glued_chain", "tied_lm"])
def test_every_number_of_microbatches(model, schedule, pp_size, microbatches):
    assert_pipeline_equals_serial(model, pp_size=pp_size, schedule=schedule, microbatches=microbatches, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [name for name in AXES if name != "alone"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["llama", "gemma", "gpt2", "bert", "t5", "user_transformer"])
def test_every_pair_of_axes(model, schedule, axes):
    assert_pipeline_equals_serial(model, schedule=schedule, axes=axes, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("axes", ["alone", "dp 2 zero 1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", DEEP)
def test_whole_grid_in_low_precision(model, schedule, axes, precision):
    assert_pipeline_equals_serial(model, schedule=schedule, axes=axes, precision=precision, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", [model for model in DEEP if model not in ("glued_chain",)])
def test_whole_grid_with_checkpointed_layers(model, schedule):
    assert_pipeline_equals_serial(model, schedule=schedule, arguments={"gradient_checkpoint_config": True}, steps=4)


def test_the_grid_has_ties_and_every_part_a_layer():
    assert len(TIED) > 6
    assert num_layers_for("llama", 2) is None
    assert num_layers_for("llama", 8) == 8
    assert num_layers_for("t5", 8) == 4
