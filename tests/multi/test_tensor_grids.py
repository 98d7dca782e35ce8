"""Layers on grids of ranks against the same layers on one: outputs, all gradients, shapes, bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import distributed
from torch import nn

from booster.cli.benchmark.measure import PerceptronLayer
from booster.comm import count_communication
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel_nd import (
    LINEAR_3D_ACTIVATIONS,
    SUMMA_ACTIVATIONS,
    BlockLayout,
    Linear3D,
    SummaLinear,
    linear_3d_mesh,
    shard_mlp,
    summa_mesh,
)

pytestmark = pytest.mark.on_device

# What holds a weight (outputs, inputs) and a bias, of the first and of the second layer.
SUMMA = [(BlockLayout((("column",), ("row",))), BlockLayout((("column",),)))] * 2
CUBE = [
    (BlockLayout((("input", "weight"), ("output",))), BlockLayout((("input",),))),
    (BlockLayout((("output", "weight"), ("input",))), BlockLayout((("output",),))),
]


def make_grid(kind, world_size):
    """Returns the grid, the cut of the activations, and those of the two layers' weights and biases."""
    if kind == "3d":
        return linear_3d_mesh(round(world_size ** (1 / 3))), LINEAR_3D_ACTIVATIONS, CUBE
    depth = 2 if kind == "2.5d" else 1
    return summa_mesh(round((world_size / depth) ** 0.5), depth), SUMMA_ACTIVATIONS, SUMMA


class Pair(nn.Module):
    def __init__(self, hidden, inner, has_bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, has_bias), nn.Linear(inner, hidden, has_bias)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def assert_close(actual, expected, what):
    assert actual.shape == expected.shape, what
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")


def assert_like_serial(kind, world_size, rows, hidden, inner, has_bias=True):
    """Compares in fp64, so that another order of sums would hide no difference."""
    grid, activations, parameters = make_grid(kind, world_size)
    serial = Pair(hidden, inner, has_bias).to(current_device(), torch.float64)
    divided = copy.deepcopy(serial)
    shard_mlp(divided, grid)
    whole, weights = torch.randn(2, rows, hidden, dtype=torch.float64).to(current_device())
    x = grid.block(whole, activations).requires_grad_()
    whole.requires_grad_()
    output, expected = divided(x), serial(whole)
    assert_close(output, grid.block(expected, activations), "output")
    (output * grid.block(weights, activations)).sum().backward()
    (expected * weights).sum().backward()
    assert_close(x.grad, grid.block(whole.grad, activations), "input gradient")
    for name, (weight, bias) in zip(("up", "down"), parameters, strict=True):
        ours, theirs = getattr(divided, name), getattr(serial, name)
        assert_close(ours.weight.grad, grid.block(theirs.weight.grad, weight), f"weight gradient of {name}")
        assert (ours.bias is None) == (not has_bias)
        if has_bias:
            assert_close(ours.bias.grad, grid.block(theirs.bias.grad, bias), f"bias gradient of {name}")
    grid.close()


@distributed(4)
@pytest.mark.parametrize("has_bias", [True, False])
def test_squares_give_what_one_process_gives(has_bias):
    assert_like_serial("2d", 4, 6, 4, 10, has_bias)


@distributed(9)
@pytest.mark.slow
def test_squares_of_side_three_give_what_one_process_gives():
    assert_like_serial("2d", 9, 6, 3, 9)


@distributed(8)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", ["2.5d", "3d"])
def test_squares_and_cubes_of_eight_give_what_one_process_gives(kind, has_bias):
    assert_like_serial(kind, 8, 8, 4, 12, has_bias)


@distributed(1)
@pytest.mark.parametrize("kind", ["2d", "3d"])
def test_grids_of_one_rank_give_what_one_process_gives(kind):
    with count_communication() as count:
        assert_like_serial(kind, 1, 3, 5, 7)
    assert not count.calls


# The blocks that the shapes of Colossal-AI's documentation lead to: 256 -> 1024 -> 256 features, 16 rows.
def local_shapes(kind, world_size):
    grid, activations, _ = make_grid(kind, world_size)
    pair = Pair(256, 1024).to(current_device())
    shard_mlp(pair, grid)
    x = grid.block(torch.randn(16, 256).to(current_device()), activations)
    inner = pair.up(x)
    shapes = [x.shape, pair.up.weight.t().shape, inner.shape, pair.down.weight.t().shape, pair.down(inner).shape]
    grid.close()
    return [list(shape) for shape in shapes]


@distributed(4)
def test_the_shapes_on_a_square():
    assert local_shapes("2d", 4) == [[8, 128], [128, 512], [8, 512], [512, 128], [8, 128]]


@distributed(8)
def test_the_shapes_on_two_squares():
    assert local_shapes("2.5d", 8) == [[4, 128], [128, 512], [4, 512], [512, 128], [4, 128]]


@distributed(8)
def test_the_shapes_on_a_cube():
    assert local_shapes("3d", 8) == [[4, 128], [128, 256], [4, 512], [512, 64], [4, 128]]


def received_by_one_layer(kind, world_size, rows, inputs, outputs):
    """Returns what the notes of the two files say that a rank receives in forward, and in backward, in elements."""
    if kind == "3d":
        side = round(world_size ** (1 / 3))
        x, weight, output = rows * inputs / side**3, inputs * outputs / side**3, rows * outputs / side**3
        forward = (side - 1) * (x + weight + output)
        # The three are gathered or summed once more, X and W gathered again, and Y in the place of a sum.
        return forward, (side - 1) * (output + 2 * weight + 2 * x)
    depth = 2 if kind == "2.5d" else 1
    side = round((world_size / depth) ** 0.5)
    x, weight = rows * inputs / (depth * side**2), inputs * outputs / side**2
    return (side - 1) * (x + weight), (side - 1) * 2 * (x + weight) + 2 * (depth - 1) / depth * weight


def assert_bytes(kind, world_size):
    rows, inputs, outputs = 8, 4, 12
    grid, activations, _ = make_grid(kind, world_size)
    cls = Linear3D if kind == "3d" else SummaLinear
    layer = cls(nn.Linear(inputs, outputs, bias=False).to(current_device()), grid)
    x = grid.block(torch.randn(rows, inputs).to(current_device()), activations).requires_grad_()
    with count_communication() as forward:
        output = layer(x)
    with count_communication() as backward:
        output.sum().backward()
    expected = received_by_one_layer(kind, world_size, rows, inputs, outputs)
    assert [sum(count.received.values()) / 4 for count in (forward, backward)] == list(expected)
    grid.close()


@distributed(4)
def test_the_bytes_on_a_square():
    assert_bytes("2d", 4)


@distributed(8)
@pytest.mark.parametrize("kind", ["2.5d", "3d"])
def test_the_bytes_on_squares_and_cubes_of_eight(kind):
    assert_bytes(kind, 8)


@distributed(8)
@pytest.mark.parametrize("kind", ["2.5d", "3d"])
def test_what_needs_no_gradient_costs_nothing(kind):
    grid, activations, _ = make_grid(kind, 8)
    pair = Pair(4, 12).to(current_device())
    shard_mlp(pair, grid)
    x = grid.block(torch.randn(8, 4).to(current_device()), activations)

    def received(pair):
        output = pair(x)
        with count_communication() as count:
            output.sum().backward()
        return sum(count.received.values())

    whole = received(pair)
    pair.down.weight.requires_grad_(False)
    without_weight = received(pair)
    pair.down.bias.requires_grad_(False)
    assert received(pair) < without_weight < whole
    assert pair.up.weight.grad is not None
    grid.close()


@distributed(8)
@pytest.mark.parametrize("kind", ["2.5d", "3d"])
def test_ranks_that_hold_the_same_weights_train_alike(kind):
    grid, activations, parameters = make_grid(kind, 8)
    serial = PerceptronLayer(4).to(current_device(), torch.float64)
    divided = copy.deepcopy(serial)
    shard_mlp(divided, grid)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (serial, divided)]
    whole = torch.randn(8, 4, dtype=torch.float64).to(current_device())
    x = grid.block(whole, activations)
    for _ in range(4):
        for layer, inputs, optimizer in zip((serial, divided), (whole, x), optimizers, strict=True):
            layer(inputs).square().sum().div(32).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, (weight, bias) in zip(("up", "down"), parameters, strict=True):
        ours, theirs = getattr(divided, name), getattr(serial, name)
        assert_close(ours.weight, grid.block(theirs.weight, weight), f"weight of {name}")
        assert_close(ours.bias, grid.block(theirs.bias, bias), f"bias of {name}")
    grid.close()


@distributed(4)
def test_the_places_of_a_grid():
    grid = summa_mesh(2)
    rank = torch.distributed.get_rank()
    assert dict(grid.coordinates) == {"depth": 0, "row": rank // 2, "column": rank % 2}
    assert torch.distributed.get_process_group_ranks(grid.group("column")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert torch.distributed.get_process_group_ranks(grid.group("row")) == [rank % 2, rank % 2 + 2]
    assert grid.group("row", "column") is None
    assert grid.group("column") is grid.group("column")
    grid.close()


@distributed(4)
def test_grids_that_cannot_be():
    for make in (
        lambda: summa_mesh(3),
        lambda: summa_mesh(2, depth=2),
        lambda: linear_3d_mesh(2),
        lambda: summa_mesh(0),
    ):
        with pytest.raises(ConfigError, match="but there are 4: start "):
            make()
    grid = summa_mesh(2)
    with pytest.raises(
        ConfigError, match=r"dimension 0 of a weight is 7, which is not divisible by 2 ranks: use 6 or 8"
    ):
        SummaLinear(nn.Linear(4, 7), grid)
    with pytest.raises(
        ConfigError, match=r"dimension 1 of a weight is 3, which is not divisible by 2 ranks: use 2 or 4"
    ):
        SummaLinear(nn.Linear(3, 4), grid)
    grid.close()


@distributed(8)
def test_features_that_a_cube_cannot_divide():
    grid = linear_3d_mesh(2)
    with pytest.raises(
        ConfigError, match=r"dimension 0 of a weight is 6, which is not divisible by 4 ranks: use 4 or 8"
    ):
        Linear3D(nn.Linear(4, 6), grid)
    grid.close()
