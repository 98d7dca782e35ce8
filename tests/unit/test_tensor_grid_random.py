"""Which ranks of a grid draw the same random numbers."""

from __future__ import annotations

import pytest
import torch

from booster.plugins.hybrid_parallel.tensor_parallel.rng import TensorParallelRNG
from booster.plugins.hybrid_parallel.tensor_parallel_nd.feature_reductions import shared_axes
from booster.plugins.hybrid_parallel.tensor_parallel_nd.grid import TensorGridShape

LAYOUT = TensorGridShape.of("2.5d", 8, 2).outer  # examples over depth and row, features over column
BLOCK = (2, 5, 6)  # of two examples, of five tokens, and of six features


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), ()),
        ((1,), ()),
        ((2,), ("depth", "row")),
        ((2, 1), ("depth", "row")),
        ((2, 1, 1), ("depth", "row")),
        ((2, 1, 1, 1), ("depth", "row")),
        ((2, 5, 1), ("depth", "row")),
        ((1, 5, 1), ()),
        ((5,), ()),
        ((6,), ("column",)),
        ((1, 1, 6), ("column",)),
        ((2, 5, 6), None),
        ((2, 1, 6), None),
        ((2, 5, 24), None),  # between two linear layers
        ((2, 3, 5, 5), None),  # of heads
        ((24,), None),
    ],
)
def test_ranks_that_share_random_numbers(shape, axes):
    assert shared_axes(shape, BLOCK, LAYOUT) == axes


def draws(rank, key):
    """Returns a rank's own number, two shared ones, another own one, and one after the region."""
    torch.manual_seed(1)
    rng = TensorParallelRNG(rank, "tensor")
    rng.enter()
    numbers = [torch.rand(1).item()]
    for draw in range(2):
        with rng.shared(draw, key):
            numbers.append(torch.rand(1).item())
    numbers.append(torch.rand(1).item())
    rng.leave()
    return [*numbers, torch.rand(1).item()]


def test_shared_draws_in_a_region():
    first, second, other = draws(0, 0), draws(1, 0), draws(2, 1)
    assert first[1:3] == second[1:3]
    assert first[4] == second[4] == other[4]
    assert len({*first, *second[:1], second[3], *other}) == 5 + 2 + 4
    assert draws(0, 0) == first


def test_a_region_with_shared_draws_alone_is_followed_by_another_one():
    torch.manual_seed(1)
    rng = TensorParallelRNG(0, "tensor")
    numbers = []
    for _ in range(3):
        rng.enter()
        with rng.shared(0):
            numbers.append(torch.rand(1).item())
        rng.leave()
    assert len(set(numbers)) == 3


def test_a_recomputed_region_repeats_shared_draws():
    torch.manual_seed(1)
    rng = TensorParallelRNG(3, "tensor")
    rng.enter()
    state = torch.get_rng_state()
    with rng.shared(0):
        number = torch.rand(1).item()
    rng.leave()
    rng.enter()  # of another layer
    torch.set_rng_state(state)
    with rng.shared(0):
        assert torch.rand(1).item() == number
