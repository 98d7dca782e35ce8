"""float8: quantisation, both matrix products, and the linear layer against the formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from booster.kernels import float8
from booster.kernels.float8 import (
    FORWARD_DTYPE,
    GRADIENT_DTYPE,
    native_problem,
    quantize,
    scaled_matmul,
    scaled_matmul_reference,
)
from booster.kernels.loader import kernel_status
from booster.mixed_precision.fp8 import Float8Linear

FORMATS = [FORWARD_DTYPE, GRADIENT_DTYPE]


def numbers_of(dtype):
    """Returns every finite number of a float8 format, sorted."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_quantize_takes_the_nearest_number(dtype, source):
    torch.manual_seed(0)
    tensor = (torch.randn(7, 11) * 3).to(source)
    quantised, scale = quantize(tensor, dtype)
    assert (quantised.dtype, scale.dtype, scale.shape) == (dtype, torch.float32, ())
    limit = torch.finfo(dtype).max
    assert torch.equal(scale, tensor.abs().max().float() / limit)
    assert quantised.double().abs().max() == limit
    wanted = (tensor.float() / scale).double()
    distance = (wanted[..., None] - numbers_of(dtype)).abs().min(-1).values
    assert torch.equal((wanted - quantised.double()).abs(), distance)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-30, 1e-5, 1.0, 1e30, 3e38])
def test_any_magnitude_survives(dtype, magnitude):
    tensor = torch.tensor([magnitude, -magnitude / 2, 0.0])
    quantised, scale = quantize(tensor, dtype)
    assert torch.isfinite(1 / scale)
    back = quantised.float() * scale
    # Below the smallest scale there are no more digits than fp32's own subnormals have.
    assert torch.allclose(back, tensor, rtol=0.13, atol=2.0**-126)
    assert back.isfinite().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_and_nothing(dtype):
    for tensor in (torch.zeros(3, 4), torch.zeros(0, 4)):
        quantised, scale = quantize(tensor, dtype)
        assert scale == 1
        assert quantised.shape == tensor.shape
        assert torch.equal(quantised.float(), tensor)


@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (4, 0), (0, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_row_is_quantised_as_if_alone(shape, dim):
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(-20, 20, shape[1])
    quantised, scale = quantize(matrix, FORWARD_DTYPE, dim)
    assert scale.shape == tuple(1 if index == dim else size for index, size in enumerate(shape))
    for row, found, own in zip(matrix.unbind(1 - dim), quantised.unbind(1 - dim), scale.unbind(1 - dim), strict=True):
        expected, expected_scale = quantize(row, FORWARD_DTYPE)
        assert torch.equal(found.float(), expected.float())
        assert own.item() == expected_scale


def skip_unless_native() -> None:
    for dtype in FORMATS:
        for by_rows in (False, True):
            if (problem := native_problem("cpu", dtype, by_rows=by_rows)) is not None:
                pytest.skip(problem[:200])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("emulate", [True, False])
def test_an_overflow_is_seen_in_the_whole_product(bad, emulate):
    if not emulate:
        skip_unless_native()
    a, b = torch.randn(3, 5), torch.randn(5, 4)
    a[1, 2] = bad
    for dtype in FORMATS:
        product = product_of(a, b, torch.float32, dtype, emulate=emulate)
        assert product.isnan().all()


def product_of(a, b, out_dtype=torch.float32, dtype_a=FORWARD_DTYPE, *, emulate=True, by_rows=False):
    a_q, scale_a = quantize(a, dtype_a, 1 if by_rows else None)
    b_q, scale_b = quantize(b, FORWARD_DTYPE, 0 if by_rows else None)
    return scaled_matmul(a_q, b_q, scale_a, scale_b, out_dtype, emulate=emulate)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype_a", FORMATS)
def test_reference_equals_the_formula_in_float64(dtype_a, out_dtype):
    torch.manual_seed(0)
    a_q, scale_a = quantize(torch.randn(6, 9) * 10, dtype_a)
    b_q, scale_b = quantize(torch.randn(9, 5) * 0.1, FORWARD_DTYPE)
    found = scaled_matmul_reference(a_q, b_q, scale_a, scale_b, out_dtype)
    exact = (a_q.double() * scale_a.double()) @ (b_q.double() * scale_b.double())
    assert found.dtype == out_dtype
    # One rounding to the format, and fp32's error over a sum of 9 terms before it.
    limit = torch.finfo(out_dtype).eps / 2 * exact.abs() + 12 * 2.0**-24 * exact.abs().max()
    assert ((found.double() - exact).abs() <= limit).all()


def test_reference_does_not_run_under_autocast():
    a_q, scale = quantize(torch.randn(8, 8), FORWARD_DTYPE)
    plain = scaled_matmul_reference(a_q, a_q, scale, scale, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_matmul_reference(a_q, a_q, scale, scale, torch.float32), plain)


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 32, 48), (3, 5, 7), (17, 16, 33), (64, 100, 2)])
@pytest.mark.parametrize("dtype_a", FORMATS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_rows", [False, True])
def test_native_equals_reference(shape, dtype_a, out_dtype, by_rows):
    skip_unless_native()
    torch.manual_seed(0)
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner), torch.randn(columns, inner).t()
    native = product_of(a, b, out_dtype, dtype_a, emulate=False, by_rows=by_rows).double()
    reference = product_of(a, b, out_dtype, dtype_a, by_rows=by_rows).double()
    assert native.shape == (rows, columns)
    # The sums differ in order alone: a few fp32 units of the largest, and one unit where that flips a rounding.
    limit = torch.finfo(out_dtype).eps * reference.abs() + inner * 2.0**-23 * reference.abs().max()
    assert ((native - reference).abs() <= limit).all()


def test_scales_of_a_transposed_matrix():
    skip_unless_native()
    torch.manual_seed(0)
    a_q, scale_a = quantize(torch.randn(32, 16), FORWARD_DTYPE, 0)
    b_q, scale_b = quantize(torch.randn(48, 32), FORWARD_DTYPE, 1)
    given = a_q.t(), b_q.t(), scale_a.t(), scale_b.t()
    # The stride of a dimension of size 1 is whatever it was; the product of CUDA compares it.
    assert given[2].is_contiguous()
    assert given[2].stride() != (1, 1)
    native, reference = (scaled_matmul(*given, torch.float32, emulate=emulate) for emulate in (False, True))
    torch.testing.assert_close(native, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("emulate", [None, True, False])
def test_empty_products(emulate):
    assert product_of(torch.randn(0, 4), torch.randn(4, 3), emulate=emulate).shape == (0, 3)
    assert torch.equal(product_of(torch.randn(2, 0), torch.randn(0, 3), emulate=emulate), torch.zeros(2, 3))


def test_the_cpu_emulates_unless_told_otherwise():
    torch.manual_seed(0)
    a, b = torch.randn(32, 64), torch.randn(64, 32)
    assert torch.equal(product_of(a, b, emulate=None), product_of(a, b, emulate=True))


def test_native_problem_names_the_cause():
    assert "no-such-device" in native_problem("no-such-device")


def test_a_device_whose_product_is_wrong_is_not_used(monkeypatch):
    monkeypatch.setattr("booster.kernels.float8._native", lambda *_, **__: torch.zeros(16, 16))
    assert "wrong" in native_problem.__wrapped__("cpu")


def test_kernel_status_lists_the_matmul():
    [status] = [kernel for kernel in kernel_status() if kernel.name == "float8 matmul"]
    assert status.status == "reference"
    assert "CPU" in status.reason
    [status] = [kernel for kernel in kernel_status("no-such-device") if kernel.name == "float8 matmul"]
    assert status.status == "reference"


def fake_quantised(tensor, dtype):
    """Quantises and dequantises, one number after the other."""
    largest = max((abs(value) for value in tensor.flatten().tolist()), default=0.0)
    limit = torch.finfo(dtype).max
    scale = float(torch.tensor(largest / limit, dtype=torch.float32)) if largest else 1.0
    grid = numbers_of(dtype)
    values = []
    for value in tensor.flatten().tolist():
        wanted = float(torch.tensor(value / scale, dtype=torch.float32))
        near = (grid - max(-limit, min(limit, wanted))).abs()
        candidates = grid[near == near.min()]  # two at a tie, of which the even one is taken
        even = [c for c in candidates.tolist() if torch.tensor(c).to(dtype).view(torch.uint8) % 2 == 0]
        values.append((even[0] if len(candidates) > 1 else float(candidates[0])) * scale)
    return torch.tensor(values, dtype=torch.float64).reshape(tensor.shape)


def fake_rows(matrix, dim):
    """Quantises and dequantises what is summed over, one row or column after the other."""
    return torch.stack([fake_quantised(row, FORWARD_DTYPE) for row in matrix.unbind(1 - dim)], 1 - dim)


def by_formula(x, weight, bias, grad, recipe="dynamic"):
    """Returns output and gradients of the layer for matrices, in float64."""
    if recipe == "rowwise":
        output = fake_rows(x, 1) @ fake_rows(weight, 1).t() + (0 if bias is None else bias.double())
        grad_input = fake_rows(grad, 1) @ fake_rows(weight, 0)
        return output, grad_input, fake_rows(grad, 0).t() @ fake_rows(x, 0), grad.double().sum(0)
    x_q, weight_q = fake_quantised(x, FORWARD_DTYPE), fake_quantised(weight, FORWARD_DTYPE)
    grad_q = fake_quantised(grad, GRADIENT_DTYPE)
    output = x_q @ weight_q.t() + (0 if bias is None else bias.double())
    return output, grad_q @ weight_q, grad_q.t() @ x_q, grad.double().sum(0)


def make_layer(inner, columns, *, bias=True, emulate=None, recipe="dynamic"):
    torch.manual_seed(0)
    layer = nn.Linear(inner, columns, bias=bias)
    Float8Linear.convert_(layer, emulate, recipe)
    return layer


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 4)])
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
def test_layer_equals_the_formulas(recipe, leading, bias, emulate):
    if not emulate:
        skip_unless_native()
    layer = make_layer(7, 5, bias=bias, emulate=emulate, recipe=recipe)
    x = torch.randn(*leading, 7, requires_grad=True)
    output = layer(x)
    grad = torch.randn(*leading, 5)
    output.backward(grad)
    expected = by_formula(
        x.detach().reshape(-1, 7),
        layer.weight.detach(),
        None if layer.bias is None else layer.bias.detach(),
        grad.reshape(-1, 5),
        recipe,
    )
    found = [output.reshape(-1, 5), x.grad.reshape(-1, 7), layer.weight.grad]
    found += [] if layer.bias is None else [layer.bias.grad]
    assert output.shape == (*leading, 5)
    for ours, theirs in zip(found, expected, strict=False):
        # fp32 sums of at most 24 terms.
        assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
def test_operands_are_as_the_hardware_needs_them(recipe, monkeypatch):
    """`a` by rows and `b` by columns, sizes that are multiples of 16, and precise sums of gradients."""
    skip_unless_native()
    if not hasattr(torch.nn.functional, "scaled_mm"):
        pytest.skip("this torch has another name for the product")
    layer, x = make_layer(48, 20, emulate=False, recipe=recipe), torch.randn(32, 48, requires_grad=True)
    real, calls = torch.nn.functional.scaled_mm, []

    def record(a, b, scale_a, kind_a, scale_b, kind_b, **options):
        calls.append((a, b, scale_a, scale_b, options["use_fast_accum"]))
        assert kind_a == kind_b
        return real(a, b, scale_a, kind_a, scale_b, kind_b, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", record)
    layer(x).sum().backward()
    assert [is_fast for *_, is_fast in calls] == [True, False, False]
    for a, b, scale_a, scale_b, _ in calls:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert all(size % 16 == 0 for size in (*a.shape, *b.shape))
        shapes = ((len(a), 1), (1, b.shape[1])) if recipe == "rowwise" else ((), ())
        assert (scale_a.shape, scale_b.shape) == shapes
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
    # What the layer holds is multiplied without a copy in the forward.
    assert calls[0][0].shape == (32, 48)


def test_large_values_cost_other_rows_no_precision():
    layers = {recipe: make_layer(16, 16, bias=False, recipe=recipe) for recipe in ("dynamic", "rowwise")}
    x = torch.randn(8, 16)
    x[0] *= 1e6
    exact = x[1:] @ layers["dynamic"].weight.t()
    errors = {recipe: (layer(x)[1:] - exact).norm() / exact.norm() for recipe, layer in layers.items()}
    assert errors["rowwise"] < 0.05
    assert errors["dynamic"] > 0.5  # most of them are below the smallest number


# Of torch's compiler itself, whenever it meets a function with a backward of its own.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise"])
def test_layer_is_compiled_in_one_graph(recipe):
    layer, x = make_layer(16, 16, recipe=recipe), torch.randn(4, 16, requires_grad=True)
    expected = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = compiled(x)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), x)[0])


def test_what_the_device_can_is_a_constant_of_a_compiled_graph():
    def choose(x):
        return x + 1 if float8._is_native("cpu", FORWARD_DTYPE, FORWARD_DTYPE, True) else x

    found = torch.compile(choose, backend="eager", fullgraph=True)(torch.zeros(1))
    assert found.item() == (native_problem("cpu", by_rows=True) is None)


def test_layer_without_rows():
    layer = make_layer(4, 3)
    x = torch.randn(0, 4, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    assert output.shape == (0, 3)
    assert x.grad.shape == (0, 4)
    assert torch.equal(layer.weight.grad, torch.zeros(3, 4))
    assert torch.equal(layer.bias.grad, torch.zeros(3))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_formats_of_output_and_gradients(source):
    layer = make_layer(4, 3)
    x = torch.randn(2, 4, dtype=source, requires_grad=True)
    assert layer(x).dtype == source
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert x.grad.dtype == source
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_only_the_gradients_that_are_needed():
    layer = make_layer(4, 3)
    layer.weight.requires_grad_(False)
    x = torch.randn(2, 4)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((3,), 2.0))
    layer.bias.requires_grad_(False)
    assert not layer(x).requires_grad
    x.requires_grad_(True)
    layer(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert layer(x).shape == (2, 3)


def test_an_overflowing_gradient_reaches_input_and_weight():
    layer = make_layer(4, 3)
    x = torch.randn(2, 4, requires_grad=True)
    grad = torch.zeros(2, 3)
    grad[0, 0] = math.inf
    layer(x).backward(grad)
    assert x.grad.isnan().all()
    assert layer.weight.grad.isnan().all()
    assert layer.bias.grad[0] == math.inf


def test_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    layer = make_layer(6, 6)
    x = torch.randn(3, 6, requires_grad=True)
    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)
