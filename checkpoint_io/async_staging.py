"""Copies what a rank writes into host memory that is kept from save to save, so that the training may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from booster.checkpoint_io.copy_elements import copy_elements, is_plain, wait_for_devices
from booster.checkpoint_io.plan import WriteRange
from booster.checkpoint_io.staging import PAGE_BYTES, host_memory
from booster.interface import TensorSlice

__all__ = ["Arena", "stage_slices"]

Span = tuple[int, int]


class Arena:
    """Host memory for the copies of one save, kept for the next one: fresh memory costs more than the copy itself.

    It grows to what a save needs. What one save leaves unused is given back when the next one begins.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def take(self, num_bytes: int, *, is_pinned: bool = False) -> torch.Tensor:
        """Returns bytes that are the caller's until `reset`, at a multiple of `PAGE_BYTES`.

        Args:
            num_bytes: How many.
            is_pinned: Whether accelerators should reach them directly.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        fitting = [block for block in self._blocks if block.is_pinned == is_pinned and block.room >= num_bytes]
        if not fitting:
            self._blocks = [block for block in self._blocks if block.used > 0]  # before the new one is made
            fitting = [_Block(num_bytes, is_pinned)]
            self._blocks += fitting
        return min(fitting, key=lambda block: block.room).take(num_bytes)

    def reset(self) -> None:
        """Takes all memory back: no copy of the save before may be in use. What that save did not use is freed."""
        self._blocks = [block for block in self._blocks if block.used > 0]
        for block in self._blocks:
            block.used = 0

    @property
    def num_bytes(self) -> int:
        """How much memory the arena has."""
        return sum(block.memory.numel() for block in self._blocks)


class _Block:
    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        self.memory = host_memory(num_bytes, is_pinned=is_pinned)
        self.is_pinned = is_pinned
        self.used = 0

    @property
    def room(self) -> int:
        return self.memory.numel() - self.used

    def take(self, num_bytes: int) -> torch.Tensor:
        taken = self.memory[self.used : self.used + num_bytes]
        self.used = min(self.used + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, self.memory.numel())
        return taken


def stage_slices(ranges: Sequence[WriteRange], slices: Sequence[TensorSlice], arena: Arena) -> list[TensorSlice]:
    """Returns copies of the slices that hold what the ranges write, for `write_ranges` with the same ranges.

    When it returns, the caller may change its tensors. Memory: the bytes of the ranges, in the format of the file.
    Collective: no.

    Args:
        ranges: What this rank's memory is written from.
        slices: This rank's slices.
        arena: Where the copies go; they are valid until its `reset`.
    """
    spans_of: dict[int, list[Span]] = {}
    for part in ranges:
        spans_of.setdefault(part.slice_index, []).append(part.span)
    merged = {index: _merged(spans) for index, spans in spans_of.items()}
    is_pinned = wait_for_devices(slices[index].tensor for index in merged)
    sizes = [_staged_bytes(slices[index], merged.get(index, [])) for index in range(len(slices))]
    memory = arena.take(sum(_aligned(size) for size in sizes), is_pinned=is_pinned)
    copies, offset = [], 0
    for index, (held, size) in enumerate(zip(slices, sizes, strict=True)):
        copies.append(_staged(held, merged.get(index, []), memory[offset : offset + size]))
        offset += _aligned(size)
    wait_for_devices(slices[index].tensor for index in merged)
    return copies


_ALIGNMENT = 64  # of each copy, for vector instructions


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _merged(spans: list[Span]) -> list[Span]:
    """Returns the spans in order, those that follow each other as one."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _staged_bytes(held: TensorSlice, spans: list[Span]) -> int:
    """Returns the room for a slice's copy: from the first element to the last, the gaps as well, never touched."""
    return (spans[-1][1] - spans[0][0]) * held.dtype.itemsize if spans else 0


def _staged(held: TensorSlice, spans: list[Span], memory: torch.Tensor) -> TensorSlice:
    if not spans:
        return replace(held, span=(held.span[0], held.span[0]), tensor=torch.empty(0, dtype=held.dtype))
    first = spans[0][0]
    copied = memory.view(held.dtype)
    for start, stop in spans:
        _copy(held, start, stop, copied[start - first : stop - first])
    return replace(held, span=(first, spans[-1][1]), tensor=copied)


def _copy(held: TensorSlice, start: int, stop: int, out: torch.Tensor) -> None:
    tensor, begin = held.tensor.detach(), held.span[0]
    is_same = tensor.dtype == held.dtype and tensor.is_contiguous()
    if is_plain(tensor, held.dtype) or (is_same and tensor.device.type != "cpu"):
        # With all of torch's threads, or without waiting for the device.
        out.copy_(tensor.view(-1)[start - begin : stop - begin], non_blocking=True)
    else:
        copy_elements(tensor, start - begin, stop - begin, out.view(torch.uint8), held.dtype)
