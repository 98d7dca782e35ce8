"""The oracle that puts ranks' slices together finds every false claim."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from oracles.joined_slices import join_slices

from booster.interface import TensorSlice

WHOLE = torch.arange(24.0).view(4, 6)


def part(box, span=None, *, primary=True, change=0.0):
    """The slice of WHOLE with that box and span."""
    rows, columns = (slice(offset, offset + length) for offset, length in box)
    flat = WHOLE[rows, columns].reshape(-1) + change
    span = span or (0, len(flat))
    return TensorSlice(
        name="w",
        dtype=torch.float32,
        global_shape=(4, 6),
        box=box,
        span=span,
        tensor=flat[slice(*span)],
        primary=primary,
    )


LEFT, RIGHT = ((0, 4), (0, 4)), ((0, 4), (4, 2))


def test_spans_of_boxes_become_the_logical_tensor():
    joined = join_slices([[part(LEFT, (0, 5))], [part(LEFT, (5, 16)), part(RIGHT)]], {"w": ("tied",)})
    assert torch.equal(joined["w"], WHOLE)
    assert torch.equal(joined["tied"], WHOLE)


def test_a_number_without_dimensions_is_joined_too():
    joined = join_slices([[TensorSlice.full("n", torch.tensor(3), primary=True)]])
    assert torch.equal(joined["n"], torch.tensor(3))


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([[part(LEFT)]], "no rank holds"),
        ([[part(LEFT), part(RIGHT, (0, 7))]], "no rank holds"),
        ([[part(LEFT), part(RIGHT)], [part(RIGHT)]], "not one primary"),
        ([[part(LEFT), part(RIGHT, primary=False)]], "not one primary"),
        ([[part(LEFT), part(RIGHT)], [part(RIGHT, primary=False, change=1e-6)]], "different values"),
        ([[part(LEFT), dataclasses.replace(part(RIGHT), global_shape=(5, 6))]], "two shapes"),
    ],
)
def test_false_claims_are_found(of_ranks, message):
    with pytest.raises(AssertionError, match=message):
        join_slices(of_ranks)
