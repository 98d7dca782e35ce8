"""LowLevelZeroPlugin: training over ranks gives what one process gives, for every model and every argument."""

from __future__ import annotations

import functools

import pytest
import torch
from harness import distributed, preload
from oracles.serial_training import make_optimizer
from parity import assert_parallel_equals_serial
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model, model_names, split_batch

from booster import Booster
from booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin

preload(*TRANSFORMERS_MODULES)
SMALL = [
    "mlp_odd",
    "frozen_unused_conditional",
    "multi_output_groups",
    "tied_lm",
    "torch_transformer",
    "lstm",
    "vq_autoencoder",
    "routed_experts",
    "deepfm",
]
PRECISIONS = ["bf16", "fp16"]
STAGES = [1, 2]
NUM_BUCKETS = 8  # about, so that parameters reach over several of them


@functools.cache
def several_buckets(model):
    """Returns a `reduce_bucket_size_in_m` that is small for a model: a bucket has a quarter of it."""
    return 4 * sum(parameter.numel() for parameter in get_model(model).build().parameters()) / NUM_BUCKETS / 2**20


def assert_equals_serial(model, *, stage, precision=None, **settings):
    arguments = {
        "stage": stage,
        "reduce_bucket_size_in_m": several_buckets(model),
        **settings.pop("arguments", {}),
    }
    # SGD in low precision: its update is linear in the gradient, so that an error is the gradient's own.
    settings.setdefault("optimizer", "adamw" if precision is None else "sgd")
    assert_parallel_equals_serial("low_level_zero", model, precision=precision, plugin_arguments=arguments, **settings)


def alternating(values, others, always=()):
    """Every pair; by default every value with one of the others in turn, and those of `always` with all of them."""
    found = []
    for number, value in enumerate(values):
        for index, other in enumerate(others):
            is_default = value in always or index == number % len(others)
            case = (value, *other) if isinstance(other, tuple) else (value, other)
            found.append(pytest.param(*case, marks=() if is_default else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("model", "stage"), alternating(model_names(), STAGES, always=SMALL[:4]))
def test_fp32_equals_serial(model, stage):
    assert_equals_serial(model, stage=stage, max_norm=0.5)


@pytest.mark.parametrize(
    ("model", "precision", "stage"),
    alternating(model_names(), [("bf16", 1), ("fp16", 2)], always=["mlp_odd", "frozen_unused_conditional", "tied_lm"]),
)
def test_low_precision_equals_serial(model, precision, stage):
    assert_equals_serial(model, stage=stage, precision=precision, max_norm=0.5)


@pytest.mark.parametrize(("model", "precision", "stage"), alternating(SMALL, [("bf16", 2), ("fp16", 1)]))
def test_low_precision_in_the_other_stage_equals_serial(model, precision, stage):
    assert_equals_serial(model, stage=stage, precision=precision)


@pytest.mark.parametrize(
    ("model", "world_size", "stage"), alternating(SMALL, [(3, 2), (4, 1)], always=["mlp_odd", "routed_experts"])
)
def test_other_world_sizes_equal_serial(model, world_size, stage):
    assert_equals_serial(model, stage=stage, world_size=world_size)


@pytest.mark.parametrize(("world_size", "stage"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("model", ["mlp_odd", "frozen_unused_conditional", "routed_experts"])
def test_the_other_stage_in_other_world_sizes_equals_serial(model, world_size, stage):
    assert_equals_serial(model, stage=stage, world_size=world_size)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("world_size", "stage"), [(3, 2), (4, 1)])
@pytest.mark.parametrize("model", ["mlp_odd", "routed_experts"])
def test_low_precision_in_other_world_sizes_equals_serial(model, world_size, stage, precision):
    assert_equals_serial(model, stage=stage, world_size=world_size, precision=precision)


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
@pytest.mark.parametrize(("model", "stage"), alternating(["mlp_odd", "convnet_batchnorm"], STAGES))
def test_one_rank_equals_serial(model, stage, precision):
    assert_equals_serial(
        model, stage=stage, world_size=1, precision=precision, accumulation=2, synchronize="accumulate", max_norm=0.5
    )


@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize(
    ("model", "stage"), alternating(["mlp_odd", "frozen_unused_conditional", "tied_lm", "routed_experts"], STAGES)
)
def test_accumulation_equals_serial(model, synchronize, stage):
    assert_equals_serial(model, stage=stage, accumulation=3, synchronize=synchronize, max_norm=0.1)


@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize(("precision", "stage"), alternating(PRECISIONS, STAGES))
def test_accumulation_in_low_precision_equals_serial(precision, synchronize, stage):
    assert_equals_serial(
        "byte_gpt", stage=stage, precision=precision, accumulation=2, synchronize=synchronize, max_norm=0.5
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"overlap_communication": False},
        {"overlap_allgather": True},
        {"overlap_communication": False, "overlap_allgather": True},
        {"reduce_bucket_size_in_m": 12},
        {"reduce_bucket_size_in_m": 1e6},
        {"cpu_offload": True},
        {"verbose": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("model", "stage"), alternating(["byte_gpt", "frozen_unused_conditional"], STAGES))
def test_arguments_change_nothing(model, arguments, stage):
    assert_equals_serial(model, stage=stage, arguments=arguments, accumulation=2, synchronize="no_sync", max_norm=0.5)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["mlp_odd", "frozen_unused_conditional"])
def test_the_smallest_buckets_change_nothing(model, stage):
    arguments = {"reduce_bucket_size_in_m": 1e-6}
    assert_equals_serial(model, stage=stage, arguments=arguments, accumulation=2, synchronize="no_sync", max_norm=0.5)


# Not hooks of modules but operators tell which weights a forward waits for: here are modules that read others' weights,
# that read one in many calls, and that are called several times.
@pytest.mark.parametrize("model", ["torch_transformer", "lstm", "tied_lm", "albert_pretraining", "convnet_batchnorm"])
def test_weights_arrive_before_they_are_read(model):
    assert_equals_serial(model, stage=1, world_size=2, arguments={"overlap_allgather": True})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2])
def test_arguments_in_low_precision_change_nothing(precision, stage):
    arguments = {"overlap_communication": False, "overlap_allgather": True, "communication_dtype": torch.float32}
    assert_equals_serial(
        "byte_gpt", stage=stage, precision=precision, arguments=arguments, accumulation=2, synchronize="always"
    )


@pytest.mark.parametrize("model", ["mlp_odd", pytest.param("routed_experts", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("precision", "stage", "extra_dp_size"),
    [(None, 1, 2), *alternating([None, *PRECISIONS], [(2, 4), (1, 2), (2, 2)])],
)
def test_replicas_of_shards_equal_serial(model, stage, extra_dp_size, precision):
    assert_equals_serial(
        model,
        stage=stage,
        world_size=4,
        precision=precision,
        accumulation=2,
        synchronize="no_sync",
        max_norm=0.5,
        arguments={"extra_dp_size": extra_dp_size, "overlap_allgather": True},
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("synchronize", ["always", "no_sync", "accumulate"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("model", model_names())
def test_whole_grid_equals_serial(model, world_size, stage, synchronize, optimizer):
    assert_equals_serial(
        model,
        stage=stage,
        world_size=world_size,
        accumulation=2,
        synchronize=synchronize,
        max_norm=0.5,
        optimizer=optimizer,
        arguments={"overlap_allgather": stage == 2, "overlap_communication": synchronize != "accumulate"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("synchronize", ["always", "no_sync"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("model", model_names())
def test_whole_grid_in_low_precision_equals_serial(model, world_size, stage, precision, synchronize):
    assert_equals_serial(
        model,
        stage=stage,
        world_size=world_size,
        precision=precision,
        accumulation=2,
        synchronize=synchronize,
        max_norm=0.5,
    )


def _lay_out_flat(groups):
    """Puts the weights of each group one after another at multiples of 32 bytes, as the plugin does.

    Matrix products round in another way where a matrix begins at another alignment (Intel MKL, "Getting Reproducible
    Results": 64 bytes), which this test ignores.
    """
    for group in groups:
        padded = [nn.functional.pad(one.detach().reshape(-1), (0, -one.numel() % 8)) for one in group["params"]]
        parts = torch.cat(padded).split([len(one) for one in padded])
        for parameter, part in zip(group["params"], parts, strict=True):
            parameter.data = part[: parameter.numel()].view(parameter.shape)


@pytest.mark.parametrize(("model", "stage"), alternating(SMALL, STAGES))
@distributed(world_size=2)
def test_two_ranks_and_ddp_have_the_same_bits(model, stage):
    # (a + b) / 2 and a / 2 + b / 2 are the same number, and SGD's arithmetic is per element.
    entry = get_model(model)
    zero = LowLevelZeroPlugin(stage=stage, precision="fp32", reduce_bucket_size_in_m=several_buckets(model))
    ddp = TorchDDPPlugin(find_unused_parameters=entry.uses_unused_parameters)
    weights = []
    for plugin in (zero, ddp):
        booster = Booster(plugin=plugin)
        module = entry.build().to(booster.device)
        _lay_out_flat(entry.param_groups(module))
        boosted, optimizer, *_ = booster.boost(module, make_optimizer("sgd", entry.param_groups(module)))
        for step in range(4):
            batch = split_batch(entry.make_batch(step, 4), plugin.dp_rank, 2)
            booster.backward(entry.loss(boosted, batch), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(boosted.state_dict())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@distributed(world_size=[2, 3])
def test_max_norm_is_clipping_by_hand(stage, precision):
    entry = get_model("multi_output_groups")
    records = []
    for max_norm in (0.05, 0.0):
        plugin = LowLevelZeroPlugin(stage=stage, precision=precision, max_norm=max_norm, initial_scale=2**10)
        booster, module = Booster(plugin=plugin), entry.build()
        boosted, optimizer, *_ = booster.boost(module, make_optimizer("adamw", entry.param_groups(module)))
        norms = []
        for step in range(3):
            batch = split_batch(entry.make_batch(step, 2 * plugin.dp_size), plugin.dp_rank, plugin.dp_size)
            booster.backward(entry.loss(boosted, batch), optimizer)
            if max_norm == 0.0:
                booster.clip_grad_norm_(optimizer, 0.05)
            optimizer.step()
            norms.append(optimizer.get_grad_norm())
            optimizer.zero_grad()
        assert min(norms) > 0.05  # it does clip
        records.append((norms, boosted.state_dict()))
    (norms, weights), (norms_by_hand, weights_by_hand) = records
    assert norms == norms_by_hand
    assert all(torch.equal(tensor, weights_by_hand[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@distributed(world_size=[2, 3])
def test_norms_of_any_order_equal_one_process(norm_type, world_size):
    entry = get_model("mlp_odd")
    plugin = LowLevelZeroPlugin(precision="fp32", reduce_bucket_size_in_m=several_buckets("mlp_odd"))
    booster, module, plain = Booster(plugin=plugin), entry.build(), entry.build()
    model, optimizer, *_ = booster.boost(module, make_optimizer("sgd", entry.param_groups(module)))
    batch = entry.make_batch(0, 2 * world_size)
    booster.backward(entry.loss(model, split_batch(batch, plugin.dp_rank, world_size)), optimizer)
    found = booster.clip_grad_norm_(optimizer, 0.01, norm_type)
    optimizer.step()
    entry.loss(plain, batch).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    make_optimizer("sgd", entry.param_groups(plain)).step()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
