"""Arguments of ColossalAI: taken where what they ask for happens, else an error on all ranks says what to write."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

from booster import (
    Booster,
    ConfigError,
    LazyInitContext,
    disable_existing_loggers,
    get_accelerator,
    get_current_device,
    mixed_precision,
)
from booster.compatibility import ARGUMENTS
from booster.lazy_init import is_lazy
from booster.optim import CAME, Adafactor, CPUAdam, FusedAdam, FusedLAMB, FusedSGD, HybridAdam, Lamb, Lars, Muon
from booster.plugins import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "colossalai.md"
OPTIMIZATIONS = (
    "enable_all_optimization",
    "enable_flash_attention",
    "enable_fused_normalization",
    "enable_jit_fused",
    "enable_sequence_overlap",
)
TAKEN_BY = {
    TorchDDPPlugin: ("fp8_communication",),
    TorchFSDPPlugin: ("fp8_communication",),
    LowLevelZeroPlugin: ("fp8_communication", "use_fp8"),
    GeminiPlugin: (*OPTIMIZATIONS, "enable_sequence_parallelism", "fp8_communication", "use_fp8"),
    HybridParallelPlugin: (*OPTIMIZATIONS, "fp8_communication", "use_fp8", "overlap_p2p"),
}


def _weights():
    return [nn.Parameter(torch.ones(3))]


def _make(cls, of_rank):
    arguments = of_rank[torch.distributed.get_rank()]
    try:
        cls(**arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("cls", TAKEN_BY, ids=lambda cls: cls.__name__)
def test_what_is_off_is_taken(cls):
    off = dict.fromkeys(TAKEN_BY[cls], False)
    none = dict.fromkeys(TAKEN_BY[cls])
    assert run_ranks(_make, 2, cls, [off, none]) == [None, None]


def _taken():
    GeminiPlugin(enable_all_optimization=True)
    HybridParallelPlugin(enable_all_optimization=True, enable_flash_attention=True)
    HybridParallelPlugin(overlap_p2p=True, scheduler_nodes=None, inner_ring_size=None)
    TorchFSDPPlugin(backward_prefetch=None)


def test_what_happens_anyway_is_taken():
    run_ranks(_taken, 2)


@pytest.mark.parametrize(
    ("cls", "instead"),
    [
        (TorchDDPPlugin, "bf16_compress_hook"),
        (TorchFSDPPlugin, "reduce_dtype=torch.bfloat16"),
        (LowLevelZeroPlugin, "communication_dtype=torch.bfloat16"),
        (GeminiPlugin, "precision='bf16'"),
        (HybridParallelPlugin, "communication_dtype=torch.bfloat16"),
    ],
)
def test_fp8_communication_on_one_rank_is_an_error_on_all(cls, instead):
    errors = run_ranks(_make, 2, cls, [{}, {"fp8_communication": True}])
    assert [name for name, _ in errors] == ["ConfigError"] * 2
    for _, text in errors:
        assert "fp8_communication=True asks for collectives in fp8, which are not built here: leave it out" in text
        assert instead in text
    assert errors[0][1].startswith("rank 1 failed, so rank 0 stops too: ")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("enable_fused_normalization", r"torch\.compile\(model\)"),
        ("enable_jit_fused", r"torch\.compile\(model\)"),
        ("use_fp8", r"Booster\(mixed_precision='fp8'\)"),
    ],
)
def test_other_kernels_are_an_error_with_what_does_it_here(name, instead):
    with pytest.raises(ConfigError, match=rf"^{name}=True asks for .*{instead}"):
        HybridParallelPlugin(**{name: True})


def test_an_unknown_argument_is_pythons_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'enable_flash'"):
        HybridParallelPlugin(enable_flash=True)


def test_loads_take_the_arguments_of_colossalai(tmp_path):
    booster = Booster(device="cpu")
    model = nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.save_model(model, tmp_path / "m")
    booster.save_optimizer(optimizer, tmp_path / "o")
    saved = model.unwrap().weight.detach().clone()
    with torch.no_grad():
        model.unwrap().weight.add_(1)
    booster.load_model(model, tmp_path / "m", low_cpu_mem_mode=False, num_threads=4)
    booster.load_optimizer(optimizer, tmp_path / "o", low_cpu_mem_mode=True, num_threads=1)
    assert torch.equal(model.unwrap().weight, saved)
    with pytest.raises(ConfigError, match="num_threads=0 is not a number of threads: leave it out"):
        booster.load_model(model, tmp_path / "m", num_threads=0)


@pytest.mark.parametrize("cls", [HybridAdam, FusedAdam, CPUAdam])
def test_adam_takes_model_params(cls):
    weights = _weights()
    optimizer = cls(model_params=weights, lr=0.5)
    assert optimizer.param_groups[0]["params"] == weights
    with pytest.raises(ConfigError, match="are one argument, but both were given: leave model_params out"):
        cls(model_params=weights, params=weights)


@pytest.mark.parametrize("cls", [HybridAdam, FusedAdam, CPUAdam])
def test_adam_without_amsgrad(cls):
    cls(_weights(), amsgrad=False)
    with pytest.raises(ConfigError, match=r"use torch.optim.AdamW\(amsgrad=True\)"):
        cls(_weights(), amsgrad=True)


@pytest.mark.parametrize(
    "cls", [HybridAdam, FusedAdam, CPUAdam, CAME, Adafactor, FusedLAMB, FusedSGD, Lamb, Lars, Muon]
)
def test_an_unknown_argument_of_an_optimizer_is_an_error_of_its_class(cls):
    with pytest.raises(TypeError, match=rf"^{cls.__name__}[.(].* got an unexpected keyword argument 'beta'"):
        cls(_weights(), beta=0.9)
    with pytest.raises(TypeError, match=rf"^{cls.__name__}[.(].* missing .* argument: 'params'"):
        cls()


def test_optimizers_take_what_they_do():
    FusedAdam(_weights(), set_grad_none=True)
    with pytest.raises(ConfigError, match=r"zero_grad\(set_to_none=False\)"):
        FusedAdam(_weights(), set_grad_none=False)
    Lamb(_weights(), bias_correction=True)
    with pytest.raises(ConfigError, match=r"FusedLAMB\(bias_correction=False, max_grad_norm=0\)"):
        Lamb(_weights(), bias_correction=False)
    assert Lars(_weights(), epsilon=0.25).param_groups[0]["eps"] == 0.25


def test_every_argument_is_on_the_page():
    assert [name for name in ARGUMENTS if f"`{name}`" not in PAGE.read_text()] == []


def _places():
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2, zero_stage=1, precision="fp32")
    sizes = (plugin.tp_size, plugin.pp_size, plugin.sp_size, plugin.dp_size, plugin.zero_stage)
    groups = [plugin.tp_group, plugin.pp_group, plugin.sp_group, plugin.dp_group]
    stage = plugin.stage_manager
    ends = (stage.stage, stage.num_stages, stage.is_first_stage(), stage.is_last_stage(ignore_chunk=True))
    return sizes, [torch.distributed.get_process_group_ranks(group) for group in groups], ends, plugin.mesh.shape


def test_sizes_groups_and_stages_of_a_hybrid_plugin():
    for rank, (sizes, groups, ends, shape) in enumerate(run_ranks(_places, 4)):
        assert sizes == (2, 2, 1, 1, 1)
        assert groups == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], [rank], [rank]]
        assert ends == (rank // 2, 2, rank < 2, rank >= 2)
        assert shape == (1, 2, 1, 2)


def _stages():
    plugins = [
        *(LowLevelZeroPlugin(stage=stage, extra_dp_size=2) for stage in (1, 2)),
        GeminiPlugin(),
        *(TorchFSDPPlugin(sharding_strategy=one) for one in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
        TorchDDPPlugin(),
    ]
    assert all(plugin.tp_size == plugin.pp_size == plugin.sp_size == 1 for plugin in plugins)
    stages = [plugin.stage_manager for plugin in (*plugins, HybridParallelPlugin(tp_size=2, precision="fp32"))]
    assert all((one.num_stages, one.is_first_stage(), one.is_last_stage()) == (1, True, True) for one in stages)
    return [plugin.zero_stage for plugin in plugins], [None if one.mesh is None else one.mesh.shape for one in plugins]


def test_zero_stages_and_meshes():
    for stages, shapes in run_ranks(_stages, 2):
        assert stages == [1, 2, 3, 3, 2, 0, 0]
        assert shapes == [(2, 1), (2, 1), (1, 2), (1, 2), (1, 2), (2, 1), (2,)]


def test_the_last_layer_of_a_v_schedule_is_on_the_first_stage():
    assert run_ranks(_ends_of_a_v, 2) == [(True, True), (False, False)]


def _ends_of_a_v():
    plugin = HybridParallelPlugin(pp_size=2, pp_style="zbv", num_model_chunks=2, num_microbatches=2, precision="fp32")
    return plugin.stage_manager.is_first_stage(), plugin.stage_manager.is_last_stage()


def test_names_of_colossalai():
    assert mixed_precision.FP16_Torch_MixedPrecision is mixed_precision.FP16TorchMixedPrecision
    assert isinstance(mixed_precision.mixed_precision_factory("bf16"), mixed_precision.BF16_MixedPrecision)
    accelerator = get_accelerator()
    assert accelerator.get_current_device() == get_current_device() == Booster().device
    assert accelerator.name == get_current_device().type
    accelerator.reset_peak_memory_stats()
    accelerator.synchronize()
    accelerator.empty_cache()
    assert 0 < accelerator.memory_allocated() <= accelerator.max_memory_allocated() or accelerator.name != "cpu"


def test_existing_loggers_are_disabled():
    names = ["compatibility_test.one", "compatibility_test.two", "booster.compatibility_test"]
    for name in names:
        logging.getLogger(name).setLevel(logging.DEBUG)
    disable_existing_loggers(include=names[:1])
    assert [logging.getLogger(name).level for name in names] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    disable_existing_loggers(exclude=["booster", "pytest"])
    assert [logging.getLogger(name).level for name in names] == [logging.WARNING, logging.WARNING, logging.DEBUG]


def test_the_context_materializes():
    with LazyInitContext():
        model = nn.Linear(1000, 1000)
    assert LazyInitContext.materialize(model, verbose=True) is model
    assert not is_lazy(model.weight)
