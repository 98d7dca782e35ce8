"""Predicted step times: the machine profile, the cost of operators, and the clock of a simulated step."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from machine_profiles import FLOPS_PER_SECOND, profile_of
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from booster import ConfigError, estimate_memory
from booster.estimate import machine_profile, repeated_layers
from booster.estimate.machine_profile import Curve, default_path, find_profile, load_profile, save_profile
from booster.estimate.machine_speed import fit_latency
from booster.estimate.operator_costs import operator_cost

WIDTH, BATCH, LAYERS = 64, 32, 4


def make_model(layers=LAYERS):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def time_of(plugin, profile, num_ranks=2, model=None, **settings):
    estimate = estimate_memory(
        make_model() if model is None else model,
        plugin,
        batch=torch.empty(BATCH, WIDTH),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        criterion=lambda outputs, batch: outputs.sum(),
        num_ranks=num_ranks,
        settings=settings,
        profile=profile,
    )
    return estimate.step_time


def costs_of(function):
    found = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            found.append(operator_cost(func, args, kwargs or {}, result))
            return result

    with Record():
        function()
    return [one for one in found if one is not None]


# Profiles.


def test_curves_pass_through_their_points_and_continue_in_proportion():
    curve = Curve(((100.0, 1.0), (10000.0, 10.0)))
    assert [curve.seconds(amount) for amount in (0, 50, 100, 10000, 20000)] == [0, 0.5, 1.0, 10.0, 20.0]
    assert curve.seconds(1000.0) == pytest.approx(10**0.5)
    assert curve.rate == 1000


def test_latency_and_bandwidth_are_fitted():
    volumes = [64, 4096, 2**20, 2**24]
    assert fit_latency(volumes, [5e-5 + 2e-9 * one for one in volumes]) == pytest.approx((5e-5, 2e-9))
    assert fit_latency(volumes, [2e-9 * one - 1e-8 for one in volumes])[0] == 0.0
    assert fit_latency([1, 2], [2.0, 1.0])[1] == 0.0


def test_a_profile_is_kept_and_the_nearest_one_found(tmp_path, monkeypatch):
    monkeypatch.setenv(machine_profile.CACHE_VARIABLE, str(tmp_path))
    assert find_profile(4) is None
    for number in (2, 8):
        save_profile(replace(profile_of(latency=1e-5), num_ranks=number), default_path(number))
    assert load_profile(default_path(2)) == profile_of(latency=1e-5)
    assert [find_profile(number).num_ranks for number in (1, 2, 3, 5, 64)] == [2, 2, 2, 8, 8]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


def test_the_cache_is_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.delenv(machine_profile.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_profile.profile_folder() == tmp_path / "torch-booster" / "machines"


@pytest.mark.parametrize("change", [{"version": 0}, {"operators": {}}, {"collectives": 3}, {"operators": 1}])
def test_another_file_is_refused(tmp_path, change):
    path = tmp_path / "profile.json"
    save_profile(profile_of(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=r"profile\.json is not a machine profile of this version .*profile-mesh"):
        load_profile(path)
    with pytest.raises(ConfigError, match="can't be read"):
        load_profile(tmp_path / "missing.json")


def test_speeds_of_other_numbers_of_ranks():
    profile = profile_of(latency=1e-4, seconds_per_byte=1e-9)
    speed = profile.speed("all_reduce", 8, 2)
    assert (speed.num_ranks, speed.latency, speed.seconds_per_byte) == (8, pytest.approx(3e-4), 1e-9)
    assert profile.speed("gather", 2) is None


# Operators.


def test_operations_and_bytes_are_counted():
    left, right = torch.empty(8, 16), torch.empty(16, 4)
    (product,) = costs_of(lambda: left @ right)
    assert (product.kind, product.flops, product.num_bytes) == ("matmul", 2 * 8 * 16 * 4, 4 * (128 + 64 + 32))
    stacks = torch.empty(5, 8, 16), torch.empty(5, 16, 4)
    (batched,) = costs_of(lambda: torch.bmm(*stacks))
    assert (batched.flops, batched.batch) == (5 * product.flops, 5)
    (added,) = costs_of(lambda: left + left)
    assert (added.kind, added.num_bytes) == ("elementwise", 3 * left.nbytes)
    (scaled,) = costs_of(lambda: left.mul_(2))
    assert (scaled.kind, scaled.dtype) == ("inplace", "float32")
    assert costs_of(lambda: left.t().view(4, 4, 8).expand(4, 4, 8)) == []


def test_attention_and_embeddings():
    heads = torch.empty(2, 4, 16, 8, requires_grad=True)
    found = costs_of(lambda: functional.scaled_dot_product_attention(heads, heads, heads).sum().backward())
    attention = [one for one in found if one.kind == "attention"]
    product = 2 * (2 * 4) * 16 * 16 * 8
    assert [one.flops for one in attention] == [2 * product, 5 * product]
    table, rows = torch.empty(1000, 8), torch.zeros(3, dtype=torch.int64)
    (looked_up,) = costs_of(lambda: functional.embedding(rows, table))
    assert looked_up.kind == "index"
    assert looked_up.num_bytes < table.nbytes / 10


# Clocks.


def test_one_device_takes_the_time_of_its_products():
    time = time_of(None, profile_of(), num_ranks=1)
    flops = (3 * LAYERS - 1) * 2 * BATCH * WIDTH**2  # the first layer's input needs no gradient
    assert time.flops == flops
    assert time.total == pytest.approx(flops / FLOPS_PER_SECOND, rel=1e-3)
    assert (time.communication, time.bubble) == (0, 0)


def test_calls_and_memory_take_time():
    calls = time_of(None, profile_of(call=1.0), num_ranks=1)
    assert calls.total == pytest.approx(calls.num_calls, rel=1e-3)
    assert calls.step == pytest.approx(LAYERS)  # one update each
    slow = time_of(None, profile_of(bytes_per_second=1e3), num_ranks=1)
    weights = LAYERS * WIDTH**2 * 4
    assert slow.step == pytest.approx(3 * weights / 1e3, rel=1e-3)  # read two, write one


def test_a_function_counts_by_what_a_cpu_takes_for_it():
    tensor, target = torch.empty(4, 8), torch.zeros(4, dtype=torch.int64)
    functions = [torch.tanh, functional.gelu, lambda one: one.softmax(-1), torch.sqrt, torch.sum, functional.relu]
    kinds = [costs_of(lambda function=function: function(tensor))[0].kind for function in functions]
    assert kinds == ["transcendental", "special", "transcendental", "special", "elementwise", "elementwise"]
    logits = torch.empty(4, 8, requires_grad=True)
    backward = costs_of(functional.cross_entropy(logits, target).backward)
    assert "transcendental" not in {one.kind for one in backward}  # from what forward has kept


def test_a_wait_for_other_ranks_takes_time():
    profile = replace(profile_of(latency=1e-9), wait_seconds=1.0)
    assert time_of("torch_ddp", profile).exposed_communication >= 1
    assert time_of("torch_ddp", replace(profile, wait_seconds=0.0)).exposed_communication < 1e-6
    assert time_of(None, profile, num_ranks=1).exposed_communication == 0


def test_a_device_hides_calls():
    waiting = time_of(None, profile_of(call=1e-7, is_asynchronous=True), num_ranks=1)
    kernels = time_of(None, profile_of(), num_ranks=1)
    assert waiting.total == pytest.approx(kernels.total, rel=0.01)


def test_gradients_are_reduced_at_the_speed_of_the_transport():
    alone = time_of("torch_ddp", profile_of())
    reduced = time_of("torch_ddp", profile_of(seconds_per_byte=1e-6))
    sent = LAYERS * WIDTH**2 * 4  # 2 (P - 1) / P bytes
    assert reduced.exposed_communication == pytest.approx(1e-6 * sent, rel=0.01)
    assert reduced.total - alone.total == pytest.approx(1e-6 * sent, rel=0.01)


def test_what_is_offloaded_travels_there_and_back():
    profile = replace(profile_of(is_asynchronous=True), host_bytes_per_second=1e6)
    kept, offloaded = (
        time_of("gemini", profile, precision="bf16", placement_policy="static", offload_optim_frac=fraction)
        for fraction in (0.0, 1.0)
    )
    assert kept.offloading == 0
    assert offloaded.offloading > 0
    assert offloaded.step - offloaded.offloading == pytest.approx(kept.step, rel=0.2)


def test_what_overlaps_is_hidden_by_the_plugins_own_order():
    settings = {"seconds_per_byte": 1e-9, "latency": 0.0}
    waiting = time_of("low_level_zero", profile_of(**settings), stage=1, precision="fp32", reduce_bucket_size_in_m=0.01)
    hiding = time_of(
        "low_level_zero",
        profile_of(overlap=1.0, **settings),
        stage=1,
        precision="fp32",
        reduce_bucket_size_in_m=0.01,
    )
    assert waiting.exposed_communication == pytest.approx(waiting.communication)
    assert hiding.communication == pytest.approx(waiting.communication)
    assert 0 < hiding.exposed_communication < 0.9 * waiting.exposed_communication


def test_tensor_parallel_ranks_share_the_products():
    # pairs of layers are sharded, with a function between them
    alone = time_of("hybrid_parallel", profile_of(), model=_pairs(), precision="fp32", tp_size=1)
    shared = time_of("hybrid_parallel", profile_of(), model=_pairs(), precision="fp32", tp_size=2)
    assert shared.flops == pytest.approx(alone.flops / 2, rel=0.01)


def _pairs():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("style", ["gpipe", "1f1b"])
def test_stages_wait_as_the_schedule_lets_them(style):
    settings = {"pp_size": 2, "pp_style": style, "num_microbatches": 4, "precision": "fp32"}
    time = time_of("hybrid_parallel", profile_of(), **settings)
    busy = time.model - time.bubble
    assert time.bubble / busy == pytest.approx((2 - 1) / 4, rel=0.01)  # of p stages and m microbatches
    sharing = time_of("hybrid_parallel", replace(profile_of(), ranks_per_core=2.0), **settings)
    assert sharing.bubble == pytest.approx(time.bubble / 2)  # while one waits, the other has the core
    slow = time_of("hybrid_parallel", profile_of(latency=1e-3), **settings)
    assert slow.bubble - time.bubble >= 2e-3  # a forward's message and a backward's, at least


def test_deep_models_take_the_time_of_their_layers(monkeypatch):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(20))

        def forward(self, inputs):
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs

    profile = profile_of(call=1e-5, seconds_per_byte=1e-9)
    full = time_of("low_level_zero", profile, model=Deep(), precision="fp32")
    monkeypatch.setattr(repeated_layers, "MIN_NUMEL", 0)
    shown = time_of("low_level_zero", profile, model=Deep(), precision="fp32")
    assert asdict(shown) == pytest.approx(asdict(full), rel=0.05)


def test_without_a_profile_there_is_no_time():
    assert time_of("torch_ddp", None) is None
