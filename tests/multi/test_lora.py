"""LoRA of peft under every plugin: losses and adapters are those of one process, and the base stays frozen."""

from __future__ import annotations

import contextlib
import warnings

import peft
import pytest
import torch
from harness import preload, run_ranks
from lora_cases import ON_FOUR, PLUGINS, TENSOR_PARALLEL, WITH_STAGES, batch_of, run_batch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from booster import Booster, ConfigError, checkpoint_activations
from booster.comm import barrier
from booster.plugins import HybridParallelPlugin

pytestmark = pytest.mark.on_device

NAMES = ("bert", "gpt2", "llama", "opt")
preload("peft", *(f"transformers.models.{name}.modeling_{name}" for name in NAMES))
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, **NO_DROPOUT, intermediate_size=64)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0)),
}
TARGETS = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "v_proj"],
    "opt": ["q_proj", "v_proj"],
    "all": "all-linear",
    "ends": ["embed_tokens", "lm_head", "down_proj"],
}


def build(model, targets, **arguments):
    torch.manual_seed(0)
    task = "SEQ_CLS" if model == "bert" else "CAUSAL_LM"
    config = peft.LoraConfig(r=4, target_modules=TARGETS[targets], task_type=task, init_lora_weights=False, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied heads as targets
        return peft.get_peft_model(MODELS[model](), config)


def train(name, targets, plugin, *, num_steps=3, policy=None, compiled=False, **arguments):
    """Train on this rank; return the booster, the boosted model and the losses."""
    model = build(name, targets, **arguments)
    if policy is not None:
        checkpoint_activations(model, **policy)
    booster = Booster(plugin=(PLUGINS | TENSOR_PARALLEL)[plugin](), compile=compiled and {"backend": "aot_eager"})
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(num_steps):
        losses.append(run_batch(booster, model, batch_of(name, booster.plugin), optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, losses


def train_and_save(name, targets, plugin, folder, **arguments):
    booster, model, losses = train(name, targets, plugin, **arguments)
    booster.save_model(model, folder)
    return losses


def check_training(folder, name, targets, plugin, **arguments):
    """Compare losses and weights with one process, and the base with its initial weights."""
    num_ranks = 4 if plugin in ON_FOUR else 2
    expected = run_ranks(train_and_save, 1, name, targets, "none", folder / "1", **arguments)[0]
    for losses in run_ranks(train_and_save, num_ranks, name, targets, plugin, folder / "n", **arguments):
        assert losses == pytest.approx(expected, rel=1e-5)
    one, found = (load_file(folder / which / "model.safetensors") for which in ("1", "n"))
    assert one.keys() == found.keys()
    for key, value in one.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)  # sums in other orders
    model = build(name, targets, **arguments)
    frozen = {key: value for key, value in model.named_parameters() if not value.requires_grad and key in found}
    assert frozen
    assert all(torch.equal(found[key], value) for key, value in frozen.items())
    assert not all(torch.equal(found[key], value) for key, value in model.named_parameters() if value.requires_grad)


@pytest.mark.parametrize("plugin", [name for name in PLUGINS if name != "none"])
@pytest.mark.parametrize("targets", ["some", "all"])
@pytest.mark.parametrize("model", NAMES)
def test_training(tmp_path, model, targets, plugin):
    check_training(tmp_path, model, model if targets == "some" else targets, plugin)


@pytest.mark.parametrize("plugin", TENSOR_PARALLEL)
@pytest.mark.parametrize("targets", ["some", "all"])
@pytest.mark.parametrize("model", NAMES)
def test_tensor_parallel_training(tmp_path, model, targets, plugin):
    check_training(tmp_path, model, model if targets == "some" else targets, plugin)


@pytest.mark.parametrize("plugin", TENSOR_PARALLEL)
@pytest.mark.parametrize(
    ("targets", "arguments"),
    [
        ("ends", {}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("llama", {"use_rslora": True, "lora_bias": True, "bias": "lora_only"}),
        ("all", {"use_dora": True}),
        ("all", {"use_dora": True, "lora_dropout": 1e-12}),  # drops nothing, and computes the layer again
    ],
    ids=["ends", "copies", "bias", "dora", "dora_dropout"],
)
def test_other_adapters(tmp_path, targets, arguments, plugin):
    check_training(tmp_path, "llama", targets, plugin, **arguments)


@pytest.mark.parametrize("plugin", TENSOR_PARALLEL)
@pytest.mark.parametrize("model", ["bert", "gpt2", "opt"])
def test_dora_of_other_layers(tmp_path, model, plugin):
    """Layers with biases, and packed ones of transformers' Conv1D."""
    check_training(tmp_path, model, "all", plugin, use_dora=True)


def losses_of(plugin, policy, compiled, **arguments):
    torch._dynamo.reset()
    counters.clear()
    *_, losses = train("llama", "all", plugin, num_steps=4, policy=policy, compiled=compiled, **arguments)
    if compiled:
        assert counters["stats"]["unique_graphs"] > 0
    return losses, sum(counters["graph_break"].values())


POLICIES = [None, {}, {"policy": "selective"}, {"policy": "budget", "budget_bytes": 2**30}]
COMBINED = [
    (plugin, policy, compiled)
    for plugin in PLUGINS | TENSOR_PARALLEL
    for policy in range(len(POLICIES))
    for compiled in (False, True)
    if policy or compiled
]


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "policy", "compiled"), COMBINED)
def test_activation_policies_and_compiled_layers(plugin, policy, compiled):
    num_ranks = 1 if plugin == "none" else 4 if plugin in ON_FOUR else 2
    expected = run_ranks(losses_of, num_ranks, plugin, None, False)
    found = run_ranks(losses_of, num_ranks, plugin, POLICIES[policy], compiled, timeout=180)
    for (losses, _), (others, num_breaks) in zip(expected, found, strict=True):
        assert others == (pytest.approx(losses, rel=1e-5) if compiled else losses)
        assert num_breaks == 0


@pytest.mark.slow
@pytest.mark.parametrize("plugin", TENSOR_PARALLEL)
def test_compiled_dora(plugin):
    num_ranks = 4 if plugin in ON_FOUR else 2
    arguments = {"use_dora": True, "lora_dropout": 1e-12}
    expected, found = (
        run_ranks(losses_of, num_ranks, plugin, None, compiled, timeout=180, **arguments) for compiled in (False, True)
    )
    for (losses, _), (others, num_breaks) in zip(expected, found, strict=True):
        assert others == pytest.approx(losses, rel=1e-5)
        assert num_breaks == 0


def adapters_after_dropout(plugin):
    _, model, _ = train("llama", "all", plugin, lora_dropout=0.5)
    return {
        name: parameter.detach()
        for name, parameter in model.module.named_parameters()
        if ("q_proj.lora_A" in name or "o_proj.lora_B" in name) and parameter.requires_grad
    }


@pytest.mark.parametrize("plugin", ["tp", "split_gather", "ring"])
def test_dropout_keeps_replicated_adapters_equal(plugin):
    first, second = run_ranks(adapters_after_dropout, 2, plugin)
    assert len(first) == 8
    for name, value in first.items():
        assert torch.equal(value, second[name])


def masks_of_inputs():
    """Return the masks of a replicated and of a sharded input, of the first layer."""
    booster, model, _ = train("llama", "all", "tp", num_steps=0, lora_dropout=0.5)
    attention, masks = model.module.get_submodule("base_model.model.model.layers.0.self_attn"), {}
    for key in ("q_proj", "v_proj", "o_proj"):
        dropout = attention.get_submodule(f"{key}.lora_dropout.default")
        dropout.register_forward_hook(lambda module, args, output, key=key: masks.update({key: output != 0}))
    model(input_ids=torch.arange(32, device=booster.device)[None])
    return masks


def test_dropout_masks():
    first, second = run_ranks(masks_of_inputs, 2)
    assert torch.equal(first["q_proj"], second["q_proj"])
    assert not torch.equal(first["q_proj"], first["v_proj"])
    assert not torch.equal(first["o_proj"], second["o_proj"])


def save_adapter(plugin, folder, **arguments):
    """Save an adapter; return the loss before and after it is merged, None where it cannot be."""
    booster, model, _ = train("llama", "all", plugin, **arguments)
    model.eval()
    batch = batch_of("llama", booster.plugin)
    with torch.no_grad():
        loss, merged = run_batch(booster, model, batch), None
        booster.save_model(model, folder / "whole")
        barrier()
        user_model = booster.unwrap_model(model)
        if booster.is_main_process:
            state_dict = load_file(folder / "whole" / "model.safetensors")
            user_model.save_pretrained(folder / "adapter", state_dict=state_dict)
        if booster.plugin.pp_size == 1:
            with model.gathered() if hasattr(model, "gathered") else contextlib.nullcontext():
                user_model.merge_adapter()
            merged = run_batch(booster, model, batch)
    return loss, merged


def reopen(folder):
    """Return the loss of a saved adapter on its base, and of the merged model."""
    torch.manual_seed(0)  # as in build()
    model = peft.PeftModel.from_pretrained(MODELS["llama"](), folder / "adapter")
    batch = batch_of("llama", Booster().plugin)
    with torch.no_grad():
        return float(model(**batch).loss), float(model.merge_and_unload()(**batch).loss)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # called by peft
@pytest.mark.parametrize("plugin", [name for name in PLUGINS | TENSOR_PARALLEL if name != "none"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_saved_and_merged_adapters(tmp_path, kind, plugin):
    arguments = {"use_dora": kind == "dora"}
    expected, _ = run_ranks(save_adapter, 1, "none", tmp_path, **arguments)[0]
    for loss, merged in run_ranks(save_adapter, 4 if plugin in ON_FOUR else 2, plugin, tmp_path, **arguments):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert merged == pytest.approx(expected, rel=1e-5) or (merged is None and plugin in WITH_STAGES)
    assert reopen(tmp_path) == pytest.approx((expected, expected), rel=1e-5)


def refuse_local_save():
    _, model, _ = train("llama", "all", "tp", num_steps=0)
    with pytest.raises(ConfigError, match="for an adapter of peft pass the saved weights as state_dict="):
        model.module.save_pretrained("nowhere")


def test_a_save_of_local_shards_is_refused():
    run_ranks(refuse_local_save, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def train_unknown_model(plugin, plan=None):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(Block(), Block()), config)
    plugin = HybridParallelPlugin(tp_size=2, precision="fp32", plan=plan) if plugin == "tp" else None
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.001)
    model, optimizer, *_ = booster.boost(model, optimizer)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(booster.device)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, sum(parameter.numel() for parameter in booster.unwrap_model(model).parameters())


@pytest.mark.parametrize("prefix", [None, "", "base_model.model."])
def test_unknown_models_and_plans_of_users(prefix):
    plan = None if prefix is None else {f"{prefix}*.up": "colwise", f"{prefix}*.down": "rowwise"}
    expected, size = run_ranks(train_unknown_model, 1, "none")[0]
    for losses, local_size in run_ranks(train_unknown_model, 2, "tp", plan):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert local_size < 0.6 * size


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(8, 8)

    def forward(self, x):
        return self.only(x)


def refusal(config, of_llama=True):
    torch.manual_seed(0)
    model = peft.get_peft_model(MODELS["llama"]() if of_llama else Alone(), config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")).boost(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True), "(DoraEmbeddingVariant) cannot be sharded"),
        (peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]), "(ia3.Linear) cannot be"),
        (peft.AdaLoraConfig(target_modules="all-linear", total_step=9), "(adalora.SVDLinear) cannot be"),
        (peft.LoraConfig(target_modules=["up_proj"], trainable_token_indices=[1]), "TokensWrapper) cannot be"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "use LoraConfig or PromptTuningConfig"),
        (peft.LoraConfig(target_modules=["only"]), "no other linear layer next to it reads its output"),
    ],
    ids=["dora", "ia3", "adalora", "tokens", "prefix", "alone"],
)
def test_what_is_refused_in_few_words(config, text):
    for error in run_ranks(refusal, 2, config, of_llama="no other" not in text):
        assert text in error
        assert len(error) < 300
        assert "tp_size=1" in error
