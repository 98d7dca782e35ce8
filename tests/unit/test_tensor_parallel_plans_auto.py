"""Plans derived from models that people wrote: what is split was seen to compute the same, the rest stays whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hybrid_cases import entry_of
from torch import nn
from zoo import get_model, needs_transformers

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block
from booster.plugins.hybrid_parallel.tp_plan.plan import TensorParallelPlan
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan

HEADS = Block(num_units=4, unit_size=8)


def blocks(plan: TensorParallelPlan) -> dict[str, tuple[str, tuple[Block, ...]]]:
    return {entry.name: (entry.style, entry.blocks) for entry in plan.entries if entry.style != "sequence"}


class Fused(nn.Module):
    """Query, key and value in one projection, taken apart by the number of heads."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.dim = num_heads, width
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.project(x).split(self.dim, dim=-1)
        heads = [one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in (query, key, value)]
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.dim))


class Grouped(nn.Module):
    """Four query heads, two key-value heads, softmax by hand, no number of heads anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.find, self.give, self.out = (nn.Linear(32, size) for size in (32, 16, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.ask, self.find, self.give)
        query, key, value = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in layers)
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
        attended = (query @ key.transpose(-1, -2)).softmax(dim=-1) @ value
        return self.out(attended.transpose(1, 2).flatten(2))


class Interleaved(nn.Module):
    """Query, key and value of each head behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (-1, 3, 8)).permute(3, 0, 2, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 2 * 13), nn.Linear(13, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Leaking(nn.Module):
    """Gives what is between its layers too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.up(x).relu()
        return self.down(hidden), hidden


class TwoLeft(nn.Module):
    """The second number between its layers is taken from the first half, which a part of them lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(hidden + hidden.roll(1, dims=-1))


def test_a_transformer() -> None:
    for name in ("user_transformer", "user_transformer_with_head_counts"):
        model = get_model(name).construct()
        plan = choose_plan(model, tp_size=2)
        found = blocks(plan)
        for layer in ("layers.0", "layers.1"):
            for part in ("query", "key", "value"):
                assert found[f"{layer}.attention.{part}"] == ("colwise", (HEADS,))
            assert found[f"{layer}.attention.out"] == ("rowwise", (HEADS,))
            assert found[f"{layer}.gate"] == found[f"{layer}.up"] == ("colwise", (Block(num_units=54),))
            assert found[f"{layer}.down"] == ("rowwise", (Block(num_units=54),))
        assert len(found) == 14
        assert plan.stacks == (("layers.0", "layers.1"),)
        assert {(change.module, change.local_value(2, 0)) for change in plan.attributes} == {
            ("layers.0.attention", 2),
            ("layers.1.attention", 2),
        }
        assert any(
            note.startswith("head is not sharded: its weight is tied to another module's") for note in plan.notes
        )
        assert "derived from the model" in plan.source


def test_a_mixer_and_why_its_sequence_cannot_be_split() -> None:
    model = get_model("user_mixer").construct()
    found = blocks(choose_plan(model, tp_size=3))
    assert found["layers.1.places_up"] == ("colwise", (Block(num_units=14),))
    assert found["layers.1.features.2"] == ("rowwise", (Block(num_units=29),))
    assert len(found) == 8
    with pytest.raises(ConfigError, match=r"tokens independently .*input of places_up for some tokens is not"):
        choose_plan(model, tp_size=3, shards_sequence=True)


def test_a_transformer_whose_sequence_is_split() -> None:
    plan = choose_plan(get_model("user_transformer").construct(), tp_size=2, shards_sequence=True)
    alone = [entry.name for entry in plan.entries if entry.style == "sequence"]
    assert alone == [f"layers.{layer}.norm{norm}" for layer in (0, 1) for norm in (1, 2)]
    assert entry_of(plan, "layers.0.up").region == "layers.0.up"
    assert entry_of(plan, "layers.0.attention.key").region == "layers.0.attention"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_projections(device: str) -> None:
    with torch.device(device):
        plan = choose_plan(Fused(32, 4), tp_size=2)
        interleaved = choose_plan(Interleaved(), tp_size=2)
        gated = choose_plan(Gated(), tp_size=2)
    assert blocks(plan)["project"] == ("packed_colwise", (HEADS,) * 3)
    values = {change.attribute: change.local_value(2, 1) for change in plan.attributes}
    assert values == {"num_heads": 2, "dim": 16}
    assert blocks(interleaved)["qkv"] == ("colwise", (Block(num_units=4, unit_size=24),))
    assert blocks(gated)["both"] == ("packed_colwise", (Block(num_units=13),) * 2)


def test_grouped_queries_share_their_keys() -> None:
    found = blocks(choose_plan(Grouped(), tp_size=4))
    key_value = Block(num_units=2, unit_size=8, num_query_units=4, num_groups=2)
    assert found["ask"] == ("colwise", (Block(num_units=4, unit_size=8, num_groups=2),))
    assert found["find"] == found["give"] == ("colwise", (key_value,))


class Turned(Grouped):
    """The same, of which queries are turned by the places of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8

    def forward(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = position_embeddings
        first = x[..., : self.head_dim] * cos + x[..., : self.head_dim].flip(-1) * sin
        return super().forward(torch.cat([first, x[..., self.head_dim :]], dim=-1))


def test_places_of_tokens_are_given() -> None:
    assert blocks(choose_plan(nn.Sequential(Turned()), tp_size=2)) == blocks(
        choose_plan(nn.Sequential(Grouped()), tp_size=2)
    )


@needs_transformers
def test_attention_of_transformers_that_is_given_places() -> None:
    for split in (False, True):
        plan = blocks(choose_plan(get_model("StableLmForCausalLM").build(), tp_size=2, shards_sequence=split))
        assert plan["model.layers.1.self_attn.q_proj"][0] == "colwise"
        assert plan["model.layers.1.self_attn.o_proj"][0] == "rowwise"


def test_more_ranks_than_heads() -> None:
    with pytest.raises(ConfigError, match=r"tp_size=8 is larger than the 4 heads"):
        choose_plan(nn.ModuleList([Fused(32, 4), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))]), tp_size=8)


@pytest.mark.parametrize("kind", [Leaking, TwoLeft])
def test_what_needs_the_whole_stays_whole(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"good": Gated(), "bad": kind()})
    plan = choose_plan(model, tp_size=2)
    assert set(blocks(plan)) == {"good.both", "good.down"}
    assert "bad.up is not sharded: their results differ when they are sharded" in plan.notes


def test_what_cannot_be_run_alone_stays_whole() -> None:
    class Asking(Gated):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return super().forward(x + other)

    plan = choose_plan(nn.ModuleDict({"good": Gated(), "bad": Asking()}), tp_size=2)
    assert "bad.both is not sharded: its forward has the further argument 'other', whose value is unknown" in plan.notes


def test_weights_that_are_read_without_their_layer_stay_whole() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, self.up.weight).relu(), self.down.weight)

    with pytest.raises(ConfigError, match="up is not sharded: the module uses their weights without calling them"):
        choose_plan(Reading(), tp_size=2)


def test_torch_encoder_layers_are_sharded_but_for_their_attention() -> None:
    plan = choose_plan(get_model("torch_transformer").construct(), tp_size=2)
    assert set(blocks(plan)) == {f"encoder.layers.{layer}.linear{number}" for layer in (0, 1) for number in (1, 2)}


def test_neither_the_model_nor_random_numbers_are_changed() -> None:
    model = Fused(32, 4).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    choose_plan(model, tp_size=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert model.num_heads == 4
    assert model.project.out_features == 96


class BetweenLayers(nn.Module):
    """Parameters before, between and behind a pair of layers that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.PReLU(), nn.Linear(32, 8)
        self.inner, self.outer = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.norm(x))) * self.inner) * self.outer + x


def test_gradients_of_parameters_between_split_layers_are_summed() -> None:
    found = {entry.name: entry.style for entry in choose_plan(nn.Sequential(BetweenLayers()), tp_size=2).entries}
    assert found == {
        "0.inner": "replicated_with_grad_allreduce",
        "0.up": "colwise",
        "0.act": "replicated_with_grad_allreduce",
        "0.down": "rowwise",
    }


class NormOfHeads(Fused):
    """A norm of each query head, of which every rank runs its own."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.project(x).split(self.dim, dim=-1)
        heads = [one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in (query, key, value)]
        attended = F.scaled_dot_product_attention(self.norm(heads[0]), *heads[1:], attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.dim))


def test_gradients_of_a_norm_of_heads_are_summed() -> None:
    found = {entry.name: entry.style for entry in choose_plan(nn.Sequential(NormOfHeads()), tp_size=2).entries}
    assert found == {"0.project": "packed_colwise", "0.out": "rowwise", "0.norm": "replicated_with_grad_allreduce"}


def test_a_batch_norm_of_features_keeps_its_layers_whole():
    norm = nn.BatchNorm1d(16)  # of sequences of 16 tokens it would normalize tokens, which can be divided
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    assert blocks(choose_plan(model, tp_size=2)).keys() == {"3", "5"}
