"""float8 matrix multiplication with per-tensor scaling: native where the device supports it, emulated elsewhere."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

FORWARD_DTYPE = torch.float8_e4m3fn  # 3 bits of mantissa, up to 448: activations and weights
GRADIENT_DTYPE = torch.float8_e5m2  # 2 bits of mantissa, up to 57344: gradients, which have a larger dynamic range

_SMALLEST_SCALE = 2.0**-126  # the smallest fp32 with a finite reciprocal
_HAS_SCALED_MM = hasattr(F, "scaled_mm") and hasattr(F, "ScalingType")  # else torch._scaled_mm is used
_NATIVE_MULTIPLE = 16  # the hardware requires sizes that are multiples of this


def quantize(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor in float8 and its dequantization scale.

    The scale is a 0-dim fp32 tensor on the same device. It maps the largest magnitude to the dtype's largest number,
    and is 1 for zeros and empty tensors. An inf or nan anywhere makes every value of the product nan, so that overflows
    are detected. No host synchronization.

    Args:
        tensor: Floating-point tensor.
        dtype: `FORWARD_DTYPE` or `GRADIENT_DTYPE`.
    """
    limit = torch.finfo(dtype).max
    if tensor.numel() == 0:
        return tensor.to(dtype), torch.ones((), dtype=torch.float32, device=tensor.device)
    low, high = torch.aminmax(tensor)
    largest = torch.maximum(-low, high).float()
    scale = torch.where(largest == 0, 1.0, largest / limit).clamp_min(_SMALLEST_SCALE)
    # Casts of numbers over the limit saturate on some devices and give nan on others, and rounding may exceed it.
    return (tensor.float() / scale).clamp(-limit, limit).to(dtype), scale


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    emulate: bool | None = None,
) -> torch.Tensor:
    """Return `(a * scale_a) @ (b * scale_b)` of float8 matrices, in `out_dtype`.

    Args:
        a: Matrix (M, K) from `quantize`.
        b: Matrix (K, N) from `quantize`.
        scale_a: Scale of `a`.
        scale_b: Scale of `b`.
        out_dtype: float32, bfloat16 or float16.
        emulate: If True, multiply in fp32; if False, use the device's float8 instructions. Optional, defaults to float8
            instructions on accelerators that have them. The CPU is emulated by default: its native float8 product sums
            in another order and was slower (0.6 times the speed, torch 2.13, 1024 x 1024).
    """
    if emulate is None:
        emulate = a.device.type == "cpu" or native_problem(a.device.type, a.dtype, b.dtype) is not None
    if emulate or 0 in (*a.shape, *b.shape):
        return scaled_matmul_reference(a, b, scale_a, scale_b, out_dtype)
    return _native(a, b, scale_a, scale_b, out_dtype)


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Emulate `scaled_matmul`: multiply in fp32 and round once.

    Products of float8 numbers are exact in fp32, so only the order of summation can differ from the hardware's.
    """
    with torch.autocast(a.device.type, enabled=False):  # autocast would multiply in bfloat16
        # One scale after the other: the product of both could overflow fp32 even if the result does not.
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


@functools.cache
def native_problem(
    device_type: str, dtype_a: torch.dtype = FORWARD_DTYPE, dtype_b: torch.dtype = FORWARD_DTYPE
) -> str | None:
    """Return why this device type can't multiply these float8 dtypes natively, or None if it can.

    Determined by one tiny product, once per process.

    Args:
        device_type: Device type: "cpu", "cuda", ...
        dtype_a: dtype of the left matrix.
        dtype_b: dtype of the right matrix.
    """
    if not _HAS_SCALED_MM and not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no scaled matmul"
    try:
        ones = torch.ones(_NATIVE_MULTIPLE, _NATIVE_MULTIPLE, device=device_type)
        scale = torch.ones((), device=device_type)
        product = _native(ones.to(dtype_a), ones.to(dtype_b), scale, scale, torch.float32)
        is_right = bool((product == float(_NATIVE_MULTIPLE)).all())
    except (RuntimeError, AssertionError, ValueError) as error:  # the type depends on device and build of torch
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None if is_right else f"the float8 product on {device_type} is wrong"


def _native(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = a.shape[0], b.shape[1]
    # The hardware requires row-major `a` and column-major `b`.
    a = _padded(a).contiguous()
    b = _padded(b).t().contiguous().t()
    if _HAS_SCALED_MM:
        one_scale = F.ScalingType.TensorWise
        product = F.scaled_mm(a, b, scale_a, one_scale, scale_b, one_scale, output_dtype=out_dtype)
    else:
        product = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype)
    return product[:rows, :columns]


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = (-size % _NATIVE_MULTIPLE for size in matrix.shape)
    if rows == 0 and columns == 0:
        return matrix
    # Padded as bytes, as not every device can pad float8 tensors; a zero byte is 0.0 in every float8 dtype.
    return F.pad(matrix.view(torch.uint8), (0, columns, 0, rows)).view(matrix.dtype)
