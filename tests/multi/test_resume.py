"""A run that stops and starts again is the run that was never stopped."""

from __future__ import annotations

import logging

import pytest
import torch
from harness import distributed
from resume_cases import CUTS, PRECISIONS, Job, assert_resume_is_exact

from booster import Booster
from booster.comm import group_rank
from booster.errors import CheckpointError, ConfigError
from booster.plugins import TorchDDPPlugin
from booster.rng_state import preserved_rng
from booster.single_device import SingleDevicePlugin

pytestmark = pytest.mark.on_device


@pytest.fixture(autouse=True)
def _random_state():
    with preserved_rng():
        yield


@pytest.mark.parametrize("cut", ["mid-accumulation", "epoch end", "after rotation"])
def test_one_device_resumes_bit_for_bit(tmp_path, cut):
    assert_resume_is_exact(tmp_path / "c", "fp32", cut, lambda: SingleDevicePlugin("cpu"))


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        *[(precision, cut) for precision in ("fp32", "fp16") for cut in ("mid-accumulation", "epoch end", "mid-epoch")],
        ("bf16", "mid-accumulation"),
        ("fp16_naive", "mid-accumulation"),
        ("fp8", "mid-epoch"),
    ],
)
def test_ranks_resume_bit_for_bit(tmp_path, precision, cut):
    assert_resume_is_exact(tmp_path / "c", precision, cut, TorchDDPPlugin)


@pytest.mark.slow
@distributed(world_size=(1, 2, 4))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_cut_of_every_world_resumes_bit_for_bit(tmp_path, precision, cut):
    if cut == "after an overflow" and not precision.startswith("fp16"):
        pytest.skip("only a scaled loss overflows")
    assert_resume_is_exact(tmp_path / "c", precision, cut, TorchDDPPlugin)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_cut_of_one_device_resumes_bit_for_bit(tmp_path, precision, cut):
    if cut == "after an overflow" and precision != "fp16":
        pytest.skip("only a scaled loss overflows")
    assert_resume_is_exact(tmp_path / "c", precision, cut, lambda: SingleDevicePlugin("cpu"))


@distributed(world_size=2)
def test_a_loaders_own_generator_is_each_ranks_own(tmp_path):
    plugin = TorchDDPPlugin()
    booster = Booster(plugin=plugin)

    def make(seed: int):
        generator = torch.Generator().manual_seed(seed)
        return booster.prepare_dataloader(torch.arange(12.0), 2, generator=generator), generator

    loader, generator = make(plugin.dp_rank)
    next(iter(loader))
    booster.save(tmp_path / "c", dataloader=loader)
    other, restored = make(9)
    booster.load(tmp_path / "c", dataloader=other)
    assert torch.equal(restored.get_state(), generator.get_state())
    assert not torch.equal(restored.get_state(), make(1 - plugin.dp_rank)[1].get_state())


@distributed(world_size=2)
def test_what_one_rank_alone_cannot_save_fails_on_both(tmp_path):
    job = Job()
    extra = {"a": 1} if group_rank() == 0 else {"a": object()}
    with pytest.raises(CheckpointError, match=r"extra\['a'\] is a builtins.object"):
        job.booster.save(tmp_path / "c", *job.parts, extra=extra)
    assert not (tmp_path / "c").exists()
    job.booster.wait_for_everyone()
    job.save(tmp_path / "c")
    loader = job.loader if group_rank() == 0 else job.booster.prepare_dataloader(torch.ones(8, 16), 2, shuffle=True)
    before = job.tensors()
    with pytest.raises(ConfigError, match="num_samples=26"):
        job.booster.load(tmp_path / "c", job.model, job.optimizer, dataloader=loader)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.tensors().items())


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"broadcast_buffers": False, "sync_batch_norm": False}, True),
        ({"broadcast_buffers": False}, False),
        ({"sync_batch_norm": False}, False),
    ],
)
def test_buffers_that_ranks_keep_for_themselves_are_told_once_by_a_save(tmp_path, options, is_warned):
    told = []
    handler = logging.Handler()
    handler.emit = told.append
    plugin = TorchDDPPlugin(**options)
    booster = Booster(plugin=plugin)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.full((4, 2), 1.0 + plugin.dp_rank, device=booster.device)
    booster.backward(model(inputs).sum(), optimizer)
    optimizer.step()
    own = model.module[0].running_mean.clone()
    logger = logging.getLogger("booster.dist_logger.booster")
    logger.addHandler(handler)
    for _ in range(2):
        booster.save(tmp_path / "c", model, optimizer)
    logger.removeHandler(handler)
    warnings = [record.getMessage() for record in told if record.levelname == "WARNING"]
    assert len(warnings) == (is_warned and plugin.dp_rank == 0)
    assert all("differ in the buffers 0.running_mean, as" in text for text in warnings)
    booster.load(tmp_path / "c", model, optimizer)
    assert torch.equal(model.module[0].running_mean, own) is not (is_warned and plugin.dp_rank == 1)
