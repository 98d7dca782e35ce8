"""What users get wrong, and what they are told."""

from __future__ import annotations

import errno
import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from booster import Booster, CheckpointError, ConfigError
from booster.checkpoint_io.storage import Storage
from booster.checkpoint_io.tools.convert import export_optimizer
from booster.checkpoint_io.tools.inspect import find_contents
from booster.logger import get_dist_logger


def _job(optimizer_class=AdamW, width=3):
    booster = Booster(device="cpu")
    torch.manual_seed(width)
    model = nn.Linear(width, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    loader = booster.prepare_dataloader(torch.ones(8, width), 2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(model(torch.ones(1, width)).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return booster, model, optimizer, scheduler, loader


@pytest.fixture
def warnings_of_booster(caplog):
    get_dist_logger()  # made at its first use
    logger = logging.getLogger("booster")
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(("saved", "loaded"), [(AdamW, SGD), (SGD, AdamW)])
def test_another_kind_of_optimizer_is_refused_untouched(tmp_path, saved, loaded):
    booster, model, optimizer, *_ = _job(saved)
    booster.save(tmp_path / "c", model, optimizer)
    booster, model, optimizer, *_ = _job(loaded)
    before = repr(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=f"state is of a {saved.__name__}, which lacks .* a {loaded.__name__}"):
        booster.load(tmp_path / "c", model, optimizer)
    assert repr(optimizer.state_dict()) == before


@pytest.mark.parametrize("loaded", [torch.optim.Adamax, torch.optim.RAdam])
def test_another_optimizer_with_the_same_hyperparameters_is_refused(tmp_path, loaded):
    booster, model, optimizer, *_ = _job(AdamW)
    booster.save(tmp_path / "c", model, optimizer)
    booster, model, other, *_ = _job(loaded)
    with pytest.raises(CheckpointError, match=f"of a AdamW, and this is a {loaded.__name__}, which computes another"):
        booster.load(tmp_path / "c", model, other)


def test_an_optimizer_of_the_same_arithmetic_is_taken(tmp_path):
    booster, model, optimizer, *_ = _job(Adam)
    booster.save(tmp_path / "c", model, optimizer)
    booster, model, other, *_ = _job(AdamW)
    booster.load(tmp_path / "c", model, other)
    assert repr(other.state_dict()["state"]) == repr(optimizer.state_dict()["state"])


def test_what_is_left_out_of_a_load_is_said(tmp_path, warnings_of_booster):
    booster, *parts = _job()
    booster.save(tmp_path / "c", *parts)
    booster.load(tmp_path / "c", *parts)
    assert warnings_of_booster() == []
    booster.load(tmp_path / "c", parts[0])
    (text,) = warnings_of_booster()
    assert all(word in text for word in ("an optimizer", "an LR scheduler", "a dataloader", "not loaded"))


def test_what_strict_false_leaves_out_is_said(tmp_path, warnings_of_booster):
    booster, model, *_ = _job()
    booster.save_model(model, tmp_path / "m.safetensors")
    booster, other, *_ = _job(width=4)
    booster.load_model(other, tmp_path / "m.safetensors", strict=False)
    (text,) = warnings_of_booster()
    assert "'weight' has shape (2, 3) in the checkpoint, (2, 4) in the model" in text


def test_arguments_in_another_place_are_refused(tmp_path):
    booster, model, optimizer, _, loader = _job()
    for call in (booster.save, booster.load):
        with pytest.raises(ConfigError, match="give the directory first"):
            call(model, optimizer)
        with pytest.raises(ConfigError, match="is not an LR scheduler"):
            call(tmp_path / "c", model, optimizer, loader)
    assert not (tmp_path / "c").exists()


def test_a_suffix_of_no_format_is_refused_and_a_root_of_steps_names_one(tmp_path):
    booster, model, optimizer, *_ = _job()
    with pytest.raises(ConfigError, match=r"ends in '\.ckpt', but .* for a directory pass shard=True"):
        booster.save_model(model, tmp_path / "out.ckpt")
    for name in ("out", "out.pth"):  # the suffix decides also if the call comes from the Booster
        booster.save_model(model, tmp_path / name)
        booster.save_optimizer(optimizer, tmp_path / f"optimizer-{name}")
        booster.load_model(model, tmp_path / name)
        booster.load_optimizer(optimizer, tmp_path / f"optimizer-{name}")
    booster.save(tmp_path / "run", model, step=7)
    with pytest.raises(CheckpointError, match="step-00000007"):
        booster.load_model(model, tmp_path / "run")


class _Full(Storage):
    def write_at(self, file, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device", str(file.path))


def test_an_export_to_a_full_disk_says_so(tmp_path):
    booster, _, optimizer, *_ = _job()
    booster.save_optimizer(optimizer, tmp_path / "o", shard=True)

    with pytest.raises(OSError, match="No space left on device"):
        export_optimizer(_Full(), find_contents(Storage(), tmp_path / "o"), tmp_path / "o.pt")
    assert not (tmp_path / "o.pt").exists()
