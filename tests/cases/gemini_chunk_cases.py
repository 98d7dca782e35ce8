"""A manager of chunks without a model, for tests of chunks."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from booster.plugins.gemini.chunk import Chunk
from booster.plugins.gemini.chunk_layout import ChunkLayout, ParamRegion, unit_numel
from booster.plugins.gemini.tiers import finish_transfer
from booster.plugins.sharding.buffer_pool import BufferPool

SHAPES = ((3, 5), (7,), (), (2, 2, 2))


ALL = range(len(SHAPES))


CPU = torch.device("cpu")


def make_layout(shapes=SHAPES, dtype=torch.float32, num_shards=1, trains=True):
    stops = list(accumulate(math.prod(shape) for shape in shapes))
    places = [
        ParamRegion(index, shape, stops[index] - math.prod(shape), stops[index]) for index, shape in enumerate(shapes)
    ]
    unit = unit_numel(dtype, num_shards)
    numel = math.ceil(max(1, stops[-1]) / unit) * unit
    return ChunkLayout(dtype=dtype, trains=trains, numel=numel, num_shards=num_shards, regions=tuple(places))


class Bench:
    """A chunk with its pool; what its weights must be is in `values`."""

    def __init__(
        self, shapes=SHAPES, dtype=torch.float32, *, weights_tier=None, sums_tier=None, kept=False, group=None
    ):
        is_distributed = dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        self.layout = make_layout(shapes, dtype, size)
        generator = torch.Generator().manual_seed(1)
        self.values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(self.parameters)]
        self.chunk = Chunk(0, self.layout, named, rank=rank, group=None, device=CPU)
        full = torch.full((self.layout.numel,), 77.0).to(dtype)
        full[: self.layout.used_numel] = torch.cat([value.flatten() for value in self.values])
        if kept:
            self.chunk.keep_gathered(full)
        else:
            self.chunk.weights.allocate(weights_tier)
            finish_transfer(self.chunk.weights.store(full[self.layout.shard_range(rank)]))
            for slot in self.chunk.params:
                slot.unbind()
        self.sums_tier = sums_tier
        self.pool = BufferPool(CPU)
        self.num_taken = 0

    @property
    def slots(self):
        return self.chunk.params

    @property
    def states(self):
        return {slot.state for slot in self.slots}

    def take(self, num_bytes):
        self.num_taken += 1
        buffer = self.pool.acquire(num_bytes)
        buffer.memory.fill_(0xFF)  # nan
        return buffer

    def gather(self):
        replaced = self.chunk.start_gather(
            None if self.chunk.is_kept_gathered else self.take(self.layout.num_bytes), self.take
        )
        self.chunk.finish_gather()
        if replaced is not None:
            self.pool.release(replaced)

    def release(self):
        self.pool.release(self.chunk.release())

    def receive(self, index, gradient):
        self.parameters[index].grad = gradient
        self.chunk.on_grad_ready(self.slots[index], self.take)
        assert self.parameters[index].grad is None

    def reduce(self):
        if self.chunk.grad_shard.tensor is None and not self.chunk.grad_shard.is_offloaded:
            self.chunk.grad_shard.allocate(self.sums_tier)
        self.chunk.start_reduce(self.take)
        assert self.chunk.is_reducing
        buffers, transfer = self.chunk.finish_reduce()
        finish_transfer(transfer)
        self.pool.release(*buffers)
        assert not self.chunk.is_reducing

    def gradient(self, index, seed=0):
        generator = torch.Generator().manual_seed(100 * seed + index)
        return torch.randn(self.layout.regions[index].shape, generator=generator).to(self.layout.dtype)

    def sums(self):
        """Returns this rank's sums of each parameter; the waste must be zero."""
        flat = self.chunk.grad_shard.as_tensor().clone()
        assert not flat[self.layout.used_numel :].any()
        return [flat[place.start : place.stop].view(place.shape) for place in self.layout.regions]

    def shows_weights(self, indices=ALL):
        return all(torch.equal(self.parameters[index], self.values[index]) for index in indices)

    def shows_nothing(self):
        return all(bool(parameter.isnan().all()) for parameter in self.parameters)
