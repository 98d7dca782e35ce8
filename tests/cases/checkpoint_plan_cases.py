"""Shared by tests of save plans."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict

import numpy as np
import torch

from booster.checkpoint_io.layout import MODEL
from booster.checkpoint_io.planning import save_plan
from booster.checkpoint_io.planning.save_plan import plan_save
from booster.checkpoint_io.planning.slices import SliceTable, full_box
from booster.interface import TensorSlice

NAMES = MODEL.names(is_safetensors=True)


PAGE = 4096


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@functools.cache
def memory(numel, dtype):
    return torch.zeros((), dtype=dtype).expand(numel)  # of one element's memory


def part(name, shape, *, box=None, span=None, dtype=torch.float32, primary=True, shared=True):
    box = full_box(shape) if box is None else box
    span = (0, math.prod(length for _, length in box)) if span is None else span
    return TensorSlice(
        name=name,
        dtype=dtype,
        global_shape=shape,
        box=box,
        span=span,
        tensor=memory(span[1] - span[0], dtype),
        primary=primary,
        shared=shared,
    )


def plan_of(ranks, **more):
    """Plans for these slices per rank; equal tables are given once, after a trip through their bytes."""
    raws = [SliceTable.from_slices(slices).encode() for slices in ranks]
    distinct = list(dict.fromkeys(raws))
    tables = [SliceTable.decode(raw) for raw in distinct]
    arguments = {"max_shard_bytes": 10**12, "is_sharded": True, "always_index": False, **more}
    return plan_save(tables, [distinct.index(raw) for raw in raws], NAMES, **arguments)


def check(plan, ranks, host_of_rank=None):
    """Proves a plan element by element, and returns the bytes that each rank writes."""
    numbers = {name: np.arange(math.prod(spec.shape)).reshape(spec.shape) for name, spec in plan.specs.items()}
    counts = {name: np.zeros(number.size, dtype=np.uint8) for name, number in numbers.items()}
    written, hosts, order = Counter(), defaultdict(set), []
    is_shared = sharing(ranks)
    for one in plan.ranges():
        mine, itemsize = ranks[one.owner][one.slice_index], plan.specs[one.name].dtype.itemsize
        assert (mine.name, mine.box) == (one.name, one.box)
        assert mine.span[0] <= one.span[0] < one.span[1] <= mine.span[1]
        assert mine.primary or (mine.shared and is_shared[mine.name, mine.box, mine.span])
        assert (one.span[1] - one.span[0]) * itemsize <= save_plan.BLOCK_BYTES
        block = numbers[one.name][tuple(slice(offset, offset + length) for offset, length in one.box)]
        counts[one.name][block.reshape(-1)[one.span[0] : one.span[1]]] += 1
        written[one.writer] += (one.span[1] - one.span[0]) * itemsize
        hosts[one.file].add(None if host_of_rank is None else host_of_rank[one.writer])
        assert host_of_rank is not None or one.writer == one.owner
        first = int(block.reshape(-1)[mine.span[0]]) * itemsize + plan.files[one.file].starts[one.name]
        order.append((one.file, first, one.span))
    assert order == sorted(order)
    assert all((count == 1).all() for count in counts.values())
    assert all(len(found) == 1 for found in hosts.values()), "a file is written by two hosts"
    return written


def sharing(ranks):
    """Returns for each part whether its primary shares it."""
    return {(one.name, one.box, one.span): one.shared for slices in ranks for one in slices if one.primary}


def replicas(names_and_shapes, num_ranks, *, primary_rank=0, **more):
    return [
        [part(name, shape, primary=rank == primary_rank, **more) for name, shape in names_and_shapes]
        for rank in range(num_ranks)
    ]


def check_hosts(plan, ranks, hosts):
    """Checks that ranks write their own wherever a holder is on the file's host, and others as the rule says."""
    host_of_file = {one.file: hosts[one.writer] for one in plan.ranges()}
    is_shared, hosts_of_part = sharing(ranks), defaultdict(set)
    for rank, slices in enumerate(ranks):
        for one in slices:
            if one.primary or (one.shared and is_shared.get((one.name, one.box, one.span))):
                hosts_of_part[one.name, one.box, one.span].add(hosts[rank])
    for one in plan.ranges():
        host = host_of_file[one.file]
        if hosts[one.owner] == host:
            assert one.writer == one.owner
            continue
        local = [rank for rank, number in enumerate(hosts) if number == host]
        assert one.writer == local[one.owner % len(local)]
        mine = ranks[one.owner][one.slice_index]
        assert host not in hosts_of_part[mine.name, mine.box, mine.span]


def flat_spans(tensors, num_ranks, *, copies=1):
    """ZeRO: all tensors end to end, one stretch per rank; several groups of ranks hold copies of all of it."""
    share = -(-sum(math.prod(shape) for _, shape in tensors) // num_ranks)
    ranks = [[] for _ in range(num_ranks * copies)]
    offset = 0
    for name, shape in tensors:
        numel = math.prod(shape)
        for rank in range(offset // share, (offset + numel - 1) // share + 1):
            span = (max(rank * share - offset, 0), min((rank + 1) * share - offset, numel))
            for copy in range(copies):
                ranks[copy * num_ranks + rank].append(part(name, shape, span=span, primary=copy == 0))
        offset += numel
    return ranks


def grid_boxes(tensors, grid, *, copies=1):
    """A mesh of ranks, each with a block of every matrix, and copies of it."""
    num_blocks = grid[0] * grid[1]
    ranks = []
    for rank in range(num_blocks * copies):
        row, column = divmod(rank % num_blocks, grid[1])
        slices = []
        for name, (height, width) in tensors:
            box = (_share(height, row, grid[0]), _share(width, column, grid[1]))
            slices.append(part(name, (height, width), box=box, primary=rank < num_blocks))
        ranks.append(slices)
    return ranks


def _share(size, number, count):
    first, last = size * number // count, size * (number + 1) // count
    return first, last - first
