"""Every plugin on the simulated CUDA device: trains as one process on the CPU does, without a fault of order.

`make test-device` runs all suites of parity there; these are what the default run has of each plugin.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_cases import PLUGINS, train
from harness import preload, run_ranks
from hybrid_cases import MODES, TP_2, assert_hybrid_equals_serial
from pipeline_cases import SCHEDULES, assert_pipeline_equals_serial
from safetensors.torch import load_file
from torch import nn
from zoo import TRANSFORMERS_MODULES

from booster import Booster
from booster.plugins import GeminiPlugin

preload(*TRANSFORMERS_MODULES)

DEVICE = "simulated_cuda"


# A function for each: the default run takes one case of a function with parameters.
def _train(name: str, **settings: Any) -> None:
    train(name, DEVICE, **settings)


def test_ddp():
    _train("ddp")


def test_zero():
    for name in ("zero 1", "zero 1, overlapped", "zero 2"):
        _train(name)


def test_zero_offloaded():
    _train("zero 2, offloaded")


def test_gemini():
    for name in ("gemini", "gemini, prefetched"):
        _train(name)


def test_gemini_offloaded():
    for name in ("gemini, offloaded", "gemini, offloaded and pinned"):
        _train(name)


def change_in_gathered_and_save(path: str) -> None:
    """Changes offloaded weights twice: a save must wait for their way to pinned memory, and so must a load."""
    booster = Booster(plugin=GeminiPlugin(precision="fp32", placement_policy="cpu", pin_memory=True))
    raw = nn.Linear(64, 64)
    model, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters()))
    for number in range(2):
        with model.gathered() as net, torch.no_grad():
            net.weight.fill_(number)
        booster.save_model(model, path)
        assert load_file(path)["weight"].eq(number).all()
        with model.gathered() as net, torch.no_grad():
            net.weight.fill_(7)
        booster.load_model(model, path)
        assert model.state_dict()["weight"].eq(number).all()


def test_weights_in_pinned_memory_are_saved_and_loaded_after_a_change(tmp_path):
    run_ranks(change_in_gathered_and_save, 2, str(tmp_path / "m.safetensors"), device=DEVICE)


def test_fsdp():
    for name in ("fsdp", "fsdp, gathered once"):
        _train(name)


def test_fsdp_offloaded():
    _train("fsdp, offloaded")


def test_fp16_with_a_loss_scale():
    _train("zero 2", precision="fp16", optimizer="sgd")


def test_tensor_parallel():
    assert_hybrid_equals_serial("user_transformer", TP_2, max_norm=0.5, device=DEVICE)


def test_sequence_parallel():
    for mode in ("split_gather 2", "ring 2", "all_to_all 2", "ring_attn 2"):
        assert_hybrid_equals_serial("user_transformer", MODES[mode], max_norm=0.5, device=DEVICE)


def test_pipeline_parallel():
    # Interleaved and zbv stages also send forward to ranks of lower numbers.
    for schedule in SCHEDULES:
        assert_pipeline_equals_serial("glued_chain", schedule=schedule, device=DEVICE)


def test_stages_that_differ_in_their_number_of_groups():
    # One in the middle has more links, on which torch's name of a group must not depend.
    assert_pipeline_equals_serial("glued_chain", pp_size=3, device=DEVICE)


def test_fsdp_on_one_rank():
    _train("fsdp", world_size=1)


def test_pipeline_and_tensor_parallel():
    assert_pipeline_equals_serial("user_transformer", axes="tp 2", device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", PLUGINS)
def test_low_precision(name, precision):
    _train(name, precision=precision, optimizer="sgd")
