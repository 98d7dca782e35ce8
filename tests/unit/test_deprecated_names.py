"""Deprecated public names work for callers and in subclasses."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from booster import BF16MixedPrecision, Booster


def test_the_old_name_returns_the_fingerprint():
    precision = BF16MixedPrecision()
    with pytest.warns(DeprecationWarning, match="call config_fingerprint"):
        assert precision.agreement_facts() == precision.config_fingerprint()


def test_an_override_of_the_old_name_is_compared():
    with pytest.warns(DeprecationWarning, match=r"Mine\.agreement_facts\(\) is deprecated: rename it"):

        class Mine(BF16MixedPrecision):
            def agreement_facts(self):
                return [*super().agreement_facts(), "mine"]

    precision = Mine()
    with pytest.warns(DeprecationWarning, match="call config_fingerprint"):
        lines = precision.config_fingerprint()
    assert lines == ["the mixed precision Mine in torch.bfloat16, keeps_masters=False", "mine"]


def test_an_override_of_the_new_name_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Mine(BF16MixedPrecision):
            def config_fingerprint(self):
                return [*super().config_fingerprint(), "mine"]

        assert Mine().config_fingerprint()[-1] == "mine"


def test_the_old_name_of_model_parameter():
    model = nn.Linear(1, 1)
    _, optimizer, *_ = Booster(device="cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(DeprecationWarning, match="call model_parameter"):
        assert optimizer.working_parameter(model.weight) is model.weight
