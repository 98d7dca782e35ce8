"""GeminiPlugin's arguments: what can't be is said before anything is made, on all ranks, with what to write instead."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from parity import assert_parallel_equals_serial
from torch import nn

from booster import Booster, ConfigError, DesyncError
from booster.plugins import GeminiPlugin

NAN, INF = float("nan"), float("inf")
FRACTION = "give a number from 0 to 1"
FLAG = "pass True or False"

# Argument, value, and what the message says to write instead.
BAD_VALUES = [
    ("precision", "fp23", "choose one of fp32, bf16, fp16"),
    ("precision", ["fp16"], "choose one of fp32, bf16, fp16"),
    ("precision", torch.float16, "choose one of fp32, bf16, fp16"),
    ("placement_policy", "gpu", "choose one of 'static', 'cuda', 'cpu', 'const', 'auto'"),
    ("placement_policy", None, "choose one of 'static', 'cuda', 'cpu', 'const', 'auto'"),
    *[(name, value, FRACTION) for name in ("shard_param_frac", "offload_optim_frac") for value in (-0.1, 1.1, NAN)],
    *[("offload_param_frac", value, FRACTION) for value in (2, "1", None, True)],
    ("max_prefetch", -1, "give an integer"),
    ("max_prefetch", 1.5, "give an integer"),
    ("max_prefetch", True, "give an integer"),
    ("max_norm", -1.0, "give a positive number, or 0 for no clipping"),
    ("max_norm", NAN, "give a positive number, or 0 for no clipping"),
    ("max_norm", "1", "give a positive number, or 0 for no clipping"),
    ("norm_type", 0, "give a positive number, or float('inf')"),
    ("norm_type", -INF, "give a positive number, or float('inf')"),
    ("min_chunk_size_m", 0, "above 0, such as 32"),
    ("min_chunk_size_m", INF, "above 0, such as 32"),
    ("min_chunk_size_m", None, "above 0, such as 32"),
    ("search_range_m", -1, "or 0 for chunks of min_chunk_size_m"),
    ("search_range_m", INF, "or 0 for chunks of min_chunk_size_m"),
    ("hidden_dim", 0, "give the model's hidden size, or None"),
    ("hidden_dim", 64.0, "give the model's hidden size, or None"),
    ("chunk_config_dict", {}, "give {'chunk_size': number of elements}"),
    ("chunk_config_dict", {"chunk_size": 0}, "give {'chunk_size': number of elements}"),
    ("chunk_config_dict", {"chunk_size": 1e6}, "give {'chunk_size': number of elements}"),
    ("chunk_config_dict", {"size": 512}, "give {'chunk_size': number of elements}"),
    ("chunk_config_dict", {2: {"chunk_size": 512, "keep_gathered": False}}, "give {'chunk_size': number of elements}"),
    ("chunk_config_dict", 512, "give {'chunk_size': number of elements}"),
    ("chunk_config_dict", ["chunk_size"], "give {'chunk_size': number of elements}"),
    ("chunk_init_device", "cuda", "leave it out"),
    ("chunk_init_device", torch.device("meta"), "leave it out"),
    ("chunk_init_device", "nowhere", "leave it out"),
    ("chunk_init_device", 3.5, "leave it out"),
    ("memstats", {"peak": 1}, "Leave it out"),
    ("tp_size", 0, "give an integer from 1"),
    ("tp_size", 1.0, "give an integer from 1"),
    ("tp_size", 2, "tensor parallel layers, which this version does not have yet: leave it out"),
    ("extra_dp_size", 0, "give a divisor of the world size, or 1"),
    ("extra_dp_size", 2, "does not divide the 1 ranks"),
    ("extra_dp_size", "1", "give a divisor of the world size, or 1"),
    ("device_memory_budget", 0, "give an integer above 0, such as 8 * 2**30, or None"),
    ("device_memory_budget", 1e9, "give an integer above 0, such as 8 * 2**30, or None"),
    ("device_memory_budget", "8GB", "give an integer above 0, such as 8 * 2**30, or None"),
    ("offload_dir", "/nowhere/at/all", "create it first, or leave it out"),
    ("offload_dir", 1, "give the path of a directory, or leave it out"),
    ("offload_dir", b"/tmp", "give the path of a directory, or leave it out"),
    ("initial_scale", 0, ""),
    ("initial_scale", NAN, ""),
    ("min_scale", -1, ""),
    ("max_scale", 1, ""),
    ("growth_factor", 1, ""),
    ("backoff_factor", 1, ""),
    ("growth_interval", 0, ""),
    ("hysteresis", 0, ""),
    *[
        (name, value, FLAG)
        for name, value in (
            ("enable_gradient_accumulation", 1),
            ("master_weights", "no"),
            ("pin_memory", None),
            ("force_outputs_fp32", 0),
            ("strict_ddp_mode", "yes"),
            ("enable_async_reduce", []),
            ("verbose", 2),
            ("sync_batch_norm", None),
            ("broadcast_buffers", 1),
        )
    ],
]
# Of "auto" alone.
RATIOS = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")

# Arguments that are fine alone, and what the message must name.
CONTRADICTIONS = [
    ({"offload_param_frac": 0.5, "shard_param_frac": 0.2}, ["offload_param_frac=0.5", "shard_param_frac=0.2"]),
    ({"offload_param_frac": 1.0, "shard_param_frac": 0.0}, ["offload_param_frac=1.0", "shard_param_frac=0.0"]),
    ({"strict_ddp_mode": True, "offload_param_frac": 0.5}, ["strict_ddp_mode=True", "offload_param_frac=0.5"]),
    ({"strict_ddp_mode": True, "shard_param_frac": 0.5}, ["strict_ddp_mode=True", "shard_param_frac=0.5"]),
    *[
        ({"strict_ddp_mode": True, "placement_policy": policy}, ["strict_ddp_mode=True", f"'{policy}'", "'static'"])
        for policy in ("cuda", "cpu", "const", "auto")
    ],
    *[
        ({"placement_policy": policy, name: 0.5}, [f"{name}=0.5", f"'{policy}'", "'static'"])
        for policy in ("cuda", "cpu", "const", "auto")
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    ],
    *[
        ({"placement_policy": policy, name: 0.5}, [f"{name}=0.5", f"'{policy}'", "'auto'"])
        for policy in ("static", "cuda", "cpu", "const")
        for name in RATIOS
    ],
]

GOOD_VALUES = [
    {},
    {"precision": "fp32", "max_norm": 1, "norm_type": INF},
    {"chunk_init_device": "cpu"},
    {"chunk_init_device": torch.device("cpu")},
    {"chunk_config_dict": {"chunk_size": 512}},
    {"search_range_m": 0, "min_chunk_size_m": 0.001, "hidden_dim": 1},
    {"shard_param_frac": 0, "offload_optim_frac": 1},
    {"shard_param_frac": 0.5, "offload_param_frac": 0.5},
    {"strict_ddp_mode": True, "shard_param_frac": 0.0, "offload_optim_frac": 1.0},
    {"placement_policy": "auto", "steady_cuda_cap_ratio": 1, "warmup_non_model_data_ratio": 0},
    {"placement_policy": "const", "device_memory_budget": 2**20},
    {"enable_gradient_accumulation": False, "enable_async_reduce": False, "verbose": True, "pin_memory": True},
]


@pytest.fixture
def world_of_one(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shown(name, value):
    if name in ("max_scale", "min_scale"):
        return name
    return rf"{name}(={re.escape(repr(value))}| must be a bool, got {re.escape(repr(value))}:)"


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("name", "value", "advice"), BAD_VALUES)
def test_a_bad_value_is_refused_with_what_to_write_instead(name, value, advice):
    with pytest.raises(ConfigError, match=shown(name, value)) as caught:
        GeminiPlugin(**{name: value})
    assert advice in str(caught.value)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("value", [-0.1, 1.5, NAN, "0.5", None])
@pytest.mark.parametrize("name", RATIOS)
def test_a_bad_ratio_of_auto_is_refused(name, value):
    with pytest.raises(ConfigError, match=shown(name, value)) as caught:
        GeminiPlugin(placement_policy="auto", **{name: value})
    assert FRACTION in str(caught.value)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(("arguments", "named"), CONTRADICTIONS)
def test_arguments_that_contradict_each_other_are_refused(arguments, named):
    with pytest.raises(ConfigError) as caught:
        GeminiPlugin(**arguments)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("arguments", GOOD_VALUES)
def test_good_values_are_taken(arguments):
    plugin = GeminiPlugin(**arguments)
    assert plugin.axis_sizes() == {"replica": 1, "shard": 1}


@pytest.mark.usefixtures("world_of_one")
def test_a_directory_that_is_there_is_taken(tmp_path):
    GeminiPlugin(offload_dir=tmp_path)
    GeminiPlugin(offload_dir=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        GeminiPlugin(offload_dir=tmp_path / "file")


@pytest.mark.parametrize("make", [GeminiPlugin, lambda: Booster(plugin="gemini")])
def test_before_launch_it_says_what_to_call(make):
    with pytest.raises(ConfigError, match=r"call booster\.launch_from_torch\(\)"):
        make()


def test_an_argument_that_does_not_exist_is_an_error():
    with pytest.raises(TypeError, match="enable_flash"):
        GeminiPlugin(enable_flash=True)


# The facade.


@pytest.mark.usefixtures("world_of_one")
def test_it_has_a_name():
    booster = Booster(plugin="gemini")
    assert isinstance(booster.plugin, GeminiPlugin)
    assert booster.plugin.supported_precisions() == ["fp32", "bf16", "fp16"]


@pytest.mark.usefixtures("world_of_one")
def test_fp16_has_a_loss_scale():
    booster = Booster(plugin=GeminiPlugin(precision="fp16"))
    model, optimizer, *_ = booster.boost(model := nn.Linear(4, 2), torch.optim.AdamW(model.parameters()))
    assert next(model.parameters()).dtype is torch.float16
    assert optimizer.loss_scaler.scale == 2**16


@pytest.mark.usefixtures("world_of_one")
def test_precision_and_device_are_the_plugins_own():
    plugin = GeminiPlugin(precision="bf16")
    assert plugin.control_precision()
    assert plugin.control_device()
    with pytest.raises(ConfigError, match="that has precision='bf16'"):
        Booster(plugin=plugin, mixed_precision="fp32")
    with pytest.raises(ConfigError, match="device"):
        Booster(plugin=plugin, device="meta")
    assert Booster(plugin=plugin).plugin.device == torch.device("cpu")


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("precision", "masters", "row"),
    [
        ("fp32", True, "0 10 float32 float32 float32 none float32"),
        ("bf16", True, "0 10 bfloat16 bfloat16 float32 float32 float32"),
        ("fp16", True, "0 10 float16 float16 float32 float32 float32"),
        ("bf16", False, "0 10 bfloat16 bfloat16 float32 none bfloat16, float32"),
    ],
)
def test_the_summary_shows_the_formats_that_run(precision, masters, row):
    booster = Booster(plugin=GeminiPlugin(precision=precision, master_weights=masters, initial_scale=2.0))
    model, optimizer, *_ = booster.boost(model := nn.Linear(4, 2), torch.optim.AdamW(model.parameters()))
    booster.backward(model(torch.ones(3, 4)).float().square().mean(), optimizer)
    optimizer.step()
    lines = booster.summary(model, optimizer).splitlines()
    assert lines[0].startswith("plugin: GeminiPlugin   ranks: replica=1, shard=1   device: cpu")
    assert "Linear, 10 parameters" in lines[1]
    assert " ".join(lines[-1].split()) == row


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("policy", ["static", "const", "auto", "cpu"])
def test_a_budget_that_is_too_small_says_how_much_it_takes(policy):
    plugin = GeminiPlugin(placement_policy=policy, device_memory_budget=1000, chunk_config_dict={"chunk_size": 4096})
    model = nn.Linear(64, 32)
    with pytest.raises(ConfigError, match=r"device_memory_budget=1000 is too small: \d+ bytes are needed") as caught:
        Booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    (enough,) = re.findall(r"device_memory_budget of at least (\d+)", str(caught.value))
    assert int(enough) >= 2 * 2 * 64 * 32  # the weights and a buffer for gradients, in fp16


# Several ranks.


def _error_of(arguments):
    try:
        GeminiPlugin(**arguments[dist.get_rank()])
    except (ConfigError, DesyncError) as error:
        return type(error).__name__, str(error)
    return None


def test_a_mistake_on_one_rank_is_an_error_on_all():
    """A directory may be missing on one machine; the others must not wait for a rank that has stopped."""
    errors = run_ranks(_error_of, 3, [{}, {"offload_dir": "/nowhere/at/all"}, {}])
    assert [name for name, _ in errors] == ["ConfigError"] * 3
    assert all("offload_dir='/nowhere/at/all' is not a directory" in text for _, text in errors)
    assert errors[0][1].startswith("rank 1 failed, so rank 0 stops too")


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"precision": "bf16"}, {"precision": "fp16"}, "precision='bf16'"),
        ({"max_norm": 1.0}, {"max_norm": 2.0}, "max_norm=1.0"),
        ({"extra_dp_size": 2}, {"extra_dp_size": 1}, "extra_dp_size=2"),
        ({"chunk_config_dict": {"chunk_size": 64}}, {}, "chunk_config_dict={'chunk_size': 64}"),
        ({"placement_policy": "cpu"}, {"placement_policy": "cuda"}, "placement_policy='cpu'"),
        ({"shard_param_frac": 0.5}, {}, "shard_param_frac=0.5"),
        ({"strict_ddp_mode": True}, {}, "strict_ddp_mode=True"),
        ({"initial_scale": 2.0}, {}, "initial_scale=2.0"),
        ({"max_prefetch": 1}, {}, "max_prefetch=1"),
    ],
)
def test_ranks_must_give_the_same_arguments(one, other, named):
    for name, text in run_ranks(_error_of, 2, [one, other]):
        assert name == "DesyncError"
        assert text.startswith("the ranks differ in making a GeminiPlugin: rank 0 has ")
        assert named in text


def test_what_concerns_one_rank_may_differ(tmp_path):
    mine = {"verbose": True, "device_memory_budget": 2**30, "offload_dir": str(tmp_path), "pin_memory": True}
    assert run_ranks(_error_of, 2, [mine, {}]) == [None, None]


def test_ranks_that_do_not_divide_are_named():
    for name, text in run_ranks(_error_of, 3, [{"extra_dp_size": 2}] * 3):
        assert name == "ConfigError"
        assert "extra_dp_size=2 does not divide the 3 ranks" in text


def _axes(extra_dp_size):
    plugin = GeminiPlugin(extra_dp_size=extra_dp_size)
    return plugin.axis_sizes(), plugin.dp_size, plugin.dp_rank


@pytest.mark.parametrize(("extra", "shards"), [(1, 4), (2, 2), (4, 1)])
def test_replicas_and_shards_make_up_the_world(extra, shards):
    for rank, (axes, size, own) in enumerate(run_ranks(_axes, 4, extra)):
        assert axes == {"replica": extra, "shard": shards}
        assert (size, own) == (4, rank)


WEIGHTS = [(0.0, 0.0), (0.5, 0.0), (0.5, 0.3), (0.5, 0.5), (1.0, 0.6), (1.0, 1.0)]  # those sharded, those offloaded
STATES = [0.0, 0.4, 1.0]


# By default every fraction of the states with two of the weights'.
@pytest.mark.parametrize(
    ("shard", "weights", "states"),
    [
        pytest.param(*fractions, states, marks=() if number % 3 == index else pytest.mark.slow)
        for number, fractions in enumerate(WEIGHTS)
        for index, states in enumerate(STATES)
    ],
)
def test_fractions_go_together_in_any_way(shard, weights, states):
    fractions = {"shard_param_frac": shard, "offload_param_frac": weights, "offload_optim_frac": states}
    arguments = fractions | {"chunk_config_dict": {"chunk_size": 128}}
    assert_parallel_equals_serial("gemini", "mlp_odd", world_size=2, steps=3, plugin_arguments=arguments)


@pytest.mark.parametrize("arguments", [{"extra_dp_size": 2}, {"extra_dp_size": 2, "strict_ddp_mode": True}])
def test_every_rank_may_be_a_replica(arguments):
    assert_parallel_equals_serial("gemini", "mlp_odd", world_size=2, steps=3, plugin_arguments=arguments)
