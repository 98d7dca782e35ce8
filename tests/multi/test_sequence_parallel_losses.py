"""Losses and outputs of what layers compute on the way are those of all tokens, not of one rank's; or an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distributed, run_ranks
from hybrid_cases import on_own_axis, on_tensor_axis
from oracles.joined_slices import copied_slices, join_slices
from torch import nn

from booster import Booster
from booster.device import current_device
from booster.errors import ConfigError
from booster.plugins import HybridParallelPlugin
from booster.plugins.hybrid_parallel.sequence_parallel.token_parallel_logits import TokenParallelLogits

pytestmark = pytest.mark.on_device

VOCABULARY = 61
DECODER = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0},
    "use_cache": False,
}
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
MOE = {**DECODER, **ROUTER, "num_experts": 4, "moe_intermediate_size": 16}
SEQ2SEQ = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 32, "pad_token_id": 0, "dropout": 0.0},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "encoder_layerdrop": 0.0},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "decoder_layerdrop": 0.0},
    **{"attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 0, "use_cache": False},
}
SWITCH = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
    **{"num_experts": 4, "dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0},
}
# By name: configuration, model, its arguments.
MODELS = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**DECODER, **ROUTER, "num_local_experts": 4}),
    "one_layer": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**DECODER, **ROUTER, "num_local_experts": 4, "num_hidden_layers": 1},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**MOE, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", MOE),
    "jetmoe": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {**DECODER, "num_local_experts": 4, "output_router_logits": True, "aux_loss_coef": 0.5, "kv_channels": 8},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "falcon": (  # keeps hidden states itself
        "FalconConfig",
        "FalconForCausalLM",
        {
            **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cache": False},
        },
    ),
    "nllb_moe": (  # its attention without a mask is not causal
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        {**SEQ2SEQ, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
    ),
    "mvp": ("MvpConfig", "MvpForConditionalGeneration", {**SEQ2SEQ, "classifier_dropout": 0.0}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4},
            **{"decoder_start_token_id": 0, "dropout_rate": 0.0},
        },
    ),
    "switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH),
}
# Numbers of tokens of inputs and of labels that are fewer than ranks, and as many.
SHORT = {"llama": [(1, 1), (3, 3), (2, 2), (4, 4)], "t5": [(1, 1), (8, 1), (1, 8), (3, 3)]}
LAYOUTS = {
    "all_to_all 2": on_own_axis("all_to_all", 2),
    "ring_attn 2": on_own_axis("ring_attn", 2),
    "all_to_all 4": on_own_axis("all_to_all", 4),
    "ring_attn 4": on_own_axis("ring_attn", 4),
    "tp 2 all_to_all 2": on_own_axis("all_to_all", 2, tp_size=2),
    "tp 2 ring_attn 2": on_own_axis("ring_attn", 2, tp_size=2),
    "split_gather 2": on_tensor_axis("split_gather", 2),
    "ring 2": on_tensor_axis("ring", 2),
}


def build(name, **arguments):
    transformers = pytest.importorskip("transformers")
    config, model, own = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**own, **arguments}))


def batch_of(step, length=11, *, is_padded=True):
    """Returns a batch that is the same on all ranks; its second sequence ends in padding."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if is_padded:
        mask[1, -3:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: one.to(current_device()) for name, one in batch.items()}


def boosted(model, arguments):
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", **arguments}))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))[:2]


def train_both(name, arguments, *, steps=3, outputs=("router_logits",), **extra):
    """Trains under the plugin and in one process on the same batches, and compares losses, outputs and weights."""
    serial = build(name)
    model = copy.deepcopy(serial)
    serial.to(current_device())
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    booster, model, boosted_optimizer = boosted(model, arguments)
    before = {key: value.clone() for key, value in serial.state_dict().items()}
    for step in range(steps):
        batch = {**batch_of(step), **extra}
        expected, found = serial(**batch), model(**batch)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
        for output in outputs:
            assert len(found[output]) == len(expected[output]) > 0
            torch.testing.assert_close(tuple(found[output]), tuple(expected[output]), rtol=1e-4, atol=1e-5)
        step_both(expected.loss, found.loss, optimizer, booster, boosted_optimizer)
    compare_weights(model, serial, before)


def step_both(expected, found, plain, booster, optimizer):
    """Steps one process's optimizer by its loss, and the boosted one by that of the boosted model."""
    plain.zero_grad()
    expected.backward()
    plain.step()
    booster.backward(found, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def compare_weights(model, serial, before):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, copied_slices(model.tensor_slices()))
    found = join_slices(parts, model.tied_names(), what="the weights")
    moves = {name: float((value - before[name]).norm()) for name, value in serial.state_dict().items()}
    for name, expected in serial.state_dict().items():
        away = float((found[name] - expected.cpu()).norm())
        assert away <= 2e-4 * max(moves[name], 0.02 * max(moves.values())), (name, away, moves[name])


CASES = [("mixtral", "all_to_all 2"), ("qwen3_moe", "ring_attn 2"), ("one_layer", "all_to_all 2")]
SLOW_CASES = [
    (name, layout)
    for name in ("mixtral", "qwen3_moe", "olmoe", "jetmoe")
    for layout in LAYOUTS
    if not layout.startswith(("split_gather", "ring "))
    and (name, layout) not in CASES
    and not ("tp" in layout and name in ("olmoe", "jetmoe"))  # no plan for them
]


@pytest.mark.parametrize(
    ("name", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
@pytest.mark.parametrize("checkpoints", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_auxiliary_losses_of_experts_are_those_of_all_tokens(name, layout, checkpoints):
    world_size, arguments = LAYOUTS[layout]
    run_ranks(_train_experts, world_size, name, {**arguments, "gradient_checkpoint_config": checkpoints}, timeout=120)


def _train_experts(name, arguments):
    train_both(name, arguments, outputs=("router_logits", "hidden_states"), output_hidden_states=True)


@distributed(world_size=2)
def test_experts_layers_are_computed_again_with_their_losses():
    train_both("mixtral", {**LAYOUTS["all_to_all 2"][1], "gradient_checkpoint_config": True}, steps=2)


@pytest.mark.parametrize("layout", ["all_to_all 2", "split_gather 2", pytest.param("ring 2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama", "falcon"])
@distributed(world_size=2)
def test_hidden_states_are_returned_whole(name, layout):
    train_both(name, LAYOUTS[layout][1], steps=1, outputs=("hidden_states",), output_hidden_states=True)


class Attending(nn.Module):
    """A layer that also notes a loss of its router, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.router = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [projection(x).unflatten(-1, (2, 8)).transpose(1, 2) for projection in self.projections]
        self.balance = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Balanced(nn.Module):
    """Sums its layers' own losses, or keeps their hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return x, sum(layer.balance for layer in self.layers), kept


@pytest.mark.parametrize("mode", ["all_to_all", pytest.param("ring_attn", marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_a_loss_of_one_ranks_tokens_is_refused_on_all_ranks(mode):
    torch.manual_seed(0)
    serial = Balanced()
    booster, model, optimizer = boosted(copy.deepcopy(serial), LAYOUTS[f"{mode} 2"][1])
    serial.to(booster.device)
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)).to(booster.device)
    output, balance, kept = model(x)
    with pytest.raises(ConfigError, match="compute it from the model's outputs"):
        booster.backward(output.square().mean() + balance, optimizer)
    losses = []
    for one in (serial, model):
        output, _, kept = one(x)
        losses.append(output.square().mean() + sum(states.mean((0, 1)).square().sum() for states in kept))
    torch.testing.assert_close(losses[1], losses[0])
    losses[0].backward()
    booster.backward(losses[1], optimizer)
    norm = torch.cat([one.grad.flatten() for one in serial.parameters() if one.grad is not None]).norm()
    assert float(booster.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(float(norm), rel=1e-4)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """Reads parameters between its layers, as nanoGPT's residual lambdas."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.gates = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) * self.gates[index]
        return x


@distributed(world_size=2)
def test_parameters_that_are_read_between_layers_are_refused_where_their_gradients_are_of_a_ranks_tokens():
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Gated(), LAYOUTS["split_gather 2"][1])
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)).to(booster.device)
    booster.backward(model(x).square().mean(), optimizer)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"other gradients of 'gates': they are used on a rank's own tokens"):
        optimizer.step()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@distributed(world_size=2)
def test_transformers_attention_by_hand_is_refused_by_boost():
    model = build("mvp")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"model.encoder.layers.0 uses neither F.scaled_dot_product_attention"):
        boosted(model, LAYOUTS["all_to_all 2"][1])
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    boosted(build("nllb_moe"), LAYOUTS["all_to_all 2"][1])  # whose encoder's attention is looked up


@distributed(world_size=2)
def test_experts_with_a_capacity_are_refused():
    _, model, _ = boosted(build("switch", expert_capacity=3), LAYOUTS["all_to_all 2"][1])
    batch = {"input_ids": batch_of(0)["input_ids"], "labels": batch_of(1)["input_ids"]}
    with pytest.raises(ConfigError, match="cumsum along the tokens"):
        model(**batch)


@distributed(world_size=2)
def test_weights_of_attention_are_refused():
    for arguments, asked in [({}, {"output_attentions": True}), ({"output_attentions": True}, {})]:
        _, model, _ = boosted(build("llama", **arguments), LAYOUTS["all_to_all 2"][1])
        with pytest.raises(ConfigError, match="no rank computes in full with sequence_parallelism_mode="):
            model(**batch_of(0), **asked)


@pytest.mark.parametrize("mode", ["all_to_all", pytest.param("ring_attn", marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_eager_attention_without_a_mask_is_not_causal(mode):
    serial = build("nllb_moe")
    assert serial.config._attn_implementation == "eager"
    booster, model, optimizer = boosted(copy.deepcopy(serial), LAYOUTS[f"{mode} 2"][1])
    serial.to(booster.device)
    batch = {"input_ids": batch_of(0)["input_ids"], "labels": batch_of(1, 8)["input_ids"]}
    expected, found = serial(**batch).loss, model(**batch).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    expected.backward()
    booster.backward(found, optimizer)
    norm = torch.cat([one.grad.flatten() for one in serial.parameters() if one.grad is not None]).norm()
    assert float(booster.clip_grad_norm_(optimizer, 1.0)) == pytest.approx(float(norm), rel=1e-4)


class TimesOne(torch.autograd.Function):
    """A function that torch's overrides do not see."""

    @staticmethod
    def forward(ctx, logits):
        return logits * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def _of_rows(function):
    def loss(logits, labels):
        return function(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    return loss


# Losses of logits and labels of users' loops; the first ones are computed of each rank's own tokens.
OWN_TOKENS = {
    "mean": _of_rows(F.cross_entropy),
    "sum": _of_rows(lambda rows, labels: F.cross_entropy(rows, labels, reduction="sum") / 10),
    "none": _of_rows(lambda rows, labels: F.cross_entropy(rows, labels, reduction="none").square().mean()),
    "smoothed": _of_rows(lambda rows, labels: F.cross_entropy(rows, labels, label_smoothing=0.2)),
    "weighted": _of_rows(
        lambda rows, labels: F.cross_entropy(rows, labels, torch.linspace(0.5, 2, VOCABULARY, device=labels.device))
    ),
    "capped": _of_rows(lambda rows, labels: F.cross_entropy(3 * torch.tanh(rows.float() / 3), labels)),
    "shifted": lambda logits, labels: OWN_TOKENS["mean"](logits[:, :-1].contiguous(), labels[:, 1:]),
    "masked": lambda logits, labels: F.cross_entropy(logits[labels != -100], labels[labels != -100]),
    "one row": lambda logits, labels: OWN_TOKENS["mean"](logits[:1, 4:5], labels[:1, 5:6]),
}
ALL_TOKENS = {
    "squares": lambda logits, labels: logits.square().mean(),
    "softmax": lambda logits, labels: F.nll_loss(logits.softmax(-1).log().flatten(0, 1), labels.flatten()),
    "a user's function": lambda logits, labels: OWN_TOKENS["mean"](TimesOne.apply(logits), labels),
    "both": lambda logits, labels: OWN_TOKENS["mean"](logits, labels) + logits.square().mean(),
}
LOSSES = {**OWN_TOKENS, **ALL_TOKENS}
SHARED_HEADS = {
    **{name: LAYOUTS[name] for name in ("all_to_all 2", "ring_attn 2", "all_to_all 4", "tp 2 all_to_all 2")},
    "zero 1": (2, {**LAYOUTS["all_to_all 2"][1], "zero_stage": 1}),
    "zero 2": (2, {**LAYOUTS["ring_attn 2"][1], "zero_stage": 2}),
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("layout", SHARED_HEADS)
@pytest.mark.parametrize("loss", LOSSES)
def test_heads_of_own_tokens_train_as_in_one_process(loss, layout, is_tied):
    world_size, arguments = SHARED_HEADS[layout]
    run_ranks(_train_head, world_size, loss, arguments, is_tied, timeout=120)


def _train_head(loss, arguments, is_tied):
    serial = build("llama", tie_word_embeddings=is_tied)
    booster, model, optimizer = boosted(copy.deepcopy(serial), arguments)
    serial.to(booster.device)
    plain = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    rows = []
    model.unwrap().get_output_embeddings().register_forward_hook(lambda module, args, output: rows.append(args[0]))
    before = {key: value.clone() for key, value in serial.state_dict().items()}
    for step in range(2):
        batch = batch_of(step)
        labels = batch.pop("labels")
        expected, found = (LOSSES[loss](one(**batch).logits, labels) for one in (serial, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        if loss in OWN_TOKENS:
            num_rows = {"shifted": 20, "masked": 19, "one row": 1}.get(loss, 22)
            assert sum(one.shape[0] for one in rows) <= -(-num_rows // arguments["sp_size"])
        rows.clear()
        step_both(expected, found, plain, booster, optimizer)
    compare_weights(model, serial, before)


@distributed(world_size=2)
def test_logits_are_whole_to_whom_reads_them():
    serial = build("llama")
    booster, model, _ = boosted(copy.deepcopy(serial), LAYOUTS["all_to_all 2"][1])
    serial.to(booster.device)
    batch = batch_of(0)
    expected, found = serial(**batch).logits, model(**batch).logits
    assert type(found) is TokenParallelLogits
    assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, True)
    assert repr(found) == "TokenParallelLogits(shape=(2, 11, 61), dtype=torch.float32)"
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))
    torch.testing.assert_close(found.full_tensor(), expected)
    labels = batch["labels"].masked_fill(batch["labels"] == -100, 3)
    labels[0, 2] = VOCABULARY  # a token of one rank
    if booster.device.type == "cpu":  # an accelerator's kernel fails
        with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
            F.cross_entropy(found.flatten(0, 1), labels.flatten())
    for change in (lambda: found.mul_(2), lambda: found.register_hook(print)):
        with pytest.raises(RuntimeError, match=r"of its own tokens would change none of them"):
            change()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, serial(**batch).loss)
    tokens = batch["input_ids"][:1]
    given = {"max_new_tokens": 4, "do_sample": False, "use_cache": False}
    assert torch.equal(model.unwrap().generate(tokens, **given), serial.generate(tokens, **given))
    _, plain, _ = boosted(build("llama"), {**LAYOUTS["all_to_all 2"][1], "parallel_output": False})
    assert type(plain(**batch).logits) is torch.Tensor


@distributed(world_size=2)
def test_logits_of_a_forward_without_gradients_have_none_where_they_are_read():
    serial = build("llama")
    booster, model, optimizer = boosted(copy.deepcopy(serial), LAYOUTS["all_to_all 2"][1])
    serial.to(booster.device)
    plain = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    before = {key: value.clone() for key, value in serial.state_dict().items()}
    losses = []
    for one in (serial, model):
        batch = batch_of(0)
        labels = batch.pop("labels")
        with torch.no_grad():
            reference = one(**batch_of(1)).logits
        logits = one(**batch).logits
        losses.append(F.cross_entropy(logits.flatten(0, 1), (reference.float() / 2).flatten(0, 1).softmax(-1)))
        losses[-1] = losses[-1] + OWN_TOKENS["mean"](logits, labels)
        assert not OWN_TOKENS["mean"](reference, labels).requires_grad
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    step_both(*losses, plain, booster, optimizer)
    compare_weights(model, serial, before)


@distributed(world_size=2)
def test_logits_that_are_read_after_the_step_say_so():
    booster, model, optimizer = boosted(build("llama"), LAYOUTS["all_to_all 2"][1])
    read, late = model(**batch_of(0)), model(**batch_of(0))
    expected = read.logits.full_tensor().detach().clone()
    booster.backward(late.loss, optimizer)
    optimizer.step()
    assert torch.equal(read.logits.argmax(-1), expected.argmax(-1))
    for use in (lambda: late.logits.argmax(-1), lambda: F.cross_entropy(late.logits[0], batch_of(0)["labels"][0])):
        with pytest.raises(ConfigError, match=r"changed since the forward.*full_tensor.*parallel_output=False"):
            use()


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("layout", ["all_to_all 2", "ring_attn 2", "all_to_all 4", "ring_attn 4"])
@pytest.mark.parametrize("name", SHORT)
def test_sequences_with_fewer_tokens_than_ranks(name, layout, checkpoints):
    world_size, arguments = LAYOUTS[layout]
    run_ranks(_train_short, world_size, name, {**arguments, "gradient_checkpoint_config": checkpoints}, timeout=120)


def _train_short(name, arguments):
    serial = build(name)
    booster, model, optimizer = boosted(copy.deepcopy(serial), arguments)
    serial.to(booster.device)
    plain = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    before = {key: value.clone() for key, value in serial.state_dict().items()}
    for step, lengths in enumerate([*SHORT[name], (9, 9)]):
        ids, labels = (batch_of(step, length, is_padded=False)["input_ids"] for length in lengths)
        if lengths[1] == 1 and name == "llama":  # nothing to predict
            expected, found = (one(input_ids=ids).logits.square().mean() for one in (serial, model))
        else:
            expected, found = (one(input_ids=ids, labels=labels).loss for one in (serial, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        step_both(expected, found, plain, booster, optimizer)
    compare_weights(model, serial, before)


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@distributed(world_size=2)
def test_generation_begins_with_one_token(mode):
    for name in ("t5", "llama"):
        serial = build(name).eval()
        booster, model, _ = boosted(copy.deepcopy(serial), LAYOUTS[f"{mode} 2"][1])
        serial.to(booster.device)
        tokens = batch_of(0)["input_ids"][:1, :1]
        given = {"max_new_tokens": 5, "do_sample": False}
        expected = serial.generate(tokens, use_cache=False, **given)
        model.eval()
        assert torch.equal(model.unwrap().generate(tokens, use_cache=False, **given), expected)
        with pytest.raises(ConfigError, match="no key-value cache"):
            model.unwrap().generate(tokens, use_cache=True, **given)


@distributed(world_size=2)
def test_dropout_of_short_sequences_is_the_same_on_all_ranks():
    torch.manual_seed(0)
    model = build("t5", dropout_rate=0.5)
    booster, model, optimizer = boosted(model, LAYOUTS["all_to_all 2"][1])
    torch.manual_seed(1)
    batch = {"input_ids": batch_of(0)["input_ids"], "labels": batch_of(1, 1, is_padded=False)["input_ids"]}
    loss = model(**batch).loss
    booster.backward(loss, optimizer)  # which compares the ranks' losses
    assert float(loss) > 0
