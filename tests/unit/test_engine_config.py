"""What each key of a configuration of ColossalAI becomes, and what is refused."""

from __future__ import annotations

import enum

import pytest

from booster.engine_config import read_engine_config
from booster.errors import ConfigError
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision


class AmpType(enum.Enum):
    TORCH = "torch"
    NAIVE = "naive"


def test_hyperparameters_alone_are_data_parallelism():
    found = read_engine_config({"BATCH_SIZE": 128, "NUM_EPOCHS": 200, "TENSOR_SHAPE": (1, 2), "LOG_PATH": "runs"})
    assert (found.plugin, found.parallel, found.arguments, found.mixed_precision) == ("torch_ddp", None, {}, None)
    assert (found.gradient_accumulation, found.clip_grad_norm) == (1, 0.0)


@pytest.mark.parametrize("parallel", [None, {}, {"pipeline": 1}, {"data": 1}, {"tensor": {"size": 1, "mode": "1d"}}])
def test_axes_of_one_rank_are_data_parallelism(parallel):
    assert read_engine_config({"parallel": parallel}).plugin == "torch_ddp"


def test_a_pipeline_with_its_number_of_microbatches():
    parallel = {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}
    found = read_engine_config({"NUM_MICRO_BATCHES": 4, "NUM_CHUNKS": 1, "parallel": parallel, "clip_grad_norm": 1})
    assert (found.plugin, found.parallel, found.clip_grad_norm) == ("hybrid_parallel", parallel, 1.0)
    assert found.arguments == {"precision": "fp32", "num_microbatches": 4}


def test_several_chunks_are_the_interleaved_schedule():
    arguments = read_engine_config({"parallel": {"pipeline": 2}, "NUM_CHUNKS": 2, "NUM_MICRO_BATCHES": 2}).arguments
    assert (arguments["pp_style"], arguments["num_model_chunks"]) == ("interleaved", 2)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("torch", FP16TorchMixedPrecision),
        (AmpType.TORCH, FP16TorchMixedPrecision),
        (AmpType.NAIVE, FP16NaiveMixedPrecision),
        ("apex", FP16ApexMixedPrecision),
    ],
)
def test_modes_of_fp16(mode, kind):
    found = read_engine_config({"fp16": {"mode": mode}})
    assert type(found.mixed_precision) is kind
    assert read_engine_config({"fp16": {"mode": mode, "enabled": False}}).mixed_precision is None


def test_fp16_of_weights_that_the_plugin_casts():
    found = read_engine_config({"fp16": {"mode": "naive", "initial_scale": 8.0}, "parallel": {"pipeline": 2}})
    assert found.mixed_precision is None
    assert found.arguments == {"precision": "fp16", "initial_scale": 8.0}


@pytest.mark.parametrize(
    ("level", "plugin", "arguments"),
    [
        (1, "low_level_zero", {"precision": "fp32", "stage": 1}),
        (2, "low_level_zero", {"precision": "fp32", "stage": 2}),
        (3, "gemini", {"precision": "fp32"}),
    ],
)
def test_levels_of_zero(level, plugin, arguments):
    found = read_engine_config({"zero": {"level": level}, "gradient_accumulation": 4})
    assert (found.plugin, found.arguments, found.gradient_accumulation) == (plugin, arguments, 4)


def test_zero_beside_tensor_parallelism_is_its_stage():
    found = read_engine_config({"zero": {"level": 1}, "parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    assert (found.plugin, found.arguments) == ("hybrid_parallel", {"precision": "fp32", "zero_stage": 1})


def test_handlers_of_what_plugins_do_are_taken():
    found = read_engine_config({"gradient_handler": [{"type": "DataParallelGradientHandler"}]})
    assert (found.plugin, found.gradient_handlers) == ("torch_ddp", [])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip_grad_nrom": 1.0}, "write clip_grad_norm"),
        ({"gradient_acumulation": 4}, "write gradient_accumulation"),
        ({"amp": "torch"}, r"write fp16=dict"),
        ({"pipeline": 2}, "write parallel=dict"),
        ({"cudnn_benchmark": True}, "torch.backends.cudnn.benchmark"),
        ({"parallel": 2}, "must be a dict of axes"),
        ({"fp16": True}, "names no mode"),
        ({"fp16": {"mode": "bf16"}}, "names no mode"),
        ({"fp16": {"mode": "torch", "init_scal": 2}}, "init_scal"),
        ({"fp16": {"mode": "torch"}, "parallel": {"pipeline": 2}}, "mode='naive'"),
        ({"fp16": {"mode": "apex"}, "zero": {"level": 2}}, "mode='naive'"),
        ({"zero": True}, "names no stage"),
        ({"zero": {"level": True}}, "names no stage"),
        ({"zero": {"model_config": {}}}, "names no stage"),
        ({"zero": {"level": 3}, "parallel": {"pipeline": 2}}, "write level=1 or 2"),
        ({"gradient_accumulation": 0}, "an int of 1 or more"),
        ({"clip_grad_norm": -1.0}, "a number above 0"),
        ({"NUM_MICRO_BATCHES": 4}, "no effect without pipeline stages"),
        ({"NUM_CHUNKS": 2, "parallel": {"pipeline": 1}}, "no effect without pipeline stages"),
        ({"bf16": True}, "write a hyperparameter of your script in upper case, BF16"),
        ({"plugin": "gemini"}, "plugin='gemini' is not a feature of the engine, which are parallel, fp16"),
        ({"gradient_handler": [{"type": "NobodysGradientHandler"}]}, "@register_gradient_handler"),
        ({"gradient_handler": {"type": "DataParallelGradientHandler"}}, "write a list"),
    ],
)
def test_what_cannot_happen_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read_engine_config(config)


def test_a_number_of_data_parallel_ranks_is_checked():
    assert read_engine_config({"parallel": {"data": 4}}).parallel == {"data": 4}
    assert read_engine_config({"parallel": {"data": 1}}).parallel is None
