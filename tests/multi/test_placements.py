"""Plain models whose parameters have placements train as in one process; what follows from placements, and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import preload, run_ranks
from hybrid_cases import entry_of
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import booster
from booster import Booster, ConfigError
from booster.device import current_device
from booster.plugins import HybridParallelPlugin
from booster.plugins.hybrid_parallel.partition import planned_shard_specs
from booster.plugins.hybrid_parallel.tp_plan.plan import explain, matches
from booster.plugins.hybrid_parallel.tp_plan.resolve import choose_plan

pytestmark = pytest.mark.on_device
preload(*(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")))

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


class Mlp(nn.Module):
    def __init__(self, num_blocks=1):
        super().__init__()
        self.num_blocks = num_blocks
        self.fc1, self.fc2 = nn.Linear(16, 32 * num_blocks), nn.Linear(32, 16)

    def forward(self, x):
        first, *others = self.fc1(x).chunk(self.num_blocks, -1)
        hidden = F.gelu(first)
        for other in others:
            hidden = hidden * other
        return self.fc2(hidden)


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=32, vocab_size=64, **no_dropout))


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2))


def build_bert():
    from transformers import BertConfig, BertForMaskedLM

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **no_dropout, intermediate_size=64))


def of(pattern, placement, *leaves):
    return {f"{pattern}.{leaf}": placement for leaf in leaves or ("weight",)}


# Of Colossal-AI's "Parallelize Your Training like Megatron-LM via ColoTensor": its shards of a GPT-2.
COLO_TENSOR = {
    **of("transformer.h.*.mlp.c_fc", Shard(-1), "weight", "bias"),
    **of("transformer.h.*.mlp.c_proj", Shard(0)),
    **of("transformer.wte", Shard(-1)),
    **of("transformer.wpe", Shard(-1)),
    **of("transformer.h.*.attn.c_attn", Shard(-1), "weight", "bias"),
    **of("transformer.h.*.attn.c_proj", Shard(-1), "weight", "bias"),
}
MEGATRON = {
    **of("transformer.h.*.mlp.c_fc", Shard(1)),
    **of("transformer.h.*.mlp.c_proj", Shard(0)),
    **of("transformer.h.*.attn.c_attn", Shard(1)),
    **of("transformer.h.*.attn.c_proj", Shard(0)),
    **of("transformer.wte", Shard(0)),
}
LLAMA = {
    **{key: Shard(0) for name in "qkv" for key in of(f"model.layers.*.self_attn.{name}_proj", None)},
    **of("model.layers.*.self_attn.o_proj", Shard(1)),
    **of("model.layers.*.mlp.gate_proj", Shard(0)),
    **of("model.layers.*.mlp.up_proj", Shard(0)),
    **of("model.layers.*.mlp.down_proj", Shard(1)),
    **of("model.embed_tokens", Shard(0)),
    **of("lm_head", Shard(0)),
}
LAYER = "bert.encoder.layer.*"
BERT = {
    **{key: Shard(0) for name in ("query", "key", "value") for key in of(f"{LAYER}.attention.self.{name}", None)},
    **of(f"{LAYER}.attention.output.dense", Shard(1)),
    **of(f"{LAYER}.intermediate.dense", Shard(0), "weight", "bias"),
    **of(f"{LAYER}.output.dense", Shard(1)),
    **of(f"{LAYER}.output.dense", Replicate(), "bias"),
    **of("bert.embeddings.word_embeddings", Shard(0)),
}
CASES = {
    "pair": (Mlp, {"fc1.weight": Shard(0), "fc2.weight": Shard(1)}, {"fc1": "colwise", "fc2": "rowwise"}),
    "packed": (
        lambda: Mlp(2),
        {"fc1.weight": Shard(0), "fc2.weight": Shard(-1)},
        {"fc1": "packed_colwise", "fc2": "rowwise"},
    ),
    "column": (Mlp, {"fc1.weight": Shard(0), "fc1.bias": Shard(0)}, {"fc1": "colwise_gather_output"}),
    "row": (Mlp, {"fc2.weight": Shard(1)}, {"fc2": "rowwise_split_input"}),
    "columns": (
        Mlp,
        {"fc1.weight": Shard(0), "fc2.weight": Shard(0)},
        {"fc1": "colwise_gather_output", "fc2": "colwise_gather_output"},
    ),
    "ColoTensor": (
        build_gpt2,
        COLO_TENSOR,
        {
            "transformer.h.0.attn.c_attn": "colwise_gather_output",
            "transformer.h.0.attn.c_proj": "colwise_gather_output",
            "transformer.h.0.mlp.c_fc": "colwise",
            "transformer.h.0.mlp.c_proj": "rowwise",
            "transformer.wpe": "embedding_colwise_gather_output",
            "transformer.wte": "embedding_colwise_gather_output",
            "lm_head": "rowwise_split_input",
        },
    ),
    "gpt2": (
        build_gpt2,
        MEGATRON,
        {
            "transformer.h.0.attn.c_attn": "packed_colwise",
            "transformer.h.0.attn.c_proj": "rowwise",
            "transformer.wte": "vocab",
            "lm_head": "vocab_head",
        },
    ),
    "llama": (
        build_llama,
        LLAMA,
        {
            "model.layers.0.self_attn.k_proj": "colwise",
            "model.layers.0.mlp.down_proj": "rowwise",
            "lm_head": "vocab_head",
        },
    ),
    "bert": (
        build_bert,
        BERT,
        {
            "bert.encoder.layer.0.attention.self.query": "colwise",
            "bert.encoder.layer.0.attention.output.dense": "rowwise",
            "bert.encoder.layer.0.intermediate.dense": "colwise",
            "bert.encoder.layer.0.output.dense": "rowwise",
        },
    ),
}


def mark(model, placements):
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for pattern, placement in placements.items():
            if matches(pattern, name):
                booster.shard(parameter, placement)


def train(name, tp_size, is_marked, arguments):
    make, placements, _ = CASES[name]
    torch.manual_seed(0)
    model = make()
    if is_marked:
        mark(model, placements)
    plan = None if is_marked or tp_size == 1 else placements
    plugin = HybridParallelPlugin(tp_size=tp_size, precision="fp32", plan=plan, **arguments)
    boost = Booster(plugin=plugin)
    model, optimizer, *_ = boost.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        if make in (build_gpt2, build_llama, build_bert):
            ids = torch.randint(0, 64, (2, 8), generator=generator).to(current_device())
            loss = model(input_ids=ids, labels=ids).loss
        else:
            loss = model(torch.randn(4, 16, generator=generator).to(current_device())).square().mean()
        boost.backward(loss, optimizer)
        boost.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = model.state_dict()
    return losses, {key: value.detach().cpu().clone() for key, value in weights.items()} if tp_size == 1 else None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_marked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_is_that_of_one_process(name, is_marked):
    ((expected, _),) = run_ranks(train, 1, name, 1, False, {})
    for losses, _ in run_ranks(train, 2, name, 2, is_marked, {}):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_sharded_sequences(name, mode):
    ((expected, _),) = run_ranks(train, 1, name, 1, False, {})
    sizes = {"sp_size": 2} if mode == "all_to_all" else {}
    arguments = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, **sizes}
    for losses, _ in run_ranks(train, 2 * (1 + bool(sizes)), name, 2, True, arguments):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_styles_that_follow(name):
    make, placements, styles = CASES[name]
    model = make()
    plan = choose_plan(model, tp_size=2, plan=placements)
    for module, style in styles.items():
        assert entry_of(plan, module).style == style
    specs = {parameter: rank_specs[0] for parameter, rank_specs in planned_shard_specs(model, plan, 2, 64).items()}
    assert "the weight is Shard(" in explain(plan, model, specs, 0, 2)
    mark(model, placements)
    assert choose_plan(model, tp_size=2).entries == plan.entries


ERRORS = [
    ({"fc3.weight": Shard(0)}, r"a placement for 'fc3.weight', which matches no parameter"),
    ({"fc1.weight": Shard(2)}, r"parameter of shape \(32, 16\), which has the dimensions 0 to 1"),
    ({"fc1.weight": Partial()}, r"parameters are sharded or replicated"),
    ({"fc1.weight": Shard(0), "fc1.bias": Replicate()}, r"'fc1.bias' is Replicate\(\), but .* the bias is Shard"),
    ({"fc2.weight": Shard(1), "fc2.bias": Shard(0)}, r"'fc2.bias' is Shard\(0\), but .* the bias is Replicate"),
    ({"fc1.bias": Shard(0)}, r"'fc1.bias' is to be sharded, but not the weight beside it"),
    ({"fc1.weight": Shard(0), "fc1": "colwise"}, r"'fc1' has a style, 'colwise', and a placement of its weight"),
    ({"fc1.weight": Replicate()}, r"replicate 1 parameters and shard none"),
    ({"fc1": Shard(0)}, r"a placement for 'fc1', which matches no parameter"),
]


@pytest.mark.parametrize(("plan", "message"), ERRORS)
def test_placements_that_contradict(plan, message):
    with pytest.raises(ConfigError, match=message):
        choose_plan(Mlp(), tp_size=2, plan=plan)


def test_placements_of_other_modules():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.raises(ConfigError, match=r"'1.weight' is to be sharded, which is a parameter of a LayerNorm"):
        choose_plan(model, tp_size=2, plan={"1.weight": Shard(0)})


def test_marks_that_contradict():
    model = Mlp()
    booster.shard(model.fc1.weight, Shard(0))
    booster.shard(model.fc1.weight, Shard(-2))  # the same
    with pytest.raises(ConfigError, match=r"Shard\(dim=1\) for a parameter that is Shard\(dim=-2\) already"):
        booster.shard(model.fc1.weight, Shard(1))
    with pytest.raises(ConfigError, match="got Linear, which is not a parameter"):
        booster.shard(model.fc1, Shard(0))
    with pytest.raises(ConfigError, match="'colwise', which is not a placement"):
        booster.shard(model.fc2.weight, "colwise")
    with pytest.raises(ConfigError, match=r"is Shard\(dim=1\) in the plan, but by booster.shard"):
        choose_plan(model, tp_size=2, plan={"fc1.weight": Shard(1)})
