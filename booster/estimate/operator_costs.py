"""Cost of an operator call on fake tensors: its kind, floating-point operations and bytes, and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from booster.pytree import iter_tensors

from .machine_profile import MachineProfile

_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "flex_attention")
# Functions that take more than their bytes on a CPU, the second line several times as much as the first.
_SPECIAL = ("gelu", "exp", "log", "sigmoid", "silu", "sqrt")
_TRANSCENDENTAL = ("tanh", "softmax", "erf", "mish", "softplus", "sin", "cos")
# Derivatives from what forward has computed.
_ARITHMETIC = ("tanh_backward", "_softmax_backward_data", "_log_softmax_backward_data", "sigmoid_backward")
_RANDOM = ("normal_", "bernoulli", "dropout", "rand", "uniform", "exponential")
_REDUCTIONS = ("layer_norm", "rms_norm", "batch_norm", "group_norm", "norm", "max", "min", "var", "nll")
_INDEXING = ("embedding", "index", "gather", "scatter", "take", "sort", "topk")
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "is_", "_local_scalar", "sym_")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Cost of one call.

    Attributes:
        kind: Kind of operator, a key of `MachineProfile.operators`.
        dtype: dtype of its computation, such as "float32".
        flops: Floating-point operations.
        num_bytes: Bytes that it reads and writes.
        batch: Number of independent products that it consists of.
    """

    kind: str
    dtype: str
    flops: float
    num_bytes: float
    batch: int = 1

    def seconds(self, profile: MachineProfile, *, is_cold: bool = False) -> float:
        """Return the time of the kernel; tensors are in no cache if it is cold, as in the optimizer's step."""
        if self.flops:
            compute = profile.curve(self.kind, self.dtype).seconds(self.flops / self.batch) * self.batch
            return max(compute, self.num_bytes / profile.curve("inplace", self.dtype).rate)
        if is_cold:  # a result's memory was used before
            kind = "inplace" if self.kind == "elementwise" else self.kind
            return self.num_bytes / profile.curve(kind, self.dtype).rate
        return profile.curve(self.kind, self.dtype).seconds(self.num_bytes)


# Found once for each function, as an estimate makes very many calls.
@cache
def is_call(func: Any) -> bool:
    """Return whether a call takes the time of one, though it may compute nothing, as views do."""
    return not func._schema.name.startswith("profiler::")


def operator_cost(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OperatorCost | None:
    """Return the cost of a call, or None for views and allocations, which cost less than a call."""
    if _computes_nothing(func):
        return None
    name = _name(func)
    given = list(iter_tensors((args, dict(kwargs))))
    written = [] if result is None else list(iter_tensors(result))
    floating = [one.dtype for one in (*given, *written) if one.is_floating_point() and one.dim() > 0]
    dtype = str(floating[0] if floating else torch.float32).removeprefix("torch.")
    num_bytes = float(sum(map(_touched_bytes, (*given, *written))))
    flops, batch = _flops(func, name, args, kwargs, result)
    if flops:
        kind = "attention" if any(one in name for one in _ATTENTION) else "matmul"
        return OperatorCost("convolution" if "conv" in name else kind, dtype, flops, num_bytes, batch)
    if name.startswith(("embedding", *_INDEXING)):  # reads rows, not the table
        tables = max((_touched_bytes(one) for one in given), default=0)
        num_bytes = max(num_bytes - tables, 2.0 * sum(map(_touched_bytes, written)))
    return OperatorCost(_byte_kind(func), dtype, 0.0, num_bytes)


class CostRecorder(TorchDispatchMode):
    """Dispatch mode that records the costs of operators, and the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[OperatorCost] = []
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        cost = None if func is torch.ops.prim.device.default else operator_cost(func, args, kwargs or {}, result)
        self.num_calls += is_call(func)
        self.costs += [] if cost is None else [cost]
        return result


@cache
def _name(func: Any) -> str:
    return str(func._schema.name.rpartition("::")[2])


@cache
def _computes_nothing(func: Any) -> bool:
    """Return whether a function returns a view, or memory."""
    aliases = [one.alias_info for one in func._schema.returns]
    is_view = bool(aliases) and all(one is not None and not one.is_write for one in aliases)
    return is_view or not is_call(func) or _name(func).startswith(_FREE)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements, each once where a tensor is expanded."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= 1 if stride == 0 and size > 0 else size
    return numel * tensor.itemsize


@cache
def _byte_kind(func: Any) -> str:
    name = _name(func)
    if any(one in name for one in _INDEXING):
        return "index"
    if any(one in name for one in _RANDOM):
        return "random"
    if name not in _ARITHMETIC and any(one in name for one in _TRANSCENDENTAL):
        return "transcendental"
    if name not in _ARITHMETIC and any(one in name for one in _SPECIAL):
        return "special"
    if any(one in name for one in _REDUCTIONS):
        return "reduction"
    return "inplace" if func._schema.is_mutable else "elementwise"


def _flops(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[float, int]:
    """Return the floating-point operations of a call, and the number of independent products."""
    if "for_cpu" in name and "attention" in name:  # torch counts those of accelerators only
        is_backward = "backward" in name
        query, key = args[1:3] if is_backward else args[:2]
        batch = query.shape[0] * query.shape[1]
        product = 2.0 * batch * query.shape[2] * key.shape[2] * query.shape[3]
        return (5 if is_backward else 2) * product, batch
    if name == "_grouped_mm":
        rows, width = args[0].shape[-2:]
        return 2.0 * rows * width * args[1].shape[-1], 1
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0.0, 1
    flops = float(count(*args, **kwargs, out_val=result))
    batch = 1
    if name in ("bmm", "baddbmm"):
        batch = args[-1].shape[0]
    elif any(one in name for one in _ATTENTION):
        query = args[1] if "backward" in name else args[0]
        batch = query.shape[0] * query.shape[1] if query.dim() == 4 else 1
    return flops, max(1, batch)
