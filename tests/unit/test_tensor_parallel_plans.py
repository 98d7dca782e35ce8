"""Plans of transformers' families: which module is split how, by which heads, and what changes with the split."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import entry_of
from torch import nn
from zoo import get_model

from booster.core.layer_stacks import find_stacks
from booster.plugins.hybrid_parallel.partition import planned_shard_specs
from booster.plugins.hybrid_parallel.tensor_parallel.shard_spec import Block, local_sizes
from booster.plugins.hybrid_parallel.tp_plan.plan import (
    TensorParallelPlan,
    explain,
    generalize,
    match_names,
)
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan

transformers = pytest.importorskip("transformers")

HEADS = Block(num_units=4, unit_size=8)
LLAMA_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FALCON = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 101}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "vocab_size": 101,
}


def make(kind: str, config: str, **arguments: object) -> nn.Module:
    """Returns a model without memory."""
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    with torch.device("meta"):
        return getattr(transformers, kind)(getattr(transformers, config)(**(tokens | arguments)))


def styles(plan: TensorParallelPlan) -> dict[str, str]:
    """Returns the style per pattern; every layer must have the same."""
    found: dict[str, str] = {}
    for entry in plan.entries:
        assert found.setdefault(generalize(entry.name), entry.style) == entry.style
    return found


def blocks(plan: TensorParallelPlan, name: str) -> tuple[Block, ...]:
    entry = entry_of(plan, name)
    assert entry is not None, name
    return entry.blocks


def changes(plan: TensorParallelPlan, num_ranks: int, rank: int) -> dict[str, int]:
    values = {f"{one.module}.{one.attribute}": one.local_value(num_ranks, rank) for one in plan.attributes}
    assert len(values) == len(plan.attributes)
    return values


def test_llama_by_the_plan_of_transformers() -> None:
    model = make("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE, tie_word_embeddings=True)
    plan = choose_plan(model, tp_size=2)
    layer = "model.layers.*"
    assert styles(plan) == {
        "model.embed_tokens": "vocab",
        **{f"{layer}.self_attn.{name}_proj": "colwise" for name in "qkv"},
        f"{layer}.self_attn.o_proj": "rowwise",
        **{f"{layer}.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        f"{layer}.mlp.down_proj": "rowwise",
        "lm_head": "vocab_head",
    }
    query, key_value = _grouped()
    assert blocks(plan, "model.layers.1.self_attn.q_proj") == (query,)
    assert blocks(plan, "model.layers.1.self_attn.k_proj") == (key_value,)
    assert blocks(plan, "model.layers.1.self_attn.o_proj") == (query,)
    assert blocks(plan, "model.layers.1.mlp.down_proj") == (Block(num_units=44),)
    assert plan.stacks == (("model.layers.0", "model.layers.1"),)
    gate = entry_of(plan, "model.layers.0.mlp.gate_proj")
    assert gate is not None
    assert gate.siblings == ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    assert gate.region == "model.layers.0.mlp"
    assert gate.dim == 0
    assert entry_of(plan, "model.layers.0.mlp.down_proj").dim == 1
    assert "transformers' own plan" in plan.source


def _grouped() -> tuple[Block, Block]:
    query = Block(num_units=4, unit_size=8, num_groups=2)
    return query, Block(num_units=2, unit_size=8, num_query_units=4, num_groups=2)


@pytest.mark.parametrize(("tp_size", "per_group"), [(2, 2), (4, 1)])
def test_query_heads_per_key_value_head_follow_the_split(tp_size: int, per_group: int) -> None:
    model = make("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE)
    plan = choose_plan(model, tp_size=tp_size)
    for rank in range(tp_size):
        values = changes(plan, tp_size, rank)
        assert values == {f"model.layers.{layer}.self_attn.num_key_value_groups": per_group for layer in (0, 1)}


def test_gemma_has_heads_wider_than_its_hidden_states() -> None:
    model = make("GemmaForCausalLM", "GemmaConfig", **(LLAMA_LIKE | {"num_key_value_heads": 1, "head_dim": 16}))
    plan = choose_plan(model, tp_size=4)
    assert blocks(plan, "model.layers.0.self_attn.q_proj")[0].unit_size == 16
    assert local_sizes(blocks(plan, "model.layers.0.self_attn.k_proj"), 4) == [16] * 4
    assert entry_of(plan, "model.embed_tokens").style == "vocab"


def test_norms_of_heads_sum_their_gradients_and_the_bare_model_has_no_head() -> None:
    plan = choose_plan(make("Qwen3Model", "Qwen3Config", **LLAMA_LIKE, head_dim=8), tp_size=2)
    assert styles(plan)["layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert "lm_head" not in styles(plan)


def test_experts_in_one_tensor_are_cut_by_its_dimensions() -> None:
    model = make("MixtralForCausalLM", "MixtralConfig", **LLAMA_LIKE, num_local_experts=4)
    plan = choose_plan(model, tp_size=2)
    up, down = (entry_of(plan, f"model.layers.0.mlp.experts.{name}") for name in ("gate_up_proj", "down_proj"))
    assert up.is_parameter
    assert (up.style, up.dim, up.blocks) == ("packed_colwise", 1, (Block(num_units=44),) * 2)
    assert (down.style, down.dim, down.blocks) == ("rowwise", 2, (Block(num_units=44),))
    assert entry_of(plan, "model.layers.0.mlp.experts").style == "moe_tp_experts"


def test_gathered_outputs_are_cut_in_plain_order() -> None:
    plan = choose_plan(make("Phi3ForCausalLM", "Phi3Config", **LLAMA_LIKE), tp_size=2)
    assert blocks(plan, "model.layers.0.self_attn.qkv_proj") == (Block(num_units=64),)
    assert styles(plan)["model.layers.*.self_attn.o_proj"] == "rowwise_split_input"
    assert not plan.attributes


def test_gpt_neox_keeps_query_key_and_value_of_a_head_together() -> None:
    model = make("GPTNeoXForCausalLM", "GPTNeoXConfig", **LLAMA_LIKE)
    plan = choose_plan(model, tp_size=2)
    assert blocks(plan, "gpt_neox.layers.0.attention.query_key_value") == (Block(num_units=4, unit_size=24),)


def test_gpt2_is_packed_and_transposed() -> None:
    model = make("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_head=4, n_layer=2, vocab_size=101, n_positions=16)
    plan = choose_plan(model, tp_size=2)
    fused, out = (entry_of(plan, f"transformer.h.1.attn.{name}") for name in ("c_attn", "c_proj"))
    assert (fused.style, fused.dim, fused.blocks) == ("packed_colwise", 1, (HEADS,) * 3)
    assert (out.style, out.dim, out.blocks) == ("rowwise", 0, (HEADS,))
    values = changes(plan, 2, 1)
    assert values["transformer.h.1.attn.split_size"] == 16
    assert values["transformer.h.1.attn.num_heads"] == 2
    assert not any(name.endswith("embed_dim") for name in values)
    assert styles(plan)["transformer.wte"] == "vocab"
    assert styles(plan)["lm_head"] == "vocab_head"


def test_gpt2_with_cross_attention_reads_two_inputs() -> None:
    model = make("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_head=4, n_layer=1, add_cross_attention=True)
    plan = choose_plan(model, tp_size=2)
    key_value, query = (entry_of(plan, f"transformer.h.0.crossattention.{name}") for name in ("c_attn", "q_attn"))
    assert key_value.blocks == (HEADS, HEADS)
    assert key_value.region == ""
    assert query.region == "transformer.h.0.crossattention"
    assert query.siblings == (query.name,)


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification"])
def test_bert_with_and_without_a_head(kind: str) -> None:
    model = make(kind, "BertConfig", **BERT)
    plan = choose_plan(model, tp_size=4)
    prefix = "" if kind == "BertModel" else "bert."
    layer = f"{prefix}encoder.layer.*"
    found = styles(plan)
    assert found[f"{layer}.attention.self.query"] == "colwise"
    assert found[f"{layer}.attention.output.dense"] == "rowwise"
    assert blocks(plan, f"{prefix}encoder.layer.0.attention.output.dense") == (HEADS,)
    assert blocks(plan, f"{prefix}encoder.layer.0.output.dense") == (Block(num_units=44),)
    assert entry_of(plan, f"{prefix}encoder.layer.0.attention.self.key").region.endswith("attention.self")
    assert ("bert.embeddings.word_embeddings" in found) == (kind == "BertForMaskedLM")
    assert len(find_stacks(model)[0]) == 2


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "EncoderDecoderModel"])
def test_relatives_of_bert_also_inside_of_other_models(name: str) -> None:
    found = styles(choose_plan(get_model(name).build(), tp_size=2))
    layer = "encoder.encoder.layer.*" if name == "EncoderDecoderModel" else "roberta.encoder.layer.*"
    assert found[f"{layer}.attention.self.query"] == "colwise"
    assert found[f"{layer}.output.dense"] == "rowwise"


def test_sizes_that_a_forward_puts_together_before_it_reshapes() -> None:
    plan = choose_plan(get_model("RoFormerForMaskedLM").build(), tp_size=2)
    changed = {one.attribute for one in plan.attributes if one.module == "roformer.encoder.layer.0.attention.self"}
    assert "all_head_size" in changed


def test_what_the_plans_of_transformers_have_wrong_is_corrected() -> None:
    found = styles(choose_plan(get_model("InklingForCausalLM").build(), tp_size=2))
    assert found["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert found["model.embed_tokens.embed_norm"] == "replicated_with_grad_allreduce"
    found = styles(choose_plan(get_model("ApertusForCausalLM").build(), tp_size=2))
    assert found["model.layers.*.mlp.act_fn"] == "replicated_with_grad_allreduce"


def test_opt_counts_heads_and_has_its_mlp_in_the_layer() -> None:
    model = make("OPTForCausalLM", "OPTConfig", **(LLAMA_LIKE | {"ffn_dim": 44, "word_embed_proj_dim": 32}))
    plan = choose_plan(model, tp_size=2)
    assert changes(plan, 2, 0)["model.decoder.layers.0.self_attn.num_heads"] == 2
    assert entry_of(plan, "model.decoder.layers.0.fc1").region == "model.decoder.layers.0.fc1"
    assert styles(plan)["model.decoder.embed_tokens"] == "vocab"


def test_t5_splits_its_position_bias_and_all_that_shares_the_embedding() -> None:
    model = make("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, num_heads=4, d_ff=44, num_layers=2)
    plan = choose_plan(model, tp_size=2)
    assert {entry.name for entry in plan.entries if entry.style.startswith("vocab")} == {
        "shared",
        "encoder.embed_tokens",
        "decoder.embed_tokens",
        "lm_head",
    }
    bias = entry_of(plan, "decoder.block.0.layer.0.SelfAttention.relative_attention_bias")
    assert (bias.style, bias.dim, bias.blocks) == ("embedding_colwise", 1, (Block(num_units=4),))
    assert changes(plan, 2, 0)["decoder.block.1.layer.1.EncDecAttention.n_heads"] == 2
    assert entry_of(plan, "decoder.block.1.layer.1.EncDecAttention.k").region == ""
    assert len(plan.stacks) == 2


def test_vit() -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 44}
    plan = choose_plan(make("ViTForImageClassification", "ViTConfig", **config), tp_size=2)
    assert set(styles(plan)) == {
        *(f"vit.layers.*.attention.{name}_proj" for name in "qkvo"),
        "vit.layers.*.mlp.fc1",
        "vit.layers.*.mlp.fc2",
    }


def test_bloom_is_given_the_biases_of_all_heads() -> None:
    plan = choose_plan(make("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=1, n_head=4), tp_size=2)
    assert blocks(plan, "transformer.h.0.self_attention.query_key_value") == (Block(num_units=4, unit_size=24),)
    (argument,) = plan.arguments
    assert (argument.module, argument.argument, argument.dim) == ("transformer.h.0.self_attention", "alibi", 0)
    assert argument.block == Block(num_units=4)
    assert changes(plan, 2, 0) == {"transformer.h.0.self_attention.num_heads": 2}


def test_falcon_has_three_orders_of_heads() -> None:
    name = "transformer.h.0.self_attention"
    queries = Block(num_units=4, unit_size=8, num_groups=1)
    shared = Block(num_units=1, unit_size=8, num_query_units=4, num_groups=1)
    old = choose_plan(make("FalconForCausalLM", "FalconConfig", **FALCON, multi_query=True), tp_size=4)
    assert blocks(old, f"{name}.query_key_value") == (queries, shared, shared)
    assert changes(old, 4, 3) == {f"{name}.num_heads": 1, f"{name}.num_kv_heads": 1}
    per_head = choose_plan(make("FalconForCausalLM", "FalconConfig", **FALCON, multi_query=False), tp_size=2)
    assert blocks(per_head, f"{name}.query_key_value") == (Block(num_units=4, unit_size=24),)
    assert changes(per_head, 2, 0) == {f"{name}.num_heads": 2, f"{name}.num_kv_heads": 2}
    new = {"new_decoder_architecture": True, "num_kv_heads": 2}
    grouped = choose_plan(make("FalconForCausalLM", "FalconConfig", **FALCON, **new), tp_size=2)
    assert blocks(grouped, f"{name}.query_key_value") == (Block(num_units=2, unit_size=32),)
    assert changes(grouped, 2, 1) == {f"{name}.num_heads": 2, f"{name}.num_kv_heads": 1}


def test_whisper_has_two_stacks_and_a_head_that_is_tied() -> None:
    sizes = {f"{side}_{what}": 4 if what != "layers" else 1 for side in ("encoder", "decoder")
             for what in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
    model = make("WhisperForConditionalGeneration", "WhisperConfig", d_model=32, num_mel_bins=8, **sizes)
    plan = choose_plan(model, tp_size=2)
    assert plan.stacks == (("model.encoder.layers.0",), ("model.decoder.layers.0",))
    assert styles(plan)["proj_out"] == "vocab_head"
    assert styles(plan)["model.decoder.embed_tokens"] == "vocab"
    key = entry_of(plan, "model.decoder.layers.0.encoder_attn.k_proj")
    assert (key.region, len(key.siblings)) == ("", 2)


def test_split_sequences_sum_the_gradients_of_what_works_on_tokens() -> None:
    model = make("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE)
    plan = choose_plan(model, tp_size=2, shards_sequence=True)
    alone = [entry.name for entry in plan.entries if entry.style == "sequence"]
    assert alone == [
        f"model.layers.{layer}.{name}_layernorm" for layer in (0, 1) for name in ("input", "post_attention")
    ]


def test_a_model_of_transformers_inside_of_a_users() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make("LlamaModel", "LlamaConfig", **LLAMA_LIKE)
            self.score = nn.Linear(32, 3)

    plan = choose_plan(Wrapper(), tp_size=2)
    assert styles(plan)["body.layers.*.mlp.up_proj"] == "colwise"
    assert "score" not in styles(plan)
    assert plan.stacks == (("body.layers.0", "body.layers.1"),)


def test_without_tensor_parallelism_only_the_stacks_are_found() -> None:
    plan = choose_plan(make("BertModel", "BertConfig", **BERT), tp_size=1)
    assert plan.entries == ()
    assert plan.stacks == (("encoder.layer.0", "encoder.layer.1"),)


def test_patterns_with_and_without_the_base_model() -> None:
    names = ["", "model", "model.layers.0.up", "model.layers.1.up", "head"]
    found, unmatched = match_names({"layers.*.up": 1, "model.layers.0.up": 2, "none": 3}, names, "model")
    assert found == {"model.layers.0.up": 2, "model.layers.1.up": 1}
    assert unmatched == ["none"]
    bare, _ = match_names({"model.layers.*.up": 1}, ["layers.0.up"], "model")
    assert bare == {"layers.0.up": 1}


def test_the_table_shows_shapes_bytes_and_reasons() -> None:
    model = make("BertForMaskedLM", "BertConfig", **BERT)
    plan = choose_plan(model, tp_size=2)
    specs = {name: rank_specs[0] for name, rank_specs in planned_shard_specs(model, plan, 2, 64).items()}
    table = explain(plan, model, specs, 0, 2)
    lines = table.splitlines()
    assert lines[0].split() == ["module", "style", "local", "shape", "bytes"]
    rows = {line.split()[0]: line for line in lines}
    # 16 x 32 elements of four bytes in each of two layers
    assert "16x32 of 32x32" in rows["bert.encoder.layer.*.attention.self.query.weight"]
    assert rows["bert.encoder.layer.*.attention.self.query.weight"].endswith(" 4,096")
    assert "(2)" in rows["bert.encoder.layer.*.attention.self.query.weight"]
    assert "32x22 of 32x44" in rows["bert.encoder.layer.*.output.dense.weight"]
    assert "64x32 of 101x32" in rows["bert.embeddings.word_embeddings.weight"]
    assert "64 of 101" in rows["cls.predictions.bias"]  # the head's, which is tied
    assert "(shared)" in rows["cls.predictions.decoder.weight"]
    assert "replicated" in rows["bert.embeddings.LayerNorm.weight"]
    assert "the table for models of type bert" in table
    assert "num_attention_heads" in table
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    (total,) = (line for line in lines if line.startswith("rank 0 of 2 holds"))
    assert f"of {whole:,} bytes" in total
