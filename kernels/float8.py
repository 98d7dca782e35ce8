"""float8 matrix multiplication with one scale per tensor: native where the device has it, emulated elsewhere."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

FORWARD_DTYPE = torch.float8_e4m3fn  # 3 bits of mantissa, up to 448: values and weights
GRADIENT_DTYPE = torch.float8_e5m2  # 2 bits of mantissa, up to 57344: gradients, which differ more in size

_SMALLEST_SCALE = 2.0**-126  # the smallest fp32 with a finite reciprocal
_NATIVE_MULTIPLE = 16  # the hardware takes inner dimensions that are multiples of this


def quantize(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor in float8 and the scale to multiply it with to get the values back.

    The scale is a 0-dim fp32 tensor on the same device, such that the largest magnitude becomes the format's largest
    number; 1 for zeros and empty tensors. An inf or nan anywhere makes every value of the product nan, so an overflow
    is seen. No host synchronisation.

    Args:
        tensor: Any floating tensor.
        dtype: `FORWARD_DTYPE` or `GRADIENT_DTYPE`.
    """
    limit = torch.finfo(dtype).max
    if tensor.numel() == 0:
        return tensor.to(dtype), torch.ones((), dtype=torch.float32, device=tensor.device)
    low, high = torch.aminmax(tensor)
    largest = torch.maximum(-low, high).float()
    scale = torch.where(largest == 0, 1.0, largest / limit).clamp_min(_SMALLEST_SCALE)
    # Casts of larger numbers saturate on some devices and give nan on others, and rounding may exceed the limit.
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
    """Return `(a * scale_a) @ (b * scale_b)` in `out_dtype`, of float8 matrices.

    Args:
        a: (M, K), as `quantize` gave it.
        b: (K, N), as `quantize` gave it.
        scale_a: `a`'s scale.
        scale_b: `b`'s scale.
        out_dtype: float32, bfloat16 or float16.
        emulate: True: multiply in fp32. False: the device's float8 instructions, for any size. None: those where an
            accelerator has them. The CPU's own float8 product adds up in another order than the emulation and was
            slower (0.6 times its speed, torch 2.13, 1024 x 1024), so None emulates there.
    """
    if emulate is None:
        emulate = a.device.type == "cpu" or native_problem(a.device.type, a.dtype, b.dtype) is not None
    if emulate or 0 in (*a.shape, *b.shape):
        return scaled_matmul_reference(a, b, scale_a, scale_b, out_dtype)
    return _native(a, b, scale_a, scale_b, out_dtype)


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Return what `scaled_matmul` does, by multiplying in fp32 and rounding once; see there.

    Products of float8 numbers are exact in fp32, so only the order of the sum can differ from the hardware's.
    """
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in bfloat16
        # One scale after the other: their product alone could leave fp32's range where the result does not.
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


@functools.cache
def native_problem(
    device_type: str, dtype_a: torch.dtype = FORWARD_DTYPE, dtype_b: torch.dtype = FORWARD_DTYPE
) -> str | None:
    """Return why this kind of device can't multiply these float8 formats itself; None if it can.

    Found out by one tiny product, once a process.

    Args:
        device_type: "cpu", "cuda", ...
        dtype_a: The left matrix's format.
        dtype_b: The right matrix's format.
    """
    if not _has_public_function() and not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no scaled matmul"
    try:
        ones = torch.ones(_NATIVE_MULTIPLE, _NATIVE_MULTIPLE, device=device_type)
        scale = torch.ones((), device=device_type)
        product = _native(ones.to(dtype_a), ones.to(dtype_b), scale, scale, torch.float32)
        is_right = bool((product == float(_NATIVE_MULTIPLE)).all())
    except (RuntimeError, AssertionError, ValueError) as error:  # each device and each build refuses in its own way
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None if is_right else f"the float8 product on {device_type} is wrong"


def _native(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = a.shape[0], b.shape[1]
    # The instructions read `a` by rows and `b` by columns.
    a = _padded(a).contiguous()
    b = _padded(b).t().contiguous().t()
    if _has_public_function():
        one_scale = F.ScalingType.TensorWise
        product = F.scaled_mm(a, b, scale_a, one_scale, scale_b, one_scale, output_dtype=out_dtype)
    else:
        product = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype)
    return product[:rows, :columns]


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = (-size % _NATIVE_MULTIPLE for size in matrix.shape)
    if rows == 0 and columns == 0:
        return matrix
    # Padded as bytes, of which zero is zero in every float8 format: not every device pads float8 tensors.
    return F.pad(matrix.view(torch.uint8), (0, columns, 0, rows)).view(matrix.dtype)


def _has_public_function() -> bool:
    return hasattr(F, "scaled_mm") and hasattr(F, "ScalingType")
