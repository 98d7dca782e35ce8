"""Every mistake in a plan is found before anything is cut, and its message says what to write instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block
from booster.plugins.hybrid_parallel.tp_plan.plan import Style
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan


class Attention(nn.Module):
    def __init__(self, num_heads: int | None = 4) -> None:
        super().__init__()
        if num_heads is not None:
            self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))


class Layer(nn.Module):
    def __init__(self, num_heads: int | None) -> None:
        super().__init__()
        self.attention = Attention(num_heads)
        self.up, self.norm, self.down = nn.Linear(32, 44), nn.LayerNorm(44), nn.Linear(44, 32)


class Model(nn.Module):
    def __init__(self, num_heads: int | None = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer(num_heads) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight


ATTENTION = {**{f"layers.*.attention.{name}_proj": "colwise" for name in "qkv"}, "layers.*.attention.o_proj": "rowwise"}
MLP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def test_a_right_plan() -> None:
    plan = choose_plan(Model(), tp_size=2, plan={**ATTENTION, **MLP, "head": "vocab"})
    by_name = {entry.name: entry for entry in plan.entries}
    assert by_name["layers.1.attention.o_proj"].blocks == (Block(num_units=4, unit_size=8),)
    assert by_name["embed"].style == "vocab"
    assert by_name["embed"].reason == "shares its weight with head"
    assert by_name["head"].style == "vocab_head"
    assert plan.source == "the plan given by the user"
    assert {change.local_value(2, 0) for change in plan.attributes} == {2}


def test_other_names_of_styles_and_styles_with_numbers() -> None:
    plan = {"layers.*.up": "colwise_rep", "layers.*.attention.q_proj": Style("colwise_gather_output"), "embed": "vocab"}
    entries = {entry.name: entry.style for entry in choose_plan(Model(), tp_size=2, plan=plan).entries}
    assert entries["layers.0.up"] == "colwise_gather_output"
    assert entries["head"] == "vocab_head"
    packed = {"layers.*.up": "packed_colwise:2", "layers.*.down": Style("rowwise", num_heads=22)}
    (up, *_) = choose_plan(Model(), tp_size=2, plan=packed).entries
    assert up.blocks == (Block(num_units=22),) * 2


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.upp": "colwise"}, r"matches no module .* did you mean 'layers\.\*\.up'"),
        ({"layers.*.up": "columns"}, "unknown style 'columns' .*: choose one of .*colwise"),
        ({"layers.*.up": 3}, "is not a style: write the name of one"),
        ({"layers.*.up": "colwise:3"}, "only packed_colwise and packed_rowwise take a number"),
        ({"layers.*.norm": "colwise"}, "is a LayerNorm: this style is for an nn.Linear"),
        ({"layers.*.up": "embedding_colwise"}, "is a Linear: this style is for an nn.Embedding"),
        ({"layers.*.norm": "rowwise"}, "is a LayerNorm: this style is for an nn.Linear"),
        ({"layers.*.norm": "vocab"}, "is for an nn.Embedding, or the nn.Linear that computes logits"),
        ({"layers.*.norm.weight": "vocab"}, "is a bare parameter"),
        ({"layers.*.up": "colwise"}, "no rowwise layer in 'layers.0' reads its sharded output"),
        ({"layers.*.down": "rowwise"}, "no colwise layer in 'layers.0' shards its input"),
        ({**ATTENTION, "layers.*.attention.o_proj": Style("rowwise", num_heads=8)}, "give both the same heads"),
        ({**MLP, "layers.*.up": "packed_colwise:3"}, "into 3 blocks, which is not a divisor"),
        ({**MLP, "layers.*.up": Style("colwise", num_heads=7)}, "into 7 heads, which is not a divisor"),
        (
            {**MLP, "layers.*.up": Style("colwise", blocks=(Block(num_units=40),))},
            r"blocks of \[40\], which do not add up",
        ),
        ({**MLP, "head": "vocab", "embed": "replicated"}, "shares its weight with 'embed' of another style: give all"),
        ({**MLP, "head": "rowwise"}, "shares its weight with 'embed'"),
        (
            {"layers.*.up": Style("colwise_gather_output", blocks=(Block(num_units=22), Block(num_units=22)))},
            "whose order would change",
        ),
    ],
)
def test_mistakes(plan: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_plan(Model(), tp_size=2, plan=plan)


def test_more_ranks_than_heads() -> None:
    with pytest.raises(
        ConfigError, match=r"'layers.0.attention.q_proj' \(colwise\): tp_size=8 is larger than the 4 heads"
    ):
        choose_plan(Model(), tp_size=8, plan=ATTENTION)


def test_heads_that_nothing_counts() -> None:
    with pytest.raises(ConfigError, match=r"number of heads is unknown .* write Style\('colwise', num_heads=...\)"):
        choose_plan(Model(num_heads=None), tp_size=2, plan=ATTENTION)
    counted = {
        name: Style(style, num_heads=4) if isinstance(style, str) else style for name, style in ATTENTION.items()
    }
    plan = choose_plan(Model(num_heads=None), tp_size=2, plan=counted)
    assert all(entry.blocks == (Block(num_units=4, unit_size=8),) for entry in plan.entries)


def test_split_sequences_need_gradients_that_the_plan_accounts_for() -> None:
    model = Model()
    for layer in model.layers:
        layer.attention.norm = nn.LayerNorm(32)
    plan = {**ATTENTION, **MLP, "layers.*.attention.o_proj": "replicated"}
    with pytest.raises(ConfigError, match=r"'layers.0.attention.norm' is replicated, .* counted once per"):
        choose_plan(model, tp_size=2, plan=plan, shards_sequence=True)


def test_split_sequences_need_a_stack() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(ConfigError, match="has no stack of layers"):
        choose_plan(model, tp_size=2, plan={"0": "colwise", "1": "rowwise"}, shards_sequence=True)


def test_layers_that_call_experts_themselves_need_whole_sequences() -> None:
    model = Model()
    for layer in model.layers:
        layer.experts = nn.Linear(32, 32)
    plan = {**ATTENTION, **MLP, "layers.*.experts": "moe_tp_experts"}
    with pytest.raises(ConfigError, match=r"'moe_tp_experts' .* which the layer itself calls"):
        choose_plan(model, tp_size=2, plan=plan, shards_sequence=True)


P = torch.nn.utils.parametrizations
COMPUTED_WEIGHTS = {
    "weight_norm": P.weight_norm,
    "spectral_norm": P.spectral_norm,
    "orthogonal": P.orthogonal,
    "old spectral_norm": torch.nn.utils.spectral_norm,
    "old weight_norm": torch.nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED_WEIGHTS)
def test_weights_that_are_computed_of_others(kind: str) -> None:
    model = Model()
    COMPUTED_WEIGHTS[kind](model.layers[0].up)
    with pytest.raises(ConfigError, match=r"'layers\.0\.up', which .* whose weight is computed from other parameters"):
        choose_plan(model, tp_size=2, plan=MLP)
    alone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    assert choose_plan(alone, tp_size=2).entries
    COMPUTED_WEIGHTS[kind](alone[0])
    with pytest.raises(ConfigError, match="none can be derived"):
        choose_plan(alone, tp_size=2)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("DogeForCausalLM", {"num_key_value_heads": 2}, r"not its parameter 'model\.layers\.0\.self_attn\.A' of shape"),
        ("EsmcForMaskedLM", {}, r"not its parameter '.*q_norm\.weight' of shape \(32,\)"),
        (
            "MixtralForCausalLM",
            {"num_key_value_heads": 8},
            "has 4 query heads, which is not a multiple of its 8 key-value",
        ),
    ],
)
def test_plans_of_transformers_that_leave_values_of_all_heads_whole(kind: str, settings: dict, message: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    build = getattr(transformers, kind)
    with torch.device("meta"):
        model = build(build.config_class(**SMALL, **settings))
    with pytest.raises(ConfigError, match=message):
        choose_plan(model, tp_size=2)


def test_bloom_that_slices_its_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, pretraining_tp=2, slow_but_exact=True)
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(config)
    with pytest.raises(ConfigError, match="set slow_but_exact=False"):
        choose_plan(model, tp_size=2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


def test_nothing_can_be_derived() -> None:
    with pytest.raises(ConfigError, match=r"none can be derived \(up is not sharded: their results differ when"):
        choose_plan(Normed(), tp_size=2)
    with pytest.raises(ConfigError, match="it has no consecutive linear layers"):
        choose_plan(nn.Sequential(nn.Conv1d(3, 3, 1)), tp_size=2)
