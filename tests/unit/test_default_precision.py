"""The default precision of the plugins that cast the weights: what the device computes in, equal on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from booster import BF16MixedPrecision, Booster, ConfigError, DesyncError
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from booster.plugins.sharding.config import default_precision
from booster.plugins.sharding.plugin import _log_default_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UNITS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
PLUGINS = [LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin]


def _set_units(patch, *present):
    for name in UNITS:
        patch.setattr(torch.cpu, name, lambda name=name: name in present, raising=False)


@pytest.mark.parametrize("present", UNITS)
def test_a_cpu_with_units_for_bf16_computes_in_it(monkeypatch, present):
    _set_units(monkeypatch, present)
    assert default_precision(CPU) == "bf16"


def test_another_cpu_computes_in_fp32(monkeypatch):
    _set_units(monkeypatch)
    assert default_precision(CPU) == "fp32"
    for name in UNITS:  # a torch without these functions
        monkeypatch.delattr(torch.cpu, name)
    assert default_precision(CPU) == "fp32"


@pytest.mark.parametrize(("has_units", "precision"), [(True, "bf16"), (False, "fp16")])
def test_cuda_computes_in_bf16_without_emulation(monkeypatch, has_units, precision):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has_units)
    assert default_precision(CUDA) == precision


def _trained(cls):
    patch = pytest.MonkeyPatch()
    found = {}
    try:
        for units in ((), UNITS):
            _set_units(patch, *units)
            for given in ({}, {"precision": "fp16"}):
                booster = Booster(plugin=cls(**given))
                model = nn.Linear(4, 2)
                model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
                dtypes = {parameter.dtype for parameter in model.parameters()}
                booster.backward(model(torch.ones(2, 4)).float().mean(), optimizer)
                optimizer.step()
                found[bool(units), bool(given)] = (dtypes, optimizer.step_was_skipped)
    finally:
        patch.undo()
    return found


@pytest.mark.parametrize("cls", PLUGINS)
def test_weights_have_the_default_precision_and_the_first_step_is_taken(cls):
    for found in run_ranks(_trained, 2, cls):
        assert found[False, False] == ({torch.float32}, False)
        assert found[True, False] == ({torch.bfloat16}, False)
        assert found[False, True][0] == found[True, True][0] == {torch.float16}


@pytest.mark.parametrize("name", ["low_level_zero", "gemini", "hybrid_parallel"])
def test_a_plugin_of_a_name_has_the_precision_of_the_booster(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            booster = Booster(plugin=name, mixed_precision=precision)
            assert (booster.plugin.precision, booster.mixed_precision) == (precision, None)
            model = nn.Linear(4, 4)
            model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            assert {parameter.dtype for parameter in model.parameters()} == {dtype}
            Booster(plugin=booster.plugin, mixed_precision=precision)  # the same said twice
        for other in ("fp32", "bf16", BF16MixedPrecision()):
            with pytest.raises(ConfigError, match="that has precision='fp16': choose the precision"):
                Booster(plugin=booster.plugin, mixed_precision=other)
        with pytest.raises(ConfigError, match="precision='fp8'"):
            Booster(plugin=name, mixed_precision="fp8")
    finally:
        dist.destroy_process_group()


def _on_different_hosts(cls):
    patch = pytest.MonkeyPatch()
    _set_units(patch, *UNITS[: torch.distributed.get_rank()])
    try:
        cls(precision="bf16")  # as asked for
        with pytest.raises(DesyncError) as caught:
            cls()
    finally:
        patch.undo()
    return str(caught.value)


@pytest.mark.parametrize("cls", PLUGINS)
def test_hosts_with_different_defaults_are_an_error_that_names_the_ranks(cls):
    for text in run_ranks(_on_different_hosts, 2, cls):
        assert "rank 0 has precision='fp32'" in text
        assert "rank 1 has precision='bf16'" in text


def test_the_default_is_logged_once(monkeypatch, capsys):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _set_units(monkeypatch)
        _log_default_precision.cache_clear()
        for _ in range(2):
            LowLevelZeroPlugin()
        LowLevelZeroPlugin(precision="bf16")
    finally:
        dist.destroy_process_group()
        _log_default_precision.cache_clear()
    lines = [line for line in capsys.readouterr().err.splitlines() if "precision=" in line]
    assert len(lines) == 1
    assert "precision='fp32' by default, as this cpu has no units for bf16: give precision= to choose" in lines[0]
