"""Sums of squares, pack and unpack against references: dtypes, lengths, alignments, instruction sets, threads."""

from __future__ import annotations

import math
import random

import pytest
import torch

from booster.kernels import flat_buffers, loader
from booster.kernels.flat_buffers import pack, sum_of_squares, supports_sum_of_squares, unpack

FP32, BF16, FP16 = DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {FP32: 1e-13, BF16: 2.0**-22, FP16: 2.0**-22}  # see sum_of_squares
BITS = {FP32: torch.int32, BF16: torch.int16, FP16: torch.int16}
BIG = 300_007  # elements: several granules, and more than one thread takes
STREAMED = 9_000_001  # elements: a result that goes past the caches, in any dtype


@pytest.fixture(scope="module")
def native():
    module = loader.load_kernel("flat_buffers")
    return module if module is not None else pytest.skip("this machine has no such kernel")


def _random(numel, dtype, seed=0, offset=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel + offset, generator=generator) * 3).to(dtype)[offset:]


def _exact(tensors):
    return math.fsum(square for one in tensors for square in one.double().square().tolist())


def _sum(native, tensors, num_threads=1, instruction_set=""):
    return native.sum_of_squares(flat_buffers._table(tensors), num_threads, instruction_set)


def _sums(native, tensors):
    """Returns the sums of all instruction sets, for one and three threads; their bits are to be the same."""
    return {_sum(native, tensors, threads, name) for name in native.instruction_sets() for threads in (1, 3)}


# Sums of squares.


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_every_short_length_and_alignment(native, dtype):
    for length in range(140):
        tensor = _random(length, dtype, seed=length, offset=length % 5)
        (found,) = _sums(native, [tensor])
        assert found == pytest.approx(_exact([tensor]), rel=TOLERANCE[dtype], abs=0), length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1000, 32767, 32768, 32769, 65536 + 33, BIG])
def test_sums_of_long_tensors(native, dtype, length):
    tensor = _random(length, dtype, seed=length)
    (found,) = _sums(native, [tensor])
    assert found == pytest.approx(_exact([tensor]), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(8))
def test_sums_of_many_tensors_of_mixed_dtypes(native, seed):
    source = random.Random(seed)
    lengths = [source.choice([0, 1, 17, 1000, source.randrange(100_000)]) for _ in range(30)]
    tensors = [_random(n, source.choice(DTYPES), seed=n, offset=source.randrange(3)) for n in lengths]
    (found,) = _sums(native, tensors)
    assert found == pytest.approx(_exact(tensors), rel=2.0**-22)
    assert sum_of_squares(tensors) == found


def test_the_sum_depends_on_no_address(native):
    tensor = _random(5000, FP32)
    found = {_sum(native, [torch.cat([torch.ones(shift), tensor])[shift:]]) for shift in range(17)}
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 63, 64, 1000, BIG])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_shows(native, dtype, length, value):
    for place in {0, length // 2, length - 1}:
        tensor = _random(length, dtype)
        tensor[place] = value
        for name in native.instruction_sets():
            found = _sum(native, [_random(7, dtype), tensor], 3, name)
            assert math.isnan(found) if math.isnan(value) else found == math.inf
        assert not math.isfinite(sum_of_squares([tensor]))


def test_inf_and_nan_together_are_nan(native):
    assert all(math.isnan(found) for found in _sums(native, [torch.tensor([math.inf, math.nan, 1.0])]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 50, 1000, BIG])
@pytest.mark.parametrize("magnitude", ["largest", "smallest normal", "denormal"])
def test_squares_outside_of_the_dtype(native, dtype, length, magnitude):
    info = torch.finfo(dtype)
    value = {"largest": info.max, "smallest normal": info.tiny, "denormal": info.smallest_normal * info.eps}[magnitude]
    tensor = torch.full((length,), value, dtype=dtype)
    assert float(tensor[0]) == value != 0.0
    (found,) = _sums(native, [tensor])
    assert found == pytest.approx(length * value**2, rel=1e-7, abs=0)
    assert sum_of_squares([tensor]) == found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_few_large_numbers_among_small_ones(native, dtype):
    tensor = torch.full((BIG,), torch.finfo(dtype).tiny, dtype=dtype)
    tensor[::1001] = torch.finfo(dtype).max
    (found,) = _sums(native, [tensor])
    assert found == pytest.approx(_exact([tensor]), rel=TOLERANCE[dtype])


def test_zeros_and_nothing(native):
    zeros = [torch.zeros(1000), torch.empty(0, dtype=BF16), torch.zeros(99, dtype=FP16)]
    for tensors in ([], [torch.empty(0)], zeros):
        assert _sums(native, tensors) == {0.0}
        assert sum_of_squares(tensors) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_agrees(native, dtype, monkeypatch):
    tensors = [_random(length, dtype, seed=length) for length in (0, 1, 200, 70_000)]
    found = sum_of_squares(tensors)
    assert supports_sum_of_squares(tensors)
    monkeypatch.setenv("BOOSTER_KERNELS", "reference")
    assert not supports_sum_of_squares(tensors)
    assert sum_of_squares(tensors) == pytest.approx(found, rel=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0, dtype=torch.float64),
        torch.arange(40.0)[::3],
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["transposed", "fp64", "strided", "negative bit"],
)
def test_other_tensors_take_the_reference(native, tensor):
    assert not supports_sum_of_squares([torch.ones(3), tensor])
    assert sum_of_squares([torch.ones(3), tensor]) == pytest.approx(3 + float(tensor.double().square().sum()))


def test_tensors_without_memory_are_not_read(native):
    assert flat_buffers._table([torch._efficientzerotensor(5)]) is None
    assert not supports_sum_of_squares([torch.ones(3, device="meta")])
    assert not supports_sum_of_squares([torch.ones(3).to_sparse()])


def test_gradients_of_parameters(native):
    parameter = torch.nn.Parameter(torch.full((3, 5), 2.0))
    assert sum_of_squares([parameter, parameter]) == 2 * 15 * 4.0


# Pack and unpack.


def _expected(tensor, dtype, scale):
    return (tensor.float() * scale).to(dtype)


def _assert_same_bits(found, expected):
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan].view(BITS[found.dtype]), expected[~is_nan].view(BITS[found.dtype]))


def _special(dtype):
    """Returns every number of 16 bits, or fp32 bits of all magnitudes."""
    if dtype is FP32:
        bits = torch.randint(-(2**31), 2**31, (100_003,), generator=torch.Generator().manual_seed(1))
        return torch.cat([bits.to(torch.int32).view(FP32), _random(30_000, FP32)])
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


SCALES = [0.37, -1024.0, 2.0**-20, 3e38]


# By default every pair of formats with two of the scales, one of them the odd one.
@pytest.mark.parametrize(
    ("scale", "dtype", "target"),
    [
        pytest.param(scale, dtype, target, marks=() if index in (0, 1 + (row + column) % 3) else pytest.mark.slow)
        for index, scale in enumerate(SCALES)
        for row, dtype in enumerate(DTYPES)
        for column, target in enumerate(DTYPES)
    ],
)
def test_products_are_rounded_once(native, dtype, target, scale):
    source = _special(dtype)
    flat, back = torch.empty(len(source), dtype=target), torch.empty_like(source)
    expected = _expected(source, target, scale)
    for name in native.instruction_sets():
        table, place = flat_buffers._table([source]), (flat.data_ptr(), flat_buffers._DTYPE_CODES[target])
        native.pack(table, *place, scale, 2, name)
        _assert_same_bits(flat, expected)
        native.unpack(flat_buffers._table([back]), *place, 0.5, 2, name)
        _assert_same_bits(back, _expected(expected, dtype, 0.5))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_lengths_touch_nothing_else(native, dtype, target):
    code = flat_buffers._DTYPE_CODES[target]
    for length in range(71):
        source = _random(length, dtype, seed=length, offset=length % 3)
        memory = torch.full((length + 90,), 7.0, dtype=target)
        start = length % 11
        for name in native.instruction_sets():
            memory.fill_(7.0)
            native.pack(flat_buffers._table([source]), memory[start:].data_ptr(), code, 0.3, 1, name)
            assert torch.equal(memory[start : start + length], _expected(source, target, 0.3))
            assert memory[:start].eq(7).all()
            assert memory[start + length :].eq(7).all()


def _many(dtype, seed, most_numel=150_000):
    source = random.Random(seed)
    lengths = [0, 1, *(source.randrange(most_numel) for _ in range(8)), 0, 300_000, 5]
    return [_random(length, dtype, seed=length, offset=source.randrange(2)) for length in lengths]


@pytest.mark.parametrize(
    ("dtype", "target", "seed"), [(FP32, BF16, 1), (BF16, FP32, 2), (FP16, FP16, 3), (FP32, FP32, 4)]
)
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_many_tensors_there_and_back(monkeypatch, dtype, target, seed, scale, mode):
    monkeypatch.setenv("BOOSTER_KERNELS", mode)
    monkeypatch.setattr(flat_buffers, "_MIN_NUMEL", 0)
    tensors = [one.view(-1, 1) for one in _many(dtype, seed)]
    flat = torch.empty(sum(map(len, tensors)), dtype=target)
    pack(tensors, flat, scale)
    expected = torch.cat([_expected(one.view(-1), target, scale) for one in tensors])
    assert torch.equal(flat, expected)
    back = [torch.full_like(one, 9.0) for one in tensors]
    unpack(flat, back, scale)
    for one, part in zip(back, flat.split([len(one) for one in back]), strict=True):
        assert torch.equal(one.view(-1), _expected(part, dtype, scale))


@pytest.mark.parametrize("shift", [0, 1])
def test_results_that_go_past_the_caches(native, shift):
    source = _random(STREAMED, BF16)
    flat = torch.zeros(STREAMED + 3, dtype=BF16)
    for name in native.instruction_sets():
        flat.zero_()
        native.pack(flat_buffers._table([source[:5], source[5:]]), flat[shift:].data_ptr(), 1, 0.3, 2, name)
        assert torch.equal(flat[shift : shift + STREAMED], _expected(source, BF16, 0.3))
        assert flat[:shift].eq(0).all()
        assert flat[shift + STREAMED :].eq(0).all()


def test_only_what_is_faster_is_compiled(native, monkeypatch):
    taken = []

    class Recorder:
        @staticmethod
        def pack(*_):
            taken.append("pack")

    monkeypatch.setattr(flat_buffers, "load_kernel", lambda name: Recorder)
    long, many = [_random(40_000, FP32)], [_random(10, FP32) for _ in range(100)]
    pack(long, torch.empty(40_000, dtype=BF16), 0.5)
    monkeypatch.setattr(flat_buffers, "_MIN_NUMEL", 0)
    pack(long, torch.empty(40_000, dtype=BF16))
    pack(long, torch.empty(40_000), 0.5)
    pack(many, torch.empty(1000, dtype=BF16), 0.5)
    pack([long[0].view(2, -1).t()], torch.empty(40_000, dtype=BF16), 0.5)
    assert taken == []
    pack(long, torch.empty(40_000, dtype=BF16), 0.5)
    assert taken == ["pack"]


def test_tensors_that_are_not_contiguous_are_filled(native, monkeypatch):
    monkeypatch.setattr(flat_buffers, "_MIN_NUMEL", 0)
    flat = _random(120_000, FP32)
    target = torch.zeros(300, 400, dtype=BF16).t()
    unpack(flat, [target], 0.5)
    assert torch.equal(target, (flat * 0.5).bfloat16().view(400, 300))


def test_other_dtypes_are_copied(native):
    source, flat = torch.arange(40_000, dtype=torch.float64), torch.empty(40_000)
    pack([source], flat, 0.1)
    assert torch.equal(flat, (source * 0.1).float())


@pytest.mark.parametrize("shape", [(9,), (11,), (2, 5)])
def test_a_buffer_of_another_size_is_our_own_mistake(shape):
    with pytest.raises(AssertionError, match="for tensors of 10 elements"):
        pack([torch.ones(4), torch.ones(6)], torch.empty(shape))
    with pytest.raises(AssertionError, match="for tensors of 10 elements"):
        unpack(torch.empty(shape), [torch.ones(4), torch.ones(6)])


def test_autograd_notices_what_was_written(native, monkeypatch):
    monkeypatch.setattr(flat_buffers, "_MIN_NUMEL", 0)
    weight, half = torch.ones(40_000, requires_grad=True), torch.ones(40_000, dtype=BF16)
    for write in (lambda one: pack([half], one, 0.5), lambda one: unpack(half, [one], 0.5)):
        saved = torch.ones(40_000)
        product = (weight * saved).sum()
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_an_unknown_instruction_set_is_refused(native):
    with pytest.raises(ValueError, match="abacus"):
        _sum(native, [torch.ones(3)], 1, "abacus")
