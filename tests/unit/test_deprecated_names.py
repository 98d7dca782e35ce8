"""Deprecated public names work for callers and in subclasses."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from booster import BF16MixedPrecision, Booster
from booster.core.shard_aware import full_step
from booster.interface import ModelWrapper, OptimizerWrapper, TensorSlice
from booster.optim import CPUAdam, Lars


def test_the_old_name_returns_the_fingerprint():
    precision = BF16MixedPrecision()
    with pytest.warns(DeprecationWarning, match=r"agreement_facts is deprecated: use config_fingerprint$"):
        assert precision.agreement_facts() == precision.config_fingerprint()


def test_an_override_of_the_old_name_is_compared():
    with pytest.warns(
        DeprecationWarning, match=r"Mine\.agreement_facts is deprecated: rename it to config_fingerprint$"
    ):

        class Mine(BF16MixedPrecision):
            def agreement_facts(self):
                return [*super().agreement_facts(), "mine"]

    precision = Mine()
    with pytest.warns(DeprecationWarning, match=r"agreement_facts is deprecated: use config_fingerprint$"):
        lines = precision.config_fingerprint()
    assert lines == ["the mixed precision Mine in torch.bfloat16, keeps_masters=False", "mine"]


def test_an_override_of_the_new_name_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Mine(BF16MixedPrecision):
            def config_fingerprint(self):
                return [*super().config_fingerprint(), "mine"]

        assert Mine().config_fingerprint()[-1] == "mine"


OPTIMIZER = [
    ("working_parameter", "model_parameter"),
    ("window", "accumulation"),
    ("restore_window", "restore_accumulation"),
    ("micro_step", "microbatch"),
    ("num_micro_steps", "num_microbatches"),
]
MODEL = [("exact_slices", "master_slices"), ("register_exact_copies", "register_master_slices")]


@pytest.mark.parametrize(("index", "old", "new"), [(1, *one) for one in OPTIMIZER] + [(0, *one) for one in MODEL])
def test_old_names_of_the_wrappers(index, old, new):
    model = nn.Linear(1, 1)
    boosted = Booster(device="cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[index]
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated: use {new}$"):
        assert getattr(boosted, old) == getattr(boosted, new)


@pytest.mark.parametrize("base", [CPUAdam, Lars])
def test_an_override_of_an_old_name_of_an_optimizer(base):
    with pytest.warns(DeprecationWarning, match=r"Mine\.can_fail_alone is deprecated: rename it to may_fail_locally$"):

        class Mine(base):
            @property
            def can_fail_alone(self):
                return not super().can_fail_alone

    with pytest.warns(DeprecationWarning, match="use may_fail_locally"):
        assert Mine([nn.Parameter(torch.ones(1))], lr=0.1).may_fail_locally
    with pytest.warns(DeprecationWarning, match=r"Value\.can_fail_alone is deprecated"):

        class Value(Mine):
            can_fail_alone = False

    assert not Value([nn.Parameter(torch.ones(1))], lr=0.1).may_fail_locally


def test_an_override_of_an_old_name_of_a_wrapper():
    with pytest.warns(DeprecationWarning, match=r"Mine\.adopt_masters is deprecated: rename it to use_master_weights$"):

        class Mine(OptimizerWrapper):
            def adopt_masters(self, originals):
                return not super().adopt_masters(originals)

    model = nn.Linear(1, 1)
    wrapper = Mine(torch.optim.SGD(model.parameters(), lr=0.1), ModelWrapper(model))
    with pytest.warns(DeprecationWarning, match="use use_master_weights"):
        assert wrapper.use_master_weights({})


def test_old_names_of_tensor_slices():
    with pytest.warns(DeprecationWarning, match=r"TensorSlice\.whole is deprecated: use full$"):
        unsharded = TensorSlice.whole("a", torch.ones(2), primary=True)
    with pytest.warns(DeprecationWarning, match=r"TensorSlice\.is_whole is deprecated: use is_full$"):
        assert unsharded.is_whole


def test_an_optimizer_with_the_old_name_of_full_step():
    entered = []

    class Mine:
        @contextmanager
        def whole_step(self):
            entered.append(True)
            yield

    warning = pytest.warns(DeprecationWarning, match=r"Mine\.whole_step\(\) is deprecated: rename it to full_step\(\)")
    with warning, full_step(Mine()):
        assert entered == [True]
    with full_step(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])):
        assert entered == [True]


def test_old_arguments_of_fused_steps():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 64.0)
    for weight, name in zip(weights, ("multiplier", "grad_scale"), strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            CPUAdam([weight]).fused_step(**{name: 1 / 64})
        texts = [str(one.message) for one in caught if one.category is DeprecationWarning]
        assert bool(texts) == (name == "multiplier")
        assert all(text.endswith("fused_step is deprecated: use grad_scale") for text in texts)
    assert torch.equal(*weights)
