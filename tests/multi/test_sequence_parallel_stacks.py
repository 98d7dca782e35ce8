"""Models whose stacks of layers work on split sequences have the loss and the gradients of one process."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distributed
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.comm import all_reduce_sum
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins.hybrid_parallel.activation_checkpointing import GradientCheckpointConfig, checkpoint_layers
from booster.plugins.hybrid_parallel.sequence_parallel.group import SequenceParallelGroup
from booster.plugins.hybrid_parallel.sequence_parallel.layer_stack import attach_stack
from booster.plugins.hybrid_parallel.sequence_parallel.splitters import SequenceAxisSplitter, TensorAxisSplitter
from booster.plugins.hybrid_parallel.tensor_parallel.group import TensorParallelGroup

pytestmark = pytest.mark.on_device

MODES = ["all_to_all", "ring_attn"]
VOCABULARY = 61
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
ENCODER = {key: DECODER[key] for key in DECODER if key != "num_key_value_heads"}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
# By name: configuration, model, its arguments, where the layers are.
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, ["model.layers"]),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}, ["model.layers"]),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": 4}, ["model.layers"]),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**DECODER, "head_dim": 12}, ["model.layers"]),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**DECODER, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        ["model.layers"],
    ),
    "phi": (
        "PhiConfig",
        "PhiForCausalLM",
        {**DECODER, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        ["model.layers"],
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        ["transformer.h"],
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ["bert.encoder.layer"],
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **{key: ENCODER[key] for key in ENCODER if key != "intermediate_size"},
            **{"ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0},
        },
        ["model.decoder.layers"],
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0},
            **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40},
            **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40},
            **{"pad_token_id": 0, "decoder_start_token_id": 0},
        },
        ["model.encoder.layers", "model.decoder.layers"],
    ),
    "falcon": (  # names "sdpa" itself
        "FalconConfig",
        "FalconForCausalLM",
        {
            **{key: ENCODER[key] for key in ENCODER if key != "intermediate_size"},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
        },
        ["transformer.h"],
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, ["encoder.block", "decoder.block"]),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            **{
                key: ENCODER[key]
                for key in ENCODER
                if key not in ("vocab_size", "max_position_embeddings", "pad_token_id")
            },
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            **{"image_size": 12, "patch_size": 4, "num_labels": 3},
        },
        None,
    ),
}


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x, states=None, **how):
        inputs = (x, x if states is None else states, x if states is None else states)
        heads = [
            projection(one).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, one in zip(self.projections, inputs, strict=False)
        ]
        output = F.scaled_dot_product_attention(*heads, **how)
        return self.projections[3](output.transpose(1, 2).flatten(2))


class Table(NamedTuple):
    factors: torch.Tensor


class Block(nn.Module):
    def __init__(self, width, crosses, dropout):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, 4)
        self.cross = Attention(width, 4) if crosses else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, table, checkpoints=False):
        x = x * (1 + table.factors)
        normed = self.norms[0](x)
        if checkpoints:
            x = x + checkpoint(self.attention, normed, is_causal=True, use_reentrant=False)
        else:
            x = x + self.dropout(self.attention(normed, is_causal=True))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.mlp(self.norms[2](x))


class UserModel(nn.Module):
    """Pre-norm blocks that look at another sequence too, whose length equals a rank's share of the own one.

    Their table of factors per token comes in a container.
    """

    def __init__(self, *, crosses=True, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.other = nn.Embedding(VOCABULARY, 32)
        self.table = nn.Parameter(torch.randn(64, 32) * 0.1)
        self.blocks = nn.ModuleList(Block(32, crosses, dropout) for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)
        self.checkpoints_layers = self.checkpoints_parts = False

    def forward(self, ids, others):
        x, memory = self.embedding(ids), self.other(others)
        for block in self.blocks:
            table = Table(self.table[: ids.shape[1]])
            if self.checkpoints_layers:
                x = checkpoint(block, x, memory, table, use_reentrant=False)
            else:
                x = block(x, memory, table, checkpoints=self.checkpoints_parts)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _transformers_model(name):
    transformers = pytest.importorskip("transformers")
    config_name, model_name, arguments, stacks = FAMILIES[name]
    torch.manual_seed(3)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**arguments))
    if stacks is None:
        stacks = [one for one, module in model.named_modules() if isinstance(module, nn.ModuleList)][-1:]
    for parameter in model.parameters():  # biases and scales that start as zeros would hide mistakes
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(current_device()), stacks


def _batch(name, length, *, is_padded):
    torch.manual_seed(4)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12), "labels": torch.tensor([0, 2])}
    ids = torch.randint(1, VOCABULARY, (2, length))
    labels = ids if name != "t5" else torch.randint(1, VOCABULARY, (2, length + 3))
    batch = {"input_ids": ids, "labels": labels}
    if is_padded:
        mask = torch.ones_like(ids)
        mask[1, -(length // 3) :] = 0
        batch["attention_mask"] = mask
        if name != "t5":
            batch["labels"] = ids.masked_fill(mask == 0, -100)
    return batch


def tokens(length, num_entries):
    return torch.arange(2 * length, device=current_device()).view(2, length) % num_entries


def _gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _compare(model, reference, loss, expected_loss, size, tolerance=1e-5):
    assert abs(loss.item() - expected_loss.item()) <= 1e-5 * abs(expected_loss.item())
    ours, expected = _gradients(model), _gradients(reference)
    assert ours.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in ours.items():
        mean = all_reduce_sum(gradient) / size
        error = float((mean - expected[name]).abs().max())
        assert error <= tolerance * max(float(expected[name].abs().max()), 0.01 * largest), (name, error)


def _attach(model, stacks, ranks):
    for name in stacks:
        attach_stack(list(model.get_submodule(name)), SequenceAxisSplitter(ranks))


@distributed(2, timeout=180)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*FAMILIES])
def test_transformers_models_have_the_gradients_of_one_process(name, mode):
    _check_family(name, mode, 2)


@pytest.mark.slow
@distributed([3, 4], timeout=180)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*FAMILIES])
def test_more_ranks_have_the_gradients_of_one_process(world_size, name, mode):
    _check_family(name, mode, world_size)


def _check_family(name, mode, world_size):
    ranks = SequenceParallelGroup(None, mode)
    model, stacks = _transformers_model(name)
    reference = copy.deepcopy(model)
    _attach(model, stacks, ranks)
    for length, is_padded, checkpoints in [(12, False, False), (11, True, False), (12, True, True)]:
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        batch = _batch(name, length, is_padded=is_padded and name != "vit")
        batch = {key: one.to(current_device()) for key, one in batch.items()}
        arguments = {"use_cache": False} if checkpoints and name not in ("bert", "vit") else {}
        for one in (model, reference):
            one.zero_grad()
        expected = reference(**batch, **arguments).loss
        expected.backward()
        loss = model(**batch, **arguments).loss
        loss.backward()
        _compare(model, reference, loss, expected, world_size, tolerance=2e-5)


@distributed([2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_user_written_models_that_look_at_another_sequence(world_size, mode):
    torch.manual_seed(0)
    ranks = SequenceParallelGroup(None, mode)
    model = UserModel().to(current_device())
    reference = copy.deepcopy(model)
    _attach(model, ["blocks"], ranks)
    model = copy.deepcopy(model)
    cases = [(12, 12 // world_size), (13, 4), (9, 9), (2, 5)]
    for checkpoints_layers, checkpoints_parts in [(False, False), (True, False), (False, True)]:
        model.checkpoints_layers, model.checkpoints_parts = checkpoints_layers, checkpoints_parts
        losses = []
        for one in (model, reference):
            one.zero_grad()
            batches = [(tokens(a, 60), tokens(b, 50)) for a, b in cases]
            losses.append(sum(one(*batch) for batch in batches))
            losses[-1].backward()
        _compare(model, reference, *losses, world_size, tolerance=2e-5)


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_recomputed_layers_drop_what_they_dropped(mode):
    ranks = SequenceParallelGroup(None, mode)
    gradients = []
    for checkpoints in ("none", "calls", "layers"):
        torch.manual_seed(0)
        model = UserModel(dropout=0.2).to(current_device())
        _attach(model, ["blocks"], ranks)
        model.checkpoints_layers = checkpoints == "calls"
        if checkpoints == "layers":
            checkpoint_layers(model, [f"blocks.{index}" for index in range(3)], GradientCheckpointConfig())
        torch.manual_seed(1)
        model(tokens(12, 60), tokens(4, 50)).backward()
        gradients.append((_gradients(model), torch.rand(3, device=current_device())))
    for others, _ in gradients[1:]:
        for name, gradient in gradients[0][0].items():
            assert torch.equal(gradient, others[name]), name
    draws = torch.stack([draw for _, draw in gradients])
    both = [torch.empty_like(draws) for _ in range(2)]
    dist.all_gather(both, draws)
    assert torch.equal(both[0], both[1])  # outside of stacks all ranks draw alike


class _EchoRegions(nn.Module):
    """A layer of whose tokens each is changed alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh(), "more"


@distributed([2, 3])
def test_stacks_over_tensor_parallel_ranks_are_not_scaled(world_size):
    torch.manual_seed(0)
    ranks = TensorParallelGroup(None, sequence_mode="split_gather")
    layers = nn.ModuleList(_EchoRegions() for _ in range(2)).to(current_device())
    reference = copy.deepcopy(layers)
    stack = attach_stack(list(layers), TensorAxisSplitter(ranks))
    x = torch.randn(2, 7, 8).to(current_device())
    results = []
    for one in (layers, reference):
        leaf = x.clone().requires_grad_()
        hidden = leaf
        for layer in one:
            hidden, more = layer(hidden)
            if one is layers and layer is not one[-1]:
                assert ranks.sequence_length == 7
                assert stack.full_length(hidden.shape[1]) == 7
        assert more == "more"
        hidden.square().sum().backward()
        results.append((hidden.detach(), leaf.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    for ours, expected in zip(layers.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(all_reduce_sum(ours.grad.clone()), expected.grad)  # each has its own tokens' share


class _Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        scores = (self.linear(x) @ x.transpose(1, 2)).softmax(-1)
        return scores @ x


class _LocalMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        heads = self.linear(x).unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).squeeze(1)


class _WithWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class _BatchSecond(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, x):
        return self.layer(x)


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_what_would_be_wrong_is_refused(mode):
    ranks = SequenceParallelGroup(None, mode)
    x = torch.randn(3, 8, 8).to(current_device())
    for layer, message in [
        (_Mixer(), "uses neither F.scaled_dot_product_attention"),
        (_LocalMask(), "create it outside of the layers"),
        (_WithWeights(), "need_weights=False"),
        (_BatchSecond(), "hidden states"),
    ]:
        attach_stack([layer.to(current_device())], SequenceAxisSplitter(ranks))
        with pytest.raises(ConfigError, match=message):
            layer(x)
    layers = [_LocalMask().to(current_device()) for _ in range(2)]
    attach_stack(layers, SequenceAxisSplitter(ranks))
    with pytest.raises(ConfigError, match="layerdrop=0"):
        layers[1](x)
    with pytest.raises(ConfigError, match="second dimension"):
        layers[0](x[0])


@distributed(2)
@pytest.mark.parametrize("mode", MODES)
def test_layers_of_torch_itself(mode):
    torch.manual_seed(0)
    ranks = SequenceParallelGroup(None, mode)
    make = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(make, 2, enable_nested_tensor=False).to(current_device())
    reference = copy.deepcopy(model)
    attach_stack(list(model.layers), SequenceAxisSplitter(ranks))
    x, mask = (
        one.to(current_device()) for one in (torch.randn(2, 7, 8), nn.Transformer.generate_square_subsequent_mask(7))
    )
    losses = []
    for one in (model, reference):
        losses.append(one(x, mask=mask, is_causal=True).square().sum())
        losses[-1].backward()
    _compare(model, reference, *losses, 2)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), reference.eval()(x))
