"""HybridParallelPlugin's arguments: what can't be is said before anything is made, with what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import pytest
import torch

from booster.errors import ConfigError
from booster.launch.config import Config
from booster.plugins import HybridParallelPlugin
from booster.plugins.base import arguments_of
from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig
from booster.plugins.hybrid_parallel.config import SEQUENCE_MODES, HybridConfig, arguments_from_config
from booster.plugins.hybrid_parallel.mesh import AXES, mesh_order, rank_groups

NAN, INF = float("nan"), float("inf")
FLAG = "pass True or False"
DEFAULTS = {
    **{"tp_size": 1, "pp_size": 1, "sp_size": None, "precision": "fp16", "zero_stage": 0},
    **{"enable_sequence_parallelism": False, "sequence_parallelism_mode": None, "parallel_output": True},
    **{"plan": None, "custom_policy": None, "make_vocab_size_divisible_by": 64, "dp_outside": True},
    **{"max_norm": 0.0, "norm_type": 2.0, "broadcast_buffers": True, "ddp_bucket_cap_mb": 25},
    **{"find_unused_parameters": False, "check_reduction": False, "gradient_as_bucket_view": False},
    **{"static_graph": False, "zero_bucket_size_in_m": 12, "cpu_offload": False, "communication_dtype": None},
    **{"overlap_communication": True, "overlap_allgather": False, "master_weights": True, "cast_inputs": True},
    **{"gradient_checkpoint_config": None, "num_microbatches": None, "microbatch_size": None, "pp_style": "1f1b"},
    **{"num_model_chunks": 1, "num_layers_per_stage": None, "broadcast_loss": True, "enable_metadata_cache": True},
    **{"split": None, "execution_sequence": None, "sync_batch_norm": True, "verbose": False},
    **{"initial_scale": 2**16, "min_scale": 1, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 1000},
    **{"hysteresis": 2, "max_scale": 2**32},
    **{"ep_size": 1, "capacity_factor": None, "min_capacity": 4, "drop_tokens": True},
    **{"overlap_shared_experts": True, "tp_mode": "1d", "tp_depth": None, "extra_axes": None},
}


def arguments(**given):
    return arguments_of(HybridConfig, DEFAULTS | given)


def refused(world_size=8, **given):
    """Returns what a user is told."""
    with pytest.raises(ConfigError) as caught:
        arguments(**given).check(world_size)
    return str(caught.value)


# Argument, value, and what the message says to write instead.
BAD_VALUES = [
    *[(name, value, "give a positive integer") for name in ("tp_size", "pp_size") for value in (0, -1, 2.0, None)],
    ("tp_size", True, "give a positive integer"),
    *[("ep_size", value, "give a positive integer") for value in (0, 2.0, None, True)],
    *[("sp_size", value, "give a positive integer, or None") for value in (0, 2.0, "2", True)],
    *[("tp_mode", value, "choose one of 1d, 2d, 2.5d, 3d") for value in ("4d", "2D", None, 2)],
    *[("tp_depth", value, "give a positive integer, or None") for value in (0, 2.0, "2", True)],
    ("tp_depth", 2, "leave it out, or use tp_mode='2.5d'"),
    *[("precision", value, "choose one of fp32, bf16, fp16") for value in ("fp23", None, ["fp16"], torch.float16)],
    *[
        ("zero_stage", value, "0 to shard nothing, 1 to shard optimizer states")
        for value in (3, -1, True, None, "1", 1.0, [1])
    ],
    *[("make_vocab_size_divisible_by", value, "such as 64") for value in (0, 1.5, None, True)],
    ("max_norm", -1.0, "give a positive number, or 0 for no clipping"),
    ("norm_type", 0, "give a positive number, or float('inf')"),
    *[("ddp_bucket_cap_mb", value, "must be a positive number") for value in (0, -1, INF, NAN, None, True)],
    *[("zero_bucket_size_in_m", value, "must be a positive number") for value in (0, -1, INF, NAN, None)],
    ("communication_dtype", torch.int8, "torch.float32, torch.bfloat16, torch.float16, or None"),
    *[("num_microbatches", value, "give a whole number from 1, or None") for value in (0, 1.5, True)],
    ("microbatch_size", -2, "give a whole number from 1, or None"),
    ("plan", ["colwise"], "give a dict of module names to styles"),
    ("plan", {1: "colwise"}, "give a dict of module names to styles"),
    ("custom_policy", "llama", "give a dict of module names to styles"),
    *[("gradient_checkpoint_config", value, "give True, a GradientCheckpointConfig") for value in (1, "all", [0])],
    ("gradient_checkpoint_config", {"layers": 3}, "a dict with ratio, use_reentrant, num_layers_per_stage"),
    *[("gradient_checkpoint_config", {"ratio": value}, "a number from 0 to 1") for value in (-0.1, 1.5, NAN, "1")],
    ("gradient_checkpoint_config", {"use_reentrant": True}, "set use_reentrant=False"),
    ("sequence_parallelism_mode", "ulysses", "choose one of split_gather, ring, all_to_all, ring_attn, or None"),
    *[
        (name, value, FLAG)
        for name in (
            *("enable_sequence_parallelism", "parallel_output", "dp_outside", "broadcast_buffers", "cpu_offload"),
            *("find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"),
            *("overlap_communication", "overlap_allgather", "master_weights", "cast_inputs", "sync_batch_norm"),
        )
        for value in (None, 1)
    ],
]


@pytest.mark.parametrize(("name", "value", "instead"), BAD_VALUES)
def test_a_value_that_cannot_be_is_refused(name, value, instead):
    message = refused(**{name: value})
    assert instead in message
    shown = value.values() if name == "gradient_checkpoint_config" and isinstance(value, dict) else [value]
    assert name in message or name == "custom_policy"
    assert all(repr(one) in message or str(one) in message for one in shown)


def test_every_argument_has_a_default_that_can_be():
    given = inspect.signature(HybridParallelPlugin).parameters
    assert {name: parameter.default for name, parameter in given.items()} == DEFAULTS | {"precision": None}
    compared = [line.partition("=")[0] for line in arguments().fingerprint]
    assert sorted([*compared, "verbose"]) == sorted(DEFAULTS)
    arguments().check(1)
    assert arguments().remarks() == []


# Sequence parallelism.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sequence_parallelism_mode": "ring"}, "set enable_sequence_parallelism=True, or leave the mode out"),
        ({"sp_size": 2}, "or leave sp_size out"),
        ({"enable_sequence_parallelism": True}, "tp_size=1 and sp_size=None has no ranks"),
        ({"enable_sequence_parallelism": True, "sp_size": 2}, "sp_size=2 needs a mode: give"),
        ({"enable_sequence_parallelism": True, "sp_size": 2, "tp_size": 2}, "sp_size=2 needs a mode: give"),
        *[
            ({"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, **more}, said)
            for modes, more, said in (
                (("split_gather", "ring"), {}, "give tp_size=2 or more, or choose 'all_to_all' or 'ring_attn'"),
                (("split_gather", "ring"), {"tp_size": 4, "sp_size": 2}, "leave sp_size out"),
                (("split_gather", "ring"), {"tp_size": 4, "sp_size": 1}, "leave sp_size out"),
                (("all_to_all", "ring_attn"), {"tp_size": 4}, "sp_size=None has no ranks"),
                (("all_to_all", "ring_attn"), {"sp_size": 1}, "sp_size=1 has no ranks"),
            )
            for mode in modes
        ],
    ],
)
def test_sequence_parallelism_that_cannot_be(given, said):
    assert said in refused(**given)


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_where_a_sequence_is_divided(mode):
    on_tensor_axis = mode in ("split_gather", "ring")
    given = arguments(
        enable_sequence_parallelism=True,
        sequence_parallelism_mode=mode,
        tp_size=2,
        sp_size=None if on_tensor_axis else 2,
    )
    given.check(8)
    assert (given.tp_axis_mode, given.sp_axis_mode) == ((mode, None) if on_tensor_axis else (None, mode))
    assert given.axis_sizes(8) == {"dp": 4 if on_tensor_axis else 2, "pp": 1, "sp": 1 if on_tensor_axis else 2, "tp": 2}
    assert given.remarks() == []


def test_the_tensor_axis_may_be_named_twice():
    given = arguments(enable_sequence_parallelism=True, sequence_parallelism_mode="ring", tp_size=4, sp_size=4)
    given.check(8)
    assert given.axis_sizes(8) == {"dp": 2, "pp": 1, "sp": 1, "tp": 4}


@pytest.mark.parametrize("sp_size", [None, 1])
def test_a_mode_that_was_left_out_is_worked_out_and_said(sp_size):
    given = arguments(enable_sequence_parallelism=True, tp_size=2, sp_size=sp_size)
    given.check(2)
    assert given.tp_axis_mode == given.sequence_mode == "split_gather"
    assert given.sp_axis_mode is None
    (line,) = given.remarks()
    assert "using sequence_parallelism_mode='split_gather'" in line


def test_no_sequence_parallelism():
    given = arguments(tp_size=2, sp_size=1)
    given.check(2)
    assert given.sequence_mode is given.tp_axis_mode is given.sp_axis_mode is None


# The world.


def test_sizes_that_do_not_divide_the_world():
    assert refused(6, tp_size=4) == (
        "tp_size=4 needs groups of 4 ranks, which do not divide world_size=6: choose sizes whose product is one of 1,"
        " 2, 3, 6, or start a multiple of 4 ranks"
    )
    message = refused(6, tp_size=2, sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all")
    assert message.startswith("sp_size=2 x tp_size=2 needs groups of 4 ranks, which do not divide world_size=6")
    assert "world_size=1:" in refused(1, tp_size=2)


def test_data_parallel_ranks_are_what_is_left():
    given = arguments(tp_size=3)
    given.check(12)
    assert given.axis_sizes(12) == {"dp": 4, "pp": 1, "sp": 1, "tp": 3}


# The rest.


def test_a_plan_by_its_two_names():
    plan = {"layers.*.up": "colwise"}
    assert arguments().given_plan is None
    assert arguments(plan=plan).given_plan is plan
    assert arguments(custom_policy=plan).given_plan is plan
    assert "leave custom_policy out" in refused(plan=plan, custom_policy=plan)


def test_size_of_a_bucket():
    assert arguments(ddp_bucket_cap_mb=25).zero().max_bucket_numel == 25 * 2**20 // 4
    assert arguments(ddp_bucket_cap_mb=1e-9).zero().max_bucket_numel == 1
    for stage in (1, 2):
        assert arguments(zero_stage=stage, zero_bucket_size_in_m=8).zero().max_bucket_numel == 2 * 2**20


def test_formats_of_weights():
    formats = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {name: arguments(precision=name).dtype for name in formats} == formats


def test_microbatches_change_nothing_without_stages():
    given = arguments(num_microbatches=4, microbatch_size=2)
    given.check(1)
    assert [line.partition(" ")[0] for line in given.remarks()] == ["num_microbatches=4", "microbatch_size=2"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        (False, None),
        ({"ratio": 0}, None),
        (True, GradientCheckpointConfig()),
        ({}, GradientCheckpointConfig()),
        ({"ratio": 0.5, "use_reentrant": False}, GradientCheckpointConfig(ratio=0.5)),
        (GradientCheckpointConfig(ratio=0.25), GradientCheckpointConfig(ratio=0.25)),
    ],
)
def test_what_is_computed_again(given, meant):
    assert arguments(gradient_checkpoint_config=given).checkpointing == meant


# The configuration style.


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({}, (1, 1)),
        ({"pipeline": 2, "tensor": {"size": 4, "mode": "1d"}}, (2, 4)),
        ({"pipeline": {"size": 2}}, (2, 1)),
        ({"tensor": {"size": 4, "mode": "1d"}}, (1, 4)),
        ({"tensor": 1}, (1, 1)),
        ({"tensor": {"size": 1}}, (1, 1)),
        ({"tensor": {"size": 1, "mode": None}}, (1, 1)),
        ({"tensor": {"size": 1, "mode": "1d"}, "data": 1}, (1, 1)),
        ({"data": {"size": 1}}, (1, 1)),
        (Config({"tensor": {"size": 2, "mode": "1d"}}), (1, 2)),
    ],
)
def test_a_configuration(config, meant):
    tensor = config.get("tensor")
    mode = {"tp_mode": "1d"} if isinstance(tensor, Mapping) and tensor.get("mode") else {}
    assert arguments_from_config(config) == dict(zip(("pp_size", "tp_size"), meant, strict=True)) | mode


def test_a_configuration_with_further_arguments():
    config = {"tensor": {"size": 4, "mode": "1d"}}
    more = {"zero_stage": 1, "precision": "bf16"}
    assert arguments_from_config(config, more) == {"pp_size": 1, "tp_size": 4, "tp_mode": "1d", **more}
    assert more == {"zero_stage": 1, "precision": "bf16"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"tensor": 4},
            "tensor=4 shards layers over 4 ranks but has no mode: write tensor=dict(size=4, mode='1d')",
        ),
        ({"tensor": {"size": 4}}, "write tensor=dict(size=4, mode='1d')"),
        ({"tensor": {"size": 4, "mode": None}}, "write tensor=dict(size=4, mode='1d')"),
        ({"tensor": {"size": 4, "mode": "4d"}}, "mode '4d' is unknown: use one of 1d, 2d, 2.5d, 3d"),
        ({"tensor": {"size": 4, "mode": 1}}, "mode 1 is unknown: use one of 1d, 2d, 2.5d, 3d"),
        ({"tensor": {"size": 4, "mode": ["1d"]}}, "mode ['1d'] is unknown: use one of 1d, 2d, 2.5d, 3d"),
        ({"tensor": {"size": 4, "mode": "2d", "depth": 2}}, "has the unknown key 'depth'"),
        ({"tensor": {"size": 4, "mode": "sequence", "depth": 2}}, "mode 'sequence' shards sequences, not layers"),
        ({"tensor": {"mode": "sequence", "size": 2}}, "or sequence_parallelism_mode='ring_attn' with sp_size"),
        ({"tensor": {"mode": "1d"}}, "has no 'size': write tensor=dict(size=4, mode='1d')"),
        ({"tensor": {"size": 4, "mode": "1d", "depth": 2}}, "has the unknown key 'depth'"),
        ({"tensor": {"size": 0, "mode": "1d"}}, "give a positive integer"),
        ({"tensor": "4"}, "give a positive integer"),
        ({"pipeline": 0}, "pipeline=0 is not a number of ranks: give a positive integer"),
        ({"pipeline": True}, "give a positive integer"),
        ({"pipeline": 2.0}, "give a positive integer"),
        ({"pipeline": None}, "give a positive integer"),
        ({"pipeline": {}}, "pipeline={} has no 'size': write pipeline=dict(size=2, num_microbatches=4)"),
        ({"pipeline": {"size": 2, "mode": "1f1b"}}, "has the unknown key 'mode'"),
        ({"data": 2}, "data=2 times pipeline=1 and tensor=1 is 2 ranks, but the world size is 1: leave data out"),
        ({"tensors": {"size": 4}}, "has 'tensors', which is not a parallel axis"),
        ({"tp_size": 4}, "choose from data, pipeline, tensor"),
        ({"parallel": {"pipeline": 2}}, "from_config(config['parallel'])"),
        (4, "must be a dict of axes, got 4 of type int: give a dict"),
        ([("pipeline", 2)], "give a dict, such as dict(pipeline=dict(size=2, num_microbatches=4), tensor="),
    ],
)
def test_a_configuration_that_cannot_be(config, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        arguments_from_config(config)


@pytest.mark.parametrize(("name", "axis"), [("tp_size", "tensor"), ("pp_size", "pipeline")])
def test_a_size_given_beside_the_configuration(name, axis):
    with pytest.raises(ConfigError, match=f"{name}=2 was given in addition to '{axis}'=1 of the configuration: leave"):
        arguments_from_config({}, {name: 2})


def test_before_launch():
    with pytest.raises(ConfigError, match=r"call booster\.launch_from_torch\(\)"):
        HybridParallelPlugin(tp_size=1)


# The mesh.


def test_groups_along_axes():
    sizes = {"dp": 2, "pp": 1, "sp": 2, "tp": 2}
    assert rank_groups(sizes, ["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rank_groups(sizes, ["sp"]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rank_groups(sizes, ["dp", "sp"]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert rank_groups(sizes, ["pp"]) == [[rank] for rank in range(8)]
    assert rank_groups(sizes, AXES) == [list(range(8))]


def test_data_inside_of_the_pipeline():
    given = {"dp": 2, "pp": 2, "sp": 1, "tp": 2}
    groups = {
        outside: rank_groups({axis: given[axis] for axis in mesh_order(dp_outside=outside)}, ["dp"])
        for outside in (True, False)
    }
    assert groups == {True: [[0, 4], [1, 5], [2, 6], [3, 7]], False: [[0, 2], [1, 3], [4, 6], [5, 7]]}


@pytest.mark.parametrize("along", [("dp", "sp"), ("tp",), ("dp", "pp", "tp"), ()])
def test_groups_of_512_ranks_hold_every_rank_once(along):
    sizes = {"dp": 4, "pp": 2, "sp": 8, "tp": 8}
    groups = rank_groups(sizes, along)
    assert sorted(rank for group in groups for rank in group) == list(range(512))
    assert len({len(group) for group in groups}) == 1
    assert all(group == sorted(group) for group in groups)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_size": 6, "tp_mode": "2d"}, "arranges q * q ranks, which tp_size=6 is not: use tp_size=4 or 9"),
        ({"tp_size": 2, "tp_mode": "2d"}, "which tp_size=2 is not: use tp_size=4 or 9"),
        ({"tp_size": 6, "tp_mode": "3d"}, "arranges q * q * q ranks, which tp_size=6 is not: use tp_size=8 or 27"),
        ({"tp_size": 8, "tp_mode": "2.5d"}, "has no depth: give tp_depth"),
        ({"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 3}, "arranges 3 * q * q ranks, which tp_size=8 is not: use"),
        ({"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 8}, "squares of one rank, which divide no layer"),
        ({"tp_size": 4, "tp_mode": "2d", "tp_depth": 1}, "no meaning with tp_mode='2d': leave it out"),
        ({"tp_size": 1, "tp_mode": "2d", "tp_depth": 2}, "no meaning with tp_mode='2d': leave it out"),
        ({"tp_size": 2, "plan": {}}, "plan={} names no module: name modules, or leave plan out"),
        ({"custom_policy": {}}, "custom_policy={} names no module: name modules, or leave custom_policy out"),
        ({"tp_size": 4, "tp_mode": "2d", "enable_sequence_parallelism": True}, "by tokens: use one of them"),
        (
            {"tp_size": 4, "tp_mode": "2d", "extra_axes": {"row": 2}},
            "extra_axes has 'row', which is an axis of tp_mode",
        ),
        ({"tp_size": 4, "tp_mode": "2d", "ep_size": 2}, "use tp_mode='1d' with expert parallelism"),
    ],
)
def test_grids_that_cannot_be(given, message):
    assert message in refused(**given)


def test_the_documents_configurations_of_grids():
    assert arguments_from_config({"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}) == {
        **{"pp_size": 2, "tp_size": 4, "tp_mode": "2d"},
    }
    assert arguments_from_config({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}) == {
        **{"pp_size": 1, "tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2},
    }
    assert arguments_from_config({"tensor": {"size": 8, "mode": "3d"}}) == {
        **{"pp_size": 1, "tp_size": 8, "tp_mode": "3d"},
    }
