"""float8 matrix multiplication, scaled by tensors or by rows: native where the device supports it, else emulated."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

FORWARD_DTYPE = torch.float8_e4m3fn  # 3 bits of mantissa, up to 448: activations and weights
GRADIENT_DTYPE = torch.float8_e5m2  # 2 bits of mantissa, up to 57344: gradients, which have a larger dynamic range

_SMALLEST_SCALE = 2.0**-126  # the smallest fp32 with a finite reciprocal
_HAS_SCALED_MM = hasattr(F, "scaled_mm") and hasattr(F, "ScalingType")  # else torch._scaled_mm is used
_NATIVE_MULTIPLE = 16  # the hardware requires sizes that are multiples of this


def quantize(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor in float8 and its dequantization scale.

    The scale maps the largest magnitude to the dtype's largest number, and is 1 for zeros and empty tensors. An inf or
    nan makes every value of the product nan that it takes part in, or could share a scale with, so that overflows are
    detected. No host synchronization.

    Args:
        tensor: Floating-point tensor.
        dtype: `FORWARD_DTYPE` or `GRADIENT_DTYPE`.
        dim: Dimension of a matrix along which numbers share a scale, that over which the product will sum. Optional,
            defaults to one scale of the tensor.

    Returns:
        The tensor, and its scale in fp32 on the same device: 0-dim, or a matrix of size 1 along `dim`.
    """
    limit = torch.finfo(dtype).max
    if tensor.numel() == 0:
        shape = () if dim is None else [1 if index == dim else size for index, size in enumerate(tensor.shape)]
        return tensor.to(dtype), torch.ones(shape, dtype=torch.float32, device=tensor.device)
    low, high = torch.aminmax(tensor) if dim is None else torch.aminmax(tensor, dim=dim, keepdim=True)
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
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """Return `(a * scale_a) @ (b * scale_b)` of float8 matrices, in `out_dtype`.

    The hardware needs `a` by rows and `b` by columns: the transpose of a contiguous matrix. Others, and sizes that are
    no multiples of 16, are copied first.

    Args:
        a: Matrix (M, K) from `quantize`.
        b: Matrix (K, N) from `quantize`.
        scale_a: Scale of `a`, 0-dim or (M, 1).
        scale_b: Scale of `b`, 0-dim or (1, N), as that of `a`.
        out_dtype: float32, bfloat16 or float16. On accelerators the hardware's result is rounded to bfloat16 first if
            there is a scale for each row.
        emulate: If True, multiply in fp32; if False, use the device's float8 instructions. Optional, defaults to float8
            instructions on accelerators that have them. The CPU is emulated by default: its native float8 product sums
            in another order and was slower (0.6 times the speed, torch 2.13, 1024 x 1024).
        fast_accumulation: If True, the hardware may keep sums in its own short format (14 bits on Hopper) all the way.
    """
    if emulate is None:
        emulate = a.device.type == "cpu" or not _is_native(a.device.type, a.dtype, b.dtype, scale_a.dim() > 0)
    if emulate or 0 in (*a.shape, *b.shape):
        return scaled_matmul_reference(a, b, scale_a, scale_b, out_dtype)
    return _native(a, b, scale_a, scale_b, out_dtype, fast_accumulation=fast_accumulation)


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Emulate `scaled_matmul`: multiply in fp32 and round once.

    Products of float8 numbers are exact in fp32, so only the order of summation can differ from the hardware's.
    """
    with torch.autocast(a.device.type, enabled=False):  # autocast would multiply in bfloat16
        # One scale after the other: the product of both could overflow fp32 even if the result does not.
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_native(device_type: str, dtype_a: torch.dtype, dtype_b: torch.dtype, by_rows: bool) -> bool:
    return native_problem(device_type, dtype_a, dtype_b, by_rows=by_rows) is None


@functools.cache
def native_problem(
    device_type: str,
    dtype_a: torch.dtype = FORWARD_DTYPE,
    dtype_b: torch.dtype = FORWARD_DTYPE,
    *,
    by_rows: bool = False,
) -> str | None:
    """Return why this device type can't multiply these float8 dtypes natively, or None if it can.

    Determined by one tiny product, once per process.

    Args:
        device_type: Device type: "cpu", "cuda", ...
        dtype_a: dtype of the left matrix.
        dtype_b: dtype of the right matrix.
        by_rows: Whether each row of the left and column of the right matrix has a scale.
    """
    if not _HAS_SCALED_MM and not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no scaled matmul"
    try:
        ones = torch.ones(_NATIVE_MULTIPLE, _NATIVE_MULTIPLE, device=device_type)
        scale = torch.ones((_NATIVE_MULTIPLE, 1) if by_rows else (), device=device_type)
        product = _native(ones.to(dtype_a), ones.to(dtype_b), scale, scale.t(), torch.float32)
        is_right = bool((product == float(_NATIVE_MULTIPLE)).all())
    except (RuntimeError, AssertionError, ValueError) as error:  # the type depends on device and build of torch
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None if is_right else f"the float8 product on {device_type} is wrong"


def _native(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    rows, columns = a.shape[0], b.shape[1]
    # The hardware requires row-major `a` and column-major `b`.
    a = _padded(a).contiguous()
    b = _padded(b).t().contiguous().t()
    by_rows = scale_a.dim() > 0
    # CUDA's product with a scale for each row has no other result than bfloat16.
    result_dtype = torch.bfloat16 if by_rows and a.device.type != "cpu" else out_dtype
    if by_rows:
        # The strides of a dimension of size 1 must be those of a new tensor, too; `contiguous` leaves them as they are.
        scale_a = F.pad(scale_a.flatten(), (0, a.shape[0] - rows), value=1.0).unsqueeze(1)
        scale_b = F.pad(scale_b.flatten(), (0, b.shape[1] - columns), value=1.0).unsqueeze(0)
    if _HAS_SCALED_MM:
        kind = F.ScalingType.RowWise if by_rows else F.ScalingType.TensorWise
        product = F.scaled_mm(
            a, b, scale_a, kind, scale_b, kind, output_dtype=result_dtype, use_fast_accum=fast_accumulation
        )
    else:
        product = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=result_dtype, use_fast_accum=fast_accumulation)
    return product[:rows, :columns].to(out_dtype)


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = (-size % _NATIVE_MULTIPLE for size in matrix.shape)
    if rows == 0 and columns == 0:
        return matrix
    # Padded as bytes, as not every device can pad float8 tensors; a zero byte is 0.0 in every float8 dtype.
    return F.pad(matrix.view(torch.uint8), (0, columns, 0, rows)).view(matrix.dtype)
