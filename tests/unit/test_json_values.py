"""Values become JSON and back without a change, or are refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch.optim import SGD, lr_scheduler, swa_utils

from booster.checkpoint_io.formats import json_values
from booster.errors import CheckpointError

VALUES = [
    None,
    True,
    -0.0,
    0.1 + 0.2,
    5e-324,
    2**70,
    "text \u00e9 \U0001f600 \ud800",
    (1, (2.5, "a"), []),
    [{"a": 1}, {"b": [None]}],
    {1: "int key", "1": "str key", (0, 1): 2, None: 3},
    {"$tuple": [1]},
    {"z": 1, "a": 2},
    Counter({4: 2, 2: 1}),
    OrderedDict([("b", 1), ("a", 2)]),
    {1, 2, 3},
    frozenset(["x"]),
    math.inf,
    [-math.inf],
    1 + 2j,
    complex(0.0, math.inf),
    b"\x00\xff",
    torch.bfloat16,
    np.float64(0.1),
    np.int32(-7),
    np.bool_(True),
]


def _round_trip(value):
    text = json_values.dumps(value, "value")
    assert "NaN" not in text
    assert "Infinity" not in text
    return json_values.loads(text.encode(), "value")


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_the_same(value):
    back = _round_trip(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)


def test_nan_comes_back_as_nan():
    assert math.isnan(_round_trip({"best": math.nan})["best"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = _round_trip(tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bytes(back.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_that_came_back_can_be_written_to():
    _round_trip(torch.zeros(2)).add_(1)


@pytest.mark.parametrize(
    "value", [object(), len, np.zeros(2), torch.zeros(2).to_sparse(), torch.zeros(1, device="meta")], ids=repr
)
def test_what_has_no_form_is_refused_by_its_place(value):
    with pytest.raises(CheckpointError, match=r"state\['outer'\]\[1\]"):
        json_values.encode({"outer": [0, value]}, "state")


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        json_values.encode(loop, "state")


HOSTILE = [
    b"\xff",
    b"{",
    b'{"a": 1, "a": 2}',
    b"NaN",
    b"1e999",
    b"-Infinity",
    b"9" * 5000,
    b"[" * 200_000,
    b'{"$tuple": 3}',
    b'{"$unknown": 3}',
    b'{"$tuple": [], "b": 1}',
    b'{"$float": "1.0"}',
    b'{"$dict": [[[1], 2]]}',
    b'{"$dict": [[1]]}',
    b'{"$tensor": ["float32", [2], ""]}',
    b'{"$tensor": ["load", [0], ""]}',
    b'{"$tensor": ["float32", [-1, -1], "AAAAAA=="]}',
    b'{"$numpy": ["O", "AAAAAAAAAAA="]}',
    b'{"$bytes": "***"}',
    b'{"$dtype": "Tensor"}',
]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: repr(raw[:30]))
def test_texts_of_others_are_refused(raw):
    with pytest.raises(CheckpointError, match="the file"):
        json_values.loads(raw, "the file")


def _schedulers(optimizer):
    return {
        "lambda": lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "multiplicative": lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.9),
        "step": lr_scheduler.StepLR(optimizer, 2),
        "multi_step": lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
        "constant": lr_scheduler.ConstantLR(optimizer),
        "linear": lr_scheduler.LinearLR(optimizer),
        "exponential": lr_scheduler.ExponentialLR(optimizer, 0.9),
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, 5),
        "polynomial": lr_scheduler.PolynomialLR(optimizer),
        "restarts": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        "cyclic": lr_scheduler.CyclicLR(optimizer, 0.1, 1.0),
        "one_cycle": lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer),
        "swa": swa_utils.SWALR(optimizer, 0.05),
        "chained": lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LinearLR(optimizer)]
        ),
    }


def test_every_scheduler_of_torch_comes_back():
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    for name, scheduler in _schedulers(optimizer).items():
        state = scheduler.state_dict()
        assert repr(_round_trip(state)) == repr(state), name


def test_plain_values_look_plain():
    assert json.loads(json_values.dumps({"lr": 0.1, "betas": [1, 2]}, "value")) == {"lr": 0.1, "betas": [1, 2]}
