"""Grids of ranks without ranks: places, divisions of weights and activations, and what can't be divided."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import entry_of
from peft import LoraConfig, get_peft_model
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.partition import planned_shard_specs
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block
from booster.plugins.hybrid_parallel.tensor_parallel_nd.grid import TensorGridShape
from booster.plugins.hybrid_parallel.tensor_parallel_nd.layer_check import verify_layers
from booster.plugins.hybrid_parallel.tensor_parallel_nd.plan import activation_shapes, plan_for_grid
from booster.plugins.hybrid_parallel.tp_plan.plan import Style
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan

SQUARE, SQUARES, CUBE = (
    TensorGridShape.of("2d", 4),
    TensorGridShape.of("2.5d", 8, 2),
    TensorGridShape.of("3d", 8),
)
LARGE = [TensorGridShape.of("2d", 16), TensorGridShape.of("2.5d", 27, 3), TensorGridShape.of("3d", 64)]
GRIDS = [SQUARE, SQUARES, CUBE, *LARGE]
PLAN = {"up": "colwise", "down": "rowwise"}


class Pair(nn.Module):
    def __init__(self, hidden=256, inner=1024):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def specs_of(model, grid, plan=PLAN):
    resolved = plan_for_grid(choose_plan(model, tp_size=grid.side, plan=plan), model, grid)
    return resolved, planned_shard_specs(model, resolved, grid.num_ranks, 64, grid)


def test_the_places_of_the_documents():
    assert SQUARE.coordinates(2) == {"row": 1, "column": 0}
    assert SQUARES.coordinates(5) == {"depth": 1, "row": 0, "column": 1}
    assert CUBE.coordinates(5) == {"output": 1, "input": 0, "weight": 1}
    assert [CUBE.index(rank, CUBE.outer.batch) for rank in range(8)] == [0, 2, 1, 3, 0, 2, 1, 3]


# The documents print weights as (inputs, outputs), torch has them as (outputs, inputs).
@pytest.mark.parametrize(
    ("grid", "weights", "activations"),
    [
        (SQUARE, [[128, 512], [512, 128]], [[8, 128], [8, 512], [8, 128]]),
        (SQUARES, [[128, 512], [512, 128]], [[4, 128], [4, 512], [4, 128]]),
        (CUBE, [[128, 256], [512, 64]], [[4, 128], [4, 512], [4, 128]]),
    ],
    ids=str,
)
def test_the_shapes_of_the_documents(grid, weights, activations):
    model = Pair()
    plan, specs = specs_of(model, grid)
    for rank in range(grid.num_ranks):
        shapes = [list(specs[f"{name}.weight"][rank].local_shape)[::-1] for name in ("up", "down")]
        assert shapes == weights
    found = [
        activation_shapes(entry_of(plan, name), getattr(model, name), grid, grid.num_ranks, 16)
        for name in ("up", "down")
    ]
    assert [list(found[0][0]), list(found[0][1]), list(found[1][1])] == activations
    assert found[0][1] == found[1][0]


def test_the_shapes_of_the_documents_in_one_dimension():
    model = Pair()
    plan = choose_plan(model, tp_size=2, plan=PLAN)
    specs = planned_shard_specs(model, plan, 2, 64)
    assert [list(specs[f"{name}.weight"][0].local_shape)[::-1] for name in PLAN] == [[256, 512], [512, 256]]
    shapes = [activation_shapes(entry_of(plan, name), getattr(model, name), None, 2, 16) for name in PLAN]
    assert shapes == [((16, 256), (16, 512)), ((16, 512), (16, 256))]


class Fused(nn.Module):
    """A layer with a fused projection, a norm, and heads."""

    def __init__(self, hidden=24, num_heads=12):
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(hidden), num_heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):
        query, key, value = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("is_fused", [False, True])
def test_every_element_is_primary_once(grid, is_fused):
    """Replicas agree, and the papers' memory: a rank holds 1/q**2 of a weight, of a cube 1/q**3."""
    model = nn.Sequential(Fused(48, 12), Fused(48, 12)) if is_fused else Pair(48, 96)
    plan = None if is_fused else PLAN
    _, specs = specs_of(model, grid, plan)
    for name, parameter in model.named_parameters():
        values = torch.arange(parameter.numel()).view(parameter.shape)
        counts = torch.zeros(parameter.shape, dtype=torch.long)
        for rank, spec in enumerate(specs[name]):
            local = spec.shard(values)
            for region in spec.regions:
                here, there = (
                    tuple(slice(start, start + length) for start, length in box)
                    for box in (region.local, region.logical)
                )
                assert torch.equal(local[here], values[there]), (name, rank)
                counts[there] += region.is_primary
            if parameter.dim() == 2:
                assert local.numel() * grid.side ** (3 if grid.mode == "3d" else 2) == parameter.numel()
            else:
                assert local.numel() * grid.side == parameter.numel()
            assert not spec.has_padding
        assert (counts == 1).all(), name


class Layer(nn.Module):
    def __init__(self, **others):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        for name, module in others.items():
            setattr(self, name, module)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross_attn = Layer()

    def forward(self, x):
        return self.cross_attn(x)


STACK = {"*.up": "colwise", "*.down": "rowwise"}
REFUSED = [
    (lambda: Pair(8, 15), PLAN, SQUARE, r"'up' has 15 heads or features, .* into 2 equal parts: use 14 or 16"),
    (lambda: Pair(7, 16), PLAN, SQUARE, r"'up' has 7 inputs, .* into 2 equal parts: use 6 or 8"),
    (lambda: Pair(6, 8), PLAN, CUBE, r"'down' has 6 outputs, .* into 4 equal parts: use 4 or 8"),
]


@pytest.mark.parametrize(("make", "plan", "grid", "message"), REFUSED)
def test_what_a_grid_can_not_divide(make, plan, grid, message):
    with pytest.raises(ConfigError, match=message):
        specs_of(make(), grid, plan)


def test_a_norm_whose_layout_in_a_cube_is_unknown():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            return self.second(self.first(self.norm(x)).relu())

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Attention()

        def forward(self, x):
            return x + self.part(x)

    model, plan = nn.Sequential(Block(), Block()), {"*.first": "colwise", "*.second": "rowwise"}
    resolved, _ = specs_of(model, SQUARE, plan)
    assert entry_of(resolved, "0.part.norm").style == "feature_wise"
    with pytest.raises(ConfigError, match="which has 8 features outside and inside, so tp_mode='3d' can't know"):
        specs_of(model, CUBE, plan)


@pytest.mark.parametrize(
    ("make", "plan", "note"),
    [
        (lambda: Layer(other=nn.Linear(8, 8)), STACK, "*.other, a Linear, is not in the plan"),
        (lambda: Layer(norm=nn.BatchNorm1d(8)), STACK, "*.norm, a BatchNorm1d, is not in the plan"),
        (lambda: Layer(), {"*.up": "colwise_gather_output"}, None),
        (
            lambda: Layer(other=nn.Linear(8, 8)),
            {**STACK, "*.other": "colwise_gather_output"},
            "is colwise_gather_output",
        ),
    ],
)
def test_stacks_of_which_only_pairs_are_divided(make, plan, note):
    resolved, _ = specs_of(nn.Sequential(make(), make()), SQUARE, plan)
    assert resolved.divided_stacks == ()
    assert note is None or note in resolved.notes[-1]


def test_adapters_are_refused():
    model = get_peft_model(
        nn.Sequential(Layer(), Layer()), LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    )
    plan = choose_plan(model, tp_size=2, plan=STACK)
    with pytest.raises(ConfigError, match=r"'base_model.model.0.up' has adapters, .* use tp_mode='1d'"):
        plan_for_grid(plan, model, SQUARE)


class TokensFirst(nn.Module):
    """A layer of (tokens, batch, features) with causal attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        query, key, value = (one.unflatten(-1, (-1, 4)).permute(1, 2, 0, 3) for one in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))


def test_layers_whose_first_dimension_is_not_the_batch():
    model = nn.ModuleDict({"layers": nn.ModuleList([TokensFirst(), TokensFirst()])})
    plan = {
        "layers.*.qkv": Style("packed_colwise", blocks=(Block(num_units=2, unit_size=4),) * 3),
        "layers.*.out": Style("rowwise", num_heads=2),
    }
    resolved = plan_for_grid(choose_plan(model, tp_size=2, plan=plan), model, SQUARE)
    assert resolved.divided_stacks
    with pytest.raises(ConfigError, match=r"'layers.0' mixes the first dimension of its hidden states"):
        verify_layers(resolved, model, SQUARE)


def test_layers_that_are_verified():
    model = nn.Sequential(Fused(48, 12), Fused(48, 12))
    resolved, _ = specs_of(model, SQUARE, None)
    assert verify_layers(resolved, model, SQUARE) == ()
