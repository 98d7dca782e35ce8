"""The plugin's arguments of pipeline stages: what they ask for, and what can't be, with what to write instead."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch

from booster.errors import ConfigError
from booster.plugins import HybridParallelPlugin
from booster.plugins.base import arguments_of
from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig
from booster.plugins.hybrid_parallel.config import HybridConfig, arguments_from_config
from booster.plugins.hybrid_parallel.pipeline_parallel.schedules import GPipe, PipelineSchedule, schedule_names

PARAMETERS = inspect.signature(HybridParallelPlugin).parameters
DEFAULTS = {name: parameter.default for name, parameter in PARAMETERS.items()} | {"precision": "fp32"}
TWO = {"pp_size": 2, "num_microbatches": 4}


class Backwards(PipelineSchedule):
    """A user's schedule, which needs as many microbatches as stages, or a multiple."""

    name = "backwards"

    def check(self, num_stages, num_microbatches, num_chunks):
        if num_microbatches % num_stages:
            raise ConfigError(f"{num_microbatches} microbatches don't go into {num_stages} stages")
        if num_chunks == 3:
            raise ConfigError("three chunks are one too many")

    def order(self, stage, num_stages, num_microbatches, num_chunks):
        return []


def double(x):
    return x * 2


def arguments(**given):
    return arguments_of(HybridConfig, DEFAULTS | given)


def refused(world_size=8, **given):
    """Returns what a user is told."""
    with pytest.raises(ConfigError) as caught:
        arguments(**given).check(world_size)
    return str(caught.value)


def test_what_stages_are_asked_for():
    given = arguments(
        **{"pp_size": 2, "tp_size": 2, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 4},
        **{"num_layers_per_stage": [1, 2, 2, 1], "broadcast_loss": False, "enable_metadata_cache": False},
    )
    given.check(8)
    assert given.axis_sizes(8) == {"dp": 2, "pp": 2, "sp": 1, "tp": 2}
    assert given.remarks() == []
    found = given.pipeline
    assert found.schedule.name == "zbv"
    assert (found.pp_size, found.num_model_chunks, found.num_positions) == (2, 2, 4)
    assert (found.num_microbatches, found.microbatch_size) == (4, None)
    assert found.num_layers_per_stage == [1, 2, 2, 1]
    assert (found.broadcast_loss, found.enable_metadata_cache) == (False, False)
    assert found.split is found.execution_sequence is None


def test_how_the_model_is_divided():
    sequence = ["up", double, "down"]
    given = arguments(pp_size=2, microbatch_size=3, split=["down"], execution_sequence=sequence)
    given.check(2)
    assert (given.pipeline.num_microbatches, given.pipeline.microbatch_size) == (None, 3)
    assert given.pipeline.split == ["down"]
    assert given.pipeline.execution_sequence is sequence
    assert given.pipeline.broadcast_loss
    assert given.pipeline.enable_metadata_cache


@pytest.mark.parametrize(
    ("style", "chunks", "name"),
    [
        *[
            ("1f1b", 1, "1f1b"),
            ("gpipe", 1, "gpipe"),
            ("interleaved", 2, "interleaved"),
            ("interleaved", 3, "interleaved"),
        ],
        *[("zbv", 2, "zbv"), (GPipe(), 1, "gpipe"), (Backwards(), 2, "backwards")],
    ],
)
@pytest.mark.parametrize("microbatches", [{"num_microbatches": 4}, {"microbatch_size": 2}])
def test_schedules(style, chunks, name, microbatches):
    given = arguments(pp_size=2, pp_style=style, num_model_chunks=chunks, **microbatches)
    given.check(2)
    assert given.pipeline.schedule.name == name
    if not isinstance(style, str):
        assert given.pipeline.schedule is style


@pytest.mark.parametrize(
    ("style", "chunks", "said"),
    [
        *[("1f1b", 2, "num_model_chunks=1"), ("gpipe", 2, "num_model_chunks=1"), ("interleaved", 1, "'1f1b'")],
        *[("zbv", 1, "num_model_chunks=2"), ("zbv", 3, "num_model_chunks=2"), (Backwards(), 3, "one too many")],
    ],
)
@pytest.mark.parametrize("microbatches", [{"num_microbatches": 4}, {"microbatch_size": 2}])
def test_parts_that_do_not_fit_the_schedule(style, chunks, said, microbatches):
    assert said in refused(pp_size=2, pp_style=style, num_model_chunks=chunks, **microbatches)


def test_microbatches_that_do_not_fit_the_schedule():
    assert refused(pp_size=2, pp_style=Backwards(), num_microbatches=3) == "3 microbatches don't go into 2 stages"
    arguments(pp_size=3, pp_style=Backwards(), microbatch_size=1).check(3)  # told when there is a batch


BAD_VALUES = [
    *[({"num_model_chunks": value}, "give a whole number from 1") for value in (0, None, True, 2.0)],
    ({"pp_style": "2f2b"}, f"choose one of {', '.join(schedule_names())}, register a schedule"),
    ({"pp_style": None}, "register a schedule with register_schedule"),
    ({"pp_style": ["1f1b"]}, "register a schedule with register_schedule"),
    ({"pp_style": Backwards}, "give an object of it, pp_style=Backwards()"),
    *[
        ({"num_layers_per_stage": value}, "give a list of whole numbers from 1, such as [3, 5]")
        for value in (4, "4", [], [0, 2], [1.0, 2], [True, 2], {1, 2})
    ],
    *[({"split": value}, "such as ['layers.4']") for value in ("layers.4", [], [""], [4], {"layers.4"}, 4)],
    *[
        ({"execution_sequence": value}, "a list of names of modules and")
        for value in ("layers.4", [], [4], [""], double)
    ],
    *[
        ({name: value}, "pass True or False")
        for name in ("broadcast_loss", "enable_metadata_cache")
        for value in (None, 1)
    ],
]


@pytest.mark.parametrize("stages", [{}, TWO])
@pytest.mark.parametrize(("given", "instead"), BAD_VALUES)
def test_a_value_that_cannot_be_is_refused_with_any_number_of_stages(given, instead, stages):
    message = refused(**stages, **given)
    assert instead in message
    assert next(iter(given)) in message
    assert " at 0x" not in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pp_size": 4}, "pp_size=4 without num_microbatches and microbatch_size does not say"),
        ({"pp_size": 4}, "give num_microbatches=8, or microbatch_size=1"),
        ({**TWO, "microbatch_size": 2}, "num_microbatches=4 and microbatch_size=2 both say how a batch is divided"),
        ({**TWO, "num_layers_per_stage": [1, 2, 3]}, "has 3 numbers, and pp_size=2 divides a model into 2 chunks"),
        (
            {**TWO, "pp_style": "zbv", "num_model_chunks": 2, "num_layers_per_stage": [1, 2]},
            "pp_size=2 with num_model_chunks=2 divides a model into 4 chunks: give 4 numbers",
        ),
        ({**TWO, "num_layers_per_stage": [1, 2], "split": ["a"]}, "both say where a model is divided"),
        (
            {**TWO, "split": ["a", "b"]},
            "has 2 names, which divide a model into 3 chunks, and pp_size=2 needs 2: give 1",
        ),
        ({**TWO, "zero_stage": 2}, "give zero_stage=1, which shards optimizer states as well"),
        ({**TWO, "gradient_checkpoint_config": {"num_layers_per_stage": [1]}}, "has 1 numbers for pp_size=2"),
        ({**TWO, "world_size": 3}, "pp_size=2 needs groups of 2 ranks, which do not divide world_size=3"),
    ],
)
def test_arguments_that_cannot_be_together(given, said):
    assert said in refused(**given)


@pytest.mark.parametrize(
    "more",
    [
        {"sync_batch_norm": True, "zero_stage": 1, "cpu_offload": True},
        {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"},
        {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
        {"dp_outside": False, "num_microbatches": 1},
    ],
)
def test_what_goes_with_stages(more):
    given = arguments(**{**TWO, **more})
    given.check(8)
    assert given.pipeline is not None


def test_without_stages_it_is_said_what_changes_nothing():
    given = arguments(
        **{"num_microbatches": 4, "microbatch_size": 2, "pp_style": Backwards(), "num_model_chunks": 2},
        **{"num_layers_per_stage": [1], "split": ["a", "b"], "execution_sequence": ["a", double], "zero_stage": 2},
    )
    given.check(1)
    assert given.pipeline is None
    lines = given.remarks()
    assert [line.partition("=")[0] for line in lines] == [
        *("num_microbatches", "microbatch_size", "pp_style", "num_model_chunks", "num_layers_per_stage", "split"),
        "execution_sequence",
    ]
    assert all(line.endswith("changes nothing: pp_size=1 has no pipeline stages to fill") for line in lines)
    assert lines[-1].startswith("execution_sequence=['a', <function double>] ")


# What ranks compare.


def test_the_texts_that_ranks_compare_hold_no_addresses():
    def facts():
        part = functools.partial(double, torch.nn.functional.relu)
        given = arguments(**TWO, pp_style=Backwards(), execution_sequence=["up", lambda x: x, double, part])
        return given.fingerprint

    first, second = facts(), facts()
    assert first == second
    assert not [text for text in first if " at 0x" in text]
    assert any("Backwards" in text for text in first)
    assert any("['up', <function test_" in text and "<function double>" in text for text in first)


# Layers that are computed again.


def test_layers_that_are_computed_again_by_stage():
    config = {"num_layers_per_stage": [3, 0]}
    given = arguments(**TWO, gradient_checkpoint_config=config)
    given.check(2)
    assert given.checkpointing == GradientCheckpointConfig(num_layers_per_stage=[3, 0])
    assert [given.checkpointing.num_layers(4, stage) for stage in (0, 1)] == [3, 0]
    assert given.checkpointing.num_layers(2, 0) == 2
    assert GradientCheckpointConfig(ratio=0.5).num_layers(3, 1) == 2
    assert GradientCheckpointConfig().num_layers(3, 1) == 3
    assert arguments(**TWO, gradient_checkpoint_config={"num_layers_per_stage": [0, 0]}).checkpointing is None
    assert arguments(gradient_checkpoint_config={"num_layers_per_stage": [2]}).checkpointing.num_layers(5) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_layers_per_stage": [1, 1], "ratio": 1.0}, "and ratio=1.0 both set the number of recomputed layers"),
        ({"num_layers_per_stage": [1, 1, 1]}, "has 3 numbers for pp_size=2 stages"),
        ({"num_layers_per_stage": []}, "has 0 numbers for pp_size=2 stages"),
        *[
            ({"num_layers_per_stage": value}, "must be a list of non-negative integers")
            for value in ([1, -1], [1.0, 1], "11", 2, [True, 1])
        ],
    ],
)
def test_layers_that_cannot_be_computed_again(given, said):
    assert said in refused(**TWO, gradient_checkpoint_config=given)


# The configuration style.


def test_a_configuration_with_stages():
    pipeline = {"size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2}
    config = {"pipeline": pipeline, "tensor": {"size": 2, "mode": "1d"}}
    found = arguments_from_config(config, {"zero_stage": 1})
    expected = {"num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2, "zero_stage": 1}
    assert found == {"pp_size": 2, "tp_size": 2, "tp_mode": "1d", **expected}
    arguments(**found).check(4)
    assert arguments_from_config({"pipeline": 2}, {"num_microbatches": 4}) == {**TWO, "tp_size": 1}


@pytest.mark.parametrize(
    ("pipeline", "more", "said"),
    [
        ({"size": 2, "num_stages": 2}, {}, "has the unknown key 'num_stages': write pipeline=dict(size=2,"),
        ({"num_microbatches": 4}, {}, "has no 'size': write pipeline=dict(size=2, num_microbatches=4)"),
        (
            {"size": 2, "num_microbatches": 4},
            {"num_microbatches": 8},
            "num_microbatches=8 was given in addition to 4 in the configuration's 'pipeline': leave one of them out",
        ),
    ],
)
def test_a_configuration_of_stages_that_cannot_be(pipeline, more, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        arguments_from_config({"pipeline": pipeline}, more)
