"""HybridParallelPlugin: the loops that people write around it, and models that are not all trained."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import distributed, preload
from hybrid_cases import LAYOUTS, TP_2, TP_2_DP_2, assert_hybrid_equals_serial
from hybrid_twins import Twins, adamw, sgd
from oracles.joined_slices import joined_over_ranks
from oracles.shard_aware_lamb import ShardAwareLamb
from torch import nn
from zoo import TRANSFORMERS_MODULES, get_model

from booster import Booster
from booster.plugins import HybridParallelPlugin

preload(*TRANSFORMERS_MODULES)


def slow(*values):
    """Returns a case that `make test` leaves to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


STAGES = pytest.mark.parametrize("zero_stage", [0, slow(1), 2])


@pytest.mark.parametrize(
    ("synchronize", "zero_stage"),
    [
        (way, stage) if (way, stage) in (("always", 1), ("no_sync", 2), ("accumulate", 0)) else slow(way, stage)
        for way in ("always", "no_sync", "accumulate")
        for stage in (0, 1, 2)
    ],
)
def test_accumulation_equals_serial(synchronize, zero_stage):
    assert_hybrid_equals_serial(
        "user_transformer",
        TP_2_DP_2,
        zero_stage=zero_stage,
        accumulation=3,
        synchronize=synchronize,
        max_norm=0.1,
        steps=3,
    )


@pytest.mark.parametrize("layout", ["split_gather 2", "all_to_all 2", "ring_attn 2"])
def test_accumulation_over_divided_sequences_equals_serial(layout):
    assert_hybrid_equals_serial(
        "llama", LAYOUTS[layout], zero_stage=1, accumulation=2, synchronize="no_sync", max_norm=0.1, steps=3
    )


@pytest.mark.parametrize(
    ("zero_stage", "norm_type"),
    [(0, 2.0), slow(0, 1.0), slow(0, 3.0), slow(0, float("inf")), slow(2, 2.0), (2, 1.0), (2, 3.0), (2, float("inf"))],
)
@pytest.mark.on_device
@distributed(world_size=4)
def test_norms_of_any_order_equal_one_process(norm_type, zero_stage):
    # Two heads of keys on two ranks, ties, padding: everything is counted once.
    for name, arguments in (("llama", {"tp_size": 4}), ("gpt2", {"tp_size": 2}), ("gemma", {"tp_size": 4})):
        twins = Twins(name, zero_stage=zero_stage, optimizer=sgd, **arguments)
        twins.backward(0)
        found = twins.booster.clip_grad_norm_(twins.optimizer, 0.01, norm_type)
        expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01, norm_type)
        torch.testing.assert_close(torch.as_tensor(float(found)), expected.cpu(), rtol=1e-5, atol=0)
        twins.step()
        twins.assert_equal()


@pytest.mark.on_device
@STAGES
@distributed(world_size=2)
def test_max_norm_clips_every_step(zero_stage):
    twins = Twins("user_transformer", tp_size=2, zero_stage=zero_stage, max_norm=0.05)
    for step in range(3):
        twins.backward(step)
        norm = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05)
        assert norm > 0.05  # it does clip
        twins.step()
        torch.testing.assert_close(twins.optimizer.get_grad_norm(), float(norm), rtol=1e-5, atol=0)
    twins.assert_equal()


def groups_by_kind(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases and norms do not, the tied embedding has a learning rate of its own; some are frozen."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    embedding = [named.pop("tokens.weight")]
    flat = [one for one in named.values() if one.dim() < 2]
    matrices = [one for one in named.values() if one.dim() >= 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": flat, "weight_decay": 0.0},
        {"params": embedding, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def partly_frozen() -> nn.Module:
    """A column-parallel layer, a row-parallel bias and a norm don't train; one module is never called."""
    model = get_model("user_transformer").build()
    model.spare = nn.Linear(3, 3)
    model.layers[0].attention.query.requires_grad_(False)
    model.layers[0].down.bias.requires_grad_(False)
    model.layers[1].norm1.requires_grad_(False)
    return model


@pytest.mark.on_device
@STAGES
@distributed(world_size=4)
def test_groups_and_frozen_and_unused_parameters_equal_one_process(zero_stage):
    modes = ({}, {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"})
    for arguments in modes:
        twins = Twins(
            "user_transformer",
            build=lambda: seeded(partly_frozen),
            optimizer=groups_by_kind,
            tp_size=2,
            zero_stage=zero_stage,
            **arguments,
        )
        twins.train()
        twins.assert_equal()
        assert torch.equal(twins.plain.spare.weight.cpu(), twins.initial["spare.weight"])


@pytest.mark.on_device
@STAGES
@distributed(world_size=4)
def test_a_norm_that_is_unfrozen_later_equals_one_process(zero_stage):
    """Its gradient is partial on each rank, as that of the embedding."""
    twins = Twins(
        "user_transformer",
        build=lambda: seeded(partly_frozen),
        tp_size=2,
        zero_stage=zero_stage,
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
    )
    twins.train()
    for model in (twins.plain, twins.booster.unwrap_model(twins.model)):
        model.layers[1].norm1.requires_grad_(True)
    twins.train()
    twins.assert_equal()


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build()


@pytest.mark.on_device
@STAGES
@distributed(world_size=4)
def test_an_optimizer_of_whole_parameters_equals_one_process(zero_stage):
    def lamb(model):
        return ShardAwareLamb([one for one in model.parameters() if one.requires_grad])

    twins = Twins("llama", optimizer=lamb, tp_size=4 if zero_stage == 0 else 2, zero_stage=zero_stage)
    twins.train()
    twins.assert_equal()


def checkpointing_llama() -> nn.Module:
    model = get_model("llama").build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.on_device
@pytest.mark.parametrize("layout", ["tp 2", slow("split_gather 2"), "ring 2", slow("all_to_all 2"), "ring_attn 2"])
@distributed(world_size=2)
def test_layers_that_are_computed_again_equal_one_process(layout):
    arguments = LAYOUTS[layout][1]
    for name, build, more in (
        ("llama", checkpointing_llama, {}),
        ("llama", None, {"gradient_checkpoint_config": True}),
        ("t5", None, {"gradient_checkpoint_config": {"ratio": 0.5}}),
        ("user_transformer", None, {"gradient_checkpoint_config": True}),
    ):
        twins = Twins(name, build=build, **arguments, **more)
        twins.train()
        twins.assert_equal()


def bert_with_dropout(hidden: float, attention: float) -> nn.Module:
    import transformers

    settings = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": hidden,
        "attention_probs_dropout_prob": attention,
    }
    config = transformers.BertConfig(**settings, attn_implementation="sdpa")
    return seeded(lambda: transformers.BertForMaskedLM(config).train())


@pytest.mark.on_device
@distributed(world_size=2)
def test_dropout_where_ranks_hold_the_same_is_that_of_one_process():
    twins = Twins("bert", build=lambda: bert_with_dropout(0.2, 0.0), tp_size=2)
    for step in range(3):
        whole, part = twins.batch(step)
        for model, batch, backward in (
            (twins.plain, whole, lambda loss: loss.backward()),
            (twins.model, part, lambda loss: twins.booster.backward(loss, twins.optimizer)),
        ):
            torch.manual_seed(50 + step)
            backward(twins.entry.loss(model, batch))
        twins.step()
    twins.assert_equal()


@pytest.mark.on_device
@pytest.mark.parametrize("layout", ["tp 2", "split_gather 2", "all_to_all 2", "ring_attn 2"])
@distributed(world_size=2)
def test_layers_that_are_computed_again_drop_the_same(layout):
    weights = []
    for checkpointing in (None, True):
        twins = Twins(
            "bert",
            build=lambda: bert_with_dropout(0.2, 0.2),
            gradient_checkpoint_config=checkpointing,
            **LAYOUTS[layout][1],
        )
        torch.manual_seed(9)
        for step in range(2):
            twins.booster.backward(twins.entry.loss(twins.model, twins.batch(step)[1]), twins.optimizer)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
        weights.append(joined_over_ranks(twins.model))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights[0]["bert.embeddings.LayerNorm.weight"], torch.ones(32))


@pytest.mark.on_device
@STAGES
@distributed(world_size=4)
def test_an_overflow_on_one_rank_skips_the_step_on_all(zero_stage):
    twins = Twins("llama", tp_size=2, zero_stage=zero_stage, precision="fp16", initial_scale=2**8, hysteresis=1)
    overflows = [False]

    def spoil(gradient):
        return torch.full_like(gradient, float("inf")) if overflows[0] and dist.get_rank() == 3 else gradient

    # Part of a matrix that only this rank and its replica hold.
    twins.booster.unwrap_model(twins.model).model.layers[1].mlp.down_proj.weight.register_hook(spoil)

    def train(step):
        before = joined_over_ranks(twins.model)
        twins.booster.backward(twins.entry.loss(twins.model, twins.batch(step)[1]), twins.optimizer)
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        after = joined_over_ranks(twins.model)
        return [name for name in before if not torch.equal(before[name], after[name])]

    assert train(0)
    overflows[0] = True
    assert not train(1)
    assert twins.optimizer.num_skipped_steps == 1
    assert twins.optimizer.loss_scaler.state_dict()["scale"] == 2**7
    overflows[0] = False
    assert train(2)
    assert twins.optimizer.num_skipped_steps == 1


@pytest.mark.on_device
@pytest.mark.parametrize("layout", ["tp 2", "split_gather 2", "all_to_all 2", "ring_attn 2"])
@distributed(world_size=2)
def test_outputs_are_those_of_one_process(layout):
    arguments = LAYOUTS[layout][1]
    for name, parallel_output in (("llama", True), ("llama", False), ("gpt2", True), ("bert", True)):
        twins = Twins(name, parallel_output=parallel_output, **arguments)
        batch = twins.batch(0)[0]
        for mode in (True, False):
            twins.plain.train(mode)
            twins.model.train(mode)
            with torch.no_grad() if not mode else nullcontext():
                expected, found = twins.plain(**batch), twins.model(**batch)
            assert found.logits.shape == expected.logits.shape
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
            torch.testing.assert_close(found.logits * 1.0, expected.logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.logits.softmax(-1), expected.logits.softmax(-1), rtol=1e-4, atol=1e-6)
            assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))


@pytest.mark.on_device
@distributed(world_size=2)
def test_a_loss_of_ones_own_from_the_logits_is_right():
    """Not only cross entropy: every computation with logits sees all of them."""
    twins = Twins("llama", tp_size=2)
    for step in range(2):
        whole, part = twins.batch(step)
        losses = []
        for model, batch in ((twins.plain, whole), (twins.model, part)):
            scores = model(input_ids=batch["input_ids"]).logits
            losses.append(scores.log_softmax(-1)[..., 5].square().mean() + scores[:, -1].topk(3).values.sum() * 0.01)
        losses[0].backward()
        twins.booster.backward(losses[1], twins.optimizer)
        twins.step()
    twins.assert_equal()


@pytest.mark.on_device
@distributed(world_size=2)
def test_text_is_generated_by_all_ranks_alike():
    twins = Twins("llama", tp_size=2, parallel_output=False)
    twins.plain.eval()
    twins.model.eval()
    ids = twins.batch(0)[0]["input_ids"][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = twins.plain.generate(ids, **options)
        found = twins.booster.unwrap_model(twins.model).generate(ids, **options)
    assert torch.equal(found, expected)


@pytest.mark.on_device
@distributed(world_size=2)
def test_evaluation_leaves_training_as_it_was():
    twins = Twins("bert", build=lambda: bert_with_dropout(0.0, 0.0), tp_size=2)
    for step in range(3):
        twins.model.eval()
        with torch.no_grad():
            twins.model(**twins.batch(step + 10)[1])
        twins.model.train()
        twins.backward(step)
        twins.step()
    twins.assert_equal()


@pytest.mark.on_device
@distributed(world_size=2)
def test_a_forward_whose_backward_never_comes_leaves_no_trace():
    twins = Twins("llama", tp_size=2, optimizer=adamw)
    for step in range(3):
        twins.entry.loss(twins.model, twins.batch(step + 10)[1])  # with a graph
        twins.backward(step)
        twins.step()
    twins.assert_equal()


@pytest.mark.on_device
@distributed(world_size=2)
def test_two_forwards_before_their_backwards_equal_one_process():
    twins = Twins("user_transformer", tp_size=2)
    for step in range(2):
        whole, part = twins.batch(step)
        more, more_part = twins.batch(step + 5)
        (twins.entry.loss(twins.plain, whole) + 0.5 * twins.entry.loss(twins.plain, more)).backward()
        loss = twins.entry.loss(twins.model, part) + 0.5 * twins.entry.loss(twins.model, more_part)
        twins.booster.backward(loss, twins.optimizer)
        twins.step()
    twins.assert_equal()


@pytest.mark.on_device
@pytest.mark.parametrize("mode", ["split_gather", "ring"])
@pytest.mark.parametrize("is_compiled", [True, False])
@distributed(world_size=2, timeout=120)  # as other compiled cases
def test_fewer_tokens_than_ranks_where_a_model_flattens_them(is_compiled, mode):
    torch._dynamo.reset()
    twins = Twins("opt", tp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    model = torch.compile(twins.model, backend="aot_eager") if is_compiled else twins.model
    for num_sequences, length in ((3, 1), (2, 5), (2, 1)):
        tokens = torch.arange(num_sequences * length, device=twins.booster.device).view(num_sequences, length)
        twins.plain(input_ids=tokens).logits.square().mean().backward()
        twins.booster.backward(model(input_ids=tokens).logits.square().mean(), twins.optimizer)
        twins.step()
    twins.assert_equal()


def test_messages_instead_of_shared_memory_change_nothing():
    assert_hybrid_equals_serial("llama", TP_2, uses_shared_memory=False, steps=2)


@pytest.mark.on_device
@distributed(world_size=2)
def test_slices_say_which_ranks_hold_what():
    twins = Twins("llama", tp_size=2)
    slices = {}
    for one in twins.model.tensor_slices():
        slices.setdefault(one.name, []).append(one)
    head = slices["lm_head.weight"]
    assert {part.global_shape for part in head} == {(99, 32)}  # the padding is in no slice
    assert sum(part.tensor.numel() for part in head) == (64 * 32 if dist.get_rank() == 0 else 35 * 32)
    assert all(part.primary == (dist.get_rank() == 0) for part in slices["model.norm.weight"])


def _language_model(name):
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    if name == "t5":
        sizes = {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
        options = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "attn_implementation": "eager"}
        return T5ForConditionalGeneration(T5Config(**sizes, **options))
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=50, **no_dropout, attn_implementation="eager")
    )


class _Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)


@pytest.mark.parametrize("wrap", [_Wrapped, slow(nn.Identity())], ids=["in a user's module", "itself"])
@pytest.mark.parametrize("name", ["gpt2", slow("t5")])
@distributed(2)
def test_attention_weights_are_those_of_all_heads(name, wrap):
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    plain, raw = wrap(_language_model(name)), wrap(_language_model(name))
    plain.to(booster.device)
    model, optimizer, *_ = booster.boost(raw, sgd(raw))
    plain_optimizer = sgd(plain)
    tokens = torch.randint(2, 50, (2, 7), generator=torch.Generator().manual_seed(1)).to(booster.device)
    for _ in range(2):
        found, expected = (one(input_ids=tokens, labels=tokens, output_attentions=True) for one in (model, plain))
        keys = [key for key in expected if key.endswith("attentions") and expected[key]]
        assert len(keys) == (3 if name == "t5" else 1)
        losses = []
        for outputs in (found, expected):
            weights = [one for key in keys for one in outputs[key]]
            assert {one.shape[1] for one in weights} == {4}
            entropies = [(one * (one + 1e-6).log()).sum(-1).mean((0, 2)) for one in weights]
            losses.append(outputs.loss + sum((one * torch.arange(4).to(one)).sum() for one in entropies))
        booster.backward(losses[0], optimizer)
        losses[1].backward()
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
    expected = {key: value.cpu() for key, value in plain.state_dict().items()}
    torch.testing.assert_close(joined_over_ranks(model), expected, rtol=1e-4, atol=1e-5)
