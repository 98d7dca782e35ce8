"""Stretches of any tensor against the plain way: flatten all of it, convert it, take the bytes of the stretch."""

from __future__ import annotations

import random

import pytest
import torch

from booster.checkpoint_io import copy_elements as module
from booster.checkpoint_io.copy_elements import copy_elements, needs_no_conversion, synchronize_devices

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def _random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)  # every bit pattern, not-a-numbers as well


def _copied(tensor, start, stop, dtype):
    out = torch.full(((stop - start) * dtype.itemsize,), 0xA5, dtype=torch.uint8)
    copy_elements(tensor, start, stop, out, dtype)
    return bytes(out.numpy())


def _expected(tensor, start, stop, dtype):
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)[start:stop].to(dtype)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _views(base):
    """Yields what has the elements of a three-dimensional tensor in another order, or fewer, or some more than once."""
    yield base
    yield base.transpose(0, 2)
    yield base.permute(1, 2, 0)
    yield base[:, ::2]
    yield base[1:, :, 1:3]
    yield base[:1].expand(4, *base.shape[1:])
    yield base.movedim(0, 1).unsqueeze(0)
    yield base[0, 0, 0]
    yield base[0, 0]
    yield base[:0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_stretch_of_any_view(dtype):
    choose = random.Random(str(dtype))  # the same in every run
    for view in _views(_random((3, 5, 4), dtype, 1)):
        stretches = [(0, view.numel())] + [sorted(choose.choices(range(view.numel() + 1), k=2)) for _ in range(12)]
        for start, stop in stretches:
            assert _copied(view, start, stop, dtype) == _expected(view, start, stop, dtype), (view.shape, start, stop)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20, 61])
def test_boxes_are_bounded_and_in_order(limit):
    base = torch.arange(60).view(3, 5, 4)
    for view in _views(base):
        flat = view.reshape(-1).tolist()
        for start in range(0, view.numel(), 3):
            for stop in range(start + 1, view.numel() + 1, 2):
                boxes = list(module._boxes(view, start, stop, limit))
                assert all(box.numel() <= limit for box in boxes)
                assert [value for box in boxes for value in box.reshape(-1).tolist()] == flat[start:stop]


@pytest.mark.parametrize(
    ("held", "stored"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float64, torch.float16),
        (torch.int64, torch.int8),
        (torch.float32, torch.complex64),
        (torch.bool, torch.float32),
    ],
    ids=str,
)
def test_conversion_on_the_way(held, stored):
    base = torch.arange(60).view(3, 5, 4).to(held)
    for view in _views(base):
        assert _copied(view, 0, view.numel(), stored) == _expected(view, 0, view.numel(), stored)
        assert _copied(view, view.numel() // 3, view.numel(), stored) == _expected(
            view, view.numel() // 3, view.numel(), stored
        )


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_tiles_of_a_large_view(held):
    base = _random((67, 130, 41), held, 1)
    for view in (base.permute(2, 1, 0), base.transpose(0, 1), base[:, ::2], base.permute(2, 0, 1)[3:]):
        for start, stop in ((0, view.numel()), (1234, view.numel() - 56_789)):
            expected = _expected(view, start, stop, torch.float32)
            assert torch.equal(_numbers(_copied(view, start, stop, torch.float32)), _numbers(expected))


def _numbers(raw):
    return torch.frombuffer(bytearray(raw), dtype=torch.int32)


def test_torch_is_never_asked_for_more_than_one_of_its_threads(monkeypatch):
    sizes = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: (sizes.append(other.numel()), copy(self, other)))
    view = torch.zeros(513, 700).t()
    _copied(view, 7, view.numel(), torch.bfloat16)
    _copied(view.contiguous(), 7, view.numel(), torch.bfloat16)
    assert max(sizes) <= 2**15  # as many elements as torch gives to one thread
    assert sum(sizes) == 2 * (view.numel() - 7)


def test_lazily_conjugated_and_negated_tensors():
    base = torch.randn(4, 3, dtype=torch.complex64)
    for view in (base.conj(), base.conj().t(), base.conj().imag, base.imag.t(), base.conj()[1]):
        assert not needs_no_conversion(view, view.dtype)
        assert _copied(view, 1, view.numel(), view.dtype) == _expected(view, 1, view.numel(), view.dtype)


def test_parameters_are_copied_without_a_graph():
    for parameter in (torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(4, 3)).t()):
        assert _copied(parameter, 2, 9, torch.float32) == _expected(parameter, 2, 9, torch.float32)
        assert _copied(parameter, 2, 9, torch.bfloat16) == _expected(parameter, 2, 9, torch.bfloat16)


def test_a_view_that_is_never_flattened():
    # 8 PiB if it were: only a copy that looks at the stretch alone can end.
    huge = torch.arange(8, dtype=torch.float64).view(2, 1, 4).expand(2, 2**47, 4)
    row = 2**47 * 4
    assert torch.tensor(list(_copied(huge, row - 6, row + 6, torch.float64)), dtype=torch.uint8).view(
        torch.float64
    ).tolist() == [2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5]


def test_without_an_accelerator_there_is_no_wait():
    assert synchronize_devices([torch.zeros(2), torch.zeros(3)]) is False
    assert synchronize_devices([]) is False
