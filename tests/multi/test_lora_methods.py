"""`enable_lora` and `save_lora_as_pretrained`: adapters go from any plugin to peft and back."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from harness import preload, run_ranks
from lora_cases import ON_FOUR, PLUGINS, TENSOR_PARALLEL, batch_of, run_batch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from booster import Booster, CheckpointError, ConfigError

pytestmark = [
    pytest.mark.on_device,
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),  # by peft
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # called by peft
]
preload("peft", "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert")

ALL = {**PLUGINS, **TENSOR_PARALLEL}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def base(name: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(**SIZES, **dropout, num_hidden_layers=2))
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, num_hidden_layers=4))


CONFIGS = {
    "lora": ("llama", {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}),
    "rslora": ("llama", {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "use_rslora": True}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "use_dora": True}),
    "modules_to_save": ("bert", {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    # Whose base weights peft stores beside the adapters.
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "down_proj"], "task_type": "CAUSAL_LM"}),
    "head": ("llama", {"target_modules": ["lm_head", "down_proj"], "task_type": "CAUSAL_LM"}),
    "bias": ("bert", {"target_modules": ["query", "value"], "bias": "lora_only"}),
}


def config_of(kind: str) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, init_lora_weights=False, **CONFIGS[kind][1])


def train(model: nn.Module, booster: Booster, name: str, num_steps: int = 3):
    """Returns the boosted model and the losses."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(num_steps):
        losses.append(run_batch(booster, model, batch_of(name, booster.plugin), optimizer))
        booster.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def train_and_save(kind: str, plugin: str, folder: Path) -> list[float]:
    name = CONFIGS[kind][0]
    booster = Booster(plugin=ALL[plugin]())
    model, losses = train(booster.enable_lora(base(name), lora_config=config_of(kind)), booster, name)
    booster.save_lora_as_pretrained(model, folder)
    return losses


def train_alone(kind: str, folder: Path) -> list[float]:
    """Trains and saves by peft and torch alone."""
    name = CONFIGS[kind][0]
    model = peft.get_peft_model(base(name), config_of(kind))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    losses, batch = [], batch_of(name, Booster(device="cpu").plugin)
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    return losses


CASES = [("lora", plugin) for plugin in ALL if plugin != "none"]
CASES += [("rslora", plugin) for plugin in ("zero_2", "torch_fsdp", "tp")]
CASES += [("dora", plugin) for plugin in ("torch_ddp", "zero_1", "gemini", "torch_fsdp", "tp", "pp", "tp_pp")]
CASES += [
    (kind, plugin) for kind in ("embeddings", "head") for plugin in ("zero_2", "gemini", "torch_fsdp", "tp", "pp")
]
CASES += [("bias", plugin) for plugin in ("torch_fsdp", "tp_pp")]
CASES += [("modules_to_save", plugin) for plugin in ("zero_2", "gemini", "torch_fsdp", "tp", "pp", "tp_pp")]


@pytest.mark.parametrize(("kind", "plugin"), CASES)
def test_the_saved_adapter_is_that_of_peft(tmp_path, kind, plugin):
    expected = train_alone(kind, tmp_path / "peft")
    for losses in run_ranks(train_and_save, 4 if plugin in ON_FOUR else 2, kind, plugin, tmp_path / "own"):
        assert losses == pytest.approx(expected, rel=1e-5)
    one, found = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("peft", "own"))
    assert one.keys() == found.keys()
    for key, value in one.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-5)
    configs = [json.loads((tmp_path / which / "adapter_config.json").read_text()) for which in ("peft", "own")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]
    name = CONFIGS[kind][0]
    batch = batch_of(name, Booster(device="cpu").plugin)
    outputs = [
        peft.PeftModel.from_pretrained(base(name), tmp_path / which).eval()(**batch).logits for which in ("peft", "own")
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def continue_adapter(plugin: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    booster = Booster(plugin=ALL[plugin]())
    model = booster.enable_lora(base(), pretrained_dir=folder)
    loaded = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
    assert all(one.requires_grad == ("lora_" in name) for name, one in model.named_parameters())
    return train(model, booster, "llama", 1)[1], loaded


@pytest.mark.parametrize("plugin", ["torch_ddp", "zero_2", "gemini", "torch_fsdp", "tp", "pp"])
def test_a_saved_adapter_is_continued(tmp_path, plugin):
    run_ranks(train_and_save, 2, "lora", "zero_1", tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    model = peft.PeftModel.from_pretrained(base(), tmp_path)
    with torch.no_grad():
        expected = float(model(**batch_of("llama", Booster(device="cpu").plugin)).loss)
    for losses, loaded in run_ranks(continue_adapter, 2, plugin, tmp_path):
        assert losses == [pytest.approx(expected, rel=1e-5)]
        assert all(torch.equal(loaded[key], value) for key, value in stored.items())


def two_adapters() -> nn.Module:
    model = peft.get_peft_model(base(), config_of("lora"))
    model.add_adapter("second", config_of("embeddings"))
    model.set_adapter("second")
    return model


def save_two(plugin: str, folder: Path) -> None:
    booster = Booster(plugin=ALL[plugin]())
    model = two_adapters()
    model, _ = train(model, booster, "llama", 2)
    booster.save_lora_as_pretrained(model, folder)


@pytest.mark.parametrize("plugin", ["zero_2", "gemini", "torch_fsdp", "tp", "pp"])
def test_several_adapters(tmp_path, plugin):
    run_ranks(save_two, 2, plugin, tmp_path)
    first, second = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("", "second"))
    model = two_adapters()
    for found, name in ((first, "default"), (second, "second")):
        assert found.keys() == peft.get_peft_model_state_dict(model, adapter_name=name).keys()
    assert all(torch.equal(first[key], value) for key, value in peft.get_peft_model_state_dict(model).items())
    assert any(key.endswith("embed_tokens.base_layer.weight") for key in second)
    reopened = peft.PeftModel.from_pretrained(base(), tmp_path)
    reopened.load_adapter(tmp_path / "second", "second")
    for key, value in peft.get_peft_model_state_dict(reopened, adapter_name="second").items():
        assert torch.equal(second[key], value)


def bf16_base(plugin: str) -> dict[str, set[torch.dtype]]:
    booster = Booster(plugin=ALL[plugin]())
    model = booster.enable_lora(base().to(torch.bfloat16), lora_config=config_of("lora"))
    model, losses = train(model, booster, "llama", 2)
    assert losses[1] < losses[0]
    named = model.unwrap().named_parameters()
    dtypes: dict[str, set[torch.dtype]] = {"base": set(), "adapter": set()}
    for name, one in named:
        dtypes["adapter" if "lora_" in name else "base"].add(one.dtype)
    return dtypes


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp"])
def test_a_base_in_bf16_has_adapters_in_fp32(plugin):
    for dtypes in run_ranks(bf16_base, 2, plugin):
        assert dtypes == {"base": {torch.bfloat16}, "adapter": {torch.float32}}


def states_of_adapters(plugin: str) -> tuple[set[str], int]:
    booster = Booster(plugin=ALL[plugin]())
    model = booster.enable_lora(base(), lora_config=config_of("lora"))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    model, optimizer, *_ = booster.boost(model, optimizer)
    run_batch(booster, model, batch_of("llama", booster.plugin), optimizer)
    with_gradient = {name for name, one in model.unwrap().named_parameters() if one.grad is not None}
    optimizer.step()
    sizes = [value.numel() for state in optimizer.optim.state.values() for value in state.values() if value.dim()]
    return with_gradient, sum(sizes)


@pytest.mark.parametrize("plugin", ["torch_ddp", "zero_1", "zero_2", "gemini", "torch_fsdp"])
def test_a_frozen_base_costs_neither_gradients_nor_states(plugin):
    model = peft.get_peft_model(base(), config_of("lora"))
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    num_shards = 1 if plugin == "torch_ddp" else 2
    for with_gradient, numel in run_ranks(states_of_adapters, 2, plugin):
        assert all("lora_" in name for name in with_gradient)
        assert 2 * trained / num_shards <= numel <= 2.2 * trained / num_shards  # two numbers an element, and padding


def test_mistakes(tmp_path):
    booster = Booster(device="cpu")
    adapted = booster.enable_lora(base(), lora_config=config_of("lora"))
    boosted, *_ = booster.boost(copy.deepcopy(adapted))
    plain, *_ = booster.boost(nn.Linear(2, 2))
    booster.save_lora_as_pretrained(boosted, tmp_path / "adapter")
    other = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 16}, num_key_value_heads=2, num_hidden_layers=2))
    names = {name for name, _ in other.named_parameters()}
    for call, message in (
        (lambda: booster.enable_lora(boosted, lora_config=config_of("lora")), r"call it before boost\(\)"),
        (lambda: booster.enable_lora(adapted, lora_config=config_of("lora")), r"got a model with adapters"),
        (lambda: booster.enable_lora(base()), r"got neither of lora_config and pretrained_dir: give"),
        (
            lambda: booster.enable_lora(base(), tmp_path, config_of("lora")),
            r"got both of lora_config and pretrained_dir: give",
        ),
        (lambda: booster.enable_lora(base(), lora_config={"r": 4}), r"is not a configuration of peft"),
        (
            lambda: booster.enable_lora(base(), lora_config=peft.LoraConfig(target_modules=["query"])),
            r"peft can't add an adapter to LlamaForCausalLM .*target_modules",
        ),
        (lambda: booster.enable_lora(base(), tmp_path / "nothing"), r"has no adapter_config.json"),
        (lambda: booster.enable_lora(base(), 3), r"pretrained_dir must be a path, got 3"),
        (lambda: booster.enable_lora(other, tmp_path / "adapter"), r"is not one of this LlamaForCausalLM: .* of shape"),
        (
            lambda: booster.enable_lora(base(), lora_config=config_of("lora"), quantize=True),
            r"does not quantize the base",
        ),
        (lambda: booster.save_lora_as_pretrained(plain, tmp_path / "x"), r"got a Linear without adapters"),
        (lambda: booster.save_lora_as_pretrained(boosted, tmp_path / "x", False), r"asks for a pickled adapter"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    assert names == {name for name, _ in other.named_parameters()}  # the refused adapter is gone
    assert not (tmp_path / "x").exists()
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_model.safetensors.manifest.json").unlink()  # with the checksums of the other file
    save_file(
        {**stored, "base_model.model.model.foreign.lora_A.weight": torch.ones(1)},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match=r"foreign.lora_A.weight' is of shape \(1,\) there and missing here"):
        booster.enable_lora(base(), tmp_path / "adapter")


def test_an_optimizer_from_before_the_adapters_is_refused():
    booster = Booster(device="cpu")
    model = base()
    optimizer = torch.optim.AdamW(model.parameters())
    model = booster.enable_lora(model, lora_config=config_of("lora"))
    with pytest.raises(ConfigError, match=r"none of the optimizer's 39 parameters trains .*build the optimizer after"):
        booster.boost(model, optimizer)
    booster.boost(model, torch.optim.AdamW(model.parameters()))


def save_small_adapter(folder: Path) -> None:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(booster.enable_lora(base(), lora_config=config_of("lora")))
    booster.save_lora_as_pretrained(model, folder)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "is not a configuration of peft .KeyError"),
        (lambda folder: (folder / "adapter_config.json").write_text("{..."), "is not a configuration of peft .JSON"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no header"), "adapter_model.safetensors"),
        (lambda folder: flip_a_byte(folder / "adapter_model.safetensors"), "checksum"),
    ],
    ids=["config", "json", "missing", "header", "data"],
)
def test_damaged_adapters(tmp_path, damage, message):
    save_small_adapter(tmp_path)
    damage(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        Booster(device="cpu").enable_lora(base(), tmp_path)


def test_an_adapter_is_not_a_model(tmp_path):
    save_small_adapter(tmp_path)
    booster = Booster(device="cpu")
    model, *_ = booster.boost(booster.enable_lora(base(), tmp_path))
    with pytest.raises(CheckpointError, match=r"It is an adapter of peft: booster.enable_lora"):
        booster.load_model(model, tmp_path)
    (tmp_path / "adapter_model.safetensors.manifest.json").unlink()  # as peft writes
    booster.enable_lora(base(), tmp_path)


def state_of(model: nn.Module):
    modules = [(name, id(module), type(module), sorted(vars(module))) for name, module in model.named_modules()]
    flags = [(name, id(one), one.requires_grad) for name, one in model.named_parameters()]
    return modules, flags


def fail_on_one_rank(folder: Path) -> None:
    """A rank's mistake changes no rank's model, and the next call works."""
    booster = Booster(plugin=ALL["torch_ddp"]())
    is_wrong = booster.plugin.dp_rank == 1
    model = base()
    model.lm_head.requires_grad_(False)
    before = state_of(model)
    half_way = peft.LoraConfig(target_modules=["q_proj", "post_attention_layernorm"])  # after some layers were replaced
    for wrong, message in (
        ({"lora_config": half_way}, "is not supported"),
        ({"lora_config": peft.LoraConfig(target_modules=["query"])}, "'query'} not found in the base model"),
        ({"pretrained_dir": folder}, "is not one of this LlamaForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=message):
            booster.enable_lora(model, **(wrong if is_wrong else {"lora_config": config_of("lora")}))
        assert state_of(model) == before
    adapted = booster.enable_lora(model, lora_config=config_of("lora"))
    assert sum(one.requires_grad for one in adapted.parameters()) == 16


def test_a_mistake_changes_nothing(tmp_path):
    booster = Booster(device="cpu")
    model, *_ = booster.boost(booster.enable_lora(base("bert"), lora_config=config_of("modules_to_save")))
    booster.save_lora_as_pretrained(model, tmp_path)  # of another model
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"query"', '"q_proj"').replace('"value"', '"v_proj"'))
    (tmp_path / "adapter_model.safetensors.manifest.json").unlink()
    run_ranks(fail_on_one_rank, 2, tmp_path)


def resized(folder: Path) -> nn.Module:
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    model.resize_token_embeddings(72, mean_resizing=False)
    return model


def save_resized(plugin: str, folder: Path) -> None:
    booster = Booster(plugin=ALL[plugin]())
    model, *_ = booster.boost(booster.enable_lora(resized(folder / "base"), lora_config=config_of("lora")))
    booster.save_lora_as_pretrained(model, folder / "own")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as the embedding layer has:UserWarning")
@pytest.mark.parametrize("plugin", ["zero_1", "torch_fsdp", "tp", "pp"])
def test_embeddings_of_a_grown_vocabulary_are_saved(tmp_path, plugin):
    base().save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(resized(tmp_path / "base"), config_of("lora"))
    model.save_pretrained(tmp_path / "peft")
    run_ranks(save_resized, 2, plugin, tmp_path)
    one, found = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("peft", "own"))
    assert any("embed_tokens" in key for key in one)
    assert one.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in one.items() if "lora_" not in key)
