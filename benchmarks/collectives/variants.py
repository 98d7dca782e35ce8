"""Variants of benchmarks/collectives: each collective by torch's own call, by messages and through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from _harness.engine import Engine
from _harness.pair import Step

from booster.comm import (
    all_reduce_sum,
    all_to_all_single,
    broadcast,
    start_all_gather,
    start_reduce_scatter,
    transport,
    use_shared_memory,
)

__all__ = ["DTYPES", "MEMORY", "MESSAGES", "OPERATIONS", "TORCH", "Buffers", "calls_a_step", "variants"]

TORCH, MESSAGES, MEMORY = "torch", "messages", "shared memory"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_CHECKED = 1024
_BYTES_A_STEP = 2 * 2**20  # short calls are repeated: the ranks come to a step some hundred microseconds apart

# torch 2.13 renamed both and warns at each call of the old names.
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Buffers(Protocol):
    """What a case says about its buffers: elements and bytes of the whole one, format, and operation."""

    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


def calls_a_step(num_bytes: int) -> int:
    """Returns how often a step makes a call on so many bytes."""
    return max(1, _BYTES_A_STEP // num_bytes)


def variants(case: Buffers) -> list[Engine]:
    """Return the variants of this operation. Messages are this package's own where gloo's call is slow."""
    names = [TORCH, MESSAGES, MEMORY] if case.operation in _BY_MESSAGES else [TORCH, MEMORY]
    return [Engine(name=name, build=partial(_build, case, name)) for name in names]


def _build(case: Buffers, name: str) -> Step:
    if name == TORCH:
        return _TORCH_STEPS[case.operation](case, None)
    group = dist.new_group(list(range(dist.get_world_size())))
    use_shared_memory(name == MEMORY, only_in=group)
    if (transport(group) == MEMORY) != (name == MEMORY):
        raise RuntimeError(f"a group that should use {name} uses {transport(group)}")
    return _OUR_STEPS[case.operation](case, group)


def _torch_reduce_scatter_step(case: Buffers, group: dist.ProcessGroup | None) -> Step:
    payload = _filled(case)
    output = torch.zeros(case.numel // dist.get_world_size(), dtype=payload.dtype)
    return _step(case.num_bytes, lambda: _torch_reduce_scatter(output, payload, group=group), output)


def _our_reduce_scatter_step(case: Buffers, group: dist.ProcessGroup | None) -> Step:
    payload = _filled(case)
    output = torch.zeros(case.numel // dist.get_world_size(), dtype=payload.dtype)
    received = torch.zeros(payload.numel() - output.numel(), dtype=payload.dtype)
    return _step(
        case.num_bytes, lambda: start_reduce_scatter(payload, group, received).wait(output, accumulate=False), output
    )


def _torch_all_gather_step(case: Buffers, group: dist.ProcessGroup | None) -> Step:
    own = _own_part(_filled(case)).clone()
    buffer = torch.zeros(case.numel, dtype=own.dtype)
    return _step(case.num_bytes, lambda: _torch_all_gather(buffer, own, group=group), buffer)


def _our_all_gather_step(case: Buffers, group: dist.ProcessGroup | None) -> Step:
    own = _own_part(_filled(case))
    buffer = torch.zeros(case.numel, dtype=own.dtype)
    _own_part(buffer).copy_(own)
    return _step(case.num_bytes, lambda: start_all_gather(buffer, group).wait(), buffer)


def _all_reduce_step(call: Callable[..., object]) -> Callable[[Buffers, dist.ProcessGroup | None], Step]:
    def build(case: Buffers, group: dist.ProcessGroup | None) -> Step:
        tensor = torch.zeros(case.numel, dtype=DTYPES[case.dtype])  # of zeros, which stay what they are
        return _step(case.num_bytes, lambda: call(tensor, group=group), tensor)

    return build


def _all_to_all_step(call: Callable[..., object]) -> Callable[[Buffers, dist.ProcessGroup | None], Step]:
    def build(case: Buffers, group: dist.ProcessGroup | None) -> Step:
        payload = _filled(case)
        output = torch.zeros_like(payload)
        return _step(case.num_bytes, lambda: call(output, payload, group=group), output)

    return build


def _torch_broadcast_step(case: Buffers, group: dist.ProcessGroup | None) -> Step:
    tensor = _filled(case)
    return _step(case.num_bytes, lambda: dist.broadcast(tensor, src=0, group=group), tensor)


def _our_broadcast_step(case: Buffers, group: dist.ProcessGroup | None) -> Step:
    tensor = _filled(case)
    return _step(case.num_bytes, lambda: broadcast([tensor], group), tensor)


_TORCH_STEPS: dict[str, Callable[[Buffers, dist.ProcessGroup | None], Step]] = {
    "reduce_scatter": _torch_reduce_scatter_step,
    "all_gather": _torch_all_gather_step,
    "all_reduce": _all_reduce_step(dist.all_reduce),
    "all_to_all": _all_to_all_step(dist.all_to_all_single),
    "broadcast": _torch_broadcast_step,
}
_OUR_STEPS: dict[str, Callable[[Buffers, dist.ProcessGroup | None], Step]] = {
    "reduce_scatter": _our_reduce_scatter_step,
    "all_gather": _our_all_gather_step,
    "all_reduce": _all_reduce_step(all_reduce_sum),
    "all_to_all": _all_to_all_step(all_to_all_single),
    "broadcast": _our_broadcast_step,
}
OPERATIONS = tuple(_TORCH_STEPS)
_BY_MESSAGES = ("reduce_scatter", "all_gather")


def _step(num_bytes: int, call: Callable[[], object], result: torch.Tensor) -> Step:
    every = max(1, result.numel() // _NUM_CHECKED)
    num_calls = calls_a_step(num_bytes)

    def step(index: int) -> float:
        for _ in range(num_calls):
            call()
        return float(result[::every].float().sum())

    return step


def _filled(case: Buffers) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(case.numel, generator=generator).to(DTYPES[case.dtype])


def _own_part(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.chunk(dist.get_world_size())[dist.get_rank()]
