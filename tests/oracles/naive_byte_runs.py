"""Slices element by element: the naive twins of `byte_runs` and of its proof of tiling."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np


def elements(shape, box, span):
    """Returns where each element of a slice is in the row-major tensor, in slice order."""
    numbers = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    block = numbers[tuple(slice(offset, offset + length) for offset, length in box)]
    return block.reshape(-1)[span[0] : span[1]]


def runs(shape, box, span, itemsize):
    """Returns (logical byte, local byte, length) of every run, joined element by element."""
    found = []
    for place, element in enumerate(elements(shape, box, span).tolist()):
        logical, local = element * itemsize, place * itemsize
        if found and found[-1][0] + found[-1][2] == logical and found[-1][1] + found[-1][2] == local:
            found[-1][2] += itemsize
        else:
            found.append([logical, local, itemsize])
    return [tuple(run) for run in found]


def random_shape(source: random.Random, max_dims: int = 4, max_size: int = 6) -> tuple[int, ...]:
    """Returns a shape of 0 to `max_dims` dimensions; some sizes are 1, few are 0."""
    sizes = [source.choice([1, *range(1, max_size + 1)]) for _ in range(source.randint(0, max_dims))]
    return tuple(0 if source.random() < 0.03 else size for size in sizes)


def random_boxes(source: random.Random, shape, num_cuts: int):
    """Returns boxes that tile the shape: one is cut in two again and again."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(num_cuts):
        box = boxes.pop(source.randrange(len(boxes)))
        dims = [dim for dim, (_, length) in enumerate(box) if length > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = source.choice(dims)
        offset, length = box[dim]
        at = source.randint(1, length - 1)
        boxes.append((*box[:dim], (offset, at), *box[dim + 1 :]))
        boxes.append((*box[:dim], (offset + at, length - at), *box[dim + 1 :]))
    return boxes


def random_spans(source: random.Random, box, num_cuts: int):
    """Returns spans that tile a box."""
    numel = math.prod(length for _, length in box)
    cuts = sorted({0, numel, *(source.randint(0, numel) for _ in range(num_cuts))})
    return list(itertools.pairwise(cuts)) or [(0, 0)]


def random_partition(source: random.Random, shape, num_ranks: int):
    """Returns (rank, box, span) of shards that tile the shape; a rank may have none or several."""
    shards = []
    for box in random_boxes(source, shape, source.choice([0, 0, num_ranks - 1, num_ranks + 2])):
        for span in random_spans(source, box, source.choice([0, 0, num_ranks])):
            shards.append((source.randrange(num_ranks), box, span))
    return shards
