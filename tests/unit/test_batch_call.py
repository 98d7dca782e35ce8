"""How a batch becomes a model's arguments, and what is said where it doesn't."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster import Booster
from booster.core.model_wrapper import batch_on_device, call_with_batch
from booster.errors import ConfigError


class Taking(nn.Module):
    def forward(self, x, y=None):
        if y is not None and y.dtype != x.dtype:
            raise TypeError("dtypes differ")
        return x if y is None else x + y


ONE = torch.ones(2)


@pytest.mark.parametrize("batch", [ONE, (ONE,), [ONE], {"x": ONE}], ids=["tensor", "tuple", "list", "dict"])
def test_a_batch_becomes_arguments(batch):
    assert torch.equal(call_with_batch(Taking(), batch), ONE)


@pytest.mark.parametrize("batch", [(ONE, ONE), {"x": ONE, "y": ONE}], ids=["tuple", "dict"])
def test_labels_are_arguments_too(batch):
    assert torch.equal(call_with_batch(Taking(), batch), 2 * ONE)


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (
            nn.Sequential(nn.Linear(2, 2)),
            (ONE, ONE),
            r"2 entries .* Sequential, whose forward has the signature .*y=None",
        ),
        (nn.Linear(2, 2), {"x": ONE}, r"the keys x .* Linear"),
        (Taking(), (), "empty batch"),
    ],
    ids=["too many", "another name", "none"],
)
def test_what_does_not_fit_is_said(model, batch, said):
    with pytest.raises(ConfigError, match=said):
        call_with_batch(model, batch)


def test_a_type_error_of_the_model_stays_its_own():
    with pytest.raises(TypeError, match="dtypes differ"):
        call_with_batch(Taking(), (ONE, ONE.long()))


def test_a_loader_is_no_iterator():
    booster = Booster(device="cpu")
    model, *_ = booster.boost(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"given a list, .*iter\(dataloader\)"):
        booster.execute_pipeline([ONE], model, lambda outputs, _: outputs.mean())


def test_host_tensors_of_a_batch_are_copied_to_an_accelerator():
    batch = {"x": ONE, "parts": [ONE, "a name"]}
    there = batch_on_device(batch, torch.device("meta"))  # as there is no accelerator
    assert there["x"].device.type == there["parts"][0].device.type == "meta"
    assert there["parts"][1] == "a name"
    assert batch["x"] is ONE
    assert batch_on_device(batch, torch.device("cpu")) is batch
